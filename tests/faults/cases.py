"""The table of faults. A case is done to a copy of the world (world.py); `words` is what a user types there.

`code` and `says` (a regular expression) are what must come of it; `unchanged` are files that must be the same afterwards. No
case may end in a traceback, leave a temporary file, or write an escape sequence that a file contains. `alone`: a process of
its own, at most `megabytes` of memory and `seconds`; the others run in the process of the tests. `fast`: part of `make test`.
"""

import base64
import gzip
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from faults.world import (
    COMPARE,
    FINETUNE,
    PRETRAIN,
    cast,
    cut,
    edit,
    flip,
    last_checkpoint,
    long_word,
    put,
    reseal,
    spoil,
    swap,
    tensors,
)

ESCAPE = "\x1b]0;owned\x07\x1b[31m"
DEEP = "[" * 200_000
DIGITS = "9" * 5000
DETECT, PREDICT = 'detect export "the timak walks"', "predict tasks/table/seed-0 table.csv --out p.csv"
EVALUATE_TASK = "evaluate tasks/table/seed-0 table.csv"


@dataclass(frozen=True)
class Case:
    id: str
    words: str
    code: int
    says: str = ""
    change: Callable[[Path], object] = lambda w: None
    unchanged: Sequence[str] = ()
    stdin: bytes = b""
    fast: bool = False
    alone: bool = False
    megabytes: int = 1500
    seconds: float = 60.0
    file_limit: int = 0


CASES: list[Case] = []


def case(id: str, words: str, code: int, says: str = "", change=lambda w: None, **more) -> None:
    CASES.append(Case(id, words, code, says, change, **more))


# fmt: off
# 1. Files that are read are verified: exports, fine-tuned folders, runs, tokenizers, shards

for verb, words in {"detect": DETECT, "finetune": FINETUNE.replace("tasks", "new"), "start": f"{PRETRAIN}2 start=export"}.items():
    case(f"export-weights-bit-{verb}", words, 4, r"model\.safetensors.*sha256", lambda w: flip(w / "export/model.safetensors"), fast=verb == "detect")
    case(f"export-tokenizer-word-{verb}", words, 4, r"tokenizer\.json", lambda w: swap(w / "export/tokenizer.json", '"the"', '"thx"'))
    case(f"export-config-{verb}", words, 4, r"config\.json", lambda w: swap(w / "export/config.json", '"num_attention_heads": 2', '"num_attention_heads": 4'))
    case(f"export-config-gone-{verb}", words, 3, r"config\.json", lambda w: (w / "export/config.json").unlink())
for name in ("model.safetensors", "task.json", "config.json", "tokenizer.json", "tokenizer_config.json"):
    for verb, words in {"predict": PREDICT, "evaluate": EVALUATE_TASK}.items():
        case(f"task-{name}-bit-{verb}", words, 4, name.replace(".", r"\."), lambda w, name=name: flip(w / "tasks/table/seed-0" / name, 0.6), fast=verb == "predict" and name == "task.json")
for label, content, says in [("empty", "{}", "names no file"), ("list", "[]", "manifest|object"), ("cut", '{"config.json": {', "cannot be read"), ("deep", DEEP, "nested"), ("digits", f'{{"config.json": {{"bytes": {DIGITS}}}}}', "digits"), ("nan", '{"config.json": {"bytes": NaN}}', "NaN"), ("outside", '{"../../../../../../dev/zero": {"sha256": "0"}}', "does not name|no file of the folder"), ("absolute", '{"/dev/zero": {"sha256": "0"}}', "does not name|no file of the folder"), ("half", '{"\\ud800": {"sha256": "0"}}', "a lone surrogate|cannot be read"), ("text", '{"config.json": "x", "model.safetensors": 3}', "sha256|does not name")]:
    case(f"manifest-{label}", DETECT, 4, says, lambda w, content=content: put(w / "export/MANIFEST.json", content), fast=label in ("empty", "deep", "outside"))
    case(f"checkpoint-manifest-{label}", "detect run hello", 0, "is damaged and not used", lambda w, content=content: put(last_checkpoint(w) / "manifest.json", content), fast=label == "outside", alone=label == "absolute", megabytes=1200)
case("manifest-lacks-weights", DETECT, 4, "does not name model.safetensors", lambda w: edit(w / "export/MANIFEST.json", lambda m: m.pop("model.safetensors") and m), fast=True)
case("manifest-size", DETECT, 4, r"config\.json has .* bytes, not 3", lambda w: edit(w / "export/MANIFEST.json", lambda m: m["config.json"].update(bytes=3)))
case("manifest-gone", DETECT, 0, "the", lambda w: (w / "export/MANIFEST.json").unlink())
case("readme-edited", DETECT, 0, "the", lambda w: put(w / "export/README.md", "mine"))
case("table-put-into-the-folder", PREDICT, 0, "40 rows", lambda w: put(w / "tasks/table/seed-0/notes.csv", "mine"))
case("trusted-edit", f"{DETECT} --trust", 0, "WARNING.*config.json", lambda w: swap(w / "export/config.json", '"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.2'), fast=True)
case("verify-whole", "verify export", 0, "whole", fast=True)
case("verify-edited", "verify export", 4, r"config\.json", lambda w: swap(w / "export/config.json", '"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.2'), fast=True)
case("verify-run", "verify run", 0, "whole")
case("verify-run-damaged", "verify run", 4, r"model\.safetensors", lambda w: flip(last_checkpoint(w) / "model.safetensors"))
case("verify-shards", "verify shards", 0, "whole")
case("verify-shards-damaged", "verify shards", 4, "train-00000", lambda w: flip(w / "shards/train-00000.safetensors"))
case("verify-task", "verify tasks/table/seed-0", 0, "whole")
case("verify-nothing", "verify text.txt", 3, "neither")

# ... and validated where somebody has written a manifest that agrees


def sealed(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda w: (change(w / "export"), reseal(w / "export"))


def config_value(**values: object) -> Callable[[Path], object]:
    return sealed(lambda folder: edit(folder / "config.json", lambda content: content.update(values)))


def vocabulary(change: Callable[[dict], object]) -> Callable[[Path], object]:
    return sealed(lambda folder: edit(folder / "tokenizer.json", lambda it: change(it["model"]["vocab"]) and None))


WEIGHTS = "model.safetensors"
case("nan-weights", DETECT, 4, r"model\.safetensors.*word_embeddings.*(NaN|finite)", sealed(lambda f: tensors(f / WEIGHTS, spoil("word_embeddings", float("nan")))), fast=True)
case("nan-weights-json", f"{DETECT} --json", 4, "finite", sealed(lambda f: tensors(f / WEIGHTS, spoil("word_embeddings", float("nan")))))
case("inf-weights", DETECT, 4, r"LayerNorm.*finite", sealed(lambda f: tensors(f / WEIGHTS, spoil("LayerNorm.weight", float("inf")))))
case("nan-weights-finetune", FINETUNE.replace("tasks", "new"), 4, "finite", sealed(lambda f: tensors(f / WEIGHTS, spoil("word_embeddings", float("nan")))))
case("nan-weights-task", PREDICT, 4, "finite", lambda w: (tensors(w / "tasks/table/seed-0" / WEIGHTS, spoil("classifier", float("nan"))), reseal(w / "tasks/table/seed-0")))
for kind in (torch.int8, torch.int64, torch.bool, torch.uint8):
    case(f"dtype-{str(kind).split('.')[1]}", DETECT, 4, rf"model\.safetensors.*{str(kind).split('.')[1]}", sealed(lambda f, kind=kind: tensors(f / WEIGHTS, cast("query.weight", kind))), fast=kind is torch.int8)
case("dtype-float16", DETECT, 0, "the", sealed(lambda f: tensors(f / WEIGHTS, cast("query.weight", torch.float16))))
case("tensor-missing", DETECT, 4, r"model\.safetensors", sealed(lambda f: tensors(f / WEIGHTS, lambda t: t.pop(next(n for n in t if "key.weight" in n)))))
case("tensor-shape", DETECT, 4, r"model\.safetensors", sealed(lambda f: tensors(f / WEIGHTS, lambda t: t.update({n: v[:-1].clone() for n, v in t.items() if "query.weight" in n}))))
case("weights-cut", DETECT, 4, r"model\.safetensors", sealed(lambda f: cut(f / WEIGHTS)))
case("weights-header-length", DETECT, 4, r"model\.safetensors", sealed(lambda f: put(f / WEIGHTS, b"\xff" * 8 + b"{}")))
case("weights-header-deep", DETECT, 4, r"model\.safetensors", sealed(lambda f: put(f / WEIGHTS, (200_000).to_bytes(8, "little") + DEEP.encode())))
case("weights-empty", DETECT, 4, r"model\.safetensors", sealed(lambda f: put(f / WEIGHTS, b"")))
for key, value in {"vocab_size": 10**12, "hidden_size": 10**9, "num_hidden_layers": 10**9, "max_position_embeddings": 10**12, "intermediate_size": 10**11, "embedding_size": 10**10}.items():
    case(f"config-{key}-huge", DETECT, 4, key if key == "vocab_size" else "config|fit|" + key, config_value(**{key: value}), fast=key == "vocab_size", alone=key == "vocab_size", megabytes=1200)
for label, value in {"text": "abc", "negative": -3, "zero": 0, "float": 1.5, "true": True, "null": None, "list": [300]}.items():
    case(f"config-vocab_size-{label}", DETECT, 4, "vocab_size", config_value(vocab_size=value), fast=label == "negative")
    case(f"config-hidden_size-{label}", DETECT, 4, "config", config_value(hidden_size=value))
case("config-heads", DETECT, 4, "config|heads", config_value(num_attention_heads=5))
case("config-model-type-list", DETECT, 3, "type", config_value(model_type=["electra"]))
case("config-length-text", DETECT, 4, "pretraining_length", config_value(pretraining_length="x"))
case("config-objective-list", DETECT, 4, "pretraining_objective", config_value(pretraining_objective=["electra"]))
for label, content in {"deep": DEEP, "cut": '{"model_type"', "list": "[1]", "latin": b'{"model_type": "\xff"}', "digits": f'{{"vocab_size": {DIGITS}}}', "infinity": '{"vocab_size": 1e999}', "empty": ""}.items():
    case(f"config-{label}", DETECT, 4, "config", sealed(lambda f, content=content: put(f / "config.json", content)), fast=label in ("deep", "latin"))
case("special-shared", DETECT, 4, r"tokenizer\.json.*share the id", vocabulary(lambda v: v.update({"[MASK]": v["[PAD]"]})), fast=True)
case("special-absent", DETECT, 4, r"tokenizer\.json has no \[SEP\]", sealed(lambda f: put(f / "tokenizer.json", (f / "tokenizer.json").read_text().replace("[SEP]", "[SEX]"))))
case("id-beyond", DETECT, 4, r"tokenizer\.json.*(id|vocabulary)", vocabulary(lambda v: v.update({"zebra": 100_000})), fast=True)
case("id-absurd", DETECT, 4, r"tokenizer\.json", vocabulary(lambda v: v.update({"zebra": 4_000_000_000})), alone=True, megabytes=1200)
case("tokenizer-special-shared-adopted", "tokenizer new --from-json bad.json", 4, "share the id", lambda w: (put(w / "bad.json", (w / "tokenizer/tokenizer.json").read_text()), edit(w / "bad.json", lambda it: it["model"]["vocab"].update({"[MASK]": 0}))), fast=True)
case("tokenizer-regex", "tokenizer new --from-json bad.json", 4, "regular expression", lambda w: (put(w / "bad.json", (w / "tokenizer/tokenizer.json").read_text()), edit(w / "bad.json", lambda it: it.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}))), fast=True)
for label, content in {"deep": DEEP, "cut": '{"version"', "latin": b"\xff{}", "list": "[]", "empty": "", "null": "null", "model": '{"model": 3}'}.items():
    case(f"tokenizer-{label}", "tokenizer new --from-json bad.json", 4, r"bad\.json", lambda w, content=content: put(w / "bad.json", content), fast=label == "deep")
    case(f"run-tokenizer-{label}", "detect run hello", 4, r"tokenizer\.json", lambda w, content=content: put(w / "run/tokenizer.json", content))
case("labels-disagree", PREDICT, 4, r"(config|task)\.json.*label", lambda w: (edit(w / "tasks/table/seed-0/config.json", lambda c: c.update(id2label={"0": "yes", "1": "no"}, label2id={"yes": 0, "no": 1})), reseal(w / "tasks/table/seed-0")), fast=True)
case("labels-too-many", PREDICT, 4, "task.json", lambda w: (edit(w / "tasks/table/seed-0/task.json", lambda t: t["task"].update(labels=["a", "b", "c"])), reseal(w / "tasks/table/seed-0")))
case("labels-twice", PREDICT, 4, "task.json", lambda w: (edit(w / "tasks/table/seed-0/task.json", lambda t: t["task"].update(labels=["a", "a"])), reseal(w / "tasks/table/seed-0")))
for key, value in {"length": 10**9, "epochs": "x", "kind": "zebra", "text": [[]], "name": "../../x"}.items():
    case(f"task-json-{key}", PREDICT, 4, r"task\.json", lambda w, key=key, value=value: (edit(w / "tasks/table/seed-0/task.json", lambda t: t["task"].update({key: value})), reseal(w / "tasks/table/seed-0")))
case("run-tokenizer-word", "export run new", 4, r"tokenizer\.json", lambda w: swap(w / "run/tokenizer.json", '"the"', '"thx"'), fast=True)
case("run-tokenizer-word-detect", "detect run hello", 4, r"tokenizer\.json", lambda w: swap(w / "run/tokenizer.json", '"the"', '"thx"'))
case("run-heads", "detect run hello", 4, r"config\.toml.*heads", lambda w: swap(w / "run/config.toml", "heads = 2", "heads = 4"), fast=True)
for place in (0.0, 0.3, 0.9):
    case(f"shard-bit-{place}", f"{PRETRAIN}2", 4, "train-00000", lambda w, place=place: flip(w / "shards/train-00000.safetensors", place))
case("shard-gone", f"{PRETRAIN}2", 4, "missing", lambda w: (w / "shards/train-00000.safetensors").unlink())
case("shards-manifest-cut", f"{PRETRAIN}2", 4, r"manifest\.json", lambda w: cut(w / "shards/manifest.json"), fast=True)
case("shards-manifest-deep", f"{PRETRAIN}2", 4, r"manifest\.json", lambda w: put(w / "shards/manifest.json", DEEP))
case("shards-manifest-sum", f"{PRETRAIN}2", 4, r"manifest\.json.*sum", lambda w: edit(w / "shards/manifest.json", lambda m: m["splits"]["train"].update(tokens=5)))
case("shards-manifest-vocabulary", f"{PRETRAIN}2", 4, "vocab", lambda w: edit(w / "shards/manifest.json", lambda m: m.update(vocab_size=10**9)))
case("shards-manifest-vocabulary-other", f"{PRETRAIN}2", 4, "vocab", lambda w: edit(w / "shards/manifest.json", lambda m: m.update(vocab_size=301)))
case("shards-manifest-split", f"{PRETRAIN}2", 4, r"manifest\.json.*heldout", lambda w: edit(w / "shards/manifest.json", lambda m: m["splits"].pop("heldout") and m))
PREPARE = "prepare shards text.txt --tokenizer tokenizer --heldout 0.1 --workers 1 --unit-bytes 3000"
case("prepare-shard-gone", PREPARE, 0, "WARNING.*missing.*Preparing again", lambda w: (w / "shards/train-00000.safetensors").unlink(), unchanged=("shards/manifest.json",), fast=True)
case("prepare-shard-flipped", PREPARE, 0, "Preparing again", lambda w: flip(w / "shards/train-00000.safetensors"), unchanged=("shards/manifest.json",))
case("prepare-manifest-cut", PREPARE, 4, r"manifest\.json.*remove it", lambda w: cut(w / "shards/manifest.json"), unchanged=("shards/train-00000.safetensors",))

# 2. State files survive one bad byte

METRICS = "run/metrics.jsonl"


def metrics_line(number: int, content: bytes) -> Callable[[Path], None]:
    def change(w: Path) -> None:
        lines = (w / METRICS).read_bytes().split(b"\n")
        lines[number] = content + lines[number][1:] if len(content) == 1 else content
        (w / METRICS).write_bytes(b"\n".join(lines))

    return change


for label, content in {"byte": b"X", "ff": b"\xff", "empty-object": b"{}", "deep": DEEP.encode(), "list": b"[1]", "digits": f'{{"step": {DIGITS}}}'.encode(), "nan": b'{"kind": "train", "step": NaN}', "text": b'{"kind": "train", "step": "3"}', "values": b'{"kind": "train", "step": 2, "loss": "x", "seconds": []}'}.items():
    case(f"metrics-{label}-pretrain", PRETRAIN, 0, "1 damaged line", metrics_line(1, content), fast=label in ("byte", "ff"))
    case(f"metrics-{label}-export", "export run new", 0, "1 damaged line", metrics_line(1, content), unchanged=(METRICS,))
case("metrics-ff-evaluate", "evaluate run", 0, "damaged", metrics_line(1, b"\xff"), unchanged=(METRICS,))
for label, content in {"cut": '{"torch"', "ff": b"\xff", "deep": DEEP, "list": "[]", "empty": ""}.items():
    case(f"environment-{label}", PRETRAIN, 0, "finished", lambda w, content=content: put(w / "run/environment.json", content), fast=label == "ff")
    case(f"run-state-{label}", PRETRAIN, 0, "finished", lambda w, content=content: put(w / "run/run_state.json", content), fast=label == "cut")
    case(f"results-{label}", FINETUNE, 0, "accuracy", lambda w, content=content: put(w / "tasks/results.json", content), fast=label == "cut")
    case(f"baselines-{label}", FINETUNE, 0, "accuracy", lambda w, content=content: put(w / "tasks/table/baselines.json", content))
    case(f"settings-{label}", FINETUNE, 4, r"settings\.json.*(restore|remove)", lambda w, content=content: put(w / "tasks/table/settings.json", content), fast=label == "ff")
    case(f"result-{label}", FINETUNE, 4, r"result\.json", lambda w, content=content: put(w / "tasks/table/seed-0/result.json", content))
    case(f"comparison-{label}", COMPARE, 4, r"comparison\.json.*(restore|remove)", lambda w, content=content: put(w / "compared/comparison.json", content), fast=label == "cut")
    case(f"compared-result-{label}", COMPARE, 0, "2", lambda w, content=content: put(next((w / "compared").glob("*/seed-0/result.json")), content), fast=label == "list")
    case(f"compared-report-{label}", COMPARE, 0, "2", lambda w, content=content: put(w / "compared/results.json", content))
    case(f"config-toml-{label}", "detect run hello", 4, r"config\.toml is damaged", lambda w, content=content: (put(w / "run/config.toml", "x = " + (content.decode("latin-1") if isinstance(content, bytes) else content)) if content else put(w / "run/config.toml", "")), fast=label == "cut")
case("config-toml-bytes", "evaluate run", 4, r"config\.toml is damaged", lambda w: put(w / "run/config.toml", b"\xff\xff"))
case("config-toml-pretrain", PRETRAIN, 4, r"config\.toml is damaged", lambda w: cut(w / "run/config.toml", 0.7), unchanged=("run/checkpoints/*/*", METRICS))
for name in ("step-000000006-backup", "step-6", "step-", "step-000000006 (copy)", "step-abc", "old"):
    case(f"checkpoint-name-{name}", PRETRAIN, 0, "finished", lambda w, name=name: put(w / "run/checkpoints" / name / "x", "x"), unchanged=(f"run/checkpoints/{name}/x",), fast=name.endswith("backup"))
case("checkpoint-is-a-file", PRETRAIN, 0, "finished", lambda w: put(w / "run/checkpoints/step-000000099", "x"))
for name in ("model.safetensors", "state.json", "manifest.json", "optimizer.safetensors"):
    case(f"checkpoint-{name}-bit", PRETRAIN, 0, "is damaged and not used", lambda w, name=name: flip(last_checkpoint(w) / name), fast=name == "state.json")
    case(f"checkpoint-{name}-gone", PRETRAIN, 0, "is damaged and not used", lambda w, name=name: (last_checkpoint(w) / name).unlink())
case("checkpoints-all-damaged", PRETRAIN, 4, "all .* damaged", lambda w: [flip(path) for path in (w / "run/checkpoints").glob("*/state.json")], unchanged=("run/checkpoints/*/*",))
case("checkpoint-nan-sealed", "detect run hello", 4, "finite", lambda w: [(tensors(f / "model.safetensors", spoil("words", float("nan"))), reseal(f, "manifest.json")) for f in (w / "run/checkpoints").iterdir()], fast=True)

# 3. Nothing hostile gets far

for label, name in {"up": "../../x", "absolute": "/tmp/x", "dots": "..", "hidden": ".x", "empty-ish": "a/", "escape": "a\x1b[31m", "long": "x" * 300, "backslash": "..\\x", "reserved": "submission"}.items():
    case(f"task-name-{label}", f"{FINETUNE.replace('tasks', 'new')} 'name={name}'", 2, "name", fast=label in ("up", "escape"))
TASK = 'kind = "classification"\ntext = ["text"]\nlabel = "label"\ndata = "."\nepochs = 1\n[files]\ntrain = "table.csv"\ntest = "table.csv"\n[submission]\ntest = "../../out.tsv"\n'
case("submission-name", f"{FINETUNE.replace('table.csv', 'hostile.toml').replace('tasks', 'new')}", 2, "submission", lambda w: put(w / "hostile.toml", TASK), fast=True)
for label, text in {"markup": "[/b]", "escape": ESCAPE, "c1": "\x9b31m", "right-to-left": "\u202eyes", "link": "[x](javascript:1)"}.items():
    table = "text,label\n" + "\n".join(f"the timak walks {n},{text if n % 2 else 'no'}" for n in range(20)) + "\n"
    case(f"label-{label}", FINETUNE.replace("tasks", "new"), 0, "accuracy", lambda w, table=table: put(w / "table.csv", table), fast=label == "escape")
    column = f'text,"{text}"\n' + "\n".join(f"the timak walks {n},{'yes' if n % 2 else 'no'}" for n in range(20)) + "\n"
    case(f"column-{label}", FINETUNE.replace("tasks", "new"), 0, "accuracy", lambda w, column=column: put(w / "table.csv", column))
case("path-escape", f"detect 'x{ESCAPE}' hello", 3, r"x\\x1b", fast=True)
case("text-escape", "detect export 'the \x1b[31mtimak\x1b[0m \x9b31m'", 0, "the")
case("usage-escape", f"'nover{ESCAPE}b'", 2, "No such command")
case("csv-deep-cell", f"{FINETUNE.replace('tasks', 'new')} kind=multilabel", 0, "", lambda w: put(w / "table.csv", "text,label\n" + "".join(f"the timak {n},{'yes|no' if n % 2 else 'no'}\n" for n in range(20)) + f"deep,{DEEP}\n"), fast=True)
case("json-deep-row", FINETUNE.replace("table.csv", "deep.jsonl").replace("tasks", "new"), 3, "nested", lambda w: put(w / "deep.jsonl", '{"text": "a", "label": "x"}\n{"text": ' + DEEP + "\n"), fast=True)
case("json-deep-list", FINETUNE.replace("table.csv", "deep.json").replace("tasks", "new"), 3, "nested", lambda w: put(w / "deep.json", '[{"text": "a", "label": ' + DEEP))
case("recipe-deep", "config show deep.toml", 2, "nested", lambda w: put(w / "deep.toml", "x = " + DEEP), fast=True)
case("recipe-device", "config show /dev/zero", 2, "recipe")
case("recipe-latin", "config show latin.toml", 2, "cannot be read|UTF-8", lambda w: put(w / "latin.toml", b"x = '\xff'"))
case("squad-deep", "finetune export squad.json kind=span --out new", 3, "JSON|nested", lambda w: put(w / "squad.json", '{"data": [' + DEEP))

# 4. No input makes it hang or eat the machine

case("word-of-a-megabyte", "tokenizer new word.txt --vocab-size 500", 0, "tokens", lambda w: put(w / "word.txt", long_word(1_000_000)), alone=True, seconds=60, fast=False)
case("word-of-a-megabyte-bpe", "tokenizer new word.txt --vocab-size 500 --kind bpe", 0, "tokens", lambda w: put(w / "word.txt", long_word(1_000_000)), alone=True, seconds=60)
case("word-of-a-megabyte-unigram", "tokenizer new word.txt --vocab-size 500 --kind unigram", 0, "tokens", lambda w: put(w / "word.txt", long_word(1_000_000) + " " + (w / "text.txt").read_text()), alone=True, seconds=60)
case("word-of-a-megabyte-detect", "detect export word.txt", 0, "", lambda w: put(w / "word.txt", long_word(1_000_000)), alone=True, megabytes=900)
case("cell-of-20-megabytes", "predict tasks/table/seed-0 wide.csv --out p.csv", 0, "2 rows, 1 longer", lambda w: put(w / "wide.csv", "text,label\nthe timak,yes\n" + "the timak walks " * 1_300_000 + ",no\n"), alone=True, megabytes=900)
case("cell-of-20-megabytes-finetune", FINETUNE.replace("table.csv", "wide.csv").replace("tasks", "new"), 0, "accuracy", lambda w: put(w / "wide.csv", (w / "table.csv").read_text() + "the timak walks " * 1_300_000 + ",no\n"), alone=True, megabytes=1100)
case("columns-100000", FINETUNE.replace("table.csv", "wide.csv").replace("tasks", "new"), 3, "", lambda w: put(w / "wide.csv", ",".join(f"c{n}" for n in range(100_000)) + "\n" + "," * 99_999 + "\n"), alone=True)
for words, says in {"train.steps=1000000000000000000000000000000": "steps.*(beyond|integer)", "train.steps=1e30": "steps", "encoder.layers=1000000000": "layers.*less than or equal to 1000", "encoder.hidden=1000000000": "hidden", "encoder.positions=10000000000": "positions", "optimizer.lr=inf": "lr.*finite", "optimizer.lr=nan": "lr", "optimizer.clip=inf": "clip", "optimizer.betas=[0.9]": "betas.*too few", "optimizer.betas=[[0.9],0.9]": "betas", "optimizer.betas=" + "[" * 2000: "nested|not a valid value", "train.batch=1000000000000": "batch", f"train.steps={DIGITS}": "digits|not a valid value|steps", "train.steps=-1": "steps", "train.save_minutes=inf": "save_minutes", "seed=100000000000000000000": "seed", "rows.length=1000000000000": "rows.length", "schedule.warmup=1e40": "warmup", "masking.share=nan": "share", "a.b.c.d.e.f.g.h.i.j.k.l=1": "unknown key|deep"}.items():
    case(f"setting-{words[:40]}", f"{PRETRAIN}2 '{words}'", 2, says, fast=words.startswith(("train.steps=1e30", "encoder.layers", "optimizer")))
for words, says in {"epochs=1000000000000": "epochs", "lr=inf": "lr", "batch=1000000000000000": "batch", "length=100000000000": "length", "evaluations=10000000000": "evaluations", "warmup=nan": "warmup"}.items():
    case(f"finetune-{words[:30]}", f"{FINETUNE.replace('tasks', 'new')} {words}", 2, says, fast=words == "lr=inf")
for budget in ("1e400 steps", "1e30 steps", "0 steps", "nan steps", "1e999 flops", "1e300 h", "9" * 400 + " steps"):
    case(f"budget-{budget[:12]}", f'compare recipe.toml data=shards --budget "{budget}" --out new --seeds 1', 2, "budget|steps", fast=budget.startswith("1e"))
for size in ("1000000000000", "0", "-5", "99999999999999999999999"):
    case(f"vocab-size-{size}", f"tokenizer new text.txt --vocab-size {size}", 2, "vocab.size", fast=size.startswith("1000"))
for option in ("--unit-bytes 0", "--unit-bytes 99999999999999999999", "--heldout nan", "--heldout inf", "--heldout 2", "--workers 0", "--workers -3"):
    case(f"prepare{option.replace(' ', '-')}", f"prepare new text.txt --tokenizer tokenizer {option}", 2, "")
case("weight-nan", "rerank export lists.jsonl --weight nan", 2, "weight", lambda w: put(w / "lists.jsonl", '{"hypotheses": []}\n'))

# 5. Every way out is the contract's

case("full-export", "export run new", 5, r"model\.safetensors does not fit.*bytes", alone=True, file_limit=20_000)
case("full-predict", "predict tasks/table/seed-0 big.csv --out p.csv", 5, r"p\.csv does not fit.*bytes", lambda w: put(w / "big.csv", "text,label\n" + "the timak walks,yes\n" * 3000), alone=True, file_limit=20_000)
case("full-tokenizer", "tokenizer new text.txt --vocab-size 300", 5, r"tokenizer\.json does not fit.*bytes", alone=True, file_limit=2_000)
case("full-prepare", "prepare new text.txt --tokenizer tokenizer --workers 1", 5, "is full.*bytes|does not fit.*bytes", alone=True, file_limit=3_000)
case("full-finetune", FINETUNE.replace("tasks", "new"), 5, "does not fit|full", alone=True, file_limit=20_000)
case("full-pretrain", f"{PRETRAIN}2", 5, "does not fit|full", alone=True, file_limit=20_000)
case("full-evaluate", "evaluate run", 5, "does not fit", alone=True, file_limit=300)
case("export-leftover", "export run new", 0, "same", lambda w: (w / ".new.999999999.tmp/generator").mkdir(parents=True))
case("predict-leftover", PREDICT, 0, "40 rows", lambda w: put(w / ".p.csv.999999999.tmp", "x"))
case("export-again", "export run new", 0, "already|same", lambda w: __import__("faults.world").world.run_words("export run new", w))
case("export-elsewhere", "export run table.csv", 5, "table.csv")
case("no-model", "detect nowhere hello", 3, "nowhere")
case("folder-as-table", "predict tasks/table/seed-0 shards", 3, "shards is a folder. Give a file")
case("read-only", "tokenizer /proc/x text.txt --vocab-size 300", 5, "cannot be written")

# 6. Half characters, endless digits, NaN, bytes that are not UTF-8: alike in every verb

HALF = '{"text": "a \\ud800 b", "label": "yes"}\n'
GOOD = "".join(json.dumps({"text": f"the timak {n}", "label": "yes" if n % 2 else "no"}) + "\n" for n in range(20))
for label, line, says in [("half", HALF, "a lone surrogate"), ("digits", f'{{"text": "a", "label": {DIGITS}}}\n', "digits"), ("nan", '{"text": "a", "label": NaN}\n', "NaN"), ("latin", b'{"text": "a \xff", "label": "yes"}\n', "UTF-8"), ("deep", '{"text": "a", "label": ' + DEEP + "\n", "nested")]:
    rows = GOOD.encode() + (line if isinstance(line, bytes) else line.encode())
    for verb, words in {"finetune": FINETUNE.replace("table.csv", "odd.jsonl").replace("tasks", "new"), "predict": "predict tasks/table/seed-0 odd.jsonl --out p.jsonl", "evaluate": "evaluate tasks/table/seed-0 odd.jsonl", "prepare": "prepare new odd.jsonl --tokenizer tokenizer --workers 1", "tokenizer": "tokenizer new odd.jsonl --vocab-size 300", "compare": 'compare recipe.toml data=shards --budget "2 steps" --out new --seeds 1 --table odd.jsonl'}.items():
        if label == "nan" and verb in ("prepare", "tokenizer"):
            pass
        case(f"{label}-{verb}", words, 3, says, lambda w, rows=rows: put(w / "odd.jsonl", rows), fast=label == "half" or verb == "predict")
case("half-json-list", "predict tasks/table/seed-0 odd.json --out p.json", 3, "a lone surrogate", lambda w: put(w / "odd.json", "[" + HALF.strip() + "]"))
case("latin-csv", "predict tasks/table/seed-0 odd.csv --out p.csv", 3, "UTF-8", lambda w: put(w / "odd.csv", b"text,label\na \xff,yes\n"))
case("latin-tsv", "predict tasks/table/seed-0 odd.tsv --out p.tsv", 3, "UTF-8", lambda w: put(w / "odd.tsv", b"text\tlabel\na \xff\tyes\n"))
case("stdin-latin", "detect export", 3, "standard input.*UTF-8", stdin=b"abc \xff", fast=True)
case("stdin-empty", "detect export", 3, "no text", stdin=b"")
case("argument-latin", "detect export 'abc \udcff'", 3, "UTF-8", fast=True)
case("file-latin", "detect export odd.txt", 3, r"odd\.txt.*UTF-8", lambda w: put(w / "odd.txt", b"abc \xff"))
case("vocab-latin", "tokenizer new --from-vocab v.txt", 4, r"v\.txt.*UTF-8", lambda w: put(w / "v.txt", b"[PAD]\n\xff\n"))
case("number-of-400-digits", FINETUNE.replace("table.csv", "odd.jsonl").replace("tasks", "new"), 0, "accuracy", lambda w: put(w / "odd.jsonl", GOOD + f'{{"text": "a b", "label": {"9" * 400}}}\n{{"text": "c b", "label": {"9" * 400}}}\n'))
case("labels-and-spaces", FINETUNE.replace("table.csv", "odd.csv").replace("tasks", "new"), 3, "differ by spaces", lambda w: put(w / "odd.csv", "text,label\n" + "".join(f"the timak {n},{('yes', 'no', 'yes ')[n % 3]}\n" for n in range(30))), fast=True)
for option in ("--seeds 1000000000000", "--jobs 1000000000", "--seeds 0"):
    case(f"finetune{option.replace(' ', '-')}", f"{FINETUNE.replace('tasks', 'new')} {option}", 2, "")
case("score-nan", "rerank electric lists.jsonl", 3, "NaN|electric", lambda w: put(w / "lists.jsonl", '{"hypotheses": [{"text": "a", "score": NaN}]}\n'))
case("formula-cells", "predict tasks/table/seed-0 odd.csv --out p.csv --escape-formulas", 0, "2 rows", lambda w: put(w / "odd.csv", 'text,label,n\n"=1+1",yes,-3\n"@x",no,4\n'))

# Folders of other people: refused whole, nothing run, nothing followed out of the folder

IMPORT = "import their new"
NOT_WRITTEN = "evil-was-here"


def theirs(change: Callable[[Path], object] = lambda folder: None) -> Callable[[Path], object]:
    """The export as somebody else's folder: no manifest, and nothing that says it is ours."""

    def make(w: Path) -> None:
        shutil.copytree(w / "export", w / "their", ignore=shutil.ignore_patterns("MANIFEST.json", "README.md"))
        edit(w / "their/config.json", lambda c: {key: value for key, value in c.items() if not key.startswith("pretraining_")})
        change(w / "their")

    return make


class Evil:
    """Unpickled, it writes a file."""

    def __reduce__(self) -> tuple:
        return (open, (NOT_WRITTEN, "w"))


def sharded(folder: Path, names: dict[str, str], keep: str = "part.safetensors") -> None:
    (folder / WEIGHTS).rename(folder / keep)
    put(folder / f"{WEIGHTS}.index.json", json.dumps({"weight_map": names}))


def all_in(name: str) -> Callable[[Path], None]:
    return lambda folder: sharded(folder, dict.fromkeys(load_file(folder / WEIGHTS), name))


def header(content: dict, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda folder: ((folder / name).rename(folder.parent / "moved"), (folder / name).symlink_to(target))


case("import-whole", IMPORT, 0, "same ids and same logits", theirs(), fast=True)
case("import-ours", "import export new", 3, "already a model folder", fast=True)
case("import-sharded", IMPORT, 0, "same logits", theirs(all_in("part.safetensors")))
for label, name in {"up": "../export/model.safetensors", "absolute": "/dev/zero", "hidden": ".part", "backslash": "..\\x", "number": 3, "empty": ""}.items():
    case(f"import-index-{label}", IMPORT, 4, "not a file in that folder", theirs(all_in(name)), fast=label == "up")
case("import-index-missing", IMPORT, 4, "missing", theirs(all_in("other.safetensors")))
case("import-index-list", IMPORT, 4, "weight_map", theirs(lambda f: (sharded(f, {}), put(f / f"{WEIGHTS}.index.json", '{"weight_map": [1]}'))))
case("import-index-lies", IMPORT, 4, "do not name the same tensors", theirs(lambda f: sharded(f, {"electra.x": "part.safetensors"})))
case("import-index-deep", IMPORT, 4, "nested", theirs(lambda f: (sharded(f, {}), put(f / f"{WEIGHTS}.index.json", DEEP))))
for name in (WEIGHTS, "config.json", "tokenizer.json"):
    case(f"import-link-{name}", IMPORT, 4, "a link that leads out of its folder", theirs(link(name, "../moved")), fast=name == WEIGHTS)
case("import-link-device", IMPORT, 4, "leads out of its folder", theirs(link(WEIGHTS, "/dev/zero")), alone=True, megabytes=1200)
case("import-link-loop", IMPORT, 4, WEIGHTS, theirs(link(WEIGHTS, WEIGHTS)))
case("import-pickle-as-safetensors", IMPORT, 4, "a pickle under the name", theirs(lambda f: put(f / WEIGHTS, pickle.dumps(Evil()))), fast=True)
case("import-zip-as-safetensors", IMPORT, 4, "a pickle under the name", theirs(lambda f: torch.save({"x": torch.ones(2)}, f / WEIGHTS)))
case("import-bin", IMPORT, 4, "a pickle, which can run code.*--allow-bin", theirs(lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin")), fast=True)
case("import-bin-evil", f"{IMPORT} --allow-bin", 4, "more than weights", theirs(lambda f: ((f / WEIGHTS).unlink(), put(f / "pytorch_model.bin", pickle.dumps({"x": Evil()})))), fast=True)
case("import-bin-evil-zip", f"{IMPORT} --allow-bin", 4, "more than weights", theirs(lambda f: ((f / WEIGHTS).unlink(), torch.save({"x": Evil()}, f / "pytorch_model.bin"))))
case("import-bin-stretched", f"{IMPORT} --allow-bin", 4, "larger than its stored data", theirs(lambda f: ((f / WEIGHTS).unlink(), torch.save({"x": torch.zeros(1).expand(1 << 40)}, f / "pytorch_model.bin"))))
case("import-bin-no-table", f"{IMPORT} --allow-bin", 4, "not a table of tensors", theirs(lambda f: ((f / WEIGHTS).unlink(), torch.save([torch.zeros(1)], f / "pytorch_model.bin"))))
case("import-bin-sparse", f"{IMPORT} --allow-bin", 4, "sparse ones", theirs(lambda f: ((f / WEIGHTS).unlink(), torch.save({"x": torch.eye(3).to_sparse()}, f / "pytorch_model.bin"))), fast=True)
case("import-float8", IMPORT, 4, "float8_e4m3fn, not floating point", theirs(lambda f: tensors(f / WEIGHTS, cast("query.weight", torch.float8_e4m3fn))), fast=True)
case("import-scalar", IMPORT, 4, "does not fit its config.json", theirs(lambda f: tensors(f / WEIGHTS, lambda t: t.update({"electra.encoder.layer.0.attention.self.query.weight": torch.tensor(1.0)}))))
case("import-pipe-config", IMPORT, 4, "not a regular file", theirs(lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json"))))
case("import-pipe-tokenizer", IMPORT, 4, "not a regular file", theirs(lambda f: ((f / "tokenizer.json").unlink(), os.mkfifo(f / "tokenizer.json"))))
case("import-code-twice", IMPORT, 4, "appears twice", theirs(lambda f: put(f / "config.json", (f / "config.json").read_text().rstrip()[:-1] + ', "auto_map": {"AutoModel": "evil.M"}, "auto_map": null}')))
case("import-index-itself", IMPORT, 4, "a header of", theirs(all_in(f"{WEIGHTS}.index.json")))
case("import-index-folder", IMPORT, 4, "not a regular file", theirs(lambda f: (all_in("part")(f), (f / "part").mkdir())))
case("import-overlap", IMPORT, 4, "invalid offset", theirs(lambda f: put(f / WEIGHTS, header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}}, bytes(24)))))
case("import-config-utf16", IMPORT, 4, "not UTF-8", theirs(lambda f: put(f / "config.json", (f / "config.json").read_text().encode("utf-16"))))
case("import-vocabulary-binary", IMPORT, 4, "not UTF-8", theirs(lambda f: ((f / "tokenizer.json").unlink(), put(f / "vocab.txt", bytes(range(128, 256)) * 30))))
case("import-header-giant", IMPORT, 4, "a header of", theirs(lambda f: put(f / WEIGHTS, (1 << 62).to_bytes(8, "little") + b"{}")), fast=True)
case("import-header-long", IMPORT, 4, "a header of 50,000,000 bytes", theirs(lambda f: put(f / WEIGHTS, (50_000_000).to_bytes(8, "little") + b" " * 50_000_000)), alone=True, megabytes=1200)
case("import-header-deep", IMPORT, 4, r"model\.safetensors", theirs(lambda f: put(f / WEIGHTS, len(DEEP).to_bytes(8, "little") + DEEP.encode())))
case("import-shape-absurd", IMPORT, 4, r"model\.safetensors", theirs(lambda f: put(f / WEIGHTS, header({"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 4]}}, b"1234"))), alone=True, megabytes=1200)
case("import-shape-empty", IMPORT, 4, "word table|no words", theirs(lambda f: put(f / WEIGHTS, header({}))))
case("import-many", IMPORT, 4, "20,000 tensors, at most", theirs(lambda f: put(f / WEIGHTS, header({f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(20_000)}))))
case("import-words-number", IMPORT, 4, "no word table", theirs(lambda f: tensors(f / WEIGHTS, lambda t: t.update({"electra.embeddings.word_embeddings.weight": torch.tensor(1.0)}))))
case("import-offsets", IMPORT, 4, r"model\.safetensors", theirs(lambda f: put(f / WEIGHTS, header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]}}, b"1234"))))
case("import-cut", IMPORT, 4, r"model\.safetensors", theirs(lambda f: cut(f / WEIGHTS)), fast=True)
case("import-nan", IMPORT, 4, "finite", theirs(lambda f: tensors(f / WEIGHTS, spoil("word_embeddings", float("nan")))))
case("import-integers", IMPORT, 4, "int8, not floating point", theirs(lambda f: tensors(f / WEIGHTS, cast("query.weight", torch.int8))))
for key, value in {"auto_map": {"AutoModel": "evil.Model"}, "_attn_implementation_internal": "evil/kernel", "custom_pipelines": {"x": {"impl": "evil.X"}}}.items():
    case(f"import-code-{key}", IMPORT, 4, f"refers to custom code \\({key}", theirs(lambda f, key=key, value=value: (edit(f / "config.json", lambda c: c.update({key: value})), put(f / "evil.py", f"open({NOT_WRITTEN!r}, 'w')"))), fast=key == "auto_map")
for key, value in {"vocab_size": 10**12, "hidden_size": 10**9, "num_hidden_layers": 10**9, "max_position_embeddings": 10**12, "hidden_act": ["gelu"], "num_attention_heads": "x", "embedding_size": None}.items():
    case(f"import-config-{key}", IMPORT, 0 if key == "vocab_size" else 3 if key == "hidden_act" else 4, "same logits" if key == "vocab_size" else "config|supported", theirs(lambda f, key=key, value=value: edit(f / "config.json", lambda c: c.update({key: value}))), fast=key == "hidden_size", alone=key == "num_hidden_layers", megabytes=1200)
for label, content in {"deep": DEEP, "cut": '{"model_type"', "list": "[1]", "latin": b'{"model_type": "\xff"}', "empty": ""}.items():
    case(f"import-config-{label}", IMPORT, 4, r"config\.json", theirs(lambda f, content=content: put(f / "config.json", content)))
    case(f"import-tokenizer-{label}", IMPORT, 4, r"tokenizer\.json", theirs(lambda f, content=content: put(f / "tokenizer.json", content)))
case("import-type-list", IMPORT, 3, "type", theirs(lambda f: edit(f / "config.json", lambda c: c.update(model_type=["electra"]))))
case("import-type-escape", IMPORT, 3, "a model of type", theirs(lambda f: edit(f / "config.json", lambda c: c.update(model_type=ESCAPE))))
case("import-name-escape", IMPORT, 0, "left out", theirs(lambda f: tensors(f / WEIGHTS, lambda t: t.update({f"x{ESCAPE}": torch.ones(2)}))))
case("import-tokenizer-regex", IMPORT, 4, "regular expression", theirs(lambda f: edit(f / "tokenizer.json", lambda it: it.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}))))
PAIR = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 9}}]
case("import-tokenizer-segments", IMPORT, 4, "segments up to 9", theirs(lambda f: edit(f / "tokenizer.json", lambda it: it.update(post_processor={"type": "TemplateProcessing", "single": PAIR[:1], "pair": PAIR, "special_tokens": {}}))))
case("import-tokenizer-unknown-frame", IMPORT, 4, "is not a tokenizer.json", theirs(lambda f: edit(f / "tokenizer.json", lambda it: it.update(post_processor={"type": "TemplateProcessing", "single": PAIR[:1], "pair": [*PAIR, {"SpecialToken": {"id": "[CLS:]", "type_id": 0}}], "special_tokens": {}}))))
case("import-tokenizer-growth", IMPORT, 4, "1,000,000 times as long", theirs(lambda f: edit(f / "tokenizer.json", lambda it: it.update(normalizer={"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 1000}] * 2}))))
case("import-nothing", "import nowhere new", 3, "does not exist", fast=True)
case("import-a-file", "import text.txt new", 3, "neither a folder nor")
case("import-no-weights", IMPORT, 3, "Keras weights", theirs(lambda f: (f / WEIGHTS).rename(f / "tf_model.h5")))
case("import-out-exists", "import their shards", 5, "exists already", theirs(), unchanged=("shards/*",))
case("import-disk-full", IMPORT, 5, "does not fit", theirs(), alone=True, file_limit=20_000)

# What stands where a file is expected, what is put where a file is to go

WHAT = {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))}


def instead(name: str, what: str) -> Callable[[Path], object]:
    return lambda w: ((w / name).unlink(missing_ok=True), WHAT[what](w / name))


if os.geteuid():
    del WHAT["device"]  # only root makes one
for what in WHAT:
    for words, name, code in [(DETECT, "export/MANIFEST.json", 4), (DETECT, "export/config.json", 3), (PREDICT, "table.csv", 3), (FINETUNE, "tasks/results.json", 5), (FINETUNE, "tasks/table/seed-0/result.json", 4), (PRETRAIN, "run/metrics.jsonl", 5), (PRETRAIN, "run/run_state.json", 5), (COMPARE, "compared/comparison.json", 5), ("verify export", "export/MANIFEST.json", 4), ("push export a/b", "export/config.json", 4), ("prepare new text.txt --tokenizer tokenizer", "tokenizer/tokenizer.json", 4), (f"{PRETRAIN}2", "shards/manifest.json", 4)]:
        case(f"{what}-as-{name}-{words.split()[0]}", words, code, "", instead(name, what), fast=name == "export/MANIFEST.json" and words == DETECT)
    for words, name in [("predict tasks/table/seed-0 table.csv --out x.csv --force", "x.csv"), ("report run --out x.html", "x.html"), ("embed export table.csv --out x.npy --force", "x.npy")]:
        case(f"{what}-as-out-{words.split()[0]}", words, 5, "a folder, a pipe or a device", instead(name, what), fast=what == "pipe")
for words, name, says in [("report run --out run/metrics.jsonl", "run/metrics.jsonl", "a .html file"), ("predict tasks/table/seed-0 table.csv --out l.csv --force", "table.csv", "the input itself"), (FINETUNE.replace("--out tasks", "--out export"), "export/*.json", "holds a model"), (FINETUNE.replace("--out tasks", "--out run"), "run/*.json", "holds a run"), (FINETUNE.replace("--out tasks", "--out compared"), "compared/*.json", "holds a comparison"), ("pretrain recipe.toml data=shards run=shards", "shards/*.json", "holds prepared shards"), ("pretrain recipe.toml data=shards run=export", "export/*.json", "holds a model"), ("pretrain recipe.toml data=shards run=tokenizer", "tokenizer/*.json", "holds a tokenizer"), ("pretrain recipe.toml data=shards run=", "shards/*.json", "run: "), (COMPARE.replace("--out compared", "--out run"), "run/*.json", "holds a run"), ("prepare shards shards --tokenizer tokenizer", "shards/*.json", "is inside the input")]:
    case(f"out-{says.replace(' ', '-')}-{words.split()[0]}", words, 2, says, lambda w: os.link(w / "table.csv", w / "l.csv"), unchanged=(name,), fast=words.startswith("report"))

# Twice, and of others: duplicate keys, swapped files, copies beside

case("manifest-key-twice", DETECT, 4, "appears twice", lambda w: swap(w / "export/MANIFEST.json", "{", '{"config.json": {"bytes": 1, "sha256": "0"}, '), fast=True)
case("config-key-twice", f"{DETECT} --trust", 4, "appears twice", lambda w: swap(w / "export/config.json", '"num_attention_heads": 2', '"num_attention_heads": 2, "num_attention_heads": 4'))
case("row-key-twice", "predict tasks/table/seed-0 odd.jsonl --out p.jsonl", 3, "appears twice", lambda w: put(w / "odd.jsonl", GOOD + '{"text": "a", "text": "b"}\n'), fast=True)
case("byte-order-mark", f"{DETECT} --trust", 4, "byte order mark", lambda w: put(w / "export/config.json", b"\xef\xbb\xbf" + (w / "export/config.json").read_bytes()))
case("byte-order-mark-recipe", "config show recipe.toml data=shards", 0, "layers", lambda w: put(w / "recipe.toml", b"\xef\xbb\xbf" + (w / "recipe.toml").read_bytes()), fast=True)
case("utf-16-recipe", "config show recipe.toml data=shards", 2, "byte 0 is not UTF-8", lambda w: put(w / "recipe.toml", (w / "recipe.toml").read_text().encode("utf-16")))
case("swapped-weights", PREDICT, 4, r"model\.safetensors", lambda w: shutil.copy(w / "export/model.safetensors", w / "tasks/table/seed-0/model.safetensors"))
case("swapped-manifest", DETECT, 4, "damaged or edited", lambda w: shutil.copy(w / "tasks/table/seed-0/MANIFEST.json", w / "export/MANIFEST.json"))
case("swapped-comparison", COMPARE, 4, "not from a comparison", lambda w: shutil.copy(w / "tasks/results.json", w / "compared/comparison.json"))
case("swapped-shards", f"{PRETRAIN}2", 4, "damaged", lambda w: shutil.copy(w / "shards/train-00001.safetensors", w / "shards/train-00000.safetensors"))
case("renamed-checkpoint", PRETRAIN, 0, "damaged and not used.*for step 6", lambda w: shutil.copytree(last_checkpoint(w), w / "run/checkpoints/step-000000009"), fast=True)
for name in ("step-٠٠٠٠٠٠٠٠٩", "step-0000000006", f"step-{'9' * 200}"):
    case(f"checkpoint-called-{name[:20]}", PRETRAIN, 0, "finished", lambda w, name=name: shutil.copytree(last_checkpoint(w), w / "run/checkpoints" / name))
for name in ("seed-0-backup", "seed-x", "seed-٣", "seed-007"):
    case(f"copy-called-{name}", FINETUNE, 0, "accuracy", lambda w, name=name: shutil.copytree(w / "tasks/table/seed-0", w / "tasks/table" / name), fast=name == "seed-0-backup")
case("compare-budget-twice", COMPARE.replace("2 steps", "2 steps,2 steps").replace("compared", "new"), 2, "named twice")
case("compare-value-twice", f"{COMPARE.replace('compared', 'new')} --vary optimizer.lr=1,1", 2, "named twice", fast=True)


def resealed(change: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda w: (change(w / "tasks/table/seed-0"), reseal(w / "tasks/table/seed-0"))


for label, values in {"empty": {"scores": None}, "text": {"scores": {"dev": {"accuracy": "x"}}}, "list": {"scores": []}, "cut": {"cut": 3}, "curve": {"curve": None}}.items():
    case(f"result-resealed-{label}", FINETUNE, 4, r"result\.json (has no|is damaged)", resealed(lambda f, values=values: edit(f / "result.json", lambda r: r.update(values))))
OUTPUTS = "outputs-dev.safetensors"
case("outputs-resealed-short", FINETUNE, 4, OUTPUTS, resealed(lambda f: tensors(f / OUTPUTS, lambda t: t.update({name: it[:-1].clone() for name, it in t.items()}))))
case("outputs-resealed-shapes", FINETUNE, 4, OUTPUTS, resealed(lambda f: tensors(f / OUTPUTS, lambda t: [it.fill_(-5) for name, it in t.items() if name.endswith("shapes")] and None)))
case("outputs-resealed-none", FINETUNE, 4, OUTPUTS, resealed(lambda f: tensors(f / OUTPUTS, lambda t: t.clear())))

# Units of a plan

SHARE, FINISH = "prepare-unit new --index 0/1", "prepare-finish new"


def planned(change: Callable[[Path], object] = lambda units: None, done: str = "") -> Callable[[Path], object]:
    """A plan, and with `done` its units, with these options."""

    def make(w: Path) -> None:
        words = [f"prepare-plan new text.txt --tokenizer tokenizer --unit-bytes 3000 --heldout 0.1 {done}", *([SHARE] if done else [])]
        assert [__import__("faults.world").world.run_words(it, w).returncode for it in words] == [0] * len(words)
        change(w / "new/units")

    return make


for label, values in {"source": {"units": [[[99, 0, 10]]]}, "before": {"units": [[[0, -5, 10]]]}, "backwards": {"units": [[[0, 50, 10]]]}, "beyond": {"units": [[[0, 0, 10**14]]]}, "no-source": {"sources": []}, "threshold": {"threshold": "abc"}, "digits": {"threshold": DIGITS}}.items():
    case(f"plan-{label}", SHARE, 4, r"plan\.json", planned(lambda u, values=values: edit(u / "plan.json", lambda p: p.update(values))), fast=label == "source")
for label, content in {"cut": '{"ver', "deep": DEEP, "list": "[]", "empty": "", "latin": b"\xff"}.items():
    case(f"plan-{label}", SHARE, 4, r"plan\.json", planned(lambda u, content=content: put(u / "plan.json", content)))
    case(f"unit-{label}", FINISH, 3, "damaged entry", planned(lambda u, content=content: put(u / "00000.json", content), "--duplicates near"))
    case(f"part-{label}", FINISH, 4, r"00000-00000\.json", planned(lambda u, content=content: put(u / "00000-00000.json", content), "--duplicates near"))
for label, values in {"prints-letters": {"train": "***", "heldout": "***"}, "prints-few": dict.fromkeys(("train", "heldout"), base64.b64encode(b"12345678").decode()), "prints-none": {}}.items():
    case(f"part-{label}", FINISH, 4, r"00000-00000\.json is damaged", planned(lambda u, values=values: edit(u / "00000-00000.json", lambda p: p.update(fingerprints=values)), "--duplicates near"), fast=label == "prints-none")
case("unit-empty-sections", FINISH, 3, "damaged entry", planned(lambda u: edit(u / "00000.json", lambda p: p.update(empty=[999])), "--duplicates exact"))
for share in ("5/3", "x", "1/0", "0", f"{DIGITS}/1"):
    case(f"share-{share[:10]}", f"prepare-unit shards --index={share}", 2, "not a part of the units", planned())

# Texts and numbers that other verbs refuse: alike in the newer ones

UTF16 = "text,label\nthe timak,yes\nthe timowa,no\n".encode("utf-16-le")
for verb, words in {"finetune": FINETUNE.replace("table.csv", "odd.csv").replace("tasks", "new"), "predict": "predict tasks/table/seed-0 odd.csv --out p.csv", "evaluate": "evaluate tasks/table/seed-0 odd.csv", "embed": "embed export odd.csv --out e.npy", "prepare": "prepare new odd.csv --tokenizer tokenizer --workers 1"}.items():
    case(f"nul-{verb}", words, 3, "NUL|no column|which column", lambda w: put(w / "odd.csv", UTF16), fast=verb in ("predict", "embed"))
    case(f"cut-gzip-{verb}", words.replace("odd.csv", "odd.csv.gz"), 3, "cut off or damaged", lambda w: put(w / "odd.csv.gz", gzip.compress(UTF16)[:-9]))
for verb, words in {"detect": "detect export", "predict": "predict tasks/table/seed-0", "embed": "embed export - --out e.npy"}.items():
    case(f"stdin-nul-{verb}", words, 3, "NUL", stdin=b"a\0b\0\n", fast=verb == "detect")
    case(f"stdin-latin-{verb}", words, 3, "UTF-8", stdin=b"abc \xff\n")
case("empty-file-first", "prepare new empty.txt text.txt --tokenizer tokenizer --workers 1", 0, "tokens", lambda w: put(w / "empty.txt", ""), fast=True)
case("empty-file", "prepare new empty.txt --tokenizer tokenizer --workers 1", 3, "no text", lambda w: put(w / "empty.txt", ""))
case("parquet-column-twice", "predict tasks/table/seed-0 odd.parquet --out p.parquet", 3, "two columns 'text'", lambda w: pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), w / "odd.parquet"), fast=True)
case("flops-vocabulary", "flops recipe.toml --vocab-size 99999999999999999999", 2, "vocab", fast=True)
case("serve-host-empty", "serve run --host '' --port 0", 2, "host")
case("serve-origin", "serve run --allow-origin zebra --port 0", 2, "origin")
case("label-tag", FINETUNE.replace("tasks", "new"), 0, "accuracy", lambda w: put(w / "table.csv", "text,label\n" + "".join(f"the timak {n},{'<img src=x>' if n % 2 else 'no'}\n" for n in range(20))))

# What a speed-run, a comparison and fine-tuning keep for themselves: of its shape, of its own run, or set aside

RUN_OF = "compared/recipe.toml/seed-0"
for label, values in {"variant": {"variant": "zebra"}, "seed": {"seed": 7}, "no-scores": {"tasks": {"cola": []}}, "steps": {"steps": -3}, "digits": {"steps": 10**4200}, "axis": {"figures": {"auc": 1e308, "mlm_loss": -1e308}}}.items():
    case(f"compared-{label}", COMPARE, 0, "result.json.damaged-1", lambda w, values=values: edit(w / RUN_OF / "result.json", lambda r: r.update(values)), fast=label == "variant")
case("compared-out-quote", COMPARE.replace("compared", "'a\"b'"), 0, "recipe.toml", lambda w: os.mkfifo(w / '"a"b'))
case("compared-recipe-formula", "compare '$\\x$.toml' data=shards --seeds 1 --budget '2 steps' --out new", 0, "recipe|toml", lambda w: shutil.copy(w / "recipe.toml", w / "$\\x$.toml"))
case("compared-probe-few", f"{COMPARE} --table two.csv", 3, "more rows", lambda w: put(w / "two.csv", "text,label\nthe timak,a\nthe bar,b\n"), fast=True)
case("compared-probe-long-label", f"{COMPARE.replace('compared', 'new')} --table two.csv", 0, "probe", lambda w: put(w / "two.csv", "text,label\n" + "".join(f"the timak {n},{'a' if n % 2 else long_word(1_000_000) if n == 2 else 'c'}\n" for n in range(600))), alone=True)
for word in ("seed=1,2", "run=a,b"):
    case(f"compared-vary-{word[:4]}", f"{COMPARE.replace('compared', 'new')} --vary {word}", 2, "set by the comparison, for each run", fast=word == "run=a,b")
SPEEDRUN = "speedrun recipe.toml data=shards glue=glue --minutes 0.001 --seeds 1 --out speed finetune.epochs=1 finetune.length=24"


def glue(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A task, beside a speed-run of which somebody has damaged what it keeps."""

    def make(w: Path) -> None:
        for split, first in (("train", 0), ("dev", 100)):
            put(w / f"glue/cola/{split}.tsv", "sentence\tlabel\n" + "".join(f"the timak {n}\t{n % 2}\n" for n in range(first, first + 20)))
        change(w / "speed")

    return make


for label, name, content in [("stage", "timings.json", '{"prepare": 3}'), ("keys", "timings.json", '{"pretrain": []}'), ("other", "timings.json", '{"zebra": 3}'), ("cut", "overlap.json", '{"co'), ("values", "overlap.json", '{"cola": 3}'), ("rows", "overlap.json", '{"cola": {"rows": "x"}}')]:
    case(f"speedrun-{name}-{label}", SPEEDRUN, 0, f"{name}.damaged-1", glue(lambda f, name=name, content=content: put(f / name, content)))
case("speedrun-seeds", SPEEDRUN.replace("--seeds 1", "--seeds 100000000000"), 2, "less than or equal", glue(lambda f: None), fast=True)
for name in ("shards", "export", "run"):
    case(f"speedrun-into-{name}", SPEEDRUN.replace("--out speed", f"--out {name}"), 2, "Choose another folder", glue(lambda f: None), unchanged=(f"{name}/*.json",), fast=name == "run")
for label, values in {"cut-pairs": {"cut": {"train": 3}}, "cut-text": {"cut": {"train": ["a", "b"]}}, "curve-items": {"curve": [1]}, "curve-axis": {"curve": [{"step": 1, "accuracy": 1e308}]}, "alarms": {"alarms": None}, "digits": {"seconds": 10**400}}.items():
    case(f"result-shape-{label}", FINETUNE, 4, r"result\.json is damaged", resealed(lambda f, values=values: edit(f / "result.json", lambda r: r.update(values))), fast=label == "alarms")
for label, values in {"metric": {"metric": 3}, "files": {"files": [{}]}, "scores": {"scores": {"dev": {}}}, "baselines": {"baselines": 3}, "search": {"search": {"trials": []}}, "confusion": {"confusion": [[1]]}}.items():
    case(f"results-entry-{label}", FINETUNE.replace("table.csv", "other.csv"), 0, "results.json.damaged-1", lambda w, values=values: (shutil.copy(w / "table.csv", w / "other.csv"), edit(w / "tasks/results.json", lambda r: r["tasks"]["table"].update(values))))
case("baselines-shape", FINETUNE, 0, "baselines.json.damaged-1", lambda w: edit(w / "tasks/table/baselines.json", lambda b: b.update(scores={"dev": 3})))
case("start-settings-cut", FINETUNE.replace("--out tasks", "start=tasks/table --out new"), 4, r"settings\.json", lambda w: cut(w / "tasks/table/settings.json"), unchanged=("tasks/table/settings.json",))


def two_seeds(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """Beside seed-0 a copy of it, to which something is done."""

    def make(w: Path) -> None:
        other = w / "tasks/table/seed-1"
        shutil.copytree(w / "tasks/table/seed-0", other)
        change(other)
        if (other / "task.json").exists():
            reseal(other)

    return make


SEEDS = "predict tasks/table table.csv --out p.csv"
LABELS = {"id2label": {"0": "yes", "1": "no"}, "label2id": {"yes": 0, "no": 1}}
case("seeds-labels-swapped", SEEDS, 4, "not of the same task.*labels", two_seeds(lambda f: (edit(f / "task.json", lambda t: t["task"].update(labels=["yes", "no"])), edit(f / "config.json", lambda c: c.update(LABELS)))), fast=True)
case("seeds-tokenizers", SEEDS, 4, "not of the same task.*tokenizer", two_seeds(lambda f: put(f / "tokenizer.json", (f / "tokenizer.json").read_text().replace('"the"', '"xhe"').replace('"walks"', '"the"').replace('"xhe"', '"walks"'))))
case("seeds-lengths", SEEDS, 4, "not of the same task.*length", two_seeds(lambda f: edit(f / "task.json", lambda t: t.update(length=12))))
for verb, words in {"predict": SEEDS, "finetune": f"{FINETUNE} --seeds 2"}.items():
    case(f"seeds-empty-{verb}", words, 4, r"seed-1/\w+\.json is missing", two_seeds(lambda f: (shutil.rmtree(f), f.mkdir())))
    case(f"seeds-nowhere-{verb}", words, 4, r"seed-1/\w+\.json is missing", two_seeds(lambda f: (shutil.rmtree(f), f.symlink_to("nowhere"))))
case("seeds-scores", FINETUNE, 4, "has other scores than", two_seeds(lambda f: edit(f / "result.json", lambda r: r["scores"].update(dev={"f1": 1}))))
case("train-sha256-list", EVALUATE_TASK, 0, "accuracy", resealed(lambda f: edit(f / "task.json", lambda t: t.update(train_sha256=[1]))))
case("regression-huge", FINETUNE.replace("table.csv", "odd.csv kind=regression").replace("tasks", "new"), 3, "too large to be learned", lambda w: put(w / "odd.csv", "text,label\n" + "".join(f"the timak {n},{n}e300\n" for n in range(1, 20))), fast=True)
case("start-too-long", FINETUNE.replace("--out tasks", f"start={'z' * 5000} --out new"), 2, "too long")
HUGE = "".join(json.dumps({"kind": "train", "step": step, "mlm_loss": loss, "seconds": 1e308}) + "\n" for step, loss in ((10**400, 1e308), (3, -1e308)))
for words in ("report run", "evaluate run"):
    case(f"metrics-huge-{words[:6]}", words, 0, "run", lambda w: put(w / METRICS, (w / METRICS).read_text() + HUGE), fast=words == "report run")
    case(f"run-called-formula-{words[:6]}", f"{words.split()[0]} 'r$\\x$'", 0, "r", lambda w: (w / "run").rename(w / "r$\\x$"))
case("report-not-a-name", "report .", 0, "report.html", lambda w: (w / "run").rename(os.fsdecode(os.fsencode(w) + b"/r\xff")), fast=True)
case("report-task-outside", "report tasks", 0, "report.html", lambda w: edit(w / "tasks/results.json", lambda r: r["tasks"].update({"../../x": r["tasks"]["table"], "z" * 5000: r["tasks"]["table"]})), fast=True)
for what in ("folder", "pipe"):
    case(f"{what}-as-curves", FINETUNE, 5, "a folder, a pipe or a device", instead("tasks/table/curves.png", what))
case("table-not-a-name", FINETUNE.replace("table.csv", "folder").replace("tasks", "new"), 3, "not UTF-8. Rename", lambda w: ((w / "folder").mkdir(), shutil.copy(w / "table.csv", os.fsdecode(os.fsencode(w) + b"/folder/train\xff.csv"))), fast=True)
for name in ("shards", "export", "run"):
    case(f"tokenizer-onto-{name}", f"tokenizer {name} text.txt --vocab-size 300", 2, "Choose another folder", unchanged=(f"{name}/*.json",), fast=name == "export")
case("extend-edited", "tokenizer new text.txt --extend export", 4, r"tokenizer\.json has", lambda w: swap(w / "export/tokenizer.json", '"the"', '"thx"'))
case("extend-nothing-new", "tokenizer new text.txt --extend export", 3, r"0 can be added.*Give more text")
case("embed-keep-digits", "embed export odd.jsonl --out e.parquet --keep x", 3, "does not fit a parquet column", lambda w: put(w / "odd.jsonl", f'{{"text": "a", "x": {"9" * 400}}}\n'), fast=True)
case("recipe-many-problems", "config show odd.toml data=x", 2, "and 19,980 more", lambda w: put(w / "odd.toml", "".join(f"k{n} = 1\n" for n in range(20_000))))
case("doctor-no-shards", "doctor recipe.toml data=nowhere", 3, "nowhere does not exist")
case("push-link", "push export a/b", 4, "config.json is a link", lambda w: ((w / "export/config.json").rename(w / "moved"), (w / "export/config.json").symlink_to("../moved")))
