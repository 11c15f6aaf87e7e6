"""Where the time of a step goes: torch's profiler over a few steps, kernels grouped by what their names say.

A kernel belongs to the first group whose pattern is in its name. Names are all there is: a kernel that a compiler made of
several operations is counted where the first pattern finds it, and what dropout costs is mostly inside of others.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable

import torch

GROUPS = {
    "optimizer": r"multi_tensor|adam|foreach|lpnorm|clip|chunkedcat",
    "attention": r"flash|fmha|attention|sdpa|mem_?eff|cudnn.*(fprop|bprop|dgrad)",
    "masked head": r"^(forward|finish|backward)_kernel|softmax|nll_loss|cross_entropy|argmax|logsumexp",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|wgmma|splitk|mm_kernel|triton_(tem|mm|bmm)|::(add|b|badd)?mm|::linear",
    "norms": r"layer_?norm|add_norm|sum_columns|rms_?norm|gammabeta",
    "activation": r"gelu|erf|tanh|silu",
    "embeddings": r"embedding|index_(put|select|add)|indexing|scatter|gather|sort|radix",
    "copies and other": r"",
}
TOP = 25
STEPS = 3
WIDTH = 96


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name.lower()))


def profile(title: str, run: Callable[[], object], cuda: bool) -> tuple[str, dict[str, float]]:
    """The report as text, and the milliseconds a step of every group. `run` is one step."""
    activity = torch.profiler.ProfilerActivity
    watched = [activity.CUDA, activity.CPU] if cuda else [activity.CPU]
    run()
    if cuda:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=watched) as found:
        started = time.perf_counter()
        for _ in range(STEPS):
            run()
        if cuda:
            torch.cuda.synchronize()
        wall = (time.perf_counter() - started) / STEPS * 1000
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for entry in found.key_averages():
        taken = entry.self_device_time_total if cuda else entry.self_cpu_time_total
        if entry.device_type == kind and taken and not getattr(entry, "is_user_annotation", False):
            times[entry.key] += taken / 1000 / STEPS
            calls[entry.key] += entry.count
    busy = sum(times.values())
    groups = dict.fromkeys(GROUPS, 0.0)
    for name, taken in times.items():
        groups[group_of(name)] += taken
    lines = [f"{title}: {wall:.2f} ms a step under the profiler, {busy:.2f} ms in kernels"]
    for group, taken in sorted(groups.items(), key=lambda pair: -pair[1]):
        lines.append(f"  {group:20}{taken:10.3f} ms{taken / max(busy, 1e-9):8.1%}")
    lines.append(f"  the {TOP} kernels that take most, with calls a step:")
    for name, taken in sorted(times.items(), key=lambda pair: -pair[1])[:TOP]:
        share = f"{taken:10.3f} ms{taken / max(busy, 1e-9):8.1%}{calls[name] / STEPS:8.0f}"
        lines.append(f"{share}  {group_of(name):18}{' '.join(name.split())[:WIDTH]}")
    return "\n".join(lines) + "\n", groups
