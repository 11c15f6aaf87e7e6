"""The paper's figures to the last digit; our own count against torch's counter on the real modules."""

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from conftest import TINY, inputs_for, make_batch
from electra.base.errors import SettingsError
from electra.model.electra import ElectraEncoderSettings
from electra.model.generators import GeneratorSettings
from electra.model.modern import ModernEmbeddings, ModernEncoder, ModernEncoderSettings
from electra.objectives import build as build_objective
from electra.objectives.corruption import MaskingSettings
from electra.objectives.electra import ElectraSettings
from electra.pretraining import flops
from electra.pretraining.run import device_peak, work
from electra.pretraining.settings import resolve
from electra.train.log import read_metrics
from electra.train.settings import TrainSettings
from helpers import electra, electra_process, shipped_additions, words_of

# What google-research/electra's flops_computation.py prints.
PRINTED = {
    "elmo": 3.4114394716164127e18,
    "xlnet": 3.856582065028608e21,
    "gpt": 3.968752230785352e19,
    "bert_small": 1.4187399146496e18,
    "bert_base": 6.428335104e19,
    "bert_large": 1.91720905883648e20,
    "electra_small": 1.293743798272e18,
    "electra_base": 6.424541834277683e19,
    "electra_400k": 7.117606040895488e20,
    "electra_1.75M": 3.113952642891776e21,
    "roberta": 3.187221435776e21,
    "albert": 3.113923955392512e22,
    "t5_11b": 4.581900124212429e22,
}


def test_every_figure_of_the_original_is_reproduced_to_the_last_digit():
    assert list(flops.published().items()) == list(PRINTED.items())


@pytest.mark.parametrize(
    ("recipe", "words", "name"),
    [
        ("electra-small", [], "electra_small"),
        ("electra-base", [], "electra_base"),
        ("electra-large", [], "electra_400k"),
        ("electra-large", ["train.steps=1750000"], "electra_1.75M"),
    ],
)
def test_a_recipe_of_the_paper_costs_what_the_paper_says(recipe, words, name):
    settings, _ = resolve(recipe, ["data=x", *words])
    task = work(settings, flops.PAPER_VOCABULARY)
    assert task.paper() == PRINTED[name]
    assert task.paper(corrected=True) == flops.published(corrected=True)[name]


def test_the_corrections_are_of_the_size_that_they_should_be():
    sizes = flops.bert_sizes(1024, 24)
    forgotten = 5 * (1024 - 1) * 24 * 512  # five operations a hidden unit instead of five a token
    assert 24 * (sizes.block(corrected=True) - sizes.block()) == forgotten
    printed, corrected = flops.published(), flops.published(corrected=True)
    head = flops.bert_sizes(256, 24, 1024).token_head() / flops.PAPER_OUTPUT_SHARE
    more = 2 * 2048 * 400_000 * (
        (0.25 - flops.PAPER_OUTPUT_SHARE) * head + 5 * (1023 + 255) * 24 * 512
    )  # fmt: skip
    assert corrected["electra_400k"] - printed["electra_400k"] == pytest.approx(more, rel=1e-9)


def counted(objective: torch.nn.Module, **batch) -> int:
    """torch counts no fused attention on the CPU, so attention is made to run as plain matrix products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(make_batch(vocabulary=300, **batch)).total.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(
    ("encoder", "generator"),
    [
        (TINY, GeneratorSettings(width=0.5)),
        (TINY, GeneratorSettings(width=0.5, depth=0.5, sharing="none")),
        (TINY, GeneratorSettings(width=1, sharing="all")),
        (TINY.model_copy(update={"embedding": TINY.hidden, "layers": 3}), GeneratorSettings(width=0.25)),
    ],
    ids=["tied", "shallow", "one encoder", "same width"],
)
def test_our_count_is_torchs_count_on_the_real_modules(encoder, generator, padded):
    settings, masking = ElectraSettings(), MaskingSettings(share=0.2)
    objective = build_objective(settings, inputs_for(300, encoder, generator, masking))
    task = flops.Work(settings, encoder, generator, masking, 300, length=24, batch=6, steps=1)
    assert task.per_token() * task.tokens == pytest.approx(counted(objective, padded=padded), rel=1e-12)


@pytest.mark.parametrize("name", shipped_additions())
def test_every_objective_costs_what_torch_counts(name):
    recipe, _ = resolve(name, ["data=x", *words_of(name)])
    objective = build_objective(
        recipe.objective, inputs_for(300, TINY, recipe.generator, recipe.masking, recipe.sampling)
    )
    parts = recipe.objective, TINY, recipe.generator, recipe.masking
    task = flops.Work(*parts, 300, length=24, batch=6, steps=1)
    assert task.per_token() * task.tokens == pytest.approx(counted(objective, padded=True), rel=1e-3)


@pytest.mark.parametrize("embedding", [32, 12])
def test_modernbert_costs_what_torch_counts(embedding):
    settings = ModernEncoderSettings(
        layers=3, hidden=32, heads=2, intermediate=24, embedding=embedding, global_every=1
    )
    encoder, batch = ModernEncoder(settings, ModernEmbeddings(settings, 97)), make_batch()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        encoder(batch.ids, batch.segments, batch.is_real).sum().backward()
    expected = flops.TRAINING_PASSES * flops.encoder_forward(settings, 24) * 6 * 24
    assert expected == counter.get_total_flops()


@pytest.mark.parametrize("window", [2, 6, 12, 46, 300])
def test_a_local_layer_costs_the_keys_of_its_window(window):
    settings = ModernEncoderSettings(layers=4, global_every=2, window=window)
    everywhere = flops.encoder_forward(settings.model_copy(update={"global_every": 1}), 24)
    spared = 24 * 24 - sum(abs(i - j) <= window // 2 for i in range(24) for j in range(24))
    expected = everywhere - 2 * 2 * (2 * settings.hidden) * spared / 24  # two local layers
    assert flops.encoder_forward(settings, 24) == pytest.approx(expected, rel=1e-12)


def test_the_papers_accounting_has_no_count_for_modernbert():
    task = flops.Work(
        ElectraSettings(), ModernEncoderSettings(), GeneratorSettings(), MaskingSettings(), 300, 24, 6, 1
    )
    with pytest.raises(SettingsError, match="no count for ModernBERT"):
        task.paper()
    assert task.per_token() > 0


def test_electra_small_costs_seventy_million_operations_a_token():
    """3 (L (2 (4h² + 2hf) + 4sh)) for both networks, and the heads: worked out by hand."""
    settings, _ = resolve("electra-small", ["data=x"])
    task = work(settings, 30522)
    assert task.per_token() == pytest.approx(70.19e6, rel=1e-4)
    assert task.tokens == 128 * 128 * 1_000_000


def test_an_objective_that_nobody_has_counted_is_refused():
    class Other(ElectraSettings):
        kind: str = "other"

    task = flops.Work(
        Other(), ElectraEncoderSettings(), GeneratorSettings(), MaskingSettings(), 300, 24, 6, 1
    )
    with pytest.raises(SettingsError, match="objective.kind='other'"):
        task.parts()
    with pytest.raises(SettingsError, match="objective.kind=other"):
        task.paper()


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10G", 70),
        ("Tesla V100-SXM2-16GB", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0),
        ("Some New Thing 3000", 0),
    ],
)
def test_devices_are_known_by_torchs_name_for_them(name, tera):
    assert flops.peak_flops(name) == tera * 1e12


def test_utilisation_is_work_done_over_work_possible():
    assert flops.mfu(2_428_000, 70.19e6, 790e12) == pytest.approx(0.216, abs=5e-4)


def test_the_verb_counts_a_recipe_and_the_time_it_takes():
    done = electra(
        "flops", "electra-small", "train.steps=1000", "--device", "A100", "--utilisation", "0.5", "--json"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["run"] == pytest.approx(70.19e6 * 128 * 128 * 1000, rel=1e-4)
    assert result["paper_run"] == pytest.approx(PRINTED["electra_small"] / 1000)
    assert result["devices"]["a100"]["hours"] * 3600 == pytest.approx(result["run"] / 156e12)


def test_the_verb_takes_the_vocabulary_of_the_data(prepared, recipe):
    done = electra("flops", recipe, f"data={prepared}", "--tflops", 1, "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert json.loads(done.stdout)["vocabulary"] == manifest["vocab_size"]


def test_the_verb_shows_tables_for_people():
    done = electra_process("flops", "electra-small", env={"COLUMNS": "100"})
    assert done.returncode == 0 and "1.294e+18" in done.stdout and "h200" in done.stdout
    published = electra("flops")
    assert published.returncode == 0 and all(name in published.stdout for name in PRINTED)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "abacus"], "no device 'abacus'"),
        (["--utilisation", "0"], "--utilisation 0.0 must be above 0"),
    ],
)
def test_a_wrong_device_or_utilisation_is_refused(words, says):
    done = electra("flops", "tiny", *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("peak", [1e9, 0.0], ids=["known", "unknown"])
def test_the_log_says_which_share_of_the_peak_is_used_where_that_is_known(
    peak, recipe, prepared, tmp_path, monkeypatch
):
    from electra.pretraining import run as pretrain

    monkeypatch.setattr(pretrain, "device_peak", lambda settings: peak)
    settings, _ = resolve(str(recipe), [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=5"])
    pretrain.pretrain(settings)
    (record,) = (entry for entry in read_metrics(tmp_path / "run") if entry["kind"] == "train")
    manifest = json.loads((prepared / "manifest.json").read_text())
    per_token = work(settings, manifest["vocab_size"]).per_token()
    expected = pytest.approx(flops.mfu(record["tokens_per_second"], per_token, 1e9)) if peak else None
    assert record.get("mfu") == expected


def test_no_peak_is_known_of_a_processor():
    assert device_peak(TrainSettings(device="cpu")) == 0
    assert flops.measured_cpu(seconds=0.02, size=64) > 1e6
