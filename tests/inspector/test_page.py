"""The page's colours, computed from its style sheet: what no browser is needed for."""

import re

import pytest

from electra.inspector.report import page_text

GROUNDS = ("ground", "panel", "sunk")
PAIRS = [
    *((text, below) for text in ("ink", "soft") for below in GROUNDS),
    *((text, below) for text in ("accent", "alarm", "good") for below in ("ground", "panel")),
    *((text, f"{text}-wash") for text in ("accent", "alarm", "good")),
    *[("soft", "accent-wash"), ("ink", "accent-wash"), ("accent-ink", "accent"), ("ground", "ink"), ("ink", "heat")],
]


def colours(scheme: str) -> dict[str, list[int]]:
    light, dark = page_text("style.css").split("@media (prefers-color-scheme: dark)")
    found = re.findall(r"--([\w-]+): #(\w{6})", light)
    found += re.findall(r"--([\w-]+): #(\w{6})", dark.partition("* {")[0]) if scheme == "dark" else []
    return {name: [int(value[at : at + 2], 16) for at in (0, 2, 4)] for name, value in found}


def luminance(colour: list[float]) -> float:
    parts = [it / 255 for it in colour]
    red, green, blue = (it / 12.92 if it <= 0.03928 else ((it + 0.055) / 1.055) ** 2.4 for it in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: list[float], other: list[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_on_every_ground(scheme):
    own = colours(scheme)
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    found = {(text, below): contrast(own[text], own[below]) for text, below in PAIRS}
    for name in (it for it in own if it.startswith("run-")):  # tags: 16 % of the colour over a panel
        mixed = [0.16 * top + 0.84 * below for top, below in zip(own[name], own["panel"], strict=True)]
        found["ink", f"tag {name}"] = contrast(own["ink"], mixed)
        assert contrast(own[name], own["panel"]) >= 3, name  # lines need less than text
    assert not {pair: round(it, 2) for pair, it in found.items() if it < 4.5}


def test_nothing_moves_for_who_does_not_want_it():
    style = page_text("style.css")
    moving = re.findall(r"[^{}]*\{[^{}]*(?:animation|transition):[^{}]*\}", style)
    assert (
        len(moving) == 1 and "prefers-reduced-motion: no-preference" in style.partition(moving[0])[0][-80:] + moving[0]
    )
