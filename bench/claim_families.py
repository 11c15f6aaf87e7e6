"""What bench/claim.py compares: families of sides, and how each is usually measured."""

from typing import NamedTuple

FULL = ("generator.width=1.0", "generator.depth=1.0")
SLOW = ("optimizer.decoupled=true", "optimizer.generator.lr=3e-4")
SIZES = ((0.25, 1.0), (0.25, 0.25), (0.5, 0.25), (1.0, 0.25), (1.0, 0.5), (1.0, 1.0))
TWO_STAGE = "two-stage"
FIRST_STAGE = ('generator.source="first-stage"', 'start="first-stage"')
"""Until the folder is known."""
Family = dict[str, tuple[str, tuple[str, ...]]]
"""A recipe and settings for each side, by its name."""


class Defaults(NamedTuple):
    budget: str
    seeds: int = 1
    task_seeds: int = 1
    more: tuple[str, ...] = ()
    base: str = "modern-small"


QUARTER, HALF, WHOLE, DOUBLE = "5.325e15 flops", "1.065e16 flops", "2.13e16 flops", "4.26e16 flops"
DEFAULTS = dict.fromkeys(("generators", "sharing", "training", "after"), Defaults(QUARTER)) | {
    "table5": Defaults(WHOLE, 2, 2, ("mnli", "qnli")),
    "compute": Defaults(",".join((DOUBLE, WHOLE, HALF, QUARTER))),
    "paper": Defaults("62500 steps", task_seeds=3, base="electra-small"),
}


def families(base: str) -> dict[str, Family]:
    electra, bert = (base, ()), (f"{base}+masked-lm", ())
    kinds = ("uniform", "unigram", "two-tower", "autoregressive")
    after = ("selection", "corrective", "replaced-span", "whole-word", "electric")
    return {
        "table5": {
            "ELECTRA": electra,
            "All-Tokens MLM": (f"{base}+all-tokens", ()),
            "Replace MLM": (f"{base}+replace-mlm", ()),
            "ELECTRA 15 %": (f"{base}+electra-15", ()),
            "BERT": bert,
            "BERT 30 %": (f"{base}+masked-lm", ("masking.share=0.3",)),
        },
        "compute": {"ELECTRA": electra, "BERT": bert},
        "generators": {
            **{
                f"width {width:g}, depth {depth:g}": (base, (f"generator.width={width}", f"generator.depth={depth}"))
                for width, depth in SIZES
            },
            **{name: (f"{base}+generator-{name}", ()) for name in kinds},
        },
        "sharing": {
            f"share {name}": (base, (*FULL, f"generator.sharing={name}", *own))
            for name, own in (("none", ()), ("tied", ()), ("gdes", ("optimizer.decoupled=true",)), ("all", ()))
        },
        "training": {
            "joint": electra,
            "adversarial": (f"{base}+adversarial", ()),
            "adversarial with likelihood": (f"{base}+adversarial", ("objective.likelihood_weight=1",)),
            "adversarial, slow generator": (f"{base}+adversarial", SLOW),
            TWO_STAGE: (f"{base}+two-stage", ()),
            "temperature 1.5 to 1": (base, ("sampling.start_temperature=1.5",)),
        },
        "after": {"ELECTRA": electra, "BERT": bert, **{name: (f"{base}+{name}", ()) for name in after}},
        "paper": {"ELECTRA-Small": electra},
    }
