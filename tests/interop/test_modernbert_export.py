"""A ModernBERT that we write loads offline with transformers' Auto classes and gives the same numbers; theirs loads
here."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from electra.base.batch import Batch
from electra.base.errors import CorruptError, DataError, MachineError
from electra.data.tokenizer import load_tokenizer, special_ids, vocabulary_size
from electra.interop import formats, read
from electra.interop import write as writing
from electra.interop.read import Pretrained, read_network
from electra.interop.write import PROBE, probe_batch
from electra.model import build_token_head, encoder_alone, initialise
from electra.model.modern import ModernDetectionHead, ModernEncoderSettings
from helpers import our_logits

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SETTINGS = ModernEncoderSettings(
    layers=4, hidden=32, heads=2, intermediate=48, embedding=32, positions=64, window=6, global_every=3,
    global_theta=9e4, local_theta=600.0,
)  # fmt: skip
NARROW = SETTINGS.model_copy(update={"embedding": 12})


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return load_tokenizer(prepared)


def build(settings, tokenizer):
    size = vocabulary_size(tokenizer)
    encoder, head = (encoder_alone(settings, size), build_token_head(settings, size))
    initialise(torch.nn.ModuleList((encoder, head)), settings, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *head.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return encoder.eval(), head.eval()


def write(out, settings, tokenizer, with_head):
    encoder, head = build(settings, tokenizer)
    kind, top = ("generator", head) if with_head else ("encoder", None)
    line = writing.write_network(out, Pretrained(encoder, top, kind, tokenizer), "a card")
    return encoder, top, line


@pytest.mark.parametrize("settings", [SETTINGS, NARROW], ids=["same width", "narrow words"])
def test_the_encoder_loads_with_auto_model_and_has_our_states(settings, tokenizer, tmp_path):
    encoder, _, line = write(tmp_path / "out", settings, tokenizer, with_head=False)
    assert line.endswith("same ids and same states as ours, read back by electra and transformers")
    probe = probe_batch(tokenizer, settings.positions)
    ids, is_real = probe.ids, probe.is_real
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__ == "ModernBertModel" and model.config.local_attention == 6
    with torch.no_grad():
        theirs = model(ids, is_real.long()).last_hidden_state
        ours = encoder(ids, torch.zeros_like(ids), is_real)
    assert (ours - theirs)[is_real].abs().max() <= 1e-5
    again = read_network(tmp_path / "out", "encoder").encoder
    assert again.settings.embedding == settings.hidden
    assert (our_logits(again, None, probe) - ours)[is_real].abs().max() <= 1e-5
    with pytest.raises(DataError, match="holds no discriminator"):
        read_network(tmp_path / "out", "discriminator")


def test_the_generator_fills_masks_in_a_pipeline(tokenizer, tmp_path):
    encoder, head, line = write(tmp_path / "out", SETTINGS, tokenizer, with_head=True)
    assert "same logits" in line
    text = "The barak walks the [MASK]."
    answers = transformers.pipeline("fill-mask", str(tmp_path / "out"))(text)
    ids = torch.tensor([Tokenizer.from_str(tokenizer.to_str()).encode(text).ids])
    logits = our_logits(encoder, head, Batch.of_rows(ids, torch.zeros_like(ids), torch.ones_like(ids).bool()))
    place = ids[0].tolist().index(special_ids(tokenizer).mask)
    assert answers[0]["token"] == logits[0, place].argmax().item()
    assert answers[0]["score"] == pytest.approx(logits[0, place].softmax(0).max().item(), abs=1e-5)


def test_what_was_written_and_read_back_is_what_there_was(tokenizer, tmp_path):
    encoder, head, _ = write(tmp_path / "out", SETTINGS, tokenizer, with_head=True)
    again = read_network(tmp_path / "out", "generator")
    assert again.encoder.settings == SETTINGS
    for module, other in ((encoder, again.encoder), (head, again.head)):
        stored = other.state_dict()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in module.state_dict().items())


def test_a_folder_written_by_transformers_loads_here(tokenizer, tmp_path):
    special = special_ids(tokenizer)
    config = transformers.ModernBertConfig(
        vocab_size=vocabulary_size(tokenizer), hidden_size=32, num_hidden_layers=5, num_attention_heads=2,
        intermediate_size=40, max_position_embeddings=64, local_attention=4, global_attn_every_n_layers=2,
        pad_token_id=special.pad, cls_token_id=special.cls, sep_token_id=special.sep,
        bos_token_id=special.cls, eos_token_id=special.sep,
    )  # fmt: skip
    model = transformers.ModernBertForMaskedLM(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    loaded = read_network(tmp_path / "theirs", "generator")
    probe = probe_batch(tokenizer, 64)
    ids, is_real = probe.ids, probe.is_real
    with torch.no_grad():
        expected = model(ids, is_real.long()).logits
    assert (our_logits(loaded.encoder, loaded.head, probe) - expected)[is_real].abs().max() <= 1e-5
    assert loaded.encoder.settings.global_every == 2


def test_configs_of_transformers_4_and_5_are_read(tokenizer):
    config = formats.config_json(SETTINGS, 300, special_ids(tokenizer), "ModernBertForMaskedLM")
    new = ("layer_types", "rope_parameters")
    old = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")
    for left_out in ((), new, old):
        kept = {key: value for key, value in config.items() if key not in left_out}
        assert formats.settings_from_config(kept) == SETTINGS


def test_local_angles_that_are_null_are_the_global_ones(tokenizer):
    """As transformers 4 reads them; where the key is absent it has its own default."""
    config = formats.config_json(SETTINGS, 300, special_ids(tokenizer), "ModernBertForMaskedLM")
    del config["rope_parameters"]
    assert formats.settings_from_config(config | {"local_rope_theta": None}).local_theta == 9e4
    del config["local_rope_theta"]
    assert formats.settings_from_config(config).local_theta == 1e4


def test_an_odd_window_of_others_is_read_as_the_even_one_it_means(tokenizer, tmp_path):
    write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    path = tmp_path / "out" / "config.json"
    (tmp_path / "out" / "MANIFEST.json").unlink()  # as other people's folders are
    path.write_text(json.dumps(json.loads(path.read_text()) | {"local_attention": 7}))
    again = read_network(tmp_path / "out", "encoder").encoder
    assert again.settings == SETTINGS
    probe = probe_batch(tokenizer, SETTINGS.positions)
    ids, is_real = probe.ids, probe.is_real
    model = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert model.config.local_attention == 7
    with torch.no_grad():
        theirs = model(ids, is_real.long()).last_hidden_state
    assert (our_logits(again, None, probe) - theirs)[is_real].abs().max() <= 1e-5


def test_checking_leaves_dropout_as_it_was(tokenizer):
    settings = SETTINGS.model_copy(update={"dropout": 0.5})
    encoder, _ = build(settings, tokenizer)
    head = ModernDetectionHead(settings).train()
    probe = probe_batch(tokenizer, settings.positions)
    first, again = (our_logits(encoder, head, probe) for _ in range(2))
    assert first.equal(again)
    assert head.training and head.label.dropout.training and not encoder.training


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention_bias": True, "norm_eps": 1e-6}, "norm_eps=1e-06, attention_bias=True is not supported"),
        ({"hidden_activation": "silu"}, "hidden_activation=silu is not supported"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, r"layers \[0, 1\] attend"),
        ({"layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2}, r"layers \[1\] attend"),
        ({"layer_types": ["sliding_attention"] * 4}, r"layers \[\] attend"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'rope_type': 'yarn'.* is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "'rope_type': 'yarn'.* is not supported"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "'rope_theta': 5.0} is not supp"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=.*'linear'.* is not supported"),
        ({"model_type": "bert"}, "type 'bert', not electra or modernbert"),
    ],
)
def test_what_we_cannot_compute_is_refused(change, says, tokenizer, tmp_path):
    write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    path = tmp_path / "out" / "config.json"
    (tmp_path / "out" / "MANIFEST.json").unlink()  # as other people's folders are
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=says):
        read_network(tmp_path / "out", "encoder")


def test_weights_that_do_not_fit_are_refused(tokenizer, tmp_path):
    write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    path = tmp_path / "out" / "config.json"
    (tmp_path / "out" / "MANIFEST.json").unlink()  # as other people's folders are
    config = json.loads(path.read_text()) | {"intermediate_size": 50}
    path.write_text(json.dumps(config))
    with pytest.raises(CorruptError, match="does not fit its config.json"):
        read_network(tmp_path / "out", "encoder")
    path.write_text("{")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_network(tmp_path / "out", "encoder")


def test_an_export_with_other_numbers_is_not_kept(tokenizer, tmp_path, monkeypatch):
    """As if the names of two tensors were swapped."""
    honest = formats.encoder_to_transformers

    def harmed(*parts):
        tensors = honest(*parts)
        return tensors | {"final_norm.weight": tensors["embeddings.norm.weight"].clone()}

    monkeypatch.setattr(formats, "encoder_to_transformers", harmed)
    with pytest.raises(CorruptError, match="different logits"):
        write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    assert not list(tmp_path.iterdir())


def test_an_export_that_transformers_would_read_otherwise_is_not_kept(tokenizer, tmp_path, monkeypatch):
    """Our reader is content: only reading with both finds out."""
    honest, described = writing.config_json, writing.tokenizer_config
    monkeypatch.setattr(read, "settings_from_config", lambda config: SETTINGS)
    monkeypatch.setattr(writing, "config_json", lambda *a: honest(*a) | {"norm_eps": 0.1})
    with pytest.raises(CorruptError, match="transformers gets different"):
        write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    monkeypatch.setattr(writing, "config_json", honest)
    other = {"padding_side": "left"}
    monkeypatch.setattr(writing, "tokenizer_config", lambda *a: described(*a) | other)
    with pytest.raises(CorruptError, match="was not kept"):
        write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tokenizer, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(MachineError, match="exists already"):
        write(tmp_path, SETTINGS, tokenizer, with_head=False)


def test_their_tokenizer_gives_our_ids(tokenizer, tmp_path):
    write(tmp_path / "out", SETTINGS, tokenizer, with_head=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = Tokenizer.from_str(tokenizer.to_str())  # where [MASK] is the special token, as in transformers
    for text in PROBE:
        encoded = theirs(text)
        assert encoded["input_ids"] == ours.encode(text).ids and "token_type_ids" not in encoded
