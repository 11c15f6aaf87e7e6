import tomllib

import pytest

from electra.base import config
from electra.base.errors import SettingsError
from electra.pretraining.settings import PretrainSettings, resolve

DATA = "data=shards"


def test_the_command_line_beats_the_recipe_and_the_recipe_beats_the_default():
    settings, sources = resolve("electra-small", [DATA, "train.steps=2000"])
    assert settings.train.steps == 2000 and sources["train.steps"] == "command line"
    assert settings.optimizer.lr == 5e-4 and sources["optimizer.lr"] == "electra-small"
    assert settings.encoder.dropout == 0.1 and sources["encoder.dropout"] == "default"


def test_an_unknown_key_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match=r"unknown key encoder.hiden. Did you mean encoder.hidden\?") as error:
        resolve("electra-small", [DATA, "encoder.hiden=3"])
    assert error.value.exit_code == 2


def test_a_key_in_the_wrong_section_is_found_by_its_name():
    with pytest.raises(SettingsError, match=r"unknown key steps. Did you mean train.steps\?"):
        resolve("electra-small", [DATA, "steps=3"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("learning_rate", "optimizer.lr"), ("train.num_train_steps", "train.steps"), ("max_grad_norm", "optimizer.clip")],
)
def test_a_key_of_transformers_is_answered_with_ours(typed, meant):
    with pytest.raises(SettingsError, match=rf"unknown key {typed}. Did you mean {meant}\?"):
        resolve("electra-small", [DATA, f"{typed}=3"])


def test_all_problems_are_reported_at_once():
    with pytest.raises(SettingsError) as error:
        resolve("electra-small", [DATA, "masking.share=1.5", "optimizer.lr=-1", "train.batchh=3", "encoder.layers=two"])
    lines = str(error.value).splitlines()
    assert len([line for line in lines if "optimizer.generator" not in line]) == 4
    assert any("masking.share" in line and "1.5" in line for line in lines)
    assert any("Did you mean train.batch?" in line for line in lines)
    assert any("encoder.layers" in line and "'two'" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rows.length=1024", "rows.length (1024) is beyond encoder.positions (512)"),
        ("encoder.heads=7", "hidden (256) must be a multiple of heads (7)"),
        ("train.accumulate=3", "batch (128) must be a multiple of accumulate (3)"),
        ('generator.sharing="all"', "needs generator.width=1"),
        ("train.steps", "'train.steps' is not of the form key=value"),
        ("encoder=3", "encoder"),
        ("optimizer.betas=[1.5, 0.9]", "optimizer.betas"),
    ],
)
def test_contradictions_are_refused_with_both_values(word, message):
    with pytest.raises(SettingsError) as error:
        resolve("electra-small", [DATA, word])
    assert message in str(error.value)


def test_missing_data_names_the_key():
    with pytest.raises(SettingsError, match="data is not set. Give it in the recipe or as data=…"):
        resolve("electra-small", [])


def test_an_unknown_recipe_is_answered_with_the_nearest_or_with_all():
    with pytest.raises(SettingsError, match=r"no recipe 'large'.* Did you mean electra-large or modern-large\?"):
        resolve("large", [])
    with pytest.raises(SettingsError, match="no recipe 'maskedlm'.* Did you mean masked-lm?"):
        resolve("tiny+maskedlm", [DATA])
    with pytest.raises(SettingsError, match="Shipped are .*electra-base, electra-large, electra-small, .*tiny"):
        resolve("zzz", [DATA])


def test_a_broken_recipe_file_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train\nsteps = 3")
    with pytest.raises(SettingsError, match="mine.toml is not valid TOML"):
        resolve(str(path), [DATA])


@pytest.mark.parametrize("name", config.recipe_names())
def test_the_resolved_tree_written_as_toml_resolves_to_itself(name, tmp_path):
    source = ["generator.source=x"] if name in ("two-stage", "frozen-generator") else []
    settings, _ = resolve(name, [DATA, *source, 'run="with \\"quotes\\" and \\\\ and 한국어"'])
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(settings), "utf-8")
    again, sources = config.resolve(PretrainSettings, str(path))
    assert again == settings
    assert set(sources.values()) == {str(path)}
    assert tomllib.loads(path.read_text("utf-8"))["train"]["steps"] == settings.train.steps


def test_a_folder_may_be_called_like_a_number_or_a_date():
    settings, _ = resolve("tiny", ["data=2024", "run=2024-01-01"])
    assert (settings.data, settings.run) == ("2024", "2024-01-01")
    words = ["data=1.10", "run=2024_11", "start=1e5", "generator.source=0x10", "generator.kind=frozen", "seed=1_0"]
    settings, _ = resolve("tiny", [*words, "generator.sharing=none"])
    assert (settings.data, settings.run, settings.start) == ("1.10", "2024_11", "1e5")
    assert (settings.generator.source, settings.seed) == ("0x10", 10)


def test_a_recipe_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "r.toml").write_bytes(b"# \xff\xfe")
    with pytest.raises(SettingsError, match="r.toml cannot be read"):
        resolve(str(tmp_path / "r.toml"), [DATA])


def test_settings_are_frozen():
    settings, _ = resolve("tiny", [DATA])
    with pytest.raises(Exception, match="frozen"):
        settings.train.steps = 3


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-4", 1e-4), ("true", True), ("[0.9, 0.98]", [0.9, 0.98]), ('"3"', "3"), ("some/path", "some/path")],
)
def test_values_on_the_command_line_are_read_as_toml_or_as_text(text, value):
    assert config.parse_value(text) == value


PAPER = {  # Clark et al., Table 6; electra-facts section 2a
    "electra-small": (12, 256, 1024, 4, 128, 0.25, 0.15, 5e-4, 128, 1_000_000, 128),
    "electra-small-plus-plus": (12, 256, 1024, 4, 128, 1.0, 0.15, 5e-4, 128, 4_000_000, 512),
    "electra-base": (12, 768, 3072, 12, 768, 1 / 3, 0.15, 2e-4, 256, 766_000, 512),
    "electra-large": (24, 1024, 4096, 16, 1024, 0.25, 0.25, 2e-4, 2048, 400_000, 512),
}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_have_the_papers_hyper_parameters(name):
    s, _ = resolve(name, [DATA])
    e = s.encoder
    sizes = (e.layers, e.hidden, e.intermediate, e.heads, e.embedding, s.generator.width)
    run = (s.masking.share, s.optimizer.lr, s.train.batch, s.train.steps, s.rows.length)
    assert (*sizes, *run) == pytest.approx(PAPER[name])
    assert (s.optimizer.betas, s.optimizer.eps, s.optimizer.weight_decay, s.optimizer.clip) == (
        (0.9, 0.999),
        1e-6,
        0.01,
        1.0,
    )
    assert (e.dropout, e.attention_dropout, s.schedule.warmup, s.schedule.power) == (0.1, 0.1, 10_000, 1.0)
    assert (s.objective.detection_weight, s.objective.generator_weight, s.sampling.temperature) == (50.0, 1.0, 1.0)
    # The original's mechanics where they change numbers.
    assert (s.masking.mask_token_share, s.optimizer.bias_correction, s.schedule.kind) == (0.85, False, "original")
    assert (e.initialisation, s.generator.sharing, s.rows.kind, s.sampling.start_temperature) == (
        "original",
        "tied",
        "segments",
        1.0,
    )


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (
            "encoder=modernbert",
            "encoder is a section of settings (got 'modernbert'). Did you mean encoder.kind=modernbert?",
        ),
        ("optimizer=muon", "optimizer is a section of settings (got 'muon'). Did you mean optimizer.kind=muon?"),
        ("rows=3", "rows is a section of settings (got 3). Did you mean rows.kind=…?"),
        (
            "encoder.window=4",
            "encoder.window is for encoder.kind=modernbert: add that, or drop encoder.window or the recipe that sets it.",
        ),
        ("encoder.heads=3", "encoder: hidden (256) must be a multiple of heads (3)."),
        ("encoder.kind=bert", "encoder.kind: 'bert' is not one of electra, modernbert."),
    ],
)
def test_choices_between_kinds_are_explained_in_the_words_of_the_command_line(word, line):
    from electra.pretraining.settings import resolve

    with pytest.raises(SettingsError) as error:
        resolve("electra-small", ["data=x", word])
    assert str(error.value) == line
