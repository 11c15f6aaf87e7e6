"""The README.md of an exported folder: what the model is, how it was trained, what it scored."""

import re
from collections.abc import Mapping
from typing import Any

USES = {
    "electra discriminator": """```python
from transformers import AutoModelForPreTraining, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForPreTraining.from_pretrained(".")   # logit > 0: the token was replaced
```

Fine-tune it with any of transformers' Electra classes.""",
    "modernbert discriminator": """```python
from transformers import AutoModelForTokenClassification, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForTokenClassification.from_pretrained(".")   # its one logit > 0: the token was replaced
```

Fine-tune it with any of transformers' ModernBert classes.""",
    "encoder": """```python
from transformers import AutoModel, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModel.from_pretrained(".")
```

The token head is not here: its word table is of another width than the layers, which transformers' class has no form
for.""",
    "generator": """```python
from transformers import pipeline
pipeline("fill-mask", ".")("Hello [MASK]!")
```

The discriminator of the same run is the model to fine-tune; this is the network that proposed replacements.""",
}


NAMES = {"electra": "ELECTRA", "modernbert": "ModernBERT"}


def model_card(kind: str, encoder: str, settings: str, figures: Mapping[str, Any]) -> str:
    """`kind` of network, around an `encoder` of either kind."""
    numbers = {key: value for key, value in figures.items() if isinstance(value, float)}
    table = "\n".join(f"| {name} | {value:.4f} |" for name, value in numbers.items())
    return f"""---
library_name: transformers
tags: [{", ".join(dict.fromkeys(("electra", encoder, kind)))}]
---

# {NAMES[encoder]} {kind}

Pre-trained with the `electra` toolkit; the figures below are those of step {figures.get("step", 0):,}.

{USES.get(f"{encoder} {kind}") or USES[kind]}

## Held-out figures

| figure | value |
|---|---|
{table}

## Settings

```toml
{settings}```
"""


def task_card(name: str, architecture: str, scores: Mapping[str, float], settings: str) -> str:
    reader = re.sub("^(Electra|ModernBert)", "AutoModel", architecture)
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

# Fine-tuned on {name}

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
