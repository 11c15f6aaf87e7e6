"""What an exported folder is held against: a probe in several languages, our logits on it, and transformers' ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from electra.base.batch import SpecialIds
from electra.base.errors import CorruptError
from electra.model.encoders import AnyEncoder, TokenHead

TOLERANCE = 1e-4
PROBE = (
    "The quick brown fox jumps over the lazy dog.",
    "Straße, Übergröße und Äpfel: naïve café façade.",
    "안녕하세요. 한국어 문장도 잘 됩니다.",
    "日本語の文章も、カタカナも大丈夫です。",
    "[MASK] tokens, numbers 3.14159 and emoji 🙂 — “quotes”.",
)


def probe_batch(tokenizer: Tokenizer, special: SpecialIds, positions: int) -> tuple[Tensor, Tensor]:
    """The probe as padded ids and their attention mask."""
    cutting = Tokenizer.from_str(tokenizer.to_str())
    cutting.enable_truncation(positions)
    rows = [cutting.encode(text).ids for text in PROBE]
    width = max(map(len, rows))
    ids = torch.tensor([row + [special.pad] * (width - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])


def our_logits(encoder: AnyEncoder, head: nn.Module | None, ids: Tensor, is_real: Tensor) -> Tensor:
    """Without dropout, also in the middle of training. States where there is no head."""
    parts = [part for part in (encoder, head) if part is not None]
    modes = [part.training for part in parts]
    for part in parts:
        part.eval()
    with torch.no_grad():
        hidden = encoder(ids, torch.zeros_like(ids), is_real)
        if isinstance(head, TokenHead):
            logits = head(hidden, encoder.embeddings.table)
        else:
            logits = hidden if head is None else head(hidden)
    for part, training in zip(parts, modes, strict=True):
        part.train(training)
    return logits


def require_equal(expected: Tensor, found: Tensor, who: str) -> None:
    difference = (expected - found).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise CorruptError(
            f"{who} gets other logits from the export (largest difference {difference:.2g}). It was not kept."
        )


def transformers_reader() -> Callable[[Path, str], tuple[list[list[int]], Tensor]] | None:
    try:
        import transformers
    except ImportError:
        return None

    def read(folder: Path, name: str) -> tuple[list[list[int]], Tensor]:
        with quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = getattr(transformers, name).from_pretrained(folder, local_files_only=True).eval()
            inputs = tokenizer(list(PROBE), padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(**inputs)[0]
        rows = [
            row[mask.bool()].tolist()
            for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        return rows, logits

    return read


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    logging = transformers.logging
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
