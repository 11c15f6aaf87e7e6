"""The files of examples/cluster: parsed by those who will read them, and run against stand-ins for SLURM where they decide something."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from electra.commands import app
from electra.data.shards import verify_shards
from electra.pretraining.settings import resolve
from helpers import environment, write_corpus
from together import wait_until

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = sorted([*CLUSTER.glob("*.sbatch"), *CLUSTER.glob("*.sh")])
SBATCH = {
    "job-name", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "output", "partition",
    "requeue", "open-mode", "signal", "array", "parsable", "dependency", "wrap",
}  # fmt: skip
STARTS = ("electra ", "torchrun ", "srun torchrun ")


def command_lines(text: str) -> list[list[str]]:
    """What a shell script starts of ours, also inside quotes (sbatch --wrap), as words; variables are names."""
    joined = re.sub(r"\\\n\s*", "", text)
    joined = re.sub(r"\\?\$\{?(\w+)[^}\s\"'/]*\}?", r"\1", joined)
    lines = [line.strip() for line in joined.splitlines() if not line.strip().startswith("#")]
    lines = [re.sub(r'^.*--wrap "(.*?)"\)?$', r"\1", line) for line in lines]
    return [shlex.split(line.split(" || ")[0].rstrip(" &")) for line in lines if line.startswith(STARTS)]


def parse_electra(words: list[str]) -> str:
    """By electra's own parser; returns the verb. The shares and recipes in the words must mean something too."""
    group = typer.main.get_command(app)
    context = group.make_context("electra", list(words))
    verb, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    parsed = command.make_context(verb, rest, parent=context).params
    if verb == "pretrain":
        resolve(parsed["recipe"], [word for word in words[2:] if "=" in word])
    return str(verb)


def parse(words: list[str]) -> str:
    if words[0] == "electra":
        words = [re.sub(r"^SLURM_ARRAY_TASK_ID/\w+$", "0/2", word) for word in words]
        return parse_electra(words[1:])
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert parsed.module and parsed.training_script == "electra" and int(parsed.nproc_per_node) > 0
    return parse_electra(parsed.training_script_args)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_shell_and_start_electra(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    verbs = [parse(words) for words in command_lines(path.read_text())]
    assert verbs == (["prepare-plan", "prepare-unit", "prepare-finish"] if path.suffix == ".sh" else ["pretrain"])


def test_a_wrong_command_line_would_be_noticed():
    for line in ("electra prepare-unit OUT", "electra pretrain modern-bass data=x", "electra pretrain tiny rum=x"):
        with pytest.raises(Exception, match="index|bass|rum"):
            parse(shlex.split(line))


@pytest.mark.parametrize("path", sorted(CLUSTER.glob("*.sbatch")), ids=lambda path: path.name)
def test_directives_are_sbatchs_and_agree_with_torchrun(path):
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", path.read_text(), re.MULTILINE)
    assert len(lines) == path.read_text().count("#SBATCH") and {name for name, _ in lines} <= SBATCH
    asked = dict(lines)
    (words,) = command_lines(path.read_text())
    assert words[words.index("--nproc-per-node") + 1] == asked["gpus-per-node"]
    nodes = words[words.index("--nnodes") + 1] if "--nnodes" in words else "1"
    assert nodes == asked["nodes"] and asked["ntasks-per-node"] == "1"


def test_kubernetes_jobs():
    plan, units, finish = yaml.safe_load_all((CLUSTER / "kubernetes_prepare.yaml").read_text())
    commands = []
    for job in (plan, units, finish):
        assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        commands.append(container["command"])
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert units["spec"]["completionMode"] == "Indexed"
    assert commands[1][-1] == f"$(JOB_COMPLETION_INDEX)/{units['spec']['completions']}"
    commands[1][-1] = commands[1][-1].replace("$(JOB_COMPLETION_INDEX)", "0")
    assert [parse(words) for words in commands] == ["prepare-plan", "prepare-unit", "prepare-finish"]
    assert len({words[2] for words in commands}) == 1, "all steps have the same folder"


def test_skypilot():
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    assert task["resources"]["accelerators"] == "H100:8" and set(task) <= {
        "name", "resources", "num_nodes", "workdir", "envs", "setup", "run",
    }  # fmt: skip
    (words,) = command_lines(task["run"])
    assert parse(words) == "pretrain" and words[words.index("--nproc-per-node") + 1] == "8"
    for part in ("setup", "run"):
        assert subprocess.run(["bash", "-n"], input=task[part], text=True, check=False).returncode == 0


def test_the_image_takes_what_is_in_the_repository():
    text = re.sub(r"\\\n", " ", (CLUSTER / "Dockerfile").read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert steps[0][0] == "FROM" and {name for name, _ in steps} <= {
        "FROM", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    copied = [source for name, rest in steps if name == "COPY" for source in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied) and "constraints.txt" in copied
    extras = re.search(r'--constraint constraints.txt "\.\[([\w,]+)\]"', text)
    assert extras and all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras[1].split(","))
    assert parse_electra(["verify", "x"]) == "verify" and json.loads(dict(steps)["CMD"])[0] == "electra"


def test_the_image_installs_nothing_that_is_not_pinned():
    """By what the packages here require of each other. Other builds of torch pin CUDA's libraries themselves."""
    pytest.importorskip("ray")
    pytest.importorskip("s3fs")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines[1:])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (words,) = re.findall(r'--constraint constraints.txt "\.\[([\w,]+)\]" (.+)', (CLUSTER / "Dockerfile").read_text())
    extras = (it for extra in words[0].split(",") for it in project["optional-dependencies"][extra])
    todo = [Requirement(it) for it in (*project["dependencies"], *extras, *words[1].split())]
    seen = set()
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        version = pinned.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}, but pinned is {version}"
        below = map(Requirement, distribution(requirement.name).requires or [])
        asked = [{"extra": extra} for extra in ("", *requirement.extras)]
        todo += [it for it in below if it.marker is None or any(map(it.marker.evaluate, asked))]
    assert len(seen) > 50


def stand_in(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


EARLIER, SAVED, FAILED = (
    f'{{"state": "{state}", "pid": {pid}}}' for state, pid in (("preempted", 1), ("preempted", 2), ("failed", 2))
)


@pytest.mark.parametrize(
    ("has_signal", "before", "after", "code", "is_requeued"),
    [
        (True, "", SAVED, 1, True),
        (True, EARLIER, SAVED, 1, True),
        (True, "", "", 143, True),  # before there was a run
        (True, EARLIER, "", 1, True),
        (
            True,
            "",
            FAILED,
            1,
            True,
        ),  # a process that was killed on the way: the next start says whether there is more to it
        (True, "", "", 0, False),  # finished just in time
        (False, "", SAVED, 1, True),  # the processes had the signal, not the script
        (False, EARLIER, "", 1, False),
        (False, EARLIER, FAILED, 1, False),
        (False, "", "", 2, False),
        (False, EARLIER, "", 0, False),
    ],
)
def test_what_was_preempted_goes_back_into_the_queue_and_nothing_else(
    tmp_path, has_signal, before, after, code, is_requeued
):
    """torchrun ends with 1 after its processes saved, and with 1 where there is no data: what an earlier start left in run_state.json
    must not put a run that fails back into the queue for ever."""
    state = tmp_path / "run" / "run_state.json"
    state.parent.mkdir()
    if before:
        state.write_text(before)
    stand_in(
        tmp_path,
        "torchrun",
        f"""#!/bin/bash
end() {{ {f"echo '{after}' > {state}; " if after else ""}exit {code}; }}
trap 'sleep 0.3; end' TERM
touch {tmp_path}/started
while {str(has_signal).lower()}; do sleep 0.05; done
end
""",
    )
    stand_in(tmp_path, "scontrol", f'#!/bin/bash\necho "$@" > {tmp_path}/queue\n')
    env = environment({"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN": str(state.parent), "SLURM_JOB_ID": "77"})
    job = subprocess.Popen(["bash", CLUSTER / "slurm_preemptible.sbatch"], env=env, stderr=subprocess.PIPE, text=True)
    if has_signal:
        wait_until((tmp_path / "started").exists, 20)
        job.send_signal(signal.SIGTERM)
    complaints = job.communicate(timeout=20)[1]
    assert (job.returncode, complaints) == (0 if is_requeued else code, "")
    queue = tmp_path / "queue"
    assert queue.exists() == is_requeued and (not is_requeued or queue.read_text() == "requeue 77\n")


def test_an_array_of_slurm_prepares_a_corpus(tmp_path, prepared):
    """`sbatch` runs what it is given at once, each job of an array in turn."""
    stand_in(tmp_path, "electra", f'#!/bin/bash\nexec {sys.executable} -m electra "$@"\n')
    stand_in(
        tmp_path,
        "sbatch",
        f"""#!{sys.executable}
import os, re, subprocess, sys
words = sys.argv[1:]
array = [re.fullmatch(r"--array=0-(\\d+)", word) for word in words]
last = next((int(match[1]) for match in array if match), 0)
for index in range(last + 1):
    env = {{**os.environ, "SLURM_ARRAY_TASK_ID": str(index)}}
    subprocess.run(words[words.index("--wrap") + 1], shell=True, check=True, env=env, stdout=sys.stderr)
print(11)
""",
    )
    texts = tmp_path / "texts"
    texts.mkdir()
    write_corpus(texts / "a.txt", documents=50)
    env = environment({"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOBS": "2"})
    words = ["bash", CLUSTER / "slurm_prepare.sh", texts, tmp_path / "out", prepared / "tokenizer.json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert verify_shards(tmp_path / "out") == []
    assert sum(map(int, re.findall(r"(\d+) documents?", done.stderr))) == 50
