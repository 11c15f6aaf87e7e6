"""Heads under autocast."""

import pytest
import torch
import torch.nn.functional as F

from conftest import TINY, make_batch
from electra.finetuning.classification import LinearHead
from electra.finetuning.question_heads import JointHead
from electra.model import build_detection_head, initialise, question_head, sequence_label_head, token_label_head
from electra.model.heads import in_float32
from electra.model.modern import ModernEncoderSettings


@pytest.mark.parametrize("settings", [TINY, ModernEncoderSettings(hidden=32, heads=2)], ids=["electra", "modernbert"])
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


MODERN = ModernEncoderSettings(layers=2, hidden=32, heads=2, intermediate=64, embedding=32, positions=40)


@pytest.mark.parametrize("settings", [TINY, MODERN], ids=["electra", "modernbert"])
@pytest.mark.parametrize("kind", ["sequence", "token", "question", "linear", "joint"])
def test_label_heads_compute_their_last_layer_in_float32_under_autocast(settings, kind):
    batch = make_batch()
    hidden = torch.randn(*batch.ids.shape, settings.hidden, generator=torch.Generator().manual_seed(0))
    head, inputs = {
        "sequence": (sequence_label_head(settings, 3), (hidden[:, 0],)),
        "token": (token_label_head(settings, 3), (hidden,)),
        "question": (question_head(settings), (hidden,)),
        "linear": (LinearHead(settings, 3), (hidden, batch)),
        "joint": (JointHead(settings.hidden, beam=4, answerability=True), (hidden, batch)),
    }[kind]
    initialise(head, settings, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = head.eval()(*inputs)
    for tensor in outputs.values() if isinstance(outputs, dict) else [outputs]:
        if tensor.is_floating_point():
            assert tensor.dtype == torch.float32
            assert (tensor != tensor.bfloat16().float()).any()


def test_a_linear_layer_in_float32_is_the_layer_itself_without_autocast():
    layer, states = torch.nn.Linear(8, 3), torch.randn(5, 8)
    assert in_float32(layer, states).equal(layer(states))
    assert in_float32(layer.to("meta"), states.to("meta")).shape == (5, 3)
