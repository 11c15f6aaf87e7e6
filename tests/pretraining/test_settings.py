"""Settings that cannot be trained together are refused before anything starts, with the remedy."""

import pytest

from electra.base import config
from electra.base.errors import SettingsError
from electra.pretraining.settings import resolve, warn_without_effect
from helpers import shipped_additions, shipped_sizes, words_of

DATA = "data=x"


@pytest.mark.parametrize(
    ("recipe", "words", "messages"),
    [
        ("electric", ["generator.kind=transformer"], ["scores every position", "generator.kind=two_tower"]),
        ("electric", ["generator.kind=unigram"], ["scores every position"]),
        ("electric", ["sampling.temperature=2.0"], ["must be 1"]),
        ("electric", ["sampling.top_k=5"], ["top_k must be off"]),
        ("two-stage", [], ["needs the run it comes from", "electra pretrain masked-lm", "generator.source="]),
        ("frozen-generator", ["generator.source=x", "generator.sharing=tied"], ["cannot share", '"gdes"']),
        ("corrective+selection", [], ["drop objective.predict or the recipe that sets it"]),
        ("electra-small", ["generator.source=x"], ['only for generator.kind = "frozen"']),
        ("electra-small", ["sampling.greedy=true", "sampling.disallow_correct=true"], ["greedy", "Drop one"]),
        ("electra-small", ["sampling.greedy=true", "sampling.top_k=3"], ["top_k", "Drop one"]),
        ("adversarial", ["generator.kind=two_tower"], ["generator.kind=transformer"]),
        ("adversarial", ["sampling.greedy=true"], ["must be off"]),
        ("replaced-span", ["masking.unit=token"], ["masking.unit=span"]),
        ("replaced-span", ["masking.span_limit=127"], ["span_limit (127)", "rows.length 128", "Lower it"]),
        ("electra-small", ["generator.sharing=all"], ["generator.width=1"]),
        ("generator-unigram", ["generator.sharing=gdes"], ["no embeddings to share", "generator.sharing=none"]),
        ("electric", ["masking.unit=word"], ["masking.unit=token"]),
        ("masked-lm", ["objective.random_share=0.2"], ["(0.85)", "(0.2)", "together at most 1"]),
        ("masked-lm+two-stage", ["generator.source=x"], ["has no generator", "Drop one"]),
        ("electra-small", ["optimizer.momentum=0.9"], ["(0.9)", "optimizer.kind=muon", "optimizer.betas"]),
        ("tiny+muon", ["optimizer.generator.kind=adamw"], ["unknown key optimizer.generator.kind"]),
        ("tiny+muon", ["optimizer.momentum=1.0"], ["optimizer.momentum"]),
        (
            "generator-two-tower",
            ["generator.sharing=all", "generator.width=1.0"],
            ["one network", "generator.sharing=tied"],
        ),
    ],
)
def test_contradictions_are_refused_with_the_remedy(recipe, words, messages):
    with pytest.raises(SettingsError) as error:
        resolve(recipe, [DATA, *words])
    for message in messages:
        assert message in str(error.value)


def test_a_frozen_generator_that_is_to_share_everything_gets_one_remedy_and_never_two_that_contradict():
    words = ["generator.source=x", "generator.sharing=all", "generator.width=1.0"]
    with pytest.raises(SettingsError, match='Use "none" or "gdes"') as error:
        resolve("frozen-generator", [DATA, *words])
    assert "generator.sharing=tied" not in str(error.value)


def test_what_is_given_for_a_generator_that_is_not_there_is_said_to_be_without_effect(caplog):
    words = ["generator.width=0.5", "sampling.temperature=2.0"]
    warn_without_effect(*resolve("tiny+masked-lm", [DATA, *words]))
    assert caplog.messages == [
        "generator.width, sampling.temperature will have no effect: a masked language model has no generator."
    ]
    caplog.clear()
    warn_without_effect(
        *resolve("modern-small+masked-lm", [DATA, "masking.share=0.3"])
    )  # its generator is the recipe's
    warn_without_effect(*resolve("tiny", [DATA, *words]))
    assert not caplog.messages


def test_what_the_kind_of_optimizer_or_schedule_does_not_read_is_said_to_be_without_effect(caplog):
    words = [DATA, "optimizer.generator.lr=1e-3", "schedule.power=2"]
    for more in (["optimizer.decoupled=true"], ["optimizer.decoupled=true", "schedule.kind=linear"]):
        warn_without_effect(*resolve("tiny", [*words, *more]))
    assert not caplog.messages
    for kind in ("cosine", "constant"):
        caplog.clear()
        warn_without_effect(*resolve("tiny", [*words, f"schedule.kind={kind}"]))
        assert caplog.messages == [
            "optimizer.generator.lr will have no effect: without optimizer.decoupled the generator has no optimizer of its own.",
            f"schedule.power will have no effect: schedule.kind={kind} does not use it.",
        ]


@pytest.mark.parametrize("size", shipped_sizes())
@pytest.mark.parametrize("addition", shipped_additions())
def test_every_addition_joins_every_size(size, addition):
    settings, _ = resolve(f"{size}+{addition}", [DATA, *words_of(addition)])
    assert settings.encoder.layers == resolve(size, [DATA])[0].encoder.layers
    values = config.flatten(config.dump(settings))
    for key, value in config.flatten(config.read_recipe(addition)).items():
        assert values[key] == value


@pytest.mark.parametrize("url", ["file:///tmp/x", "s3://bucket/shards", "memory://x"])
@pytest.mark.parametrize("key", ["data", "start", "run"])
def test_a_url_is_no_folder_to_train_in_or_from(key, url):
    with pytest.raises(SettingsError, match=rf"^{key}={url} is a URL, .* Give a path: copy .*\.$"):
        resolve("tiny", [f"{other}={url if other == key else 'x'}" for other in ("data", "start", "run")])
    assert resolve("tiny", ["data=C:/x:y", "run=a:/b"])


def test_an_unknown_objective_is_answered_with_those_there_are():
    with pytest.raises(SettingsError, match=r"objective.kind: 'electrik' is not one of electra, masked_lm"):
        resolve("electra-small", [DATA, "objective.kind=electrik"])


def test_a_key_of_another_objective_is_answered_with_its_kind():
    with pytest.raises(SettingsError, match="objective.candidates is for objective.kind=selection"):
        resolve("electra-small", [DATA, "objective.candidates=3"])


def test_recipes_joined_by_plus_override_from_left_to_right(tmp_path):
    settings, sources = resolve("tiny+masked-lm+whole-word", [DATA])
    assert (settings.encoder.hidden, settings.objective.kind, settings.masking.unit) == (64, "masked_lm", "word")
    assert settings.run == "runs/tiny+masked-lm+whole-word"
    mine = tmp_path / "mine.toml"
    mine.write_text("seed = 3")
    assert resolve(f"{mine}+masked-lm", [DATA])[0].run == "runs/mine+masked-lm"
    electric, _ = resolve("tiny+electric", [DATA])
    assert electric.sampling.start_temperature == 1.0  # tiny starts hot, electric may not
    assert sources["masking.unit"] == "tiny+masked-lm+whole-word"
    with pytest.raises(SettingsError, match="no recipe 'nonsense'"):
        resolve("tiny+nonsense", [DATA])


def test_the_generators_adam_is_the_discriminators_where_nothing_else_is_said():
    settings, _ = resolve("tiny+gdes", [DATA, "optimizer.generator.lr=1e-3"])
    assert settings.optimizer.decoupled
    assert (settings.optimizer.generator.lr, settings.optimizer.lr) == (1e-3, 4e-3)
    assert settings.optimizer.generator.betas == settings.optimizer.betas == (0.9, 0.95)
