"""Shared fixtures. The shapes in signatures are checked while the tests run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from helpers import FORKED_LOOKS, SETTINGS, Forked, electra_forked, write_corpus

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # tests import onnxruntime themselves, before our code does
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when first imported

# as in the processes that tests start, since the last bits depend on it; and other tests run beside
torch.set_num_threads(1)

# A busy machine is slow, which is no fault of what is tested.
settings.register_profile("electra", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("electra")

# From Python 3.12 on isinstance() of a protocol does not see what an nn.Module keeps among its modules.
if sys.version_info < (3, 12):
    install_import_hook(
        [
            "electra.base.batch",
            "electra.base.randomness",
            "electra.finetuning.question_heads",
            "electra.finetuning.questions",
            "electra.model",
            "electra.objectives",
        ],
        "shapes.checked",
    )

from electra.base.batch import Batch, SpecialIds  # noqa: E402
from electra.model import initialise  # noqa: E402
from electra.model.electra import ElectraEncoderSettings  # noqa: E402

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCABULARY = 97
TINY = ElectraEncoderSettings(layers=2, hidden=32, heads=2, intermediate=64, embedding=16, positions=40)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Corpora that are too large or not ours to commit; tests that need them are skipped elsewhere."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no shared corpora at {folder}")
    return folder


def make_batch(
    rows: int = 6, length: int = 24, vocabulary: int = VOCABULARY, seed: int = 0, padded: bool = True
) -> Batch:
    """Two-segment rows of random tokens, padded to different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, vocabulary, (rows, length), generator=generator)
    ids[:, 5] = SPECIAL.unk
    segments = torch.zeros_like(ids)
    is_real = torch.ones_like(ids, dtype=torch.bool)
    for row in range(rows):
        real = length - 2 * row if padded else length
        ids[row, 0], ids[row, real // 2], ids[row, real - 1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
        ids[row, real:], is_real[row, real:] = SPECIAL.pad, False
        segments[row, real // 2 + 1 : real] = 1
    return Batch(ids, segments, is_real, torch.arange(rows) + 100, seed=7, padded=padded)


def inputs_for(vocabulary: int, encoder=TINY, generator=None, masking=None, sampling=None, seed: int = 5):
    """What objectives are built from. Every third token goes on with the word before it."""
    from electra.model.generators import GeneratorSettings
    from electra.objectives.corruption import MaskingSettings, ObjectiveInputs, SamplingSettings

    continues = torch.arange(vocabulary) % 3 == 2
    continues[:5] = False
    counts = 1.0 + torch.arange(vocabulary) % 17
    return ObjectiveInputs(
        encoder=encoder,
        generator=generator or GeneratorSettings(),
        masking=masking or MaskingSettings(),
        sampling=sampling or SamplingSettings(),
        special=SPECIAL,
        continues=continues,
        token_counts=counts,
        seed=seed,
    )


def noisy(module: torch.nn.Module) -> torch.nn.Module:
    """Every weight random, LayerNorm and biases too: zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Also of a test that failed before it could end them."""
    yield
    while Forked.started:
        process = Forked.started.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a small corpus: made once, read by many."""
    from electra.data.corpus import Corpus
    from electra.data.prepare import PrepareSettings, prepare
    from electra.data.tokenizer import TokenizerSettings, save_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    text = write_corpus(folder / "text.txt")
    tokenizer = train_tokenizer(Corpus([text]), TokenizerSettings(vocab_size=300))
    save_tokenizer(tokenizer, folder / "tokenizer")
    prepare([text], folder / "shards", folder / "tokenizer", PrepareSettings(heldout_share=0.1), workers=1)
    return folder / "shards"


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "test.toml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, prepared: Path, recipe: Path) -> Path:
    """A run that was never interrupted, and its export."""
    run = tmp_path_factory.mktemp("finished") / "run"
    done = electra_forked("pretrain", recipe, f"data={prepared}", f"run={run}")
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture
def forked_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that export from Python: as `helpers.electra` does it."""
    for name, method in FORKED_LOOKS.items():
        monkeypatch.setattr(f"electra.inspector.fresh.FreshProcess.{name}", method)


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers folder of an untrained network of two layers with a tokenizer of its own."""
    from electra.data.corpus import Corpus
    from electra.data.tokenizer import TokenizerSettings, train_tokenizer, vocabulary_size
    from electra.interop.read import Pretrained
    from electra.interop.write import write_network
    from electra.model.electra import ElectraEmbeddings, ElectraEncoder
    from electra.model.heads import ElectraDetectionHead

    folder = tmp_path_factory.mktemp("toy")
    text = write_corpus(folder / "text.txt")
    tokenizer = train_tokenizer(Corpus([text]), TokenizerSettings(vocab_size=300))
    encoder = ElectraEncoder(TINY, ElectraEmbeddings(TINY, vocabulary_size(tokenizer)))
    head = ElectraDetectionHead(TINY)
    initialise(encoder, TINY, 1)
    initialise(head, TINY, 2)
    write_network(folder / "model", Pretrained(encoder, head, "discriminator", tokenizer), "")
    return folder / "model"
