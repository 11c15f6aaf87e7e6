"""Going on from other weights: everything that is there is taken, what is made to fit is what it should be, and it is said."""

import json
from pathlib import Path

import pytest
import torch

import electra as package
from electra.base.errors import DataError
from electra.data.corpus import Corpus
from electra.data.extension import added_pieces, extend_tokenizer
from electra.data.tokenizer import TokenizerSettings, load_tokenizer, train_tokenizer, vocabulary_size
from electra.pretraining.load import load_network, load_run
from electra.pretraining.run import build_parts
from electra.pretraining.settings import resolve
from helpers import electra, write_corpus

GOOGLE = Path(__file__).parents[1] / "interop" / "tensorflow" / "electra"
FIELD = "The zorbulation of kleptonics is kleptonic zorbulation. " * 30 + "\n\n"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """An ELECTRA of Google's with its generator, and text prepared with its tokenizer."""
    folder = tmp_path_factory.mktemp("imported")
    done = electra("import", GOOGLE, folder / "model", "--heads", 2)
    assert done.returncode == 0, done.stderr
    write_corpus(folder / "text.txt")
    package.prepare(folder / "text.txt", folder / "shards", folder / "model", heldout=0.1, workers=1)
    return folder


def parts_of(recipe, *words):
    settings, _ = resolve(str(recipe), [str(word) for word in words])
    return build_parts(settings, torch.device("cpu")).objective


def begin(imported, *words, start="model", length=16):
    recipe = f"tiny+{imported / 'model' / 'recipe.toml'}"
    own = f"data={imported / 'shards'}", f"start={imported / start}", f"rows.length={length}", "run=x"
    return parts_of(recipe, *own, *words)


def same(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(ours[key].equal(theirs[key]) for key in ours)


def test_a_pair_begins_with_both_networks_and_both_heads(imported, caplog):
    with caplog.at_level("INFO", "electra"):
        networks = begin(imported).networks()
    for kind in ("discriminator", "generator"):
        stored = load_network(imported / "model", kind)
        assert same(networks[kind].encoder, stored.encoder) and same(networks[kind].head, stored.head)
    assert "its head, its generator; the optimizer and the schedule are new" in caplog.text


def test_a_discriminator_alone_gets_a_new_generator_or_one_made_of_it(imported, caplog):
    alone = "model/discriminator"
    stored = load_network(imported / alone, "discriminator")
    with caplog.at_level("INFO", "electra"):
        networks = begin(imported, start=alone).networks()
        assert same(networks["discriminator"].encoder, stored.encoder) and "a new generator" in caplog.text
        assert not same(networks["generator"].encoder, load_network(imported / "model", "generator").encoder)
        made_of_it = "generator.start=discriminator", "generator.width=1", "generator.depth=0.5"
        built = begin(imported, *made_of_it, start=alone).networks()
    layers = built["generator"].encoder.layers
    assert len(layers) == 1 and same(layers[0], stored.encoder.layers[0])
    assert same(built["generator"].encoder.embeddings, stored.encoder.embeddings)
    assert "a generator of its first layer;" in caplog.text


def test_the_choices_are_checked(imported, tmp_path):
    words = f"data={imported / 'shards'}", "run=x"
    for change, says in (
        ((f"start={imported / 'model'}", "generator.start=discriminator"), "give generator.width=1"),
        (("generator.start=discriminator", "generator.width=1"), "give start=FOLDER"),
        ((f"start={imported / 'model'}",), f"RECIPE+{imported / 'model' / 'recipe.toml'}"),
    ):
        done = electra("pretrain", "tiny", *words, *change, cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr, done.stderr


def test_a_generator_that_does_not_fit_is_replaced_with_a_warning(imported, caplog):
    networks = begin(imported, "generator.width=0.25").networks()
    assert "the generator beside start is not used" in caplog.text and "generator.width" in caplog.text
    assert networks["generator"].encoder.settings.hidden == 4


def test_rows_beyond_the_positions_make_the_table_longer(imported, caplog):
    with caplog.at_level("INFO", "electra"):
        main = begin(imported, length=40).networks()["discriminator"].encoder
    table = load_network(imported / "model").encoder.embeddings.positions.weight
    longer = main.embeddings.positions.weight
    assert (
        longer.shape == (40, 8)
        and longer[:16].equal(table)
        and longer[16:32].equal(table)
        and longer[32:].equal(table[:8])
    )
    assert "has 16 positions, this run 40" in caplog.text
    without = electra(
        "pretrain", f"tiny+{imported / 'model' / 'recipe.toml'}", f"data={imported / 'shards'}", "rows.length=40"
    )
    assert without.returncode == 2 and "rows.length (40) is beyond encoder.positions (16)" in without.stderr


def test_a_run_goes_on_from_a_run_and_says_what_it_changed(finished_run, prepared, recipe, tmp_path):
    """Our own runs and exports are starts like all others: before the first step the metrics are those of the finished run."""
    for start in (finished_run, finished_run / "export"):
        run = tmp_path / start.name
        words = f"data={prepared}", f"run={run}", f"start={start}", "train.steps=6", "schedule.warmup=1", "seed=3"
        done = electra("pretrain", recipe, *words)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        heldout = [record for record in records if record["kind"] == "heldout"]
        assert [record["step"] for record in heldout] == [0, 6]
        page = (run / "before-after.md").read_text()
        assert f"| auc | {heldout[0]['auc']:.4f} | {heldout[1]['auc']:.4f} |" in page
        assert "after step 6" in done.stdout and f"{heldout[0]['auc']:.4f}" in done.stdout
        if start == finished_run:
            last = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
            expected = [record for record in last if record["kind"] == "heldout"][-1]
            for name in ("auc", "mlm_loss", "rtd_loss"):
                assert heldout[0][name] == pytest.approx(expected[name], abs=1e-6)
            rates = [record["lr"] for record in records if record["kind"] == "train"]
            assert rates == [pytest.approx(1e-3 * (1 - 4 / 6)), pytest.approx(1e-3 * (1 - 5 / 6))]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_new_tokens_are_words_of_the_field_and_old_ids_stay(kind, tmp_path):
    corpus = Corpus([write_corpus(tmp_path / "text.txt")])
    old = train_tokenizer(corpus, TokenizerSettings(kind=kind, vocab_size=400))
    text = FIELD.replace("z", "w").replace("k", "l").replace("o", "a")
    new = extend_tokenizer(old, [text], 3)
    size = vocabulary_size(old)
    assert vocabulary_size(new) == size + 3 and all(
        new.get_vocab()[token] == number for token, number in old.get_vocab().items()
    )
    before, after = old.encode(text), new.encode(text)
    assert len(after.ids) < len(before.ids) and max(after.ids) >= size
    other = "The barak walks the lonute, and the lonute walks back."
    assert old.encode(other).ids == new.encode(other).ids
    pieces = added_pieces(old, new)
    names = {number: token for token, number in new.get_vocab().items()}
    for number, ids in enumerate(pieces):
        spelled = "".join(names[piece].removeprefix("##") for piece in ids)
        assert len(ids) > 1 and spelled == names[size + number]
    assert added_pieces(old, old) == [] and added_pieces(new, old) is None
    stranger = train_tokenizer(corpus, TokenizerSettings(kind=kind, vocab_size=400, lowercase=False))
    assert added_pieces(stranger, old) is None


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_tokens_beside_the_model_keep_their_ids_too(kind, tmp_path):
    """As in ModernBERT's tokenizer, whose special tokens are not among the pieces of its model."""
    corpus = Corpus([write_corpus(tmp_path / "text.txt")])
    old = train_tokenizer(corpus, TokenizerSettings(kind=kind, vocab_size=400))
    text = FIELD.replace("z", "w").replace("k", "l").replace("o", "a")
    word = text.split()[1].lower()
    old.add_tokens(["<e1>", word])
    if kind == "unigram":
        with pytest.raises(DataError, match=f"beside its model \\(<e1>, {word}\\)"):
            extend_tokenizer(old, [text], 2)
        return
    new, size = extend_tokenizer(old, [text], 2), vocabulary_size(old)
    numbers = new.get_vocab()
    assert old.get_vocab().items() <= numbers.items()
    assert sorted(numbers.values()) == list(range(size + 2)) and len(added_pieces(old, new)) == 2
    assert new.encode(f"the <e1> {word}").ids == old.encode(f"the <e1> {word}").ids


def test_a_run_with_new_tokens_begins_with_the_mean_of_their_pieces(finished_run, prepared, recipe, tmp_path, caplog):
    (tmp_path / "field.txt").write_text(
        FIELD.replace("z", "w").replace("k", "l") * 3 + (prepared.parent / "text.txt").read_text()
    )
    done = electra(
        "tokenizer", tmp_path / "longer", tmp_path / "field.txt", "--extend", finished_run, "--new-tokens", 2
    )
    assert done.returncode == 0 and "of which 2 are new" in done.stdout, done.stderr
    done = electra(
        "prepare", tmp_path / "shards", tmp_path / "field.txt", "--tokenizer", tmp_path / "longer", "--heldout", 0.1
    )
    assert done.returncode == 0, done.stderr
    with caplog.at_level("INFO", "electra"):
        objective = parts_of(recipe, f"data={tmp_path / 'shards'}", f"start={finished_run}", "run=x")
    assert "gets 2 new tokens" in caplog.text
    _, trained = load_run(finished_run)
    pieces = added_pieces(load_tokenizer(finished_run), load_tokenizer(tmp_path / "longer"))
    for name, network in objective.networks().items():
        old, new = trained.networks()[name].encoder.embeddings.table, network.encoder.embeddings.table
        assert new[: len(old)].equal(old)
        for row, ids in zip(new[len(old) :], pieces, strict=True):
            assert torch.allclose(row, sum(old[piece] for piece in ids) / len(ids), atol=1e-7)
    bias = trained.networks()["generator"].head.bias
    assert objective.networks()["generator"].head.bias[-1].item() == pytest.approx(
        bias[pieces[-1]].mean().item(), abs=1e-7
    )


def test_too_many_new_tokens_are_refused_with_the_number_there_are(finished_run, tmp_path):
    (tmp_path / "field.txt").write_text(FIELD)
    done = electra("tokenizer", tmp_path / "out", tmp_path / "field.txt", "--extend", finished_run, "--new-tokens", 500)
    assert done.returncode == 3 and "Ask for" in done.stderr and not (tmp_path / "out").exists()


def test_another_tokenizer_is_refused(imported, prepared, tmp_path):
    words = f"data={prepared}", f"start={imported / 'model'}", f"run={tmp_path / 'run'}", "rows.length=16"
    done = electra("pretrain", f"tiny+{imported / 'model' / 'recipe.toml'}", *words)
    assert done.returncode == 3 and "another tokenizer than the data" in done.stderr


def test_a_start_that_is_refused_leaves_no_folder_behind(finished_run, recipe, prepared, tmp_path):
    words = f"data={prepared}", f"run={tmp_path / 'runs' / 'new'}"
    for wrong in (("start=nowhere",), (f"start={finished_run}", "encoder.layers=3")):
        done = electra("pretrain", recipe, *words, *wrong)
        assert done.returncode in (2, 3) and not list(tmp_path.iterdir()), done.stderr
    (tmp_path / "runs" / "new").mkdir(parents=True)
    assert electra("pretrain", recipe, *words, "start=nowhere").returncode == 3
    assert [path.name for path in (tmp_path / "runs" / "new").iterdir()] == [".lock"]  # a folder of the user's stays
