"""How many floating-point operations a recipe costs: as the paper counts them, and as the hardware sees them.

The paper's accounting is that of the original `flops_computation.py`, so that a recipe lands on the axes of the paper's
figures. It counts every operation of a forward pass, dropout and softmax included; an embedding lookup as the product
with a one-hot vector; a backward pass as another forward pass; and the softmax over the vocabulary at 15.625 % of the
positions. Beside these conventions it has three slips, which `corrected=True` puts right:

- the LayerNorm after attention counts 5 operations a token instead of 5 a hidden unit (google-research/electra#121);
- mixing the values and projecting them back count hidden units where heads * head size is meant (T5-11B only);
- the share of positions with a softmax is 15.625 % for every model, also for ELECTRA-Large, which masks 25 %.

The real accounting counts matrix products alone, which is what a device's peak is about: forward once, backward twice
(a product for each of its two factors), attention included, heads only at the positions where they are computed.
Nothing is counted for embedding lookups, and nothing that a kernel computes a second time to save memory.
"""

import re
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from electra.base.errors import SettingsError
from electra.model import EncoderSettings
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.model.modern import ModernEncoderSettings
from electra.objectives.corruption import MaskingSettings

PAPER_VOCABULARY = 30522
PAPER_OUTPUT_SHARE = 0.15625
PAPER_PASSES = 2
DROPOUT, LAYER_NORM, GELU, SOFTMAX = 4, 5, 8, 5  # operations an element, as the paper counts them
TRAINING_PASSES = 3


@dataclass(frozen=True)
class PaperSizes:
    """A transformer as the original script sees it. `attention` is heads * head size; `decoder` doubles attention."""

    hidden: int
    layers: int
    heads: int
    attention: int
    intermediate: int
    embedding: int
    length: int = 512
    vocabulary: int = PAPER_VOCABULARY
    output_share: float = PAPER_OUTPUT_SHARE
    decoder: bool = False

    def block(self, corrected: bool = False) -> int:
        """Forward, one row through one layer."""
        h, s = self.hidden, self.length
        mixed = self.attention if corrected else h
        norm = LAYER_NORM * h if corrected else LAYER_NORM
        project = 3 * (2 * h + 1) * self.attention
        scores = 2 * self.attention * s + (SOFTMAX + DROPOUT + 1) * s * self.heads
        output = 2 * mixed * s + 2 * mixed * h + h + (DROPOUT + 1) * h + norm
        attention = (project + scores + output) * (2 if self.decoder else 1)
        expand = (2 * h + GELU + 1) * self.intermediate
        contract = 2 * h * self.intermediate + h + (DROPOUT + 1) * h + LAYER_NORM * h
        return (attention + expand + contract) * s

    def embeddings(self) -> int:
        """Forward, one row: words, types and positions as one-hot products, LayerNorm, dropout, projection."""
        e, s = self.embedding, self.length
        lookup = 2 * e * self.vocabulary + 2 * e * (s + 2) + 2 * e + (LAYER_NORM + DROPOUT) * e
        project = (2 * e + 1) * self.hidden if e != self.hidden else 0
        return (lookup + project) * s

    def token_head(self) -> float:
        e, vocabulary = self.embedding, self.vocabulary
        dense = (2 * self.hidden + 1 + GELU + LAYER_NORM) * e
        return self.output_share * (dense + 2 * e * vocabulary + (SOFTMAX + 2) * vocabulary) * self.length

    def detection_head(self) -> int:
        return (2 * self.hidden + 1 + GELU + 2) * self.hidden * self.length

    def training(self, batch: int, steps: float, detects: bool = False, corrected: bool = False) -> float:
        head = self.detection_head() if detects else self.token_head()
        body = self.layers * self.block(corrected) + self.embeddings()
        return PAPER_PASSES * batch * steps * (body + head)


def bert_sizes(hidden: int, layers: int, embedding: int = 0, **more: Any) -> PaperSizes:
    """BERT's proportions: heads of 64, four times as wide in between. `embedding = 0`: as wide as the layers."""
    return PaperSizes(hidden, layers, max(1, hidden // 64), hidden, 4 * hidden, embedding or hidden, **more)


def paper_electra(
    discriminator: PaperSizes, generator: PaperSizes, batch: int, steps: float, corrected: bool = False
) -> float:
    return discriminator.training(batch, steps, detects=True, corrected=corrected) + generator.training(
        batch, steps, corrected=corrected
    )


def published(corrected: bool = False) -> dict[str, float]:
    """What the original script prints, in its order. ELMo and XLNet are counted by TensorFlow there, not by rules."""
    small = bert_sizes(256, 12, 128, length=128)
    base, large = bert_sizes(768, 12), bert_sizes(1024, 24)
    t5_encoder = PaperSizes(1024, 24, 128, 128 * 128, 65536, 1024, vocabulary=32000, output_share=0.0)
    t5_decoder = replace(t5_encoder, output_share=1.0, decoder=True)

    def masking(sizes: PaperSizes, share: float = 0.15) -> PaperSizes:
        return replace(sizes, output_share=chosen_share(share, sizes.length)) if corrected else sizes

    def alone(sizes: PaperSizes, batch: int, steps: float) -> float:
        return sizes.training(batch, steps, corrected=corrected)

    tiny = masking(bert_sizes(64, 12, 128, length=128))
    base_generator, large_generator = (
        masking(bert_sizes(256, 12, 768)),
        masking(bert_sizes(256, 24, 1024), 0.25),
    )

    return {
        "elmo": 2 * 10 * 768648884 * 568093262680 / (20.0 * 128),
        "xlnet": 2 * 500000 * 8192 * 15064773691518 / 32.0,
        "gpt": alone(bert_sizes(768, 12, vocabulary=40000, output_share=1.0), 128, 960800),
        "bert_small": alone(masking(small), 128, 1.45e6),
        "bert_base": alone(masking(base), 256, 1e6),
        "bert_large": alone(masking(large), 256, 1e6),
        "electra_small": paper_electra(small, tiny, 128, 1e6, corrected),
        "electra_base": paper_electra(base, base_generator, 256, 766000, corrected),
        "electra_400k": paper_electra(large, large_generator, 2048, 400000, corrected),
        "electra_1.75M": paper_electra(large, large_generator, 2048, 1750000, corrected),
        "roberta": alone(masking(bert_sizes(1024, 24, vocabulary=50265)), 8000, 500000),
        "albert": alone(masking(bert_sizes(4096, 12, 128, vocabulary=30000)), 4096, 1.5e6),
        "t5_11b": alone(t5_encoder, 2048, 1e6) + alone(t5_decoder, 2048, 1e6),
    }


@dataclass(frozen=True)
class Work:
    """What is computed: an objective over rows of `length` tokens of a vocabulary, `batch` rows a step."""

    objective: Any
    encoder: EncoderSettings
    generator: GeneratorSettings
    masking: MaskingSettings
    vocabulary: int
    length: int
    batch: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.steps

    def paper(self, corrected: bool = False) -> float:
        """The whole run, as the paper would count it."""
        share = chosen_share(self.masking.share, self.length) if corrected else PAPER_OUTPUT_SHARE
        sizes = self.paper_sizes(self.encoder, share)
        match self.objective.kind, self.generator.kind:
            case "electra", "transformer":
                small = self.encoder.scaled(self.generator.width, self.generator.depth)
                return paper_electra(sizes, self.paper_sizes(small, share), self.batch, self.steps, corrected)
            case "masked_lm", _:
                return sizes.training(self.batch, self.steps, corrected=corrected)
        raise SettingsError(f"the paper's accounting has no count for objective.kind={self.objective.kind}.")

    def paper_sizes(self, encoder: EncoderSettings, share: float) -> PaperSizes:
        if isinstance(encoder, ModernEncoderSettings):
            raise SettingsError(
                "the paper's accounting is of BERT's blocks and has no count for ModernBERT's."
            )
        return PaperSizes(
            encoder.hidden,
            encoder.layers,
            encoder.heads,
            encoder.hidden,
            encoder.intermediate,
            encoder.embedding,
            self.length,
            self.vocabulary,
            share,
        )

    def parts(self) -> dict[str, float]:
        """Matrix products of training, in operations a token, by part. An objective is an arm here."""
        full, share = self.encoder, chosen_share(self.masking.share, self.length)
        naming, detecting = token_head_forward(full, self.vocabulary), detection_head_forward(full)
        main = {"discriminator": TRAINING_PASSES * encoder_forward(full, self.length)}
        match self.objective.kind:
            case "masked_lm":
                return {
                    "encoder": TRAINING_PASSES * encoder_forward(full, self.length),
                    "token head": TRAINING_PASSES * share * naming,
                }
            case "electra" | "electric":
                heads = {"detection head": detecting}
            case "adversarial":
                small = full.scaled(self.generator.width, self.generator.depth)
                heads = {"detection head": detecting, "baseline": share * 2 * small.hidden * 2 / 3}
                main["generator's states for the baseline"] = encoder_forward(small, self.length)
            case "token_recovery":
                everywhere = self.objective.predict == "all"
                heads = {"recovery head": (1.0 if everywhere else share) * naming}
                if self.objective.predict != "chosen":
                    heads["detection head"] = detecting
            case "selection":
                candidates = self.objective.candidates + 1
                heads = {
                    "detection head": detecting,
                    "selection head": share * 2 * full.embedding * (full.hidden + candidates),
                }
            case "replaced_span":
                double = 2 * full.hidden
                heads = {"detection head": detecting, "span head": 2.0 * double * (double + 1)}
            case _:
                raise SettingsError(f"the cost of objective.kind={self.objective.kind!r} is not known here.")
        return self.generator_parts() | main | {k: TRAINING_PASSES * v for k, v in heads.items()}

    def generator_parts(self) -> dict[str, float]:
        """A generator that reads the text as it is names every token; one that is frozen goes forward only."""
        small = self.encoder.scaled(self.generator.width, self.generator.depth)
        share = chosen_share(self.masking.share, self.length)
        body, naming = encoder_forward(small, self.length), token_head_forward(small, self.vocabulary)
        match self.generator.kind:
            case "uniform" | "unigram":
                return {}
            case "frozen":
                return {"generator": body, "token head": share * naming}
            case "transformer":
                return {"generator": TRAINING_PASSES * body, "token head": TRAINING_PASSES * share * naming}
            case "two_tower":
                wide = naming + 2 * small.embedding * small.hidden
                return {"generator": 2 * TRAINING_PASSES * body, "token head": TRAINING_PASSES * wide}
            case "autoregressive":
                turns = self.masking.span_limit if self.masking.unit != "token" else 0
                learning = {"generator": TRAINING_PASSES * body, "token head": TRAINING_PASSES * naming}
                return learning | ({"writing spans": turns * (body + share * naming)} if turns else {})

    def per_token(self) -> float:
        """Forward and backward. With padded rows, so much for each position, real or not."""
        return sum(self.parts().values())


def chosen_share(mask_share: float, length: int) -> float:
    """The share of positions with a token head: a whole number of slots a row (objectives/corruption.py)."""
    return max(1, round(mask_share * length)) / length


def encoder_forward(settings: EncoderSettings, length: int) -> float:
    """A token through an encoder: projections 4h², feed-forward 2hi (3hi with a gate), scores and mixing 2h for each key
    that is seen. A local layer needs the keys of its window, whatever a kernel without windows computes."""
    hidden, layers = settings.hidden, settings.layers
    match settings:
        case ElectraEncoderSettings():
            matrices, keys = 2, float(layers * length)
        case ModernEncoderSettings():
            local = sum(map(settings.is_local, range(layers)))
            matrices = 3
            keys = (layers - local) * length + local * keys_nearby(length, settings.window // 2)
    weights = layers * (4 * hidden**2 + matrices * hidden * settings.intermediate)
    project = settings.embedding * hidden if settings.embedding != hidden else 0
    return 2.0 * (weights + project + 2 * hidden * keys)


def keys_nearby(length: int, reach: int) -> float:
    """How many tokens, itself included, a token of a row has at most `reach` away, on average."""
    reach = min(reach, length - 1)
    return 2 * reach + 1 - reach * (reach + 1) / length


def token_head_forward(settings: EncoderSettings, vocabulary: int) -> float:
    return 2.0 * settings.embedding * (settings.hidden + vocabulary)


def detection_head_forward(settings: EncoderSettings) -> float:
    return 2.0 * settings.hidden * (settings.hidden + 1)


# Dense bfloat16 with float32 accumulation, in TFLOP/s, nominal (float16 for V100 and T4, which lack
# bfloat16). Words of a device's name that are all in torch's name for it.
PEAKS = {
    "b200": 2250.0,
    "gh200": 989.0,
    "h200": 989.0,
    "h100": 989.0,
    "h100 pcie": 756.0,
    "h100 nvl": 835.0,
    "a100": 312.0,
    "a10": 125.0,
    "a10g": 70.0,
    "l40s": 362.0,
    "l4": 121.0,
    "v100": 125.0,
    "t4": 65.0,
    "rtx 4090": 165.0,
    "rtx 3090": 71.0,
}
MEASURED = {"h200": 790.0}  # large square products in cuBLAS
PARTIAL = {"mig", "laptop", "max"}  # slices and small relatives that carry a large device's name


def known_device(name: str) -> str:
    """The entry of PEAKS that a device's name (torch's, or a user's) speaks of, or "" where none does."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    fitting = [known for known in PEAKS if set(known.split()) <= words]
    return "" if words & PARTIAL else max(fitting, key=len, default="")


def peak_flops(name: str) -> float:
    """Operations a second that a device can do at most; 0 where we do not know."""
    return PEAKS.get(known_device(name), 0.0) * 1e12


def measured_cpu(seconds: float = 0.5, size: int = 1024) -> float:
    """Operations a second of this machine's processor in a float32 matrix product: tables know no processors."""
    matrix = torch.randn(size, size)
    matrix @ matrix
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - started)


def mfu(tokens_per_second: float, flops_per_token: float, peak: float) -> float:
    """Model FLOPs utilisation: the share of a device's peak that went into the matrix products of the model."""
    return tokens_per_second * flops_per_token / peak
