"""What a folder of runs holds is told in words where others would be put beside it."""

import pytest

from electra.base import config
from electra.base.errors import SettingsError
from electra.base.files import write_json
from electra.finetuning.classification import ClassificationSettings
from electra.finetuning.plan import MethodSettings
from electra.finetuning.report import GLUE, SETTINGS, glue_mean, refuse_other_runs, results_page

MADE = {
    "model": "runs/old",
    "model_sha256": "c7051d",
    "task": config.dump(ClassificationSettings()),
    "method": config.dump(MethodSettings()),
    "files": {"train": {"file": "t.csv", "sha256": "aa"}},
    "rows": {"train": 20},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "runs/new", "model_sha256": "bfd0da"}, "runs of another model (runs/old). "),
        ({"model_sha256": "bfd0da"}, "runs of other weights (runs/old). "),
        ({"together": {"t": "01", "few": "02"}}, "runs trained alone. "),
        ({"files": {"train": {"file": "t.csv", "sha256": "bb"}}}, "runs with another file for train (t.csv). "),
        ({"files": {"train": {"file": "u.csv", "sha256": "bb"}}}, "runs with another file for train (t.csv). "),
        (
            {"rows": {"train": 21}, "model_sha256": "bfd0da"},
            "of other weights (runs/old), with other settings (rows.train: 20 -> 21). ",
        ),
        ({"method": {**MADE["method"], "lr": 0.5}}, "with other settings (lr: 0.0003 -> 0.5). "),
    ],
)
def test_runs_of_another_model_or_of_tasks_together_are_called_that(tmp_path, changes, words):
    (tmp_path / "seed-0").mkdir()
    write_json(tmp_path / SETTINGS, MADE)
    refuse_other_runs(tmp_path, {**MADE, "model": "moved"})
    with pytest.raises(SettingsError) as error:
        refuse_other_runs(tmp_path, MADE | changes)
    assert words in str(error.value) and "bfd0da" not in str(error.value) and error.value.parameters == ("out",)


def test_runs_of_other_tasks_together_are_named(tmp_path):
    folder = tmp_path / "t"
    (folder / "seed-0").mkdir(parents=True)
    write_json(folder / SETTINGS, MADE | {"together": {"t": "01", "few": "02"}})
    for others, words in (
        ({"t": "01", "many": "03"}, "with few. "),
        ({"t": "01", "few": "04"}, "with other rows of few. "),
    ):
        with pytest.raises(SettingsError) as error:
            refuse_other_runs(folder, MADE | {"together": others})
        assert f"holds runs trained together {words}" in str(error.value)


def test_a_glue_mean_of_tasks_that_started_from_several_models_says_so():
    """As after `start=mnli`, or commands with several models in one folder."""
    dev = {"split": "dev", "file": "dev.tsv", "rows": 9, "official": True, "official_rows": 9}
    result = {"model": "run", "metric": "accuracy", "median": 0.5, "mean": 0.5, "sd": None, "best": 0.5, "best_seed": 0}
    result |= {"ensemble": {"accuracy": 0.5}, "runs": 1, "files": [dev], "notes": [], "cut": {}, "scores": {}}
    results = dict.fromkeys(GLUE, result)
    for changes, mixed in (
        ({}, []),
        ({"rte": result | {"model": "out/mnli"}}, ["rte started from out/mnli", "the others from run"]),
    ):
        glue = glue_mean(results | changes)
        page = results_page({"model": "run", "tasks": results | changes, "glue": glue})
        assert glue["mean"] == 0.5 and glue["mixed"] == mixed
        assert ("The mean is not of one model: rte started from out/mnli, the others from run." in page) == bool(mixed)
