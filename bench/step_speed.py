"""One pre-training step on the CPU: ours and the same step on transformers' modules, side by side in one run.

    python bench/step_speed.py [--rows 8] [--length 128] [--repeats 9]

Both: ELECTRA-Small of the paper (generator 64 x 12, embeddings tied), float32, dropout 0.1, 15 % of the tokens chosen,
fused AdamW, gradient clipping, the same random rows. The step on transformers is what one writes with
ElectraForMaskedLM and ElectraForPreTraining; its masked-LM class computes logits at every position, and there is no
switch for that. The two alternate, and the median of their times is compared. Peak memory is that of a process of its own.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import machine

VOCABULARY = 30_522
SHARE = 0.15
SPECIAL = (0, 100, 101, 102, 103)


def ours() -> Callable[[torch.Tensor, int], None]:
    from electra.base.batch import Batch, SpecialIds
    from electra.model.electra import ElectraEncoderSettings
    from electra.model.generators import GeneratorSettings
    from electra.objectives import ElectraSettings, build
    from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings
    from electra.train.optimizers import OptimizerSettings, build_optimizer

    inputs = ObjectiveInputs(
        encoder=ElectraEncoderSettings(),
        generator=GeneratorSettings(),
        masking=MaskingSettings(),
        sampling=SamplingSettings(),
        special=SpecialIds(*SPECIAL),
        continues=torch.zeros(VOCABULARY, dtype=torch.bool),
        token_counts=torch.zeros(VOCABULARY),
        seed=0,
    )
    objective = build(ElectraSettings(), inputs)
    optimizer = build_optimizer(OptimizerSettings(), objective)

    def step(ids: torch.Tensor, number: int) -> None:
        samples = torch.arange(len(ids)) + number * len(ids)
        batch = Batch(
            ids, torch.zeros_like(ids), torch.ones_like(ids, dtype=torch.bool), samples, 0, padded=False
        )
        objective(batch).total.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def on_transformers() -> Callable[[torch.Tensor, int], None]:
    import transformers

    sizes = {"vocab_size": VOCABULARY, "embedding_size": 128, "num_hidden_layers": 12}
    small = transformers.ElectraConfig(**sizes, hidden_size=64, intermediate_size=256, num_attention_heads=1)
    full = transformers.ElectraConfig(**sizes, hidden_size=256, intermediate_size=1024, num_attention_heads=4)
    generator = transformers.ElectraForMaskedLM(small).train()
    discriminator = transformers.ElectraForPreTraining(full).train()
    generator.electra.embeddings = discriminator.electra.embeddings
    generator.tie_weights()
    parameters = list({id(p): p for m in (generator, discriminator) for p in m.parameters()}.values())
    optimizer = torch.optim.AdamW(parameters, lr=5e-4, eps=1e-6, weight_decay=0.01, fused=True)

    def step(ids: torch.Tensor, number: int) -> None:
        torch.manual_seed(number)
        chosen = torch.rand(ids.shape).topk(round(SHARE * ids.shape[1]), dim=1).indices
        is_chosen = torch.zeros_like(ids, dtype=torch.bool).scatter(1, chosen, True)
        becomes_mask = is_chosen & (torch.rand(ids.shape) < 0.85)
        output = generator(
            ids.masked_fill(becomes_mask, SPECIAL[4]), labels=ids.masked_fill(~is_chosen, -100)
        )
        with torch.no_grad():
            probabilities = output.logits[is_chosen].softmax(-1)
            corrupted = ids.masked_scatter(is_chosen, torch.multinomial(probabilities, 1).squeeze(1))
        detection = discriminator(corrupted, labels=(corrupted != ids).long())
        (output.loss + 50 * detection.loss).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


VARIANTS = {"electra": ours, "transformers": on_transformers}


def rows(arguments: argparse.Namespace, number: int) -> torch.Tensor:
    return torch.randint(
        1000, VOCABULARY, (arguments.rows, arguments.length), generator=torch.Generator().manual_seed(number)
    )


def high_water_mark() -> float:
    """MiB. Not ru_maxrss: that one is inherited from the process that started this one."""
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def peak_memory(name: str, arguments: argparse.Namespace) -> float:
    words = [
        sys.executable,
        __file__,
        "--memory-of",
        name,
        "--rows",
        str(arguments.rows),
        "--length",
        str(arguments.length),
    ]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory-of", choices=VARIANTS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        step = VARIANTS[arguments.memory_of]()
        for number in range(3):
            step(rows(arguments, number), number)
        print(high_water_mark())
        return

    steps = {name: make() for name, make in VARIANTS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.repeats + 2):
        for name, step in steps.items():
            ids = rows(arguments, number)
            started = time.perf_counter()
            step(ids, number)
            times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    memory = {name: peak_memory(name, arguments) for name in steps}
    tokens = arguments.rows * arguments.length
    print(f"{'':14}{'ms a step':>12}{'tokens/s':>12}{'peak MiB':>12}")
    for name in steps:
        print(f"{name:14}{1000 * medians[name]:12.0f}{tokens / medians[name]:12.0f}{memory[name]:12.0f}")
    ratio = medians["transformers"] / medians["electra"]
    print(
        f"ours is {ratio:.2f} times as fast, with {memory['electra'] / memory['transformers']:.2f} of the memory"
    )
    seconds = {name: [round(value, 4) for value in values[2:]] for name, values in times.items()}
    shape = {"rows": arguments.rows, "length": arguments.length}
    machine.write(
        "step_speed",
        {"shape": shape, "seconds": seconds, "medians": medians, "peak_mib": memory, "ratio": ratio},
    )


if __name__ == "__main__":
    main()
