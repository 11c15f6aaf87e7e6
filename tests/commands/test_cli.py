"""The command line as people meet it: each verb once for good, and each mistake with its one line and exit code."""

import ast
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import electra as package
from electra import commands
from helpers import SETTINGS, electra, electra_process, environment, write_corpus
from together import Together

TEXT = "The barak walks the lonute, and the lonute walks back."


def refused(done, code: int, *parts: str) -> None:
    """One line for people, no traceback, the agreed exit code."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    message = [line for line in done.stderr.splitlines() if line.startswith("electra: ")]
    assert len(message) == 1, done.stderr
    for part in parts:
        assert part in message[0], message[0]


def test_detect_gives_every_token_a_probability_and_its_place(finished_run):
    done = electra("detect", finished_run, TEXT, "--json")
    (line,) = done.stdout.splitlines()
    tokens = json.loads(line)["tokens"]
    assert all(0 <= token["probability"] <= 1 for token in tokens)
    assert [TEXT[token["start"] : token["end"]].lower() for token in tokens] == [
        t["token"].removeprefix("##") for t in tokens
    ]


def test_detect_reads_a_file_or_standard_input_and_run_and_export_agree(finished_run, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(f"{TEXT}\n\n{TEXT}\n")
    from_file = electra("detect", finished_run, file, "--json").stdout
    from_stdin = electra("detect", finished_run / "export", "--json", stdin=f"{TEXT}\n{TEXT}\n").stdout
    ours, theirs = ([json.loads(line) for line in out.splitlines()] for out in (from_file, from_stdin))
    assert [bool(it["tokens"]) for it in ours] == [True, False, True] and len(theirs) == 2  # every line has its answer
    pairs = zip(ours[0]["tokens"], theirs[0]["tokens"], strict=True)
    assert all(math.isclose(a["probability"], b["probability"], abs_tol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("verb", ["detect", "score"])
def test_the_name_of_a_file_that_is_not_there_is_no_text(verb, finished_run, tmp_path):
    refused(electra(verb, finished_run, "nosuch.txt"), 3, "nosuch.txt does not exist", "a text of several words")
    refused(electra(verb, finished_run, tmp_path), 3, f"{tmp_path} is a folder")


def test_detect_shows_the_text_as_it_was_written_with_a_legend(finished_run):
    text = "The BARAK  walks the lonute, and BACK."
    legend, shown = electra("detect", finished_run, text).stdout.splitlines()
    assert "replaced" in legend and "0.15" in legend
    assert re.sub(r"·[01]\.\d\d", "", shown) == text


def test_help_names_every_verb_under_its_group_and_cuts_no_sentence(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = electra("--help").stdout
    for title in ("Data:", "Pre-training:", "Fine-tuning:", "Models:", "Machine and settings:"):
        assert f"\n{title}\n" in text
    assert text.index("Pre-training:") < text.index("  pretrain  ") < text.index("Fine-tuning:")
    assert "..." not in text.split("First steps")[1] and "as the paper counts and as" in text


def test_the_version_is_told():
    assert electra("--version").stdout == f"electra {package.__version__}\n"


def test_shells_complete_verbs_and_recipes():
    def completed(*words):
        env = {"_ELECTRA_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        script = "import sys; sys.argv = ['electra']; from electra.commands import main; main()"
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment(env)
        ).stdout

    assert set(completed("electra", "pre").split()) == {
        "predict",
        "prepare",
        "prepare-finish",
        "prepare-plan",
        "prepare-unit",
        "pretrain",
    }
    assert set(completed("electra", "pretrain", "tiny+mas").split()) == {"tiny+masked-lm"}
    assert "electra" in electra("--help").stdout and "--install-completion" in electra("--help").stdout


def test_config_list_tells_sizes_from_additions_and_breaks_no_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = electra("config", "list").stdout
    sizes, additions = text.split("Additions")
    assert "  electra-small " in sizes and "  masked-lm " in additions and "  masked-lm " not in sizes
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert "discriminator" in text and not any(line.endswith("-") for line in lines)


def test_text_that_spells_special_tokens_is_text(finished_run):
    done = electra("detect", finished_run, "The [MASK] walks the [SEP], and back.", "--json")
    tokens = [token["token"] for token in json.loads(done.stdout)["tokens"]]
    assert done.returncode == 0 and not {"[MASK]", "[SEP]"} & set(tokens), tokens


def test_detect_reads_text_longer_than_the_network(finished_run):
    done = electra("detect", finished_run, TEXT * 20, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["tokens"]) > 200


def test_evaluate_prints_figures_beside_the_untrained_network_and_draws_the_curves(finished_run):
    done = electra("evaluate", finished_run, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["trained"]["auc"] > figures["untrained"]["auc"]
    last = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    held = [record for record in last if record["kind"] == "heldout"][-1]
    assert figures["trained"]["mlm_loss"] == pytest.approx(held["mlm_loss"], rel=1e-5)
    assert (finished_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = electra("evaluate", finished_run)
    assert "ROC-AUC" in table.stdout and "majority_baseline" in table.stdout


def test_a_run_evaluated_elsewhere_says_what_its_path_of_shards_is_relative_to(recipe, prepared, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "shards").symlink_to(prepared)
    words = ["pretrain", recipe, "data=shards", "run=run", "train.steps=1"]
    assert electra(*words, cwd=tmp_path / "home").returncode == 0
    done = electra("evaluate", "home/run", cwd=tmp_path)
    refused(done, 3, "home/run was trained on shards, which is relative to where it was started", str(tmp_path))
    assert done.stderr.endswith("Here that is --data.\n") and "prepare" not in done.stderr
    assert electra("evaluate", "home/run", "--data", "home/shards", cwd=tmp_path).returncode == 0
    (tmp_path / "home" / "shards").unlink()
    gone = electra("evaluate", "run", "--generator", "run", cwd=tmp_path / "home")
    refused(gone, 3, "run was trained on shards", "Here that is --data.")


def test_an_auc_is_told_with_whose_generator_it_is_against(finished_run, prepared, recipe):
    again = electra("pretrain", recipe, f"data={prepared}", f"run={finished_run}").stdout
    assert re.search(r"finished, held-out auc 0\.\d+ against its own generator, mlm_loss", again)
    own = electra("evaluate", finished_run).stdout
    assert "corrupted by its own generator" in own and f"electra evaluate OTHER_RUN --generator {finished_run}" in own
    by_another = electra("evaluate", finished_run, "--generator", finished_run).stdout
    assert "own generator" not in by_another and "OTHER_RUN" not in by_another


def test_the_run_folder_holds_what_is_needed_to_know_what_was_done(finished_run, prepared):
    environment = json.loads((finished_run / "environment.json").read_text())
    assert environment["torch"] and environment["cpu_count"] and len(environment["data_manifest_sha256"]) == 64
    assert json.loads((finished_run / "run_state.json").read_text())["state"] == "finished"
    kinds = [json.loads(line)["kind"] for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("train") == 8 and kinds.count("heldout") == 4
    assert list((finished_run / "tensorboard").iterdir())


def test_config_show_says_where_each_value_came_from():
    done = electra("config", "show", "electra-small", "train.steps=2000", "data=shards")
    lines = {line.split("=")[0].strip(): line for line in done.stdout.splitlines()}
    assert lines["train.steps"].split("=")[1].split() == ["2000", "#", "command", "line"]
    assert lines["optimizer.lr"].endswith("# electra-small") and lines["seed"].endswith("# default")
    assert lines["data"].endswith("# command line") and lines["run"].endswith("# default")
    assert "data " in (bare := electra("config", "show", "electra-small").stdout) and "# not set" in bare


def test_doctor_tries_a_step_and_a_checkpoint(recipe, prepared, tmp_path):
    done = electra("doctor", recipe, f"data={prepared}", f"run={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("machine", "settings", "all hashes match", "the whole run takes about", "one checkpoint"):
        assert part in done.stdout
    assert not list(tmp_path.iterdir()) and "one process with all rows" not in done.stdout


def test_doctor_says_that_it_examines_one_process_of_several(recipe, prepared, tmp_path):
    done = electra("doctor", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.processes=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run one process with all rows, not 2: torchrun --standalone --nproc-per-node 2 -m" in done.stdout


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_that_torchrun_did_not_start_are_said_to_be_without_effect(processes, recipe, tmp_path):
    started = Together(2, tmp_path, "pretrain", recipe, "data=nowhere", f"train.processes={processes}")
    assert started.codes() == [3, 3]
    warning = "WARNING: train.processes=4 has no effect: torchrun started 2 processes."
    lines = [line for line in started.said(0).splitlines() if "has no effect" in line]
    assert lines == ([warning] if processes == 4 else []) and started.said(1) == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.processes=3", "train.parallel=fsdp"), "train.batch=8 over 3 processes"),
        (("train.parallel=fsdp",), "is for several processes"),
        (("run={run}", "optimizer.lr=1e-2"), "optimizer.lr: 0.001 -> 0.01"),
        (("run={data}",), "holds prepared shards"),
    ],
)
def test_doctor_refuses_what_pretrain_would(words, message, recipe, prepared, finished_run, tmp_path):
    filled = [word.format(run=finished_run, data=prepared) for word in words]
    for verb in ("doctor", "pretrain") if "=3" not in words[0] else ("doctor",):  # that one starts processes
        done = electra(verb, recipe, f"data={prepared}", *filled, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stdout + done.stderr, verb
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_doctor_takes_a_folder_that_pretrain_would_go_on_with(recipe, prepared, finished_run):
    files = sorted(finished_run.rglob("*"))
    done = electra("doctor", recipe, f"data={prepared}", f"run={finished_run}", "train.steps=60")
    assert done.returncode == 0 and "has step 40 of this run" in done.stdout, done.stdout
    assert sorted(finished_run.rglob("*")) == files


def test_doctor_does_not_need_the_start_of_a_run_that_goes_on(recipe, prepared, finished_run, tmp_path):
    start = shutil.copytree(finished_run, tmp_path / "start")
    words = recipe, f"data={prepared}", f"run={tmp_path / 'run'}", f"start={start}", "train.steps=2"
    assert electra("pretrain", *words).returncode == 0
    shutil.rmtree(start)
    done = electra("doctor", *words)
    assert done.returncode == 0 and electra("pretrain", *words).returncode == 0, done.stdout


def test_doctor_writes_the_passes_over_the_text_as_people_write_numbers(recipe, prepared, tmp_path):
    done = electra("doctor", recipe, f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=200000")
    (rows,) = re.findall(r"([\d,]+) rows, all hashes match", done.stdout)
    passes = 200_000 * 8 / int(rows.replace(",", ""))
    assert passes > 1000 and f"the run passes over them {passes:,.1f} times" in done.stdout, done.stdout


def test_doctor_tells_when_the_learning_rate_never_gets_near_its_peak(recipe, prepared, tmp_path):
    words = (f"data={prepared}", f"run={tmp_path / 'run'}", "schedule.warmup=40", "train.steps=40")
    done = electra("doctor", recipe, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING: the learning rate never gets above" in done.stdout and "schedule.warmup=0.05" in done.stdout
    assert "WARNING" not in electra("doctor", recipe, words[0], words[1]).stdout


def test_doctor_finds_damaged_shards(recipe, prepared, tmp_path):
    shards = shutil.copytree(prepared, tmp_path / "shards")
    flip(next(shards.glob("train-*")))
    done = electra("doctor", recipe, f"data={shards}")
    assert done.returncode == 4 and "wrong shards" in done.stdout and "train-00000" in done.stdout


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_training_works_where_nothing_is_held_out(recipe, tmp_path):
    text = write_corpus(tmp_path / "text.txt", documents=60)
    assert electra("tokenizer", tmp_path / "tok", text, "--vocab-size", 300).returncode == 0
    assert (
        electra("prepare", tmp_path / "shards", text, "--tokenizer", tmp_path / "tok", "--heldout", 0).returncode == 0
    )
    run = tmp_path / "run"
    done = electra("pretrain", recipe, f"data={tmp_path / 'shards'}", f"run={run}", "train.steps=12")
    assert done.returncode == 0, done.stderr
    assert "no held-out documents" in done.stdout
    refused(electra("evaluate", run), 3, "no held-out documents", "as data")


def test_too_few_held_out_tokens_are_told_wherever_they_are_measured(recipe, prepared, tmp_path, monkeypatch):
    """And only where they are too few."""
    write_corpus(tmp_path / "text.txt", 60)
    words = ["prepare", tmp_path / "shards", tmp_path / "text.txt", "--tokenizer", prepared, "--heldout", 0.05]
    done = electra(*words)
    tokens = json.loads((tmp_path / "shards" / "manifest.json").read_text())["splits"]["heldout"]["tokens"]
    warning = f"only {tokens:,} tokens held out: chance alone moves their AUC by "
    assert 0 < tokens < 5000 and f"WARNING: {warning}" in done.stdout
    run = [f"data={tmp_path / 'shards'}", f"run={tmp_path / 'run'}", "train.steps=2"]
    assert electra("pretrain", recipe, *run).stderr.count(warning) == 1
    assert warning in electra("doctor", recipe, *run[:1], f"run={tmp_path / 'other'}").stdout
    assert warning in electra("evaluate", tmp_path / "run").stderr
    monkeypatch.setattr("electra.data.shards.ENOUGH_HELD_OUT", tokens)
    assert "WARNING" not in electra(*words).stdout and warning not in electra("evaluate", tmp_path / "run").stderr


def test_an_interrupted_start_leaves_settings_that_still_work(finished_run, recipe, prepared, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / ".config.toml.1.tmp").write_text("half")
    (run / ".export.1.tmp").mkdir()
    assert electra("pretrain", recipe, f"data={prepared}", f"run={run}").returncode == 0
    assert not list(run.glob(".*.tmp"))


@pytest.mark.parametrize("verb", ["tokenizer", "prepare", "prepare-plan"])
def test_text_in_the_place_of_the_output_is_told_the_order(verb, prepared, tmp_path):
    text = write_corpus(tmp_path / "my text.txt", 10)
    before = text.read_bytes()
    words = ["--tokenizer", prepared] if verb != "tokenizer" else []
    for other in (prepared, tmp_path / "shards"):
        done = electra(verb, text, other, *words)
        refused(done, 2, "my text.txt is a file", "output comes first", f"electra {verb} NEW_FOLDER '{text}'")
    assert text.read_bytes() == before and not (tmp_path / "shards").exists()


def test_prepare_refuses_a_folder_with_other_things_in_it(finished_run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train-00007.safetensors").write_text("mine")
    text = write_corpus(tmp_path / "text.txt", documents=20)
    done = electra("prepare", tmp_path / "out", text, "--tokenizer", finished_run / "tokenizer.json")
    refused(done, 2, "is not empty")
    assert (tmp_path / "out" / "train-00007.safetensors").read_text() == "mine"


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove"])
def test_damaged_shards_stop_a_run_before_its_first_step(recipe, prepared, tmp_path, harm):
    shards = shutil.copytree(prepared, tmp_path / "shards")
    file = next(shards.glob("train-*"))
    match harm:
        case "flip":
            flip(file)
        case "truncate":
            file.write_bytes(file.read_bytes()[:-7])
        case "remove":
            file.unlink()
    done = electra("pretrain", recipe, f"data={shards}", f"run={tmp_path / 'run'}")
    refused(done, 4, "train-00000.safetensors")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_token_id_beyond_the_vocabulary_is_found_before_the_first_step(recipe, prepared, tmp_path):
    import hashlib

    shards = shutil.copytree(prepared, tmp_path / "shards")
    file = next(shards.glob("train-*"))
    tensors = load_file(file)
    tensors["tokens"] = tensors["tokens"].copy()
    tensors["tokens"][17] = np.uint16(60_000)
    save_file(tensors, file)
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"][0]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest["splits"]["train"]["shards"][0]["bytes"] = file.stat().st_size
    (shards / "manifest.json").write_text(json.dumps(manifest))
    refused(electra("pretrain", recipe, f"data={shards}", f"run={tmp_path / 'run'}"), 4, "60000", "17")


def test_shards_of_another_tokenizer_are_refused(finished_run, recipe, tmp_path):
    text = write_corpus(tmp_path / "text.txt", documents=60)
    assert electra("tokenizer", tmp_path / "tok", text, "--vocab-size", 310, "--cased").returncode == 0
    made = electra("prepare", tmp_path / "shards", text, "--tokenizer", tmp_path / "tok", "--heldout", 0.2)
    assert made.returncode == 0, made.stderr
    other = electra("evaluate", finished_run, "--data", tmp_path / "shards")
    refused(other, 4, "another tokenizer")
    refused(electra("pretrain", recipe, f"data={tmp_path / 'shards'}", f"run={finished_run}"), 4, "other tokenizer")


def test_a_damaged_checkpoint_falls_back_loudly_and_only_damaged_ones_exit_4(finished_run, recipe, prepared, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    newest = sorted((run / "checkpoints").iterdir())[-1]
    flip(newest / "model.safetensors")
    again = electra("pretrain", recipe, f"data={prepared}", f"run={run}")
    assert again.returncode == 0 and "is damaged and not used" in again.stderr and "resuming at step 36" in again.stderr
    weights = [
        (folder / "checkpoints" / newest.name / "model.safetensors").read_bytes() for folder in (run, finished_run)
    ]
    assert weights[0] == weights[1]
    for folder in (run / "checkpoints").iterdir():
        flip(folder / "model.safetensors")
    refused(electra("pretrain", recipe, f"data={prepared}", f"run={run}"), 4, "checkpoints", "damaged")


def test_a_diverging_run_stops_with_advice_and_keeps_its_checkpoints(recipe, prepared, tmp_path):
    words = (f"data={prepared}", f"run={tmp_path / 'run'}", "optimizer.lr=1e18", "optimizer.clip=1e30")
    done = electra("pretrain", recipe, *words)
    refused(done, 6, "not finite", "optimizer.lr")
    assert json.loads((tmp_path / "run" / "run_state.json").read_text())["state"] == "diverged"


def test_a_quickstart_is_not_written_into_a_model(finished_run):
    folder = finished_run / "export"
    before = sorted(folder.iterdir())
    refused(electra("quickstart", folder, "--steps", 1), 2, f"{folder} holds a model")
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("pretrain", "electra-small", "data=nowhere"), 3, ("nowhere does not exist", "electra prepare")),
        (("pretrain", "electra-small", "data=x", "encoder.hiden=3"), 2, ("Did you mean encoder.hidden?",)),
        (("quickstart", "out", "--steps", "0"), 2, ("--steps",)),
        (("evaluate", "nowhere"), 3, ("nowhere is not a run folder",)),
        (("export", "nowhere", "out"), 3, ("nowhere does not exist",)),
        (("detect", "nowhere", "text"), 3, ("nowhere",)),
        (("tokenizer", "out"), 2, ("--from-vocab",)),
        (("tokenizer", "out", "missing.txt"), 3, ("missing.txt",)),
        (("tokenizer", "out", "--from-vocab", "missing.txt"), 3, ("missing.txt",)),
        (("prepare", "out", "missing.txt", "--tokenizer", "missing.json"), 3, ("missing.json",)),
        (("pretrain", "electra-small", "data=x", "train.device=cuda", "train.steps=0"), 2, ("train.steps",)),
    ],
)
def test_mistakes_get_one_line_and_their_exit_code(words, code, parts, tmp_path):
    done = electra(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name not in ("runs",)]


@pytest.mark.parametrize("word", ["seeds=3", "jobs=2", "out=x"])
def test_an_option_written_as_a_setting_is_answered_with_the_option(word, tmp_path):
    done = electra("finetune", "model", "rte", word, cwd=tmp_path)
    name, value = word.split("=")
    refused(done, 2, f"--{name} {value}")


@pytest.mark.parametrize("words", [("finetune", "model", "rte", "--epochs", "3"), ("pretrain", "tiny", "--data=x")])
def test_a_setting_written_as_an_option_is_answered_with_the_setting(words, tmp_path):
    done = electra(*words, cwd=tmp_path)
    key = "epochs" if "--epochs" in words else "data"
    assert done.returncode == 2 and f"Settings have no dashes: {key}=VALUE" in done.stderr, done.stderr
    assert "Settings" not in electra("detect", "model", "--epochs", "3", cwd=tmp_path).stderr


@pytest.mark.parametrize("word", ["~/mine", "data=~/mine", "--out=~/mine", "finetune.data=~/mine"])
def test_the_home_folder_is_found_where_a_shell_leaves_its_tilde(word, tmp_path, monkeypatch):
    """Most shells expand ~ at the beginning of a word alone: `data=~/shards` wrote into a folder named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert commands.at_home(word) == word.replace("~", str(tmp_path))
    for text in ("a ~/b", "~", "x=a~/b", "no=1 ~/b", "~user/x"):
        assert commands.at_home(text) == text


@pytest.mark.parametrize(("verb", "code"), [("embed", 3), ("predict", 3), ("export", 5)])
def test_the_current_folder_in_the_place_of_a_file_or_of_a_new_folder_is_refused(verb, code, finished_run, tmp_path):
    assert electra("export", finished_run, tmp_path / "model").returncode == 0
    done = electra(verb, finished_run, ".", cwd=tmp_path)
    refused(done, code, ". is a folder" if verb != "export" else ". exists already")


def test_a_setting_with_two_values_is_refused_by_every_verb_that_takes_settings(tmp_path):
    """The last one used to win without a word."""
    twice, message = ("train.steps=3", "train.steps=4"), "train.steps has two values, 3 and 4. Give it once."
    for words in (
        ("pretrain", "tiny", "data=x"),
        ("doctor", "tiny", "data=x"),
        ("flops", "tiny"),
        ("config", "show", "tiny"),
        ("compare", "tiny", "data=x"),
        ("speedrun", "tiny", "data=x", "glue=x"),
        ("finetune", "model", "rte"),
    ):
        done = electra(*words, *twice, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stdout + done.stderr, words
    varied = electra("compare", "tiny", "data=x", "train.batch=3", "--vary", "train.batch=4,5", cwd=tmp_path)
    refused(varied, 2, "train.batch has two values, 3 and 4. Give it once.")
    refused(electra("finetune", "model", "rte", "label=a", "--label", "b", cwd=tmp_path), 2, "label=a and --label")
    refused(electra("compare", "tiny", "data=x", "seed=4", cwd=tmp_path), 2, "seed is set by the comparison")
    assert electra("config", "show", "tiny", twice[0], twice[0], cwd=tmp_path).returncode == 0
    assert not list(tmp_path.iterdir())


def flags(source: str) -> list[str]:
    """Command-line flags in sentences; a string that is nothing but a flag is an argument for another program."""
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    sentences = (text for text in strings if isinstance(text, str) and " " in text)
    return [flag for text in sentences for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)]


def test_the_library_names_no_flag_of_the_command_line():
    """Who calls a function has parameters and settings keys, no flags."""
    assert flags('raise ValueError(f"{path} exists. Use another --out.")') == ["--out"]
    folder = Path(__file__).parents[2] / "src" / "electra"
    below = [path for path in folder.rglob("*.py") if "commands" not in path.relative_to(folder).parts]
    named = {str(path): found for path in below if (found := flags(path.read_text("utf-8")))}
    assert len(below) > 50 and not named


def test_debug_shows_the_traceback(tmp_path):
    assert "Traceback" in electra_process("--debug", "tokenizer", "out", "nowhere", cwd=tmp_path).stderr


def test_a_wrong_option_is_a_usage_error(tmp_path):
    done = electra("detect", "x", "--jsn", cwd=tmp_path)
    assert done.returncode == 2 and "--jsn" in done.stderr and "Traceback" not in done.stderr


def test_a_whole_pipeline_in_folders_with_spaces_and_other_scripts(tmp_path):
    home = tmp_path / "mein Ordner 한국어"
    home.mkdir()
    text = write_corpus(home / "text.txt", documents=60)
    (home / "my recipe.toml").write_text(SETTINGS)
    steps = [
        ("tokenizer", home / "tok", text, "--vocab-size", 300),
        ("prepare", home / "shards", text, "--tokenizer", home / "tok", "--heldout", 0.2),
        ("pretrain", home / "my recipe.toml", f"data={home / 'shards'}", f"run={home / 'run'}", "train.steps=6"),
        ("detect", home / "run", TEXT),
    ]
    for words in steps:
        done = electra(*words)
        assert done.returncode == 0, done.stderr
        if "next: " in done.stdout:  # can be pasted into a shell
            for pasted in done.stdout.partition("next: ")[2].split("   or   "):
                again = electra(*shlex.split(pasted)[1:], cwd=home)
                assert again.returncode == 0, again.stderr


def test_commands_that_are_printed_with_a_path_have_it_quoted():
    """By `command`, and not by the sentence around them."""
    sources = Path(package.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if re.search(r"\belectra [a-z]+ (\w+=)?\{", path.read_text())] == []


def test_a_closed_pipe_is_not_an_error(finished_run):
    import subprocess

    from helpers import command, environment

    words = " ".join(f"'{word}'" for word in command("config", "show", "tiny"))
    done = subprocess.run(f"{words} | head -1", shell=True, capture_output=True, text=True, env=environment())
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_one_of_a_kind_is_told_in_the_singular(finished_run, tmp_path):
    (tmp_path / "one.txt").write_text("a single line\n")
    done = electra("embed", finished_run, tmp_path / "one.txt")
    assert "one.embeddings.parquet: 1 text, " in done.stdout and " · 0 s left" in done.stderr
    assert "· 1 text ·" in done.stderr


def test_score_of_another_objective_names_a_recipe_that_can_be_typed(finished_run):
    refused(
        electra("score", finished_run, "some text"), 3, "electra pretrain modern-small+electric data=SHARDS run=RUN"
    )


def test_tokenizer_says_whether_it_lowercases_and_how_many_tokens_it_lacks(tmp_path):
    text = write_corpus(tmp_path / "text.txt", 10)
    kept = electra("tokenizer", tmp_path / "a", text, "--vocab-size", 400).stdout
    assert re.search(r": \d+ tokens, fewer than 400: the text has no more; text is lowercased; --cased keeps", kept)
    cased = electra("tokenizer", tmp_path / "b", text, "--cased", "--kind", "bpe", "--vocab-size", 300).stdout
    assert cased.endswith("tokenizer.json: 300 tokens; text is not lowercased\n")
    adopted = electra("tokenizer", tmp_path / "c", "--from-json", tmp_path / "a" / "tokenizer.json").stdout
    assert adopted.endswith(" tokens; text is lowercased\n") and "fewer" not in adopted


def test_prepare_says_of_how_many_documents_characters_were_replaced(tmp_path, prepared):
    (tmp_path / "a.txt").write_bytes(b"The sch\xf6n walks.\n\nThe barak walks.\n")
    done = electra("prepare", tmp_path / "out", tmp_path / "a.txt", "--tokenizer", prepared, "--on-bad", "replace")
    assert done.returncode == 0 and "with characters replaced by \ufffd: 1\n" in done.stdout, done.stderr


def test_prepare_names_its_options_and_hints_at_text_without_documents(tmp_path, prepared):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    (tmp_path / "lines.txt").write_text("The barak walks.\n" * 50)
    words = ("prepare", tmp_path / "out", "--tokenizer", prepared, "--workers", 1)
    refused(electra(*words, tmp_path / "a.jsonl"), 3, "Set text_key", "Here that is --text-key.")
    no_row = "no row has text for 'text' (the first has 'body')"
    refused(electra(*words, tmp_path / "a.jsonl", "--on-bad", "skip"), 3, no_row, "Here that is --text-key.")
    nothing = electra(*words, tmp_path / "a.jsonl", "--on-bad", "skip", "--heldout", 0)
    assert nothing.returncode == 3 and "no text left, 1 document skipped as unusable" in nothing.stderr, nothing.stderr
    assert nothing.stderr.endswith("Here that is --text-key.\n")
    done = electra(*words, tmp_path / "lines.txt")
    assert done.returncode == 0 and "--documents line" in done.stdout and "this text is 1 document. " in done.stdout
    assert "Nothing is held out" in done.stdout
    assert (
        "Nothing is held out"
        not in electra(*words[:1], tmp_path / "b", *words[2:], tmp_path / "lines.txt", "--heldout", 0).stdout
    )


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_that_wait_let_others_work_unless_somebody_says_how_they_wait(given, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "x")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        commands.main(["--version"])
    assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_many_passes_over_little_text_are_told_before_training(recipe, prepared, tmp_path):
    settings = [f"data={prepared}", f"run={tmp_path / 'run'}"]
    done = electra("doctor", recipe, *settings, "train.steps=1000000")
    told = re.search(
        r"the run passes [\d,]+ times over its text and will learn it by heart.*\(train.steps=(\d+)\)", done.stdout
    )
    assert told, done.stdout
    assert "by heart" not in electra("doctor", recipe, *settings, f"train.steps={told[1]}").stdout
