"""Classification: transformers' logits, the metrics' definitions, what is cut, what is doubled, what is refused."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from conftest import TINY, make_batch
from electra.data.tokenizer import load_tokenizer, special_ids
from electra.finetuning.classification import ClassificationSettings, class_scores, fit, regression_scores
from electra.finetuning.training import Finetuned, collate
from electra.interop.formats import HEADS, encoder_to_transformers, our_names, renamed
from electra.model import initialise
from electra.model.electra import ElectraEmbeddings, ElectraEncoder

PAIR = ClassificationSettings(text=("a", "b"), labels=("no", "yes", "maybe"))
ROWS = [{"a": "the barak walks", "b": "back", "label": "yes"}, {"a": "the", "b": "lonute", "label": "no"}]


@pytest.fixture(scope="module")
def tokenizer(toy_model):
    return load_tokenizer(toy_model)


def network(task) -> Finetuned:
    encoder = ElectraEncoder(TINY, ElectraEmbeddings(TINY, 97))
    head = task.head(TINY)
    initialise(encoder, TINY, 1)
    initialise(head, TINY, 2)
    return Finetuned(encoder, head).eval()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("kind", ["transformers", "linear"])
def test_logits_are_those_of_transformers(tokenizer, kind, padded):
    transformers = pytest.importorskip("transformers")
    task = PAIR.model_copy(update={"head": kind}).build(tokenizer, 24, {})
    ours = network(task)
    sizes = transformers.ElectraConfig(
        vocab_size=97, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=40, num_labels=3,
    )  # fmt: skip
    theirs = transformers.ElectraForSequenceClassification(sizes).eval()
    body = {f"electra.{k}": v for k, v in encoder_to_transformers(TINY, ours.encoder.state_dict()).items()}
    theirs.load_state_dict(body, strict=False)
    batch = make_batch(padded=padded)
    mask = batch.is_real.long()
    given = {"input_ids": batch.ids, "token_type_ids": batch.segments, "attention_mask": mask}
    with torch.no_grad():
        if kind == "transformers":
            table = our_names(HEADS["ElectraForSequenceClassification"])
            head = renamed(ours.head.state_dict(), table)
            missing, unexpected = theirs.load_state_dict(head, strict=False)
            assert not unexpected and not [name for name in missing if name.startswith("classifier")]
            expected = theirs(**given).logits
        else:
            first = theirs.electra(**given).last_hidden_state[:, 0]
            expected = first @ ours.head.output.weight.T + ours.head.output.bias
        torch.testing.assert_close(ours(batch)["logits"], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_the_last_layer_for_the_first_token_alone_is_the_same_maths(tokenizer, padded):
    model = network(PAIR.build(tokenizer, 24, {}))
    batch = make_batch(padded=padded)
    short = model.encoder(batch.ids, batch.segments, batch.is_real, True)
    whole = model.encoder(batch.ids, batch.segments, batch.is_real)
    assert short.shape[1] == 1
    torch.testing.assert_close(short[:, 0], whole[:, 0], atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(x[:, 0].square().sum(), list(model.encoder.parameters())) for x in (short, whole)]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_heads_start_from_glorot(tokenizer):
    head = network(PAIR.build(tokenizer, 24, {})).head
    head = head.label
    assert head.dense.weight.std().item() == pytest.approx(math.sqrt(2 / 64), rel=0.1)
    assert not head.output.bias.any()


def test_pairs_are_encoded_as_transformers_does_and_the_cut_is_counted(tokenizer, toy_model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(toy_model)
    long = "the barak walks the lonute and the lonute walks back " * 3
    rows = [*ROWS, {"a": long, "b": "back"}, {"a": "the", "b": long}, {"a": long, "b": long}]
    task = PAIR.build(tokenizer, 24, {})
    examples, cut = task.encode(rows)
    assert cut == 3
    for row, example in zip(rows, examples, strict=True):
        expected = theirs(row["a"], row["b"], truncation="longest_first", max_length=24)
        assert len(example.ids) <= 24
        if max(len(row["a"]), len(row["b"])) < 100:
            assert list(example.ids) == expected["input_ids"]
            assert example.first == expected["token_type_ids"].index(1)
    batch = collate(task, examples[:2], with_targets=True)
    assert batch.targets["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sizes", "room", "kept"),
    [([5, 6], 20, [5, 6]), ([30], 20, [20]), ([3, 30], 20, [3, 17]), ([30, 3], 20, [17, 3]), ([30, 40], 20, [10, 10])],
)
def test_the_longer_text_gives_way_first(sizes, room, kept):
    assert fit(sizes, room) == kept


def test_text_that_spells_a_special_token_is_text(tokenizer):
    single = ClassificationSettings(text=("a",), labels=("x", "y"))
    (example,), _ = single.build(tokenizer, 24, {}).encode([{"a": "[SEP] [MASK]"}])
    special = special_ids(tokenizer)
    assert list(example.ids).count(special.sep) == 1 and special.mask not in example.ids


def test_doubling_trains_on_both_orders(tokenizer):
    task = PAIR.model_copy(update={"double_unordered": True}).build(tokenizer, 24, {})
    doubled = task.training_rows(ROWS)
    assert [(row["a"], row["b"]) for row in doubled[2:]] == [(row["b"], row["a"]) for row in ROWS]
    assert [row["label"] for row in doubled] == ["yes", "no"] * 2


def test_labels_are_guessed_sorted_and_numbers_as_numbers(tokenizer):
    open_labels = ClassificationSettings(text=("a",))
    train = [{"a": "x", "label": value} for value in (10, 9, 2)]
    task = open_labels.build(tokenizer, 24, {"train": train})
    assert task.labels == ("2", "9", "10") == task.settings.labels


def test_classification_scores_are_sklearn_s():
    rng = np.random.default_rng(0)
    gold, said = rng.integers(0, 3, 200), rng.integers(0, 3, 200)
    scores = class_scores(gold, said, 3)
    assert scores["accuracy"] == sklearn_metrics.accuracy_score(gold, said) == pytest.approx((gold == said).mean())
    assert scores["mcc"] == sklearn_metrics.matthews_corrcoef(gold, said)
    assert scores["f1_macro"] == sklearn_metrics.f1_score(gold, said, average="macro")
    assert "f1" not in scores
    two = class_scores(gold > 0, said > 0, 2)
    right = ((gold > 0) & (said > 0)).sum()
    assert two["f1"] == pytest.approx(2 * right / ((gold > 0).sum() + (said > 0).sum()))
    assert class_scores(np.array([0, 0]), np.array([0, 0]), 2)["mcc"] == 0.0


def test_results_say_which_class_the_f1_is_of(tokenizer):
    rows = [{"text": "a", "label": name} for name in ("fraud", "legit", "legit", "fraud")]
    said = [{"prediction": name} for name in ("fraud", "legit", "fraud", "legit")]
    for labels, named in (((), "the second of the two labels, as sorted"), (("legit", "fraud"), "'fraud'")):
        settings = ClassificationSettings(metric="f1", labels=labels)
        task = settings.build(tokenizer, 16, {"train": rows})
        own = next(it["f1"] for it in task.tables(rows[:3], said[:3])["per_class"] if it["label"] == task.labels[1])
        assert task.scores(rows[:3], said[:3])["f1"] == own
        assert settings.notes == (f"f1 is that of {named}; labels=[…] sets another order",)
    assert ClassificationSettings().notes == ()


def test_regression_scores_are_correlations_and_a_constant_has_none():
    gold = np.array([0.0, 1.0, 2.0, 5.0])
    scores = regression_scores(gold, gold**3)
    assert scores["spearman"] == pytest.approx(1) and 0.9 < scores["pearson"] < 1
    assert regression_scores(gold, np.ones(4))["spearman"] == 0.0


def test_the_headline_comes_first_and_predictions_carry_probabilities(tokenizer):
    settings = ClassificationSettings(text=("a",), labels=("no", "yes"), metric="mcc")
    task = settings.build(tokenizer, 24, {})
    rows = [{"a": "x", "label": label} for label in ("no", "yes", "yes")]
    outputs = [{"logits": np.array(pair, np.float32)} for pair in ((2, 0), (0, 1), (1, 0))]
    predictions = task.predict(rows, [], outputs)
    assert [p["prediction"] for p in predictions] == ["no", "yes", "no"]
    assert predictions[0]["probability_no"] == pytest.approx(1 / (1 + math.exp(-2)))
    scores = task.scores(rows, predictions)
    assert next(iter(scores)) == "mcc" and scores["accuracy"] == pytest.approx(2 / 3)
    assert task.tables(rows, predictions)["confusion"] == [[1, 0], [1, 1]]


def test_regression_learns_scaled_targets_and_answers_in_the_labels_unit(tokenizer):
    settings = ClassificationSettings(kind="regression", text=("a",), scale=5.0)
    task = settings.build(tokenizer, 24, {})
    examples, _ = task.encode([{"a": "x", "label": 4.0}, {"a": "y", "label": "2"}])
    targets = task.targets(examples, 3)
    assert targets["labels"].tolist() == pytest.approx([0.8, 0.4])
    loss = task.loss({"logits": torch.tensor([[0.8], [0.0]])}, targets)
    assert loss.item() == pytest.approx(0.4**2 / 2)
    assert task.predict([], [], [{"logits": np.array([0.8])}])[0]["prediction"] == pytest.approx(4.0)


def test_a_regression_on_large_numbers_learns_deviations_from_their_mean(tokenizer):
    """Prices would never be reached by outputs that begin near zero. Learned like that, an output of 0 is the mean."""
    train = [{"a": "x", "label": value} for value in (30_000, 90_000, "150000")]
    task = ClassificationSettings(kind="regression", text=("a",), scale="auto").build(tokenizer, 24, {"train": train})
    assert (task.settings.offset, task.settings.scale) == pytest.approx((90_000, np.std([30e3, 90e3, 150e3])))
    targets = task.targets(task.encode(train)[0], 3)["labels"]
    assert targets.mean().item() == pytest.approx(0, abs=1e-6) and targets.std(correction=0).item() == pytest.approx(1)
    outputs = [{"logits": np.array([float(value)])} for value in targets]
    predictions = task.predict([], [], outputs)
    assert [it["prediction"] for it in predictions] == pytest.approx([30_000, 90_000, 150_000])
    assert task.scores(train, predictions)["mse"] == pytest.approx(0, abs=1e-2)
    again = type(task.settings).model_validate(task.settings.model_dump()).build(tokenizer, 24, {})
    assert again.predict([], [], outputs) == predictions


def test_classes_have_no_scale():
    """So that folders of classifiers that an earlier version began are of the same settings."""
    assert ClassificationSettings(scale="auto") == ClassificationSettings()


def test_one_label_for_all_is_its_own_mean(tokenizer):
    train = [{"a": "x", "label": 7}] * 3
    task = ClassificationSettings(kind="regression", text=("a",), scale="auto").build(tokenizer, 24, {"train": train})
    assert task.target(train[0]) == 0 and task.answer(0) == 7


@pytest.mark.parametrize("scale", [0, -1, "wide"])
def test_a_scale_is_refused_in_one_line(scale):
    with pytest.raises(ValueError, match='must be a number above 0, or "auto"') as error:
        ClassificationSettings(kind="regression", scale=scale)
    assert error.value.error_count() == 1


def test_several_labels_of_a_row(tokenizer):
    settings = ClassificationSettings(kind="multilabel", text=("a",))
    rows = [{"a": "x", "label": ["p", "q"]}, {"a": "y", "label": []}, {"a": "z", "label": "q"}]
    task = settings.build(tokenizer, 24, {"train": rows})
    examples, _ = task.encode(rows)
    assert [example.target for example in examples] == [[1, 1], [0, 0], [0, 1]]
    outputs = [{"logits": np.array(pair)} for pair in ((3.0, 1.0), (-1.0, -2.0), (-1.0, 4.0))]
    predictions = task.predict(rows, examples, outputs)
    assert [p["prediction"] for p in predictions] == [["p", "q"], [], ["q"]]
    assert task.scores(rows, predictions)["f1_micro"] == 1.0
