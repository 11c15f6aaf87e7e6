"""Folders of fine-tuned models: transformers' format, and task.json, which holds all that predicting needs. They are
written and checked as exports of pre-training are (interop.write)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from electra.base import config
from electra.base.errors import CorruptError, DataError
from electra.base.files import read_object
from electra.finetuning import Task
from electra.finetuning.plan import MethodSettings, settings_class
from electra.finetuning.training import Finetuned
from electra.interop.formats import task_class
from electra.interop.read import Pretrained, read_folder
from electra.interop.write import PLAIN, Folder, Manner, answers_of, whole_or_absent
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
    return task_class(settings, task.architecture, task.pooling)


def task_folder(trained: TaskModel, files: Mapping[str, bytes]) -> Folder:
    """`files` go beside those that transformers reads and task.json."""
    encoder, task = trained.model.encoder, trained.task
    name = architecture(encoder.settings, task)
    described = {"format": 1, "architecture": name, "length": task.length, "task": config.dump(task.settings)}
    described |= {"method": config.dump(trained.method), **trained.note}
    text = json.dumps(described, indent=1, ensure_ascii=False) + "\n"
    parts = encoder, trained.model.head, name, trained.tokenizer, task.config_entries()
    return Folder(*parts, {**files, TASK_FILE: text.encode()}, trained.length, task.pooling)


def write_task_folder(out: Path, trained: TaskModel, files: Mapping[str, bytes], manner: Manner = PLAIN) -> str:
    """Returns who has read the folder back, and how."""
    folder = task_folder(trained, files)
    with whole_or_absent(out) as temporary:
        ours = answers_of(trained.model)
        readers = folder.write(temporary, ours, lambda path: answers_of(load_task_folder(path).model), manner)
    if not folder.architecture:
        return f"transformers has no such head; its AutoModel reads the encoder, electra reads all ({readers})"
    return f"same ids and same logits as ours, read back by {readers}"


def load_task_folder(folder: Path) -> TaskModel:
    if not (folder / TASK_FILE).is_file():
        raise DataError(
            f'{folder} is not a fine-tuned model of ours: it has no {TASK_FILE}. "electra finetune" writes such folders.'
        )
    stored = read_folder(folder)
    described = read_object(folder / TASK_FILE)
    try:
        settings = config.validate(settings_class(described["task"]["kind"]), described["task"])
        # any machine may use it, wherever it was trained
        method = config.validate(MethodSettings, described["method"] | {"device": "auto"})
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / TASK_FILE} cannot be used: {str(error).splitlines()[0]}.") from None
    # folders that do not say it are of before rotary encoders read beyond their `positions`
    length = described.get("length", min(settings.length, stored.settings.positions))
    if not isinstance(length, int) or not 8 <= length <= max(settings.length, stored.settings.positions):
        raise CorruptError(f"{folder / TASK_FILE}: length is {length!r}, more than the task or the network has.")
    task = settings.build(stored.tokenizer, length, {})
    labels, named = task.config_entries().get("id2label"), stored.config.get("id2label")
    if labels and named != labels:
        raise CorruptError(f"{folder / 'config.json'}: its labels (id2label) are not those of {TASK_FILE}.")
    head = task.head(stored.settings)
    encoder = stored.build(head, architecture(stored.settings, task), described_by=TASK_FILE)
    return TaskModel(Finetuned(encoder, head).eval(), task, method, stored.tokenizer, described, stored.length)
