"""Every objective and generator on the quickstart's text for 200 steps: it trains, and nothing has to be shouted."""

import pytest

import electra
from electra.commands.quickstart import collect_text
from electra.objectives.metrics import DEGENERATE_SAMPLING, PATIENCE, Watch, alarms
from electra.pretraining.run import pretrain
from electra.pretraining.settings import resolve
from electra.train.log import read_metrics
from helpers import shipped_additions, words_of

pytestmark = pytest.mark.slow
MINUTES = ["train.steps=200", "schedule.warmup=20", "train.log_every=10", "train.evaluate_every=200"]


@pytest.fixture(scope="module")
def documentation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documentation")
    text = collect_text(folder)
    electra.train_tokenizer(text, folder / "tokenizer", vocab_size=4096)
    electra.prepare(text, folder / "shards", folder / "tokenizer", heldout=0.02)
    return folder / "shards"


@pytest.fixture(scope="module")
def sources(documentation, tmp_path_factory):
    """What frozen generators come from: a full-size masked language model, and ELECTRA itself."""
    folder = tmp_path_factory.mktemp("sources")
    for name, recipe in (("masked-lm", "tiny+masked-lm"), ("electra", "tiny")):
        settings, _ = resolve(recipe, [f"data={documentation}", f"run={folder / name}", *MINUTES])
        pretrain(settings)
    return folder


@pytest.mark.parametrize("name", [*shipped_additions(), "masked-lm+whole-word"])
def test_two_hundred_steps_without_an_alarm(name, documentation, sources, tmp_path):
    words = [f"data={documentation}", f"run={tmp_path / 'run'}", *MINUTES]
    words += words_of(name, sources / "masked-lm", sources / "electra")
    settings, _ = resolve(f"tiny+{name}", words)
    pretrain(settings)
    records = read_metrics(tmp_path / "run")
    train = [record for record in records if record["kind"] == "train"]
    last = {key: float(value) for key, value in train[-1].items() if isinstance(value, int | float)}
    # Runs this short are left in peace, so the rule that must hold even here is asked directly.
    watch = Watch()
    watch.add(PATIENCE, last)
    assert DEGENERATE_SAMPLING not in alarms(watch, 1.0)
    assert not [record["text"] for record in records if record["kind"] == "alarm"]
    # The candidates of selection come from the generator and get harder while it learns and cools: its own loss may rise.
    key = "mlm_loss" if name == "selection" else "loss"
    losses = [record[key] for record in train]
    assert sum(losses[-3:]) < sum(losses[:3])
