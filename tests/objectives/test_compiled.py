"""In another process: compiled code runs without the checks of shapes that the tests install here."""

import subprocess
import sys

import pytest

from helpers import environment

SIZES = "layers=2, hidden=16, heads=1, intermediate=16, embedding=8, dropout=0, attention_dropout=0"
CODE = """
from dataclasses import replace
import torch
from electra.base.batch import Batch, SpecialIds
from electra.model.electra import ElectraEncoderSettings
from electra.model.modern import ModernEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.objectives import ElectraSettings, build
from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings

inputs = ObjectiveInputs(
    encoder=ENCODER,
    generator=GeneratorSettings(width=0.5),
    masking=MaskingSettings(),
    sampling=SamplingSettings(start_temperature=2.0),
    special=SpecialIds(0, 1, 2, 3, 4),
    continues=torch.zeros(60, dtype=torch.bool),
    token_counts=torch.zeros(60),
    seed=0,
)
objective = build(ElectraSettings(), inputs)
compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
ids = torch.arange(5, 55).view(2, 25)
batch = Batch(ids, ids * 0, ids > 0, torch.arange(2), seed=3, padded=False)
for step in range(6):
    now = replace(batch, progress=torch.tensor(step / 10, dtype=torch.float64), samples=batch.samples + step)
    expected, found = objective(now).total.item(), compiled(now).total.item()
    assert abs(expected - found) < 1e-4, (expected, found)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.parametrize("encoder", [f"ElectraEncoderSettings({SIZES})", f"ModernEncoderSettings({SIZES}, window=6)"])
def test_the_whole_step_is_one_graph_and_stays_one_while_the_run_goes_on(encoder):
    """Nothing in the forward asks the host, so a compiler can take it whole. Progress, samples and temperature change with
    every step: a second graph may be made for their changing, not one for each."""
    code = CODE.replace("ENCODER", encoder)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2
