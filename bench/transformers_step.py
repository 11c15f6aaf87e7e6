"""The pre-training step as one writes it on transformers' modules: what ours is compared with.

ElectraForMaskedLM and ElectraForPreTraining with shared embeddings; everything of fixed shape and on the device: nothing
asks for a value, and samples (Gumbel's trick) are drawn at the chosen positions alone. ElectraForMaskedLM computes logits at
every position, and there is no switch for that. What a user does about it is `head`:

- "labels": nothing. The labels are given to the class and the loss is its own, as its documentation shows: over all positions.
- "gathered": the logits of the chosen positions are picked out first, and the loss is over these.
- "chosen": goes around the class, through its parts (`electra`, `generator_predictions`, `generator_lm_head`), so that there
  are no other logits: the step of somebody who has read its code.

`mode` is torch.compile's, over the whole of masking, both networks and losses; None: not compiled.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from electra.model.electra import ElectraEncoderSettings

MASK_SHARE_OF_CHOSEN = 0.85
DETECTION_WEIGHT = 50
Head = Literal["labels", "gathered", "chosen"]
IGNORED = -100  # a label that the loss leaves out


def transformers_config(settings: ElectraEncoderSettings, vocabulary: int) -> Any:
    import transformers

    return transformers.ElectraConfig(
        vocab_size=vocabulary,
        embedding_size=settings.embedding,
        hidden_size=settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.intermediate,
        max_position_embeddings=settings.positions,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.attention_dropout,
    )


def at(values: Tensor, chosen: Tensor) -> Tensor:
    return values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[2]))


def transformers_step(
    full: ElectraEncoderSettings,
    small: ElectraEncoderSettings,
    vocabulary: int,
    share: float,
    ordinary: int,
    mask: int,
    device: torch.device,
    mode: str | None,
    head: Head,
) -> Callable[[Tensor], Tensor]:
    """`step(ids)` is one update, and returns its loss. Ids below `ordinary` are never chosen."""
    import transformers

    torch.manual_seed(0)
    generator = transformers.ElectraForMaskedLM(transformers_config(small, vocabulary))
    discriminator = transformers.ElectraForPreTraining(transformers_config(full, vocabulary))
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.tie_weights()
    both = nn.ModuleList([generator, discriminator]).to(device).train()
    parameters = list(both.parameters())  # each once, the shared ones too
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, eps=1e-6, weight_decay=0.01, fused=True)

    def fill(ids: Tensor, chosen: Tensor, original: Tensor) -> tuple[Tensor, Tensor]:
        """Logits at the chosen positions, and the generator's loss."""
        if head == "labels":
            labels = torch.full_like(ids, IGNORED).scatter(1, chosen, original)
            found = generator(ids, labels=labels)
            return at(found.logits, chosen), found.loss
        if head == "chosen":
            hidden = at(generator.electra(ids).last_hidden_state, chosen)
            logits = generator.generator_lm_head(generator.generator_predictions(hidden))
        else:
            logits = at(generator(ids).logits, chosen)
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), original.flatten())

    def losses(ids: Tensor) -> Tensor:
        count = max(1, round(share * ids.shape[1]))
        wanted = torch.rand(ids.shape, device=device).masked_fill(ids < ordinary, -1)
        chosen = wanted.topk(count, dim=1).indices
        original = ids.gather(1, chosen)
        hidden = torch.rand(original.shape, device=device) < MASK_SHARE_OF_CHOSEN
        masked = ids.scatter(1, chosen, original.masked_fill(hidden, mask))
        logits, mlm_loss = fill(masked, chosen, original)
        with torch.no_grad():
            gumbel = -(-torch.rand(logits.shape, device=device).log()).log()
            corrupted = ids.scatter(1, chosen, (logits.float() + gumbel).argmax(-1))
        detection = discriminator(corrupted, labels=(corrupted != ids).long())
        return mlm_loss + DETECTION_WEIGHT * detection.loss

    compiled = losses if mode is None else torch.compile(losses, dynamic=False, mode=mode)
    graphs = mode is not None and mode in ("reduce-overhead", "max-autotune")
    cuda = device.type == "cuda"

    def step(ids: Tensor) -> Tensor:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss = compiled(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
