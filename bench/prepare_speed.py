"""How fast is `electra prepare` beside `tokenizers.encode_batch` alone, on the same cores and the same text?

    python bench/prepare_speed.py [--data ../shared/data]

The baseline gets all documents in memory, already unpacked and parsed, and only makes encodings. `prepare` starts from
the compressed file and ends with verified shards on disk, workers started, everything synced. The two alternate; the
table shows the median of three.
"""

import argparse
import importlib.metadata
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from electra.base.jobs import cpu_count
from electra.data.corpus import Corpus
from electra.data.prepare import prepare
from electra.data.tokenizer import adopt_vocabulary, load_tokenizer, save_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=REPOSITORY.parent / "shared" / "data")
    data = parser.parse_args().data
    source = data / "pretrain_en" / "reviews_en-00.jsonl.zst"
    texts = [document.text for document in Corpus([source]).read()]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds: dict[str, list[float]] = {"tokenizers.encode_batch": [], "electra prepare": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        vocabulary = data / "vocab" / "bert-base-uncased-vocab.txt"
        tokenizer = save_tokenizer(adopt_vocabulary(vocabulary), folder)
        for _ in range(ROUNDS):
            encoder = load_tokenizer(tokenizer)
            started = time.perf_counter()
            encodings = encoder.encode_batch(texts, add_special_tokens=False)
            seconds["tokenizers.encode_batch"].append(time.perf_counter() - started)
            del encodings
            started = time.perf_counter()
            manifest = prepare([source], folder / "out", tokenizer)
            seconds["electra prepare"].append(time.perf_counter() - started)
            shutil.rmtree(folder / "out")
    rates = {name: megabytes / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["electra prepare"] / rates["tokenizers.encode_batch"]
    print(f"{'':26}{'seconds':>9}{'MB/s':>8}")
    for name, times in seconds.items():
        print(f"{name:26}{statistics.median(times):9.2f}{rates[name]:8.2f}")
    print(f"ratio {ratio:.2f} (promised: at least 0.9)")
    result = {
        "text_megabytes": round(megabytes, 2),
        "tokens": sum(split.tokens for split in manifest.splits.values()),
        "seconds": {name: [round(value, 3) for value in times] for name, times in seconds.items()},
        "megabytes_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "ratio": round(ratio, 3),
        "cores": cpu_count(),
        "processor": processor(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("tokenizers", "numpy", "pyarrow", "safetensors")},
        "command": "python bench/prepare_speed.py",
    }
    (REPOSITORY / "bench" / "results" / "prepare_speed.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(ratio < 0.9)


def processor() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
