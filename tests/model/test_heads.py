"""Heads under autocast."""

import pytest
import torch
import torch.nn.functional as F

from conftest import TINY
from electra.model import build_detection_head
from electra.model.modern import ModernEncoderSettings


@pytest.mark.parametrize(
    "settings", [TINY, ModernEncoderSettings(hidden=32, heads=2)], ids=["electra", "modernbert"]
)
def test_a_detection_head_ends_in_float32_also_under_autocast(settings):
    """Logits of half precision differ in their third digit: near ties would be decided by rounding."""
    head = build_detection_head(settings)
    last = head.output if settings is TINY else head.label.output
    hidden, inputs = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0)), []
    last.register_forward_hook(lambda layer, given, result: inputs.extend(given))
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
    assert logits.dtype == inputs[0].dtype == torch.float32
    assert torch.equal(logits, F.linear(inputs[0], last.weight, last.bias).squeeze(-1))
    assert (logits != logits.bfloat16()).any()
