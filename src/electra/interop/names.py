"""Our tensor names <-> transformers', by tables of patterns: `{n}` is the layer, `{p}` weight or bias. The tables are in
electra.py and modernbert.py."""

import re
from collections.abc import Mapping

from torch import Tensor

from electra.model.encoders import AnyEncoder

OWN_HEAD = "head."
"""Before the names of a head that no class of transformers has."""


def rename(name: str, table: Mapping[str, str]) -> str | None:
    for ours, theirs in table.items():
        pattern = re.escape(ours).replace(r"\{n\}", r"(?P<n>\d+)").replace(r"\{p\}", r"(?P<p>weight|bias)")
        if match := re.fullmatch(pattern, name):
            return theirs.format(**match.groupdict())
    return None


def renamed(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To transformers' names; every name must have one."""
    found = {rename(name, table): tensor for name, tensor in tensors.items()}
    assert None not in found and len(found) == len(tensors), (
        f"no transformers name for one of {list(tensors)}"
    )
    return {name: tensor for name, tensor in found.items() if name}


def renamed_back(tensors: Mapping[str, Tensor], table: Mapping[str, str]) -> dict[str, Tensor]:
    """To our names. What has no place here is left out; what is missing shows when the module loads."""
    inverse = {theirs: ours for ours, theirs in table.items()}
    return {ours: tensor for name, tensor in tensors.items() if (ours := rename(name, inverse))}


def encoder_tensors(encoder: AnyEncoder) -> dict[str, Tensor]:
    """By our names. A word table that is a sum (gradient-disentangled sharing) is given as what it adds up to."""
    tensors = encoder.state_dict() | {"embeddings.words.weight": encoder.embeddings.table.detach()}
    tensors.pop("embeddings.delta", None)
    return tensors
