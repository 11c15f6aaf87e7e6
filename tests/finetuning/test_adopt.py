"""Classifiers that were made with transformers, not with this toolkit, answer and are scored like ours."""

import csv
import json

import numpy as np
import pytest
import torch

from electra.finetuning.predict import load_classifier
from electra.finetuning.training import infer
from electra.inspector import load
from helpers import electra

transformers = pytest.importorskip("transformers")
TEXTS = ["The barak walks the lonute.", "And the lonute reads back, the barak jumps and jumps."]
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
}
IDS = ("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id")
FAMILIES = {
    "Electra": {"embedding_size": 16, "max_position_embeddings": 64},
    "ModernBert": {"max_position_embeddings": 64, "local_attention": 8, **dict.fromkeys(IDS, 0)},
}
LABELS = {0: "no", 1: "yes", 2: "perhaps"}


@pytest.fixture
def make(toy_model, tmp_path):
    """What `save_pretrained` of a model and its tokenizer leaves, with weights that are not the first ones."""

    def make(family: str, suffix: str, **settings):
        config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], **settings)
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}{suffix}")(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / "theirs")
        transformers.AutoTokenizer.from_pretrained(toy_model).save_pretrained(tmp_path / "theirs")
        return tmp_path / "theirs", model

    return make


def both(folder, model, rows, columns):
    """The outputs of both sides, example by example."""
    ours = load_classifier(folder, columns)
    examples, _ = ours.task.encode(rows)
    outputs = infer(ours.model, ours.task, examples, ours.method)
    for example, output in zip(examples, outputs, strict=True):
        inputs = {"input_ids": torch.tensor([list(example.ids)])}
        if model.config.model_type == "electra":
            types = [int(place >= example.first) for place in range(len(example.ids))]
            inputs["token_type_ids"] = torch.tensor([types])
        with torch.no_grad():
            yield output, model(**inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pair", [False, True], ids=["one text", "two texts"])
def test_classifiers_of_rows_have_equal_logits(make, family, pair):
    more = {"classifier_pooling": "mean"} if family == "ModernBert" and pair else {}
    folder, model = make(
        family, "ForSequenceClassification", id2label=LABELS, label2id={v: k for k, v in LABELS.items()}, **more
    )
    rows = [{"a": TEXTS[0], "b": TEXTS[1]}, {"a": TEXTS[1], "b": TEXTS[0]}]
    columns = {"text": ["a", "b"] if pair else ["a"]}
    for ours, theirs in both(folder, model, rows, columns):
        np.testing.assert_allclose(ours["logits"], theirs.logits[0].numpy(), atol=1e-5)
    assert load_classifier(folder, columns).task.labels == ("no", "yes", "perhaps")


@pytest.mark.parametrize("family", FAMILIES)
def test_classifiers_of_tokens_have_equal_logits(make, family):
    names = ["O", "B-PER", "I-PER"]
    labels = dict(enumerate(names))
    folder, model = make(family, "ForTokenClassification", id2label=labels, label2id={v: k for k, v in labels.items()})
    for ours, theirs in both(folder, model, [{"tokens": text.split()} for text in TEXTS], {}):
        size = theirs.logits.shape[1]
        np.testing.assert_allclose(ours["logits"][:size], theirs.logits[0].numpy(), atol=1e-5)
    settings = load_classifier(folder, {}).task.settings
    assert settings.scheme == "iob2" and settings.labels == tuple(names)


@pytest.mark.parametrize("family", FAMILIES)
def test_finders_of_answers_have_equal_logits(make, family):
    folder, model = make(family, "ForQuestionAnswering")
    row = {"id": "1", "question": "Who jumps?", "context": TEXTS[1]}
    ((ours, theirs),) = both(folder, model, [row], {})
    size = theirs.start_logits.shape[1]
    for name in ("start_logits", "end_logits"):
        np.testing.assert_allclose(ours[name][:size], theirs[name][0].numpy(), atol=1e-5)


def test_the_command_line_answers_as_their_pipeline_does(make, tmp_path):
    folder, _ = make("Electra", "ForSequenceClassification")  # two labels without names
    classify = transformers.pipeline("text-classification", model=str(folder))
    answer = json.loads(electra("predict", folder, TEXTS[0], "--probabilities").stdout)
    theirs = classify(TEXTS[0])[0]
    assert answer["prediction"] == theirs["label"]
    assert answer[f"probability_{theirs['label']}"] == pytest.approx(theirs["score"], abs=1e-5)
    pair = classify({"text": TEXTS[0], "text_pair": TEXTS[1]})
    asked = electra("predict", folder, "--text", "a", "--text2", "b", "--probabilities", stdin="\t".join(TEXTS))
    assert json.loads(asked.stdout)[f"probability_{pair['label']}"] == pytest.approx(pair["score"], abs=1e-5)
    table = tmp_path / "table.csv"
    with table.open("w") as file:
        csv.writer(file).writerows([["review", "label"], *([text, classify(text)[0]["label"]] for text in TEXTS)])
    result = json.loads(electra("evaluate", folder, table, "--text", "review", "--json").stdout)
    assert result["rows"] == 2 and result["scores"]["accuracy"] == 1
    answered = load(folder)
    assert answered.kind == "classification"
    assert answered.predict(TEXTS[0])[0]["prediction"] == theirs["label"] and answered.embed(TEXTS[0]).shape == (1, 32)
    missing = electra("predict", folder, table)
    assert missing.returncode == 3 and "no column 'text' (there are review, label)" in missing.stderr


def test_numbers_and_several_labels_are_known_by_their_config(make):
    folder, _ = make("Electra", "ForSequenceClassification", num_labels=1)
    assert load_classifier(folder, {}).task.settings.kind == "regression"
    folder, _ = make("Electra", "ForSequenceClassification", num_labels=3, problem_type="multi_label_classification")
    assert load_classifier(folder, {}).task.settings.kind == "multilabel"


def test_what_is_no_such_classifier_is_named_in_one_line(make, toy_model, tmp_path):
    folder, _ = make("Electra", "ForMultipleChoice")
    done = electra("predict", folder, "a b")
    assert done.returncode == 3 and "(its config.json says ElectraForMultipleChoice)" in done.stderr
    done = electra("predict", toy_model, "a b")
    assert done.returncode == 3 and "holds no fine-tuned model" in done.stderr and len(done.stderr.splitlines()) == 1
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    done = electra("predict", folder, "a b")
    assert done.returncode == 3 and "model of type 'bert', not electra or modernbert" in done.stderr
    done = electra("predict", tmp_path, "a b")
    assert done.returncode == 3 and "no task.json" in done.stderr
    done = electra("predict", "absent", "some text", cwd=tmp_path)
    assert done.returncode == 3 and "absent does not exist" in done.stderr
