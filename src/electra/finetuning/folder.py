"""Folders of fine-tuned models: transformers' format, and task.json, which holds all that predicting needs. They are
written and checked as exports of pre-training are (interop.write)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from electra.base import config
from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError
from electra.data.tokenizer import special_ids, vocabulary_size
from electra.finetuning import Task
from electra.finetuning.loop import Finetuned
from electra.finetuning.method import MethodSettings
from electra.finetuning.plan import settings_class
from electra.interop.formats import FORMATS, config_json, network_tensors
from electra.interop.read import LENGTH, Pretrained, read_folder
from electra.interop.write import Answers, check_folder, folder_content, without_dropout, write_checked
from electra.model import EncoderSettings

TASK_FILE = "task.json"


@dataclass(frozen=True)
class TaskModel:
    """A fine-tuned network with its task, and what task.json says of it besides."""

    model: Finetuned
    task: Task
    method: MethodSettings
    tokenizer: Tokenizer
    note: Mapping[str, Any]
    length: int | None = None
    """How many positions pre-training had trained."""

    @property
    def pretrained(self) -> Pretrained:
        """Its encoder alone."""
        return Pretrained(self.model.encoder, None, "encoder", self.tokenizer, length=self.length)


def architecture(settings: EncoderSettings, task: Task) -> str:
    """The class of transformers that reads the encoder with the task's head, or "" where there is none."""
    return f"{FORMATS[settings.kind].family}{task.architecture}" if task.architecture else ""


def write_task_folder(out: Path, trained: TaskModel, card: str, more: Mapping[str, bytes]) -> str:
    """`more` are further files. Returns who has read the folder back, and how."""
    encoder, settings, task = trained.model.encoder, trained.model.encoder.settings, trained.task
    size, vocab_size = vocabulary_size(trained.tokenizer), len(encoder.embeddings.table)
    if size > vocab_size:
        raise CorruptError(f"the tokenizer has {size} ids, the network {vocab_size}.")
    name = architecture(settings, task)
    class_name = name or f"{FORMATS[settings.kind].family}Model"
    described = config_json(settings, vocab_size, special_ids(trained.tokenizer), class_name)
    described |= task.config_entries()
    if trained.length is not None:
        described |= {LENGTH: trained.length}
    tensors = network_tensors(encoder, trained.model.head, name)
    content = folder_content(described, tensors, trained.tokenizer, card)
    described = {"format": 1, "architecture": name, "task": config.dump(task.settings)}
    described |= {"method": config.dump(trained.method), **trained.note}
    content[TASK_FILE] = (json.dumps(described, indent=1, ensure_ascii=False) + "\n").encode()

    def check(folder: Path) -> str:
        again = answers_of(load_task_folder(folder).model)
        return check_folder(folder, name, trained.tokenizer, answers_of(trained.model), again)

    checked_by = write_checked(out, content | dict(more), check)
    if not name:
        return f"transformers has no such head; its AutoModel reads the encoder, electra reads all ({checked_by})"
    return f"same ids and same logits as ours, read back by {checked_by}"


def answers_of(model: Finetuned) -> Answers:
    def answers(batch: Batch) -> dict[str, Tensor]:
        with without_dropout(model):
            outputs = model(batch.to(model.encoder.embeddings.table.device))
            return {name: tensor.float().cpu() for name, tensor in outputs.items()}

    return answers


def load_task_folder(folder: Path) -> TaskModel:
    if not (folder / TASK_FILE).is_file():
        raise DataError(
            f'{folder} is not a fine-tuned model of ours: it has no {TASK_FILE}. "electra finetune" writes such folders.'
        )
    try:
        described = json.loads((folder / TASK_FILE).read_bytes())
        settings = config.validate(settings_class(described["task"]["kind"]), described["task"])
        # any machine may use it, wherever it was trained
        method = config.validate(MethodSettings, described["method"] | {"device": "auto"})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / TASK_FILE} cannot be read: {str(error).splitlines()[0]}.") from None
    stored = read_folder(folder)
    task = settings.build(stored.tokenizer, min(settings.length, stored.settings.positions), {})
    head = task.head(stored.settings)
    encoder = stored.build(head, architecture(stored.settings, task), described_by=TASK_FILE)
    return TaskModel(
        Finetuned(encoder, head).eval(), task, method, stored.tokenizer, described, stored.length
    )
