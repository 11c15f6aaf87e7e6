"""Folders of fine-tuned models: transformers' format, and task.json, which holds all that predicting needs.

As with exports of pre-training, a folder is not there before it was read back with the same ids and logits, by us and,
where it is installed and has such a head, by transformers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from electra.base import config
from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.data.tokenizer import special_ids, vocabulary_size
from electra.finetuning.classification import Classification
from electra.finetuning.features import to_device
from electra.finetuning.kinds import AnyTask, build_task, settings_class
from electra.finetuning.loop import Finetuned
from electra.finetuning.method import MethodSettings
from electra.interop.check import PROBE, quiet, require_equal
from electra.interop.folder import (
    FORMATS,
    WEIGHTS,
    encoder_tensors,
    head_tensors,
    network_tensors,
    read_folder,
)
from electra.interop.hf import folder_content, write_checked
from electra.model.encoders import AnySettings, encoder_alone

TASK_FILE = "task.json"
FIELDS = ("logits", "start_logits", "end_logits")


@dataclass(frozen=True)
class LoadedTask:
    model: Finetuned
    task: AnyTask
    method: MethodSettings
    tokenizer: Tokenizer
    note: Mapping[str, Any]


def architecture(settings: AnySettings, task: AnyTask) -> str:
    """The class of transformers that reads the encoder with the task's head, or "" where there is none."""
    return f"{FORMATS[settings.kind].CLASS}{task.architecture}" if task.architecture else ""


def write_task_folder(
    out: Path,
    model: Finetuned,
    task: AnyTask,
    method: MethodSettings,
    tokenizer: Tokenizer,
    note: Mapping[str, Any],
    card: str,
    more: Mapping[str, bytes],
) -> str:
    """`note` goes into task.json beside the settings, `more` are further files. Returns what can be said of the folder."""
    encoder, settings = model.encoder, model.encoder.settings
    special, vocab_size = special_ids(tokenizer), len(encoder.embeddings.table)
    if vocabulary_size(tokenizer) > vocab_size:
        raise CorruptError(f"the tokenizer has {vocabulary_size(tokenizer)} ids, the network {vocab_size}.")
    form, name = FORMATS[settings.kind], architecture(settings, task)
    described = form.config_json(settings, vocab_size, special, name or f"{form.CLASS}Model")
    tensors = network_tensors(encoder, model.head, name)
    content = folder_content(settings, described | label_map(task), tensors, tokenizer, special, card)
    described = {"format": 1, "architecture": name, "task": config.dump(task.settings)}
    described |= {"method": config.dump(method), **note}
    content[TASK_FILE] = (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode()
    said = write_checked(out, content | dict(more), lambda folder: check_task_folder(folder, model, task))
    if not name:
        return f"{out}: transformers has no such head; its AutoModel reads the encoder, electra reads all ({said})"
    return f"{out}: same ids and same logits as ours, read back by {said}"


def label_map(task: AnyTask) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if task.labels:
        found["id2label"] = {str(index): name for index, name in enumerate(task.labels)}
        found["label2id"] = {name: index for index, name in enumerate(task.labels)}
    if isinstance(task, Classification):
        kinds = {
            "classification": "single_label_classification",
            "multilabel": "multi_label_classification",
            "regression": "regression",
        }
        found["problem_type"] = kinds[task.settings.kind]
        if task.settings.kind == "regression":
            found |= {"id2label": {"0": task.settings.label}, "label2id": {task.settings.label: 0}}
    return found


def load_task_folder(folder: Path) -> LoadedTask:
    if not (folder / TASK_FILE).is_file():
        raise DataError(
            f'{folder} is not a fine-tuned model of ours: it has no {TASK_FILE}. "electra finetune" writes such folders.'
        )
    try:
        described = json.loads((folder / TASK_FILE).read_bytes())
        given = described["task"]
        settings = config.validate(settings_class(given["kind"]), given)
        # any machine may use it, wherever it was trained
        method = config.validate(MethodSettings, described["method"] | {"device": "auto"})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / TASK_FILE} cannot be read: {str(error).splitlines()[0]}.") from None
    sizes, vocab_size, tensors, tokenizer = read_folder(folder)
    task = build_task(settings, tokenizer, min(settings.length, sizes.positions), {})
    model = Finetuned(encoder_alone(sizes, vocab_size), task.head(sizes))
    try:
        model.encoder.load_state_dict(encoder_tensors(folder, sizes, tensors))
        model.head.load_state_dict(head_tensors(sizes, tensors, architecture(sizes, task)))
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise CorruptError(f"{folder}/{WEIGHTS} does not fit {TASK_FILE}: {first}") from None
    return LoadedTask(model.eval(), task, method, tokenizer, described)


def check_task_folder(folder: Path, model: Finetuned, task: AnyTask) -> str:
    """The probe as pairs, so that both segments are looked at. Returns who has read the folder back."""
    again = load_task_folder(folder)
    inputs = probe(again.tokenizer, model.encoder.settings.positions)
    expected = answers(model, inputs)
    found = answers(again.model, inputs)
    for name, tensor in expected.items():
        require_equal(tensor, found[name], "our reader")
    try:
        import transformers
    except ImportError:
        return "electra alone (transformers is not installed)"
    name = architecture(model.encoder.settings, task)
    if not name:
        return "read back by electra"
    with quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network = getattr(transformers, name).from_pretrained(folder, local_files_only=True)
        given = tokenizer(
            list(PROBE),
            list(reversed(PROBE)),
            padding=True,
            truncation=True,
            max_length=model.encoder.settings.positions,
            return_tensors="pt",
        )
        with torch.no_grad():
            theirs = network.eval()(**given)
    segments = given.get("token_type_ids", inputs.segments)  # ModernBERT has none
    if not given["input_ids"].equal(inputs.ids) or not segments.equal(inputs.segments):
        raise CorruptError(
            "transformers' tokenizer reads the probe otherwise than ours. The folder was not kept."
        )
    compared = [field for field in FIELDS if field in expected]
    assert compared, f"no output of {name} to compare"
    for field in compared:
        ours, other = expected[field], getattr(theirs, field)
        if (
            ours.shape[:2] == inputs.ids.shape
        ):  # a figure for each token: what stands in padding is nobody's business
            ours, other = ours[inputs.is_real], other[inputs.is_real]
        require_equal(ours, other, "transformers")
    return "electra and transformers"


def answers(model: Finetuned, batch: Batch) -> dict[str, Tensor]:
    device, training = model.encoder.embeddings.table.device, model.training
    model.eval()
    with torch.no_grad():
        outputs = {name: tensor.float().cpu() for name, tensor in model(to_device(batch, device)).items()}
    model.train(training)
    return outputs


def probe(tokenizer: Tokenizer, positions: int) -> Batch:
    """The probe's texts as pairs, padded; [MASK] in them is the special token, as transformers has it."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.encode_special_tokens = False
    cutting.enable_truncation(positions)
    cutting.enable_padding(pad_id=special_ids(tokenizer).pad)
    encodings = cutting.encode_batch(list(zip(PROBE, reversed(PROBE), strict=True)))
    return Batch.of_rows(
        torch.tensor([encoding.ids for encoding in encodings]),
        torch.tensor([encoding.type_ids for encoding in encodings]),
        torch.tensor([encoding.attention_mask for encoding in encodings]).bool(),
    )
