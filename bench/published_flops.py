"""Training FLOPs of published models, as the ELECTRA paper counts them: the thirteen numbers of the original's
flops_computation.py, to the last digit, and without its slips.

    python bench/published_flops.py [--json]

The rules are those that `electra flops` has for a recipe (electra.pretraining.trial). A third slip concerns T5-11B alone,
whose heads are wider than its layers: mixing the values and projecting them back count hidden units where heads * head size
is meant. ELMo and XLNet are counted by TensorFlow there, not by rules.
"""

import argparse
import json

from electra.model.electra import ElectraEncoderSettings
from electra.pretraining.trial import PAPER_OUTPUT_SHARE, PAPER_PASSES, paper_body, paper_head

WORDS = 30522


def bert_sizes(hidden: int, layers: int, embedding: int = 0) -> ElectraEncoderSettings:
    """BERT's proportions: heads of 64, four times as wide in between. `embedding = 0`: as wide as the layers."""
    sizes = {"hidden": hidden, "layers": layers, "heads": max(1, hidden // 64), "intermediate": 4 * hidden}
    return ElectraEncoderSettings(**sizes, embedding=embedding or hidden)


def published(corrected: bool = False) -> dict[str, float]:
    """In the order of the original."""
    small, base, large = bert_sizes(256, 12, 128), bert_sizes(768, 12), bert_sizes(1024, 24)

    def training(
        sizes: ElectraEncoderSettings,
        batch: int,
        steps: float,
        share: float | None = 0.15,
        length: int = 512,
        words: int = WORDS,
        more: int = 0,
    ) -> float:
        """`share` of the positions have a token head (None: all have a detection head); `more` operations per row."""
        masked = share is not None and 0 < share < 1
        if masked:
            share = round(share * length) / length if corrected else PAPER_OUTPUT_SHARE
        body = paper_body(sizes, length, words, corrected) + more
        return PAPER_PASSES * batch * steps * (body + paper_head(sizes, length, words, share))

    def electra(
        sizes: ElectraEncoderSettings, generator: ElectraEncoderSettings, *run: float, share: float = 0.15, length: int = 512
    ) -> float:  # fmt: skip
        return training(sizes, *run, share=None, length=length) + training(generator, *run, share=share, length=length)

    tiny, base_generator, large_generator = (
        bert_sizes(64, 12, 128),
        bert_sizes(256, 12, 768),
        bert_sizes(256, 24, 1024),
    )
    return {
        "elmo": 2 * 10 * 768648884 * 568093262680 / (20.0 * 128),
        "xlnet": 2 * 500000 * 8192 * 15064773691518 / 32.0,
        "gpt": training(base, 128, 960800, 1.0, words=40000),
        "bert_small": training(small, 128, 1.45e6, length=128),
        "bert_base": training(base, 256, 1e6),
        "bert_large": training(large, 256, 1e6),
        "electra_small": electra(small, tiny, 128, 1e6, length=128),
        "electra_base": electra(base, base_generator, 256, 766000),
        "electra_400k": electra(large, large_generator, 2048, 400000, share=0.25),
        "electra_1.75M": electra(large, large_generator, 2048, 1750000, share=0.25),
        "roberta": training(large, 8000, 500000, words=50265),
        "albert": training(bert_sizes(4096, 12, 128), 4096, 1.5e6, words=30000),
        "t5_11b": sum(
            training(T5, 2048, 1e6, share, words=32000, more=t5_attention(share == 1, corrected))
            for share in (0.0, 1.0)
        ),
    }


T5 = ElectraEncoderSettings(layers=24, hidden=1024, heads=128, intermediate=65536, embedding=1024)


def t5_attention(decodes: bool, corrected: bool, length: int = 512) -> int:
    """What T5's attention costs per row beyond that of heads which are together as wide as the layers: 128 heads of 128. A
    decoder has it twice."""
    h, s, wider = T5.hidden, length, 128 * 128 - T5.hidden
    more = 3 * (2 * h + 1) * wider + 2 * wider * s + (2 * wider * s + 2 * wider * h if corrected else 0)
    whole = 3 * (2 * h + 1) * h + 4 * h * s + 10 * s * T5.heads + 2 * h * h + 6 * h + 5 * (h if corrected else 1)
    return T5.layers * s * (2 * more + whole if decodes else more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    printed, corrected = published(), published(corrected=True)
    if as_json:
        print(json.dumps({"printed": printed, "corrected": corrected}))
        return
    for name, value in printed.items():
        print(f"{name:14} {value:10.4g} {corrected[name]:10.4g}")


if __name__ == "__main__":
    main()
