"""How much of `electra predict`'s throughput is left when 32 clients ask `electra serve` for the same rows, on the same cores?

    python bench/serve_speed.py [--rows 384] [--clients 32] [--threads 1]

A classifier of random weights (the time does not depend on them) of ELECTRA-Small's size on made-up sentences of 5 to 60 words. `predict` has
the model and all rows in memory (the class that `electra predict` uses). The server is a process of its own; the clients are threads of a
third one, which competes for the same cores: each asks for the next row as soon as it has an answer, by a connection that stays open. They
alternate, three rounds, and the answers must be the same. Where other work uses the cores too, the seconds of processor time that a row takes the
server, beside those that it takes `predict`, say more than the clock.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CLIENTS = """
import http.client, json, queue, sys, threading, time
port, clients, each, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rows = json.load(open(path))
work, times, answers = queue.Queue(), [], [None] * len(rows)
for first in range(0, len(rows), each):
    work.put(first)
def client():
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while True:
        try:
            first = work.get_nowait()
        except queue.Empty:
            return
        body = json.dumps({"model": 0, "rows": rows[first : first + each]})
        began = time.perf_counter()
        connection.request("POST", "/api/predict", body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = json.loads(response.read())
        assert response.status == 200, content
        times.append(time.perf_counter() - began)
        answers[first : first + each] = [it["prediction"] for it in content["answers"]]
threads = [threading.Thread(target=client) for _ in range(clients)]
began = time.perf_counter()
for it in threads: it.start()
for it in threads: it.join()
print(json.dumps({"seconds": time.perf_counter() - began, "times": times, "answers": answers}))
"""
ROUNDS, LENGTH = 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--model", type=Path, help="a classifier that reads one text, in the place of the one that is made"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    rows = sentences(options.rows)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_classifier(Path(scratch), rows)
        (Path(scratch) / "rows.json").write_text(json.dumps(rows))
        measure(folder, rows, Path(scratch), options)


def sentences(count: int) -> list[str]:
    rng = random.Random(1)
    words = ["".join(rng.choices("aeioulnrst", k=rng.randint(2, 7))) for _ in range(2000)]
    return [" ".join(rng.choices(words, k=rng.randint(5, 60))) for _ in range(count)]


def write_classifier(scratch: Path, rows: list[str]) -> Path:
    import electra
    from electra.data.tokenizer import load_tokenizer, vocabulary_size
    from electra.interop.read import Pretrained
    from electra.interop.write import write_network
    from electra.model import encoder_alone, initialise
    from electra.pretraining.settings import resolve

    (scratch / "text.txt").write_text("\n\n".join(rows) + "\n")
    electra.train_tokenizer(scratch / "text.txt", scratch / "tokenizer", vocab_size=2000)
    tokenizer = load_tokenizer(scratch / "tokenizer")
    settings = resolve("electra-small", ["data=x", "run=x"])[0].encoder
    encoder = encoder_alone(settings, vocabulary_size(tokenizer))
    initialise(encoder, settings, 1)
    write_network(scratch / "model", Pretrained(encoder.eval(), None, "encoder", tokenizer), "")
    table = scratch / "table.jsonl"
    table.write_text("".join(json.dumps({"text": row, "label": "ab"[n % 2]}) + "\n" for n, row in enumerate(rows[:48])))
    words = {"text": "text", "label": "label", "epochs": 1, "length": LENGTH, "min_steps": 0}
    return electra.finetune(scratch / "model", table, scratch / "tasks", **words).models["table"][0]


def measure(folder: Path, rows: list[str], scratch: Path, options: argparse.Namespace) -> None:
    import torch

    import machine
    from electra.finetuning.predict import load_predictor

    torch.set_num_threads(options.threads)
    predictor = load_predictor(folder)
    asked = [{"text": row} for row in rows]
    words = [sys.executable, "-m", "electra", "serve", str(folder), "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    rates: dict[str, list[float]] = {"predict": [], "serve, a row a request": [], "serve, 8 rows a request": []}
    processor: dict[str, list[float]] = {name: [] for name in rates}
    times: dict[int, list[float]] = {1: [], 8: []}
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        clients = [sys.executable, "-c", CLIENTS, str(port), str(options.clients)]
        expected = [it["prediction"] for it in predictor(asked[:64])]
        subprocess.run([*clients, "1", str(scratch / "rows.json")], check=True, capture_output=True)  # warm
        for _ in range(ROUNDS):
            began, used = time.perf_counter(), time.process_time()
            expected = [it["prediction"] for it in predictor(asked)]
            rates["predict"].append(len(rows) / (time.perf_counter() - began))
            processor["predict"].append((time.process_time() - used) / len(rows))
            for each, name in ((1, "serve, a row a request"), (8, "serve, 8 rows a request")):
                words = [*clients, str(each), str(scratch / "rows.json")]
                used = seconds_of(server.pid)
                done = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
                assert done["answers"] == expected, "the server answers otherwise"
                rates[name].append(len(rows) / done["seconds"])
                times[each] += done["times"]
                processor[name].append((seconds_of(server.pid) - used) / len(rows))
    finally:
        server.terminate()
        server.wait(30)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    latencies = {each: {"p50": quantile(it, 0.5), "p99": quantile(it, 0.99)} for each, it in times.items()}
    for name, rate in medians.items():
        print(f"{name:28}{rate:10.1f} rows/s {rate / medians['predict']:8.2f}")
    costs = {name: statistics.median(values) for name, values in processor.items()}
    print(latencies, costs)
    shares = {name: rate / medians["predict"] for name, rate in medians.items()}
    result = {
        "rows": len(rows),
        "clients": options.clients,
        "threads": options.threads,
        "model": str(options.model or "electra-small"),
    }
    load = os.getloadavg()[1]
    machine.write(
        "serve_speed",
        result
        | {
            "rows_per_second": medians,
            "share_of_predict": shares,
            "rounds": rates,
            "latency_seconds": latencies,
            "processor_seconds_per_row": costs,
            "load_5_minutes": load,
        },
    )


def seconds_of(pid: int) -> float:
    """Processor time of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
