"""What the generator proposes and what the discriminator says of it, held against transformers' own classes on the export."""

import pytest
import torch

from electra.base.errors import DataError, SettingsError
from electra.inspector import load

transformers = pytest.importorskip("transformers")
TEXT = "The barak walks the lonute, and the lonute walks back."
LONG = " ".join([TEXT] * 12)


def ids_with(folder, text, changes):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    for place, token in changes.items():
        ids[place + 1] = tokenizer.convert_tokens_to_ids(token)
    return tokenizer, torch.tensor([ids])


def test_proposals_are_those_of_transformers_for_the_same_mask(finished_run, exported):
    tokenizer, ids = ids_with(exported / "generator", TEXT, {1: "[MASK]", 4: "[MASK]"})
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(exported / "generator").eval()
    shares = theirs(ids).logits.softmax(-1)[0]
    for place, ours in zip((1, 4), load(finished_run).fill(TEXT, [1, 4], 5), strict=True):
        best = shares[place + 1].topk(5)
        assert [it.token for it in ours] == tokenizer.convert_ids_to_tokens(best.indices.tolist())
        assert [it.probability for it in ours] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_replaced_tokens_are_judged_as_by_transformers(finished_run, exported):
    changes = {1: "the", 5: "and"}
    _, ids = ids_with(exported / "discriminator", TEXT, changes)
    theirs = transformers.ElectraForPreTraining.from_pretrained(exported / "discriminator").eval()
    model = load(finished_run)
    ours = model.replace(TEXT, changes)
    assert [it.probability for it in ours] == pytest.approx(theirs(ids).logits.sigmoid()[0, 1:-1].tolist(), abs=1e-5)
    assert [it.token for it in ours if it.is_chosen] == ["the", "and"]
    assert [it.original for it in ours] == model.tokenizer.encode(TEXT, add_special_tokens=False).tokens


def test_a_seed_gives_the_same_corruption_and_the_share_is_kept(finished_run):
    model = load(finished_run)
    first, again, other = (model.corrupt(LONG, 0.25, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sum(it.is_chosen for it in first) == pytest.approx(0.25 * len(first), rel=0.25)
    assert all(it.token == it.original for it in first if not it.is_chosen)
    assert any(it.token != it.original for it in first)
    said = model.replace(LONG, {n: it.token for n, it in enumerate(first) if it.is_chosen})
    assert [it.probability for it in said] == pytest.approx([it.probability for it in first], abs=1e-6)


def test_the_generator_is_found_beside_every_part_of_an_export(finished_run, exported):
    expected = load(finished_run).fill(TEXT, [1], 3)
    for folder in (exported, exported / "discriminator", exported / "generator", finished_run / "export"):
        proposals = load(folder).fill(TEXT, [1], 3)
        assert [it.token for it in proposals[0]] == [it.token for it in expected[0]], folder


def test_places_tokens_and_shares_that_do_not_exist_are_refused(finished_run, toy_model):
    model = load(finished_run)
    with pytest.raises(DataError, match="no token 99"):
        model.fill("The barak", [99])
    with pytest.raises(DataError, match="'qwertz' is not in the vocabulary"):
        model.replace("The barak", {0: "qwertz"})
    with pytest.raises(SettingsError, match="share=2"):
        model.corrupt("The barak", 2)
    with pytest.raises(DataError, match="no generator with a token head beside it"):
        load(toy_model).corrupt("The barak")
    assert model.corrupt("") == [] and model.replace("", {}) == []
