"""One `load` for every kind of folder, and what a model can and cannot do."""

import json
import logging

import numpy as np
import pytest
import torch

from electra.base.errors import DataError
from electra.data.tokenizer import special_ids
from electra.finetuning.run import finetune
from electra.inspector import Model, load
from electra.interop import read
from electra.interop.read import Pretrained
from electra.interop.write import write_network
from electra.model import encoder_alone, initialise
from electra.model.modern import ModernEncoderSettings
from helpers import electra

TEXT = "The barak walks the lonute."
LONG = " ".join([TEXT] * 12)


@pytest.fixture(scope="module")
def finetuned(toy_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuned")
    rows = [{"text": f"the barak {'walks' if n % 2 else 'reads'} {n}", "label": "ab"[n % 2]} for n in range(40)]
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = {"epochs": 1, "length": 16}
    finetune(toy_model, [str(folder / "table.jsonl")], overrides, folder / "out")
    return folder / "out" / "table" / "seed-0"


def test_every_kind_of_folder_is_read(finished_run, exported, finetuned):
    kinds = {
        finished_run: "discriminator",
        finished_run / "export": "discriminator",
        exported: "discriminator",
        exported / "generator": "generator",
        finetuned: "classification",
    }
    for path, kind in kinds.items():
        model = load(str(path))
        assert model.kind == kind and model.tokenizer.get_vocab_size() > 100
        assert model.encoder.settings.kind == "electra" and not model.encoder.training


def test_a_run_and_its_export_say_the_same(finished_run, exported):
    ours, theirs = (load(path).detect([TEXT, LONG, ""]) for path in (finished_run, exported))
    assert [len(tokens) > 0 for tokens in ours] == [True, True, False]
    for mine, other in zip(ours, theirs, strict=True):
        assert [it.token for it in mine] == [it.token for it in other]
        assert [it.probability for it in mine] == pytest.approx([it.probability for it in other], abs=1e-5)
    alone = load(exported).detect(TEXT)
    assert [it.probability for it in alone] == pytest.approx([it.probability for it in ours[0]], abs=1e-5)
    assert [TEXT[it.start : it.end].lower() for it in alone][:2] == ["the", alone[1].token]


def test_embeddings_are_means_or_those_of_cls(finished_run):
    model = load(finished_run)
    special, ids = special_ids(model.tokenizer), model.tokenizer.encode(TEXT, add_special_tokens=False).ids
    row = torch.tensor([[special.cls, *ids, special.sep]])
    with torch.no_grad():
        hidden = model.encoder(row, torch.zeros_like(row), None)[0]
    together = model.embed(["back.", TEXT, ""])
    assert together.shape == (3, 32) and together.dtype == np.float32
    np.testing.assert_allclose(together[1], hidden.mean(0), atol=1e-5)
    np.testing.assert_allclose(model.embed(TEXT, pooling="cls")[0], hidden[0], atol=1e-5)


def test_of_a_long_text_each_token_counts_once(finished_run):
    """The mean over windows is that of the states that `detect` reads its logits from."""
    model = load(finished_run)
    ids = model.tokenizer.encode(LONG, add_special_tokens=False).ids
    size = model.encoder.settings.positions - 2
    assert len(ids) > 2 * size
    (vector,) = model.embed(LONG)
    special, states = special_ids(model.tokenizer), []
    for window in read_all(ids, size):
        row = torch.tensor([[special.cls, *window.ids, special.sep]])
        with torch.no_grad():
            hidden = model.encoder(row, torch.zeros_like(row), None)[0]
        begin = 0 if not window.first else window.begin - window.first + 1
        end = len(hidden) if window.end == len(ids) else window.end - window.first + 1
        states.append(hidden[begin:end])
    assert len(torch.cat(states)) == len(ids) + 2
    np.testing.assert_allclose(vector, torch.cat(states).mean(0), atol=1e-5)


def read_all(ids, size):
    from electra.inspector.detect import windows_of

    return windows_of(0, ids, size)


def test_predictions_have_probabilities_and_take_rows_or_texts(finetuned):
    model = load(finetuned)
    texts = ["the barak walks 7", "the barak reads 8"]
    answers = model.predict(texts)
    assert answers == model.predict([{"text": text} for text in texts]) and model.predict([]) == []
    for answer in answers:
        assert answer["prediction"] in ("a", "b")
        assert answer["probability_a"] + answer["probability_b"] == pytest.approx(1, abs=1e-4)
    (alone,) = model.predict(texts[0])
    assert alone["probability_a"] == pytest.approx(answers[0]["probability_a"], abs=1e-4)
    with pytest.raises(DataError, match="no column 'text'"):
        model.predict([{"words": "x"}])


@pytest.mark.parametrize(
    ("which", "method", "says"),
    [
        ("generator", "detect", "holds no discriminator: its network is of kind generator. Give"),
        ("discriminator", "score", 'its objective is electra, and only "electric" learns energies. Train one'),
        ("discriminator", "predict", "is not fine-tuned .* Fine-tune it first"),
    ],
)
def test_what_a_model_cannot_do_it_says_in_one_line(exported, which, method, says):
    model = load(exported / which)
    with pytest.raises(DataError, match=says) as refused:
        getattr(model, method)(TEXT)
    assert "\n" not in str(refused.value)


def test_a_generator_of_texts_is_read_once_and_a_row_alone_is_one_row(finetuned, finished_run):
    model, task = load(finished_run), load(finetuned)
    assert model.detect(it for it in [TEXT, LONG]) == model.detect([TEXT, LONG])
    assert task.predict(it for it in [TEXT, LONG]) == task.predict([TEXT, LONG])
    assert task.predict({"text": TEXT}) == task.predict(TEXT)
    with pytest.raises(DataError, match="not text"):
        task.predict({"text": [TEXT, LONG]})


class DataFrame:
    """Like that of pandas: its items are the names of its columns."""

    def __iter__(self):
        return iter(("text", "label"))


def test_what_is_neither_texts_nor_rows_is_refused_with_what_to_give(finetuned):
    task, texts = load(finetuned), [TEXT, LONG]
    assert task.predict(np.array(texts)) == task.predict(np.array(texts, object)) == task.predict(texts)
    with pytest.raises(DataError, match=r'Give its column of texts, or its rows: table.to_dict\("records"\) in pandas'):
        task.predict(DataFrame())
    with pytest.raises(DataError, match="a table is not read as it is"):
        task.embed(DataFrame())
    for rows, says in (
        (None, "row 1 is of type NoneType"),
        ([TEXT, 3], "row 2 is of type int"),
        ([texts], "row 1 is of type list"),
    ):
        with pytest.raises(DataError, match=rf"{says}. Give a text, or a dict with text\."):
            task.predict(rows)


def test_a_folder_of_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no config.json"):
        load(tmp_path)
    with pytest.raises(DataError, match="none does not exist. Give the folder of a run"):
        load(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is neither a run folder nor a model folder"):
        load(tmp_path / "file")


def test_a_text_that_spells_a_special_token_means_the_word(finished_run):
    model = load(finished_run)
    tokens = [token.token for token in model.detect("the [MASK] walks")]
    assert "[MASK]" not in tokens and len(tokens) > 4


def warnings(caplog):
    return [record.message for record in caplog.records if "never trained" in record.message]


def test_positions_that_were_never_trained_are_said_once(finished_run, exported, caplog):
    """Rows of 24 tokens under 32 positions."""
    config = json.loads((exported / "discriminator" / "config.json").read_text())
    assert config["pretraining_length"] == 24 and config["max_position_embeddings"] == 32
    for path in (finished_run, exported):
        read.say_untrained.cache_clear()
        caplog.clear()
        model = load(path)
        with caplog.at_level(logging.WARNING, "electra"):
            model.detect(TEXT)
            assert not warnings(caplog)
            for _ in range(2):
                model.detect(LONG)
                model.embed(LONG)
        (line,) = warnings(caplog)
        assert "32 positions" in line and "rows of 24 tokens" in line and "rows.length" in line


def test_fine_tuning_beyond_the_trained_length_says_it(finished_run, tmp_path, caplog):
    rows = [{"text": f"{n} " + " ".join(["barak"] * (40 if n % 2 else 3)), "label": "ab"[n % 2]} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for length, expected in ((24, 0), (32, 1)):
        read.say_untrained.cache_clear()
        caplog.clear()
        overrides = {"epochs": 1, "length": length}
        with caplog.at_level(logging.WARNING, "electra"):
            finetune(finished_run, [str(tmp_path / "t.jsonl")], overrides, tmp_path / str(length))
        assert len(warnings(caplog)) == expected
        assert json.loads((tmp_path / str(length) / "t/seed-0/config.json").read_text())["pretraining_length"] == 24


def test_rotary_positions_and_folders_that_do_not_say_are_not_warned_of(prepared, toy_model, tmp_path, caplog):
    from electra.data.tokenizer import load_tokenizer, vocabulary_size

    settings = ModernEncoderSettings(layers=2, hidden=32, heads=2, intermediate=48, embedding=32, positions=64)
    tokenizer = load_tokenizer(prepared)
    encoder = encoder_alone(settings, vocabulary_size(tokenizer))
    initialise(encoder, settings, 1)
    write_network(tmp_path / "modern", Pretrained(encoder, None, "encoder", tokenizer, length=8), "")
    read.say_untrained.cache_clear()
    with caplog.at_level(logging.WARNING, "electra"):
        model = load(tmp_path / "modern")
        assert model.kind == "encoder" and model.network.length == 8
        model.embed(LONG)
        load(toy_model).embed(LONG)
    assert not warnings(caplog)


def test_an_export_of_before_lengths_were_written_is_read(finished_run, tmp_path):
    import shutil

    folder = shutil.copytree(finished_run / "export", tmp_path / "old")
    config = json.loads((folder / "config.json").read_text())
    del config["pretraining_length"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "MANIFEST.json").unlink()
    model: Model = load(folder)
    assert model.network.length is None and model.detect(TEXT)
    done = electra("detect", folder, TEXT, "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == len(model.detect(TEXT))


def test_a_folder_of_seeds_names_them(finetuned):
    with pytest.raises(DataError, match=r"has several models \(seed-0.*\). Load one of them"):
        load(finetuned.parent)
