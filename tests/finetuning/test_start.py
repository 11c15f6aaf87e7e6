"""What a network of fine-tuning begins with: the pre-trained weights, and random ones where they are asked for."""

from types import SimpleNamespace

import pytest

from electra.data.tokenizer import load_tokenizer
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings, PlannedTask, Start
from electra.finetuning.seeds import build_model
from electra.interop.read import Pretrained
from electra.model import encoder_alone, initialise
from electra.model.electra import ElectraEncoderSettings
from electra.model.modern import ModernEncoderSettings
from helpers import electra

SIZES = {"layers": 3, "hidden": 32, "heads": 2, "intermediate": 64, "embedding": 16}


def start_of(toy_model, settings) -> Start:
    encoder = encoder_alone(settings, 300)
    initialise(encoder, settings, 77)
    for parameter in encoder.parameters():  # norms and biases too are unlike those of a new network
        parameter.data += 0.5
    network = Pretrained(encoder, None, "encoder", load_tokenizer(toy_model))
    return Start("toy", network)


@pytest.mark.parametrize("kind", [ElectraEncoderSettings, ModernEncoderSettings])
@pytest.mark.parametrize("count", [0, 2])
def test_the_top_layers_and_the_norm_behind_them_start_anew(toy_model, kind, count):
    start = start_of(toy_model, kind(**SIZES))
    task = ClassificationSettings(labels=("a", "b")).build(start.network.tokenizer, 24, {})
    plan = SimpleNamespace(method=MethodSettings(reinitialise=count))
    model = build_model(PlannedTask(plan, task, start, {}), seed=0)
    fresh = {name for name, it in model.encoder.state_dict().items() if not it.equal(start.tensors[name])}
    above = ("layers.1.", "layers.2.", "final_norm.") if count else ()
    assert fresh == {name for name in start.tensors if above and name.startswith(above)}


def test_more_layers_than_there_are_cannot_start_anew(toy_model, tmp_path):
    table = tmp_path / "my.csv"
    table.write_text("text,label\n" + "".join(f"the barak walks {n},{'ab'[n % 2]}\n" for n in range(20)))
    done = electra("finetune", toy_model, table, "reinitialise=3", "--out", tmp_path / "out")
    assert done.returncode == 2 and "reinitialise=3, but the model has 2 layers" in done.stderr
