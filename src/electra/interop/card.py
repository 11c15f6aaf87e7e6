"""The README.md of an exported folder: what the model is, how it was trained, what it scored."""

from collections.abc import Mapping
from typing import Any

USES = {
    "discriminator": """```python
from transformers import AutoModelForPreTraining, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForPreTraining.from_pretrained(".")   # logit > 0: the token was replaced
```

Fine-tune it with any of transformers' Electra classes.""",
    "generator": """```python
from transformers import pipeline
pipeline("fill-mask", ".")("Hello [MASK]!")
```

The discriminator of the same run is the model to fine-tune; this is the network that proposed replacements.""",
}


def model_card(kind: str, settings: str, figures: Mapping[str, Any]) -> str:
    numbers = {key: value for key, value in figures.items() if isinstance(value, float)}
    table = "\n".join(f"| {name} | {value:.4f} |" for name, value in numbers.items())
    return f"""---
library_name: transformers
tags: [electra, {kind}]
---

# ELECTRA {kind}

Pre-trained by replaced token detection with the `electra` toolkit; the figures below are those of step {figures.get("step", 0):,}.

{USES[kind]}

## Held-out figures

| figure | value |
|---|---|
{table}

## Settings

```toml
{settings}```
"""


TASK_USES = {
    "ElectraForSequenceClassification": "AutoModelForSequenceClassification",
    "ElectraForTokenClassification": "AutoModelForTokenClassification",
    "ElectraForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def task_card(name: str, architecture: str, scores: Mapping[str, float], settings: str) -> str:
    reader = TASK_USES.get(architecture)
    use = "Read it with `electra predict`."
    if reader:
        use = f"""```python
from transformers import {reader}, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
model = {reader}.from_pretrained(".")
```"""
    table = "\n".join(f"| {metric} | {value:.4f} |" for metric, value in scores.items())
    return f"""---
library_name: transformers
tags: [electra]
---

# ELECTRA fine-tuned on {name}

One run of one seed, made with the `electra` toolkit; task.json says on what and how.

{use}

## Dev set

| figure | value |
|---|---|
{table}

## Method

```toml
{settings}```
"""
