"""How fast is `electra prepare` with so many workers, and how much memory does it need for so much text?

    python bench/prepare_scale.py [--workers 1 2] [--megabytes 100 1000] [--duplicates keep] [--engine local] [--folder /tmp]

Text is generated: words by Zipf's law from a made-up vocabulary of 50,000, in documents of 3.2 kB on average, of which no two are the
same; one plain file, deleted at the end. Every measurement is a process of its own, whose peak memory is its largest moment plus that
of its largest worker times their number (an upper bound). Seconds of processors are those of all processes, and what to go by on a machine that others use. The throughput of all workers is measured on the smallest size, the memory of the most
workers on all sizes.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from electra.base.jobs import cpu_count, peak_memory

REPOSITORY = Path(__file__).resolve().parents[1]
SYLLABLES = ["ba", "lo", "ti", "go", "se", "ra", "ne", "mu", "ki", "do", "sha", "ple", "stri", "an", "er", "ing"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--duplicates", default="keep")
    parser.add_argument("--engine", default="local")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--result", type=Path, default=REPOSITORY / "bench" / "results" / "prepare_scale.json")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        text, out, tokenizer, workers = words.measure
        print(json.dumps(measure(Path(text), Path(out), Path(tokenizer), int(workers), words.duplicates, words.engine)))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=words.folder) as scratch:
        folder = Path(scratch)
        tokenizer = write_tokenizer(folder)
        for size in sorted(words.megabytes):
            documents = write_text(folder / "text.txt", size * 1_000_000)
            chosen = words.workers if size == min(words.megabytes) else [max(words.workers)]
            for workers in chosen:
                command = [
                    sys.executable,
                    __file__,
                    "--duplicates",
                    words.duplicates,
                    "--engine",
                    words.engine,
                    "--measure",
                ]
                command += [str(folder / "text.txt"), str(folder / "out"), str(tokenizer), str(workers)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                row = {"megabytes": size, "documents": documents, "workers": workers, **json.loads(done.stdout)}
                row["megabytes_per_second"] = round(size / row["seconds"], 2)
                row["megabytes_per_processor_second"] = round(size / row["processor_seconds"], 2)
                row["documents_per_second"] = round(documents / row["seconds"])
                rows.append(row)
                print(row, flush=True)
                shutil.rmtree(folder / "out")
    result = {
        "rows": rows,
        "duplicates": words.duplicates,
        "engine": words.engine,
        "cores": cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "command": "python bench/prepare_scale.py " + " ".join(sys.argv[1:]),
    }
    words.result.write_text(json.dumps(result, indent=1) + "\n")


def write_tokenizer(folder: Path) -> Path:
    from electra.data.tokenizer import SPECIAL_TOKENS, adopt_vocabulary, save_tokenizer

    letters = [chr(code) for code in range(97, 123)] + [*"0123456789.,"]
    pieces = [
        *SPECIAL_TOKENS,
        *letters,
        *(f"##{piece}" for piece in (*letters, *SYLLABLES)),
        *SYLLABLES,
        *vocabulary()[:20_000],
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)))
    return save_tokenizer(adopt_vocabulary(folder / "vocab.txt"), folder)


def vocabulary() -> list[str]:
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 5, 200_000)
    words = dict.fromkeys("".join(rng.choice(SYLLABLES, size)) for size in sizes)
    return list(words)[:50_000]


def write_text(path: Path, size: int) -> int:
    """Documents until the file has `size` bytes; returns how many."""
    rng, words = np.random.default_rng(2), np.array(vocabulary())
    shares = 1 / np.arange(1, len(words) + 1)
    ends = np.cumsum(shares / shares.sum())
    documents = 0
    with path.open("w") as file:
        while file.tell() < size:
            chosen = words[np.searchsorted(ends, rng.random(400_000)).clip(max=len(words) - 1)].tolist()
            for start in range(0, len(chosen), 400):
                lines = (" ".join(chosen[at : at + 40]) + "." for at in range(start, start + 400, 40))
                file.write(f"{documents}\n" + "\n".join(lines) + "\n\n")
                documents += 1
    return documents


def measure(text: Path, out: Path, tokenizer: Path, workers: int, duplicates: str, engine: str) -> dict[str, float]:
    import electra

    started = time.perf_counter()
    manifest = electra.prepare(text, out, tokenizer, workers=workers, engine=engine, duplicates=duplicates)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker = children.ru_maxrss * 1024
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(time.process_time() + children.ru_utime + children.ru_stime, 2),
        "tokens": sum(split.tokens for split in manifest.splits.values()),
        "removed": sum(manifest.removed_documents.values()),
        "main_megabytes": round(peak_memory() / 1e6),
        "worker_megabytes": round(worker / 1e6),
    }


if __name__ == "__main__":
    main()
