"""The pre-training step as one writes it on transformers' modules: what ours is compared with.

ElectraForMaskedLM and ElectraForPreTraining, or ModernBertForMaskedLM and ModernBertForTokenClassification, with one word
table; everything of fixed shape and on the device: nothing asks for a value, and samples (Gumbel's trick) are drawn at the
chosen positions alone. The masked-LM classes compute logits at every position (ModernBERT's `sparse_prediction` does not, but
then its shapes change with the labels). What a user does about it is `head`:

- "labels": nothing. The labels are given to the class and the loss is its own, as its documentation shows: over all positions.
- "gathered": the logits of the chosen positions are picked out first, and the loss is over these.
- "chosen": goes around the class, through its parts (encoder, head, decoder), so that there are no other logits: the step of
  somebody who has read its code.

`mode` is torch.compile's, over the whole of masking, both networks and losses; None: not compiled.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from electra.base.batch import SpecialIds
from electra.interop.formats import config_json
from electra.model import EncoderSettings
from electra.model.electra import ElectraEncoderSettings

MASK_SHARE_OF_CHOSEN = 0.85
DETECTION_WEIGHT = 50
Head = Literal["labels", "gathered", "chosen"]
IGNORED = -100  # a label that the loss leaves out
Config = Callable[[EncoderSettings], dict[str, Any]]


def config_of(settings: EncoderSettings, vocabulary: int) -> dict[str, Any]:
    """In transformers' words, as an export has it."""
    return config_json(settings, vocabulary, SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103), "")


class Networks(NamedTuple):
    """Generator and discriminator with one word table; and by themselves what is inside the generator's class."""

    generator: nn.Module
    discriminator: nn.Module
    encode: Callable[[Tensor], Any]
    token_logits: Callable[[Tensor], Tensor]


def electra_networks(full: EncoderSettings, small: EncoderSettings, config: Config) -> Networks:
    import transformers

    generator = transformers.ElectraForMaskedLM(transformers.ElectraConfig(**config(small)))
    discriminator = transformers.ElectraForPreTraining(transformers.ElectraConfig(**config(full)))
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.tie_weights()
    heads = generator.generator_predictions, generator.generator_lm_head
    return Networks(generator, discriminator, generator.electra, lambda states: heads[1](heads[0](states)))


def modern_networks(full: EncoderSettings, small: EncoderSettings, config: Config) -> Networks:
    """ModernBERT's table is as wide as its layers. For one table of another width each network gets it behind a projection,
    and the generator's head ends at its width: the networks of ours, inside their classes."""
    import transformers

    generator = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**config(small)))
    discriminator = transformers.ModernBertForTokenClassification(transformers.ModernBertConfig(**config(full)))
    vocabulary, width = generator.config.vocab_size, full.embedding
    table = nn.Embedding(vocabulary, width)
    for network, settings in ((generator, small), (discriminator, full)):
        parts = nn.Sequential(table, nn.Linear(width, settings.hidden, bias=False))
        network.model.embeddings.tok_embeddings = parts if width != settings.hidden else table
    generator.head.dense = nn.Linear(small.hidden, width, bias=False)
    generator.head.norm = nn.LayerNorm(width, generator.config.norm_eps, bias=False)
    generator.decoder = nn.Linear(width, vocabulary)
    generator.decoder.weight = table.weight
    return Networks(generator, discriminator, generator.model, lambda states: generator.decoder(generator.head(states)))


def at(values: Tensor, chosen: Tensor) -> Tensor:
    return values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[2]))


def transformers_step(
    full: EncoderSettings,
    small: EncoderSettings,
    vocabulary: int,
    share: float,
    ordinary: int,
    mask: int,
    device: torch.device,
    mode: str | None,
    head: Head,
) -> Callable[[Tensor], Tensor]:
    """`step(ids)` is one update, and returns its loss. Ids below `ordinary` are never chosen."""
    torch.manual_seed(0)
    build = electra_networks if isinstance(full, ElectraEncoderSettings) else modern_networks
    generator, discriminator, encode, token_logits = build(
        full, small, lambda settings: config_of(settings, vocabulary)
    )
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
            logits = token_logits(at(encode(ids).last_hidden_state, chosen))
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
