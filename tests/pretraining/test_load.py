"""Weights of other runs are taken where they mean the same, and refused with the way out where they would not."""

import pytest

from conftest import TINY, VOCABULARY
from electra.base.errors import SettingsError
from electra.interop.formats import own_tensors
from electra.model import build_token_head, encoder_alone
from electra.model.modern import ModernEncoderSettings
from electra.pretraining.start import SCALED, copy_weights, require_fit

MODERN = ModernEncoderSettings(
    layers=4, hidden=32, heads=2, intermediate=48, embedding=32, positions=40, window=8, global_every=3
)
START, SOURCE = "start=there", "generator.source=there"


def take(name, there, here, **change):
    source = encoder_alone(there, VOCABULARY)
    target = encoder_alone(here.model_copy(update=change), VOCABULARY)
    require_fit(name, source.settings, target.settings, SCALED if name == SOURCE else ())
    copy_weights(name, own_tensors(source), target)
    assert target.embeddings.table.equal(source.embeddings.table)


@pytest.mark.parametrize("name", [START, SOURCE])
@pytest.mark.parametrize(
    ("key", "there", "here"),
    [("window", 8, 128), ("global_every", 3, 2), ("global_theta", 160000.0, 9.0), ("local_theta", 1e4, 9.0)],
)
def test_what_changes_the_function_but_no_shape_is_refused(name, key, there, here):
    with pytest.raises(SettingsError) as refused:
        take(name, MODERN, MODERN, **{key: here})
    assert str(refused.value) == (
        f"the network of {name} does not fit this recipe: "
        f"encoder.{key} is {there} there and {here} here: give encoder.{key}={there}."
    )


@pytest.mark.parametrize("settings", [MODERN, TINY])
def test_another_number_of_heads_is_refused(settings):
    here = 2 * settings.heads
    says = f"encoder.heads is {settings.heads} there and {here} here: give encoder.heads={settings.heads}.$"
    with pytest.raises(SettingsError, match=says):
        take(START, settings, settings, heads=here)
    says = f"recipe: heads {settings.heads} there and {here} here: give the generator.width and generator.depth"
    with pytest.raises(SettingsError, match=says):
        take(SOURCE, settings, settings, heads=here)


@pytest.mark.parametrize(
    ("there", "change"),
    [
        ({"layers": 2, "global_every": 2}, {"global_every": 3}),
        ({"global_every": 1}, {"window": 4, "local_theta": 9.0}),
        ({}, {"positions": 80, "dropout": 0.1, "attention_dropout": 0.1}),
    ],
    ids=["the same layers are local", "none is", "lengths and dropout"],
)
def test_what_changes_nothing_is_not_refused(there, change):
    settings = MODERN.model_copy(update=there)
    take(START, settings, settings, **change)


def test_sizes_that_differ_are_named_and_advice_is_only_what_applies():
    says = r"recipe: encoder\.intermediate is 48 there and 50 here: give encoder\.intermediate=48\.$"
    with pytest.raises(SettingsError, match=says):
        take(START, MODERN, MODERN, intermediate=50)
    says = r"and 50 here: give the generator\.width and generator\.depth that make the same sizes\.$"
    with pytest.raises(SettingsError, match=says):
        take(SOURCE, MODERN, MODERN, intermediate=50, layers=2)
    says = r"give encoder\.embedding=32\. In an exported ModernBERT words are as wide as the layers"
    with pytest.raises(SettingsError, match=says):
        take(START, MODERN, MODERN, embedding=16)
    with pytest.raises(SettingsError, match=r"give encoder\.positions=\d+\.$"):
        take(START, TINY, TINY, positions=TINY.positions - 1)


def test_another_kind_is_refused_with_the_kind_to_give():
    says = r"recipe: encoder\.kind is modernbert there and electra here: give encoder\.kind=modernbert\.$"
    with pytest.raises(SettingsError, match=says):
        take(START, MODERN, TINY)


def test_a_head_over_another_vocabulary_is_one_line():
    heads = build_token_head(MODERN, VOCABULARY), build_token_head(MODERN, VOCABULARY + 1)
    with pytest.raises(SettingsError, match=r"^generator.source=there does not fit this recipe \(size mis"):
        copy_weights(SOURCE, heads[0].state_dict(), heads[1])
