"""electra: raw text in, a pre-trained ELECTRA encoder out. The public Python API; everything loads on first use.

`electra.pretrain` is a module, whose function of the same name trains.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "PretrainSettings": "electra.pretraining.settings",
    "resolve": "electra.pretraining.settings",
    "load_run": "electra.pretraining.load",
    "evaluate_run": "electra.pretraining.evaluate",
    "train_tokenizer": "electra.data.tokenizer",
    "load_tokenizer": "electra.data.tokenizer",
    "prepare": "electra.data.prepare",
    "open_data": "electra.data.shards",
    "load": "electra.inspector",
    "ElectraError": "electra.base.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'electra' has no attribute {name!r}")
