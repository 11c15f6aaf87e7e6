"""The compiled and captured step on a CUDA device. Cases are in fast_steps.py, where each says what it protects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import environment, shipped_additions

SCRIPT = Path(__file__).parent / "fast_steps.py"
TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"


def run(case: str, *words: str, **variables: str) -> None:
    path = os.pathsep.join(map(str, filter(None, (SOURCE, TESTS, os.environ.get("PYTHONPATH")))))
    env = environment({"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **variables})
    done = subprocess.run([sys.executable, SCRIPT, case, *words], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        "equals_plain",
        "learns",
        "shapes_take_turns",
        "never_waits",
        "compiles_once",
        "temperature_is_not_frozen",
        "resumes_exactly",
        "leaves_its_graphs_when_memory_is_short",
        "goes_on_where_nothing_can_be_captured",
    ],
)
def test_the_fast_step_on_a_gpu(case):
    run(case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", shipped_additions())
def test_every_recipe_takes_the_fast_step(recipe):
    run("takes_recipe", "cuda", recipe)


def test_the_compiled_step_on_the_cpu():
    """Without inductor, so without a C compiler: what is traced, and how often; recipes in one piece. In one process, whose start takes
    longer than any of them."""
    cases = "shapes_take_turns", "compiles_once", "temperature_is_not_frozen", "takes_recipe", "takes_recipe"
    run("+".join(cases), "cpu", "modernbert", "selection")


@pytest.mark.parametrize("recipe", ["tiny", "modern-tiny"])
def test_a_step_by_kernels_equals_plain_torch(recipe):
    by_kernels(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("addition", shipped_additions())
@pytest.mark.parametrize("size", ["tiny", "modern-tiny"])
def test_every_recipe_by_kernels_equals_plain_torch(size, addition):
    by_kernels(f"{size}+{addition}")


def by_kernels(recipe: str) -> None:
    """On any machine: what a GPU compiles and runs, operator by operator, with Triton's interpreter in the GPU's place."""
    pytest.importorskip("triton")
    run("computes_by_kernels", "cpu", recipe, TRITON_INTERPRET="1")
