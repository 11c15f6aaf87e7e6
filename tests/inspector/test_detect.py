"""Scoring and reranking with an Electric model, as people use them."""

import json

import numpy as np
import pytest
import torch

from electra.data.tokenizer import special_ids
from electra.inspector.detect import say_same_score, score_texts, token_logits, windows_of
from electra.pretraining.load import load_network
from helpers import electra

TEXTS = ["The barak walks the selin.", "back.", "The gorowa reads the timute, and the timute reads back."]


@pytest.fixture(scope="module")
def electric_run(tmp_path_factory, recipe, prepared):
    run = tmp_path_factory.mktemp("electric") / "run"
    done = electra("pretrain", f"{recipe}+electric", f"data={prepared}", f"run={run}", "train.steps=8")
    assert done.returncode == 0, done.stderr
    return run


def by_hand(model, text):
    """One text at a time, through the modules."""
    loaded = load_network(model)
    special = special_ids(loaded.tokenizer)
    ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
    row = torch.tensor([[special.cls, *ids, special.sep]])
    with torch.no_grad():
        return -loaded.head(loaded.encoder(row, torch.zeros_like(row), None))[0, 1:-1]


@pytest.mark.parametrize("where", ["run", "export"])
def test_a_score_is_the_sum_of_the_negative_energies(electric_run, where, tmp_path):
    model = electric_run if where == "run" else electric_run / "export"
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    done = electra("score", model, tmp_path / "texts.txt", "--json")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["text"] for record in records] == TEXTS
    for record in records:
        expected = by_hand(model, record["text"])
        assert record["score"] == pytest.approx(expected.sum().item(), abs=1e-4)
        assert [t["score"] for t in record["tokens"]] == pytest.approx(expected.tolist(), abs=1e-4)
    plain = electra("score", model, TEXTS[0])
    assert f"{records[0]['score']:.2f}" in plain.stdout and TEXTS[0] in plain.stdout


def test_texts_together_score_as_texts_alone_and_long_ones_are_read_in_windows(electric_run):
    loaded = load_network(electric_run)
    rows = [loaded.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS * 20]
    rows.append(rows[2] * 9)  # longer than the network's positions
    together = token_logits(loaded, rows)
    for row, found in zip(rows[:3], together, strict=False):
        (alone,) = token_logits(loaded, [row])
        np.testing.assert_allclose(found, alone, atol=1e-4)
    assert len(rows[-1]) > loaded.encoder.settings.positions
    assert len(together[-1]) == len(rows[-1]) and np.isfinite(together[-1]).all()
    window = loaded.encoder.settings.positions - 2
    (start,) = token_logits(loaded, [rows[-1][:window]])
    np.testing.assert_allclose(together[-1][: window // 4], start[: window // 4], atol=1e-4)


@pytest.mark.parametrize(("count", "size"), [(0, 10), (3, 10), (10, 10), (11, 10), (95, 10), (95, 11), (8, 1)])
def test_every_token_is_taken_from_one_window_with_context_on_both_sides(count, size):
    ids = list(range(count))
    windows = list(windows_of(0, ids, size))
    assert [index for window in windows for index in range(window.begin, window.end)] == ids
    for window in windows:
        last = window.first + len(window.ids)
        assert window.first <= window.begin <= window.end <= last and len(window.ids) <= size
        assert window.begin in (0, window.first) or window.begin - window.first >= size // 4
        assert window.end in (count, last) or last - window.end >= size // 4


def test_text_that_spells_special_tokens_is_scored_as_text(electric_run, tmp_path):
    """As the characters that it spells; as the special tokens the two would be shorter."""
    text = "The [MASK] walks the [SEP]"
    spaced = "The [ MASK ] walks the [ SEP ]"
    done = electra("score", electric_run, "--json", stdin=f"{text}\n{spaced}\n")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert len(first["tokens"]) == len(second["tokens"])
    assert first["score"] == pytest.approx(second["score"], abs=1e-4)
    path = tmp_path / "lists.jsonl"
    path.write_text(json.dumps({"hypotheses": [{"text": text}, {"text": spaced}]}))
    ranked = json.loads(electra("rerank", electric_run, path).stdout)["hypotheses"]
    assert ranked[0]["pll"] == pytest.approx(ranked[1]["pll"], abs=1e-4)


def test_reranking_adds_the_weighted_score_and_sorts(electric_run, tmp_path):
    lists = [
        {"id": 7, "hypotheses": [{"text": TEXTS[0], "score": -3.0, "lattice": 1}, {"text": TEXTS[1], "score": 9.0}]},
        {"id": 8, "hypotheses": [{"text": TEXTS[2]}]},
        {"id": 9, "hypotheses": []},
    ]
    path, out = tmp_path / "lists.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(it) + "\n" for it in lists))
    done = electra("rerank", electric_run, path, "--out", out, "--weight", "0.5")
    assert done.returncode == 0, done.stderr
    ranked = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["id"] for record in ranked] == [7, 8, 9]
    plls = {text: by_hand(electric_run, text).sum().item() for text in TEXTS}
    for record, given in zip(ranked, lists, strict=True):
        totals = [hypothesis["total"] for hypothesis in record["hypotheses"]]
        assert totals == sorted(totals, reverse=True)
        for hypothesis in record["hypotheses"]:
            before = next(it for it in given["hypotheses"] if it["text"] == hypothesis["text"])
            assert hypothesis["pll"] == pytest.approx(plls[hypothesis["text"]], abs=1e-4)
            assert hypothesis["total"] == pytest.approx(before.get("score", 0) + 0.5 * hypothesis["pll"])
    assert ranked[0]["hypotheses"][-1].get("lattice", 1) == 1
    assert electra("rerank", electric_run, path).stdout.count("\n") == 3


def test_bad_lists_and_models_that_cannot_score_are_refused(electric_run, finished_run, tmp_path):
    path = tmp_path / "lists.jsonl"
    path.write_text('{"hypotheses": [{"text": "fine"}]}\n{"hypotheses": [{"score": 3}]}\n')
    done = electra("rerank", electric_run, path, "--out", tmp_path / "out.jsonl")
    assert done.returncode == 3 and "line 2" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    path.write_bytes(b'{"hypotheses": [{"text": "caf\xe9"}]}\n')
    done = electra("rerank", electric_run, path)
    assert done.returncode == 3 and ":1 has bytes that are not UTF-8" in done.stderr
    done = electra("score", finished_run, "text")
    assert (
        done.returncode == 3
        and "objective is electra" in done.stderr
        and "pretrain modern-small+electric" in done.stderr
    )
    assert electra("rerank", electric_run, tmp_path / "none.jsonl").returncode == 3
    done = electra("detect", electric_run / "export", "text")
    assert done.returncode == 3 and "electra score" in done.stderr


def test_an_electric_model_whose_scores_are_all_the_same_says_so(electric_run, caplog):
    loaded, texts = load_network(electric_run), ["The barak walks the lonute, and the lonute walks back."]
    assert loaded.head is not None
    score_texts(loaded, texts)
    assert "same score" not in caplog.text
    say_same_score.cache_clear()
    torch.manual_seed(0)
    torch.nn.init.normal_(loaded.head.output.weight, std=2e-2)  # all but the same, at some level
    torch.nn.init.constant_(loaded.head.output.bias, 1.8)
    score_texts(loaded, texts)
    assert "every token has the same score" in caplog.text


def test_the_export_of_electric_is_one_folder_and_its_card_speaks_of_energies(electric_run, tmp_path):
    done = electra("export", electric_run, tmp_path / "model")
    assert done.returncode == 0 and (tmp_path / "model" / "config.json").is_file(), done.stderr
    for folder in (tmp_path / "model", electric_run / "export"):
        card = (folder / "README.md").read_text()
        assert "gives every token an energy" in card and "logit > 0" not in card
