"""ModernBERT as the encoder of a run: trained, resumed, exported, looked at, fine-tuned, as people do it."""

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch

from electra.base import config
from electra.base.errors import SettingsError
from electra.finetuning.folder import load_task_folder
from electra.inspector import load
from electra.interop.formats import has_form
from electra.interop.write import probe_batch
from electra.pretraining.load import load_network
from electra.pretraining.run import build_parts, pretrain
from electra.pretraining.settings import PretrainSettings, resolve
from electra.pretraining.trial import flops_per_token
from electra.train.checkpoint import checkpoint_folders
from electra.train.log import read_metrics
from helpers import electra, our_logits

VARIANTS = ["masked-lm", "all-tokens", "corrective", "electric", "adversarial", "replaced-span", "selection"]
VARIANTS += ["gdes", "generator-unigram", "generator-two-tower"]
FAST = ("epochs=6", "lr=4e-3", "batch=16", "evaluations=2", "length=32")


@pytest.fixture(scope="module")
def run(tmp_path_factory, recipe, prepared):
    run = tmp_path_factory.mktemp("modern") / "run"
    words = [f"data={prepared}", f"run={run}", "encoder.dropout=0.1"]
    words += ["encoder.window=6", "encoder.global_every=2", "encoder.token_head=tied"]
    done = electra("pretrain", f"{recipe}+modernbert", *words)
    assert done.returncode == 0, done.stderr
    return run


def weights(run):
    newest = checkpoint_folders(run / "checkpoints")[-1]
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def test_it_learns(run):
    losses = [record["loss"] for record in read_metrics(run) if record["kind"] == "train"]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    heldout = [record["auc"] for record in read_metrics(run) if record["kind"] == "heldout"]
    assert heldout[-1] > 0.7


def test_an_interrupted_run_ends_with_the_same_weights(run, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run, again)
    _, *later = checkpoint_folders(again / "checkpoints")
    assert later
    for folder in later:
        shutil.rmtree(folder)
    done = electra("pretrain", again / "config.toml", f"run={again}")
    assert done.returncode == 0 and "resuming at step" in done.stderr
    assert weights(again) == weights(run)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_objective_and_generator_trains_it(name, recipe, prepared, tmp_path):
    words = [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=6", "train.evaluate_every=6"]
    words += ["encoder.token_head=tied", "encoder.global_from=last", "encoder.global_every=2", "encoder.window=6"]
    settings, _ = resolve(f"{recipe}+modernbert+{name}", words)
    figures = pretrain(settings)
    assert figures["step"] == 6 and figures["mlm_loss"] < 6
    assert flops_per_token(settings, 124) > 0
    exported = json.loads((tmp_path / "run" / "export" / "config.json").read_text())
    assert exported["model_type"] == "modernbert"


def test_an_export_whose_generator_has_no_head_can_be_a_start(recipe, prepared, tmp_path, caplog):
    words = [f"data={prepared}", "encoder.embedding=32", "train.steps=2", "train.evaluate_every=6"]
    pretrain(resolve(f"{recipe}+modernbert", [*words, f"run={tmp_path / 'first'}"])[0])
    assert electra("export", tmp_path / "first", tmp_path / "out").returncode == 0
    settings, _ = resolve(f"{recipe}+modernbert", [*words, f"run={tmp_path / 'again'}", f"start={tmp_path / 'out'}"])
    main = build_parts(settings, torch.device("cpu")).objective.networks()["discriminator"]
    stored = load_network(tmp_path / "first", "discriminator")
    assert main.encoder.embeddings.table.equal(stored.encoder.embeddings.table)
    assert "generator was exported without its token head" in caplog.text


def test_a_generator_of_first_layers_has_their_attention(recipe, prepared, tmp_path):
    """Counted from the last of three layers the second is local; counted from the last of two it would be global."""
    words = [f"data={prepared}", "encoder.layers=3", "encoder.global_from=last", "encoder.global_every=2"]
    pretrain(resolve(f"{recipe}+modernbert", [*words, f"run={tmp_path / 'first'}", "train.steps=2"])[0])
    words += [
        f"run={tmp_path / 'x'}",
        f"start={tmp_path / 'first'}",
        "generator.start=discriminator",
        "generator.width=1",
    ]
    for layers in (1, 3):
        settings, _ = resolve(f"{recipe}+modernbert", [*words, f"generator.depth={layers / 3}"])
        assert build_parts(settings, torch.device("cpu"))
    settings, _ = resolve(f"{recipe}+modernbert", [*words, f"generator.depth={2 / 3}"])
    with pytest.raises(SettingsError, match="would be local elsewhere"):
        build_parts(settings, torch.device("cpu"))


def test_the_export_is_read_by_transformers_with_our_logits(run):
    transformers = pytest.importorskip("transformers")
    trained = load_network(run, "discriminator")
    probe = probe_batch(trained.tokenizer, 32)
    ids, is_real = probe.ids, probe.is_real
    ours = our_logits(trained.encoder, trained.head, probe)
    model = transformers.AutoModelForTokenClassification.from_pretrained(run / "export" / "detector").eval()
    assert model.config.id2label == {0: "original", 1: "replaced"}
    bare = transformers.AutoModel.from_pretrained(run / "export").eval()
    assert type(bare).__name__ == "ModernBertModel"
    with torch.no_grad():
        logits = model(ids, is_real.long()).logits[..., 1]
        states = bare(ids, is_real.long()).last_hidden_state
    assert (logits - ours)[is_real].abs().max() <= 1e-4
    assert (states - our_logits(trained.encoder, None, probe))[is_real].abs().max() <= 1e-4
    again = load_network(run / "export", "discriminator")
    assert (our_logits(again.encoder, again.head, probe) - ours)[is_real].abs().max() <= 1e-4
    card = (run / "export" / "README.md").read_text()
    assert "# ModernBERT discriminator" in card and 'pipeline("token-classification", "detector")' in card


@pytest.mark.slow
def test_a_token_head_that_transformers_has_no_form_for_stays_behind(recipe, prepared, tmp_path):
    """Words of 16 units under layers of 32; with words of 32, or a head that goes back through the projection, there is one."""
    words = [f"data={prepared}", "train.steps=2", "train.evaluate_every=2"]
    for size, head in ((16, "narrow"), (32, "narrow"), (16, "tied")):
        run, out = tmp_path / f"run-{size}-{head}", tmp_path / f"out-{size}-{head}"
        sizes = f"encoder.embedding={size}", f"encoder.token_head={head}"
        assert electra("pretrain", f"{recipe}+modernbert+masked-lm", *words, f"run={run}", *sizes).returncode == 0
        done = electra("export", run, out)
        assert done.returncode == 0, done.stderr
        kept = (size, head) != (16, "narrow")
        assert ("the encoder alone: ModernBERT has no token head of 16 units" in done.stdout) == (not kept)
        assert load_network(run, "generator").head is not None
        # the export has words as wide as its layers, so it fits a run that has that too; the run fits whatever it has
        recipes = f"{recipe}+modernbert+two-stage"
        for number, source in enumerate((out, run) if head == "tied" else (out,)):
            frozen = f"run={tmp_path / f'frozen-{size}-{head}-{number}'}", f"start={run}", f"generator.source={source}"
            done = electra("pretrain", recipes, *words, *frozen, *sizes)
            assert (done.returncode == 0) == (source == run or size == 32), done.stderr
            assert kept or done.returncode == 0 or "holds no generator" in done.stderr


def test_looking_at_it_and_scoring_it(run, tmp_path):
    for model in (run, run / "export"):
        done = electra("detect", model, "The barak walks the selute.")
        assert done.returncode == 0 and "barak" in done.stdout, done.stderr
    assert electra("evaluate", run).returncode == 0
    done = electra("score", run, "The barak walks.")
    assert done.returncode == 3 and "its objective is electra" in done.stderr
    assert electra("export", run, tmp_path / "out").returncode == 0
    generator = load_network(tmp_path / "out", "generator").encoder.settings
    assert (generator.kind, generator.hidden) == ("modernbert", 16)
    answers = []
    for model in (run, run / "export", tmp_path / "out", tmp_path / "out" / "discriminator" / "detector"):
        answers.append([token.probability for token in load(model).detect("The barak walks the selute.")])
        assert answers[-1] == pytest.approx(answers[0], abs=1e-5)
    done = electra("detect", tmp_path / "out" / "generator", "The barak walks.")
    assert done.returncode == 3 and "holds no discriminator" in done.stderr


def test_a_run_starts_from_one_of_its_kind_only(run, recipe, prepared, tmp_path):
    words = [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=2", f"start={run}"]
    done = electra("pretrain", recipe, *words)
    assert done.returncode == 2 and "encoder.kind is modernbert there and electra here" in done.stderr
    assert "give encoder.kind=modernbert." in done.stderr and "wide" not in done.stderr
    assert "generator.width" not in done.stderr
    done = electra("pretrain", f"{recipe}+modernbert", *words, "encoder.window=6", "encoder.global_every=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", [".", "export"])
def test_settings_that_no_weight_shows_must_be_those_of_the_start(run, folder, recipe, prepared, tmp_path):
    words = [f"data={prepared}", f"run={tmp_path / 'run'}", "train.steps=2", f"start={run / folder}"]
    words += ["encoder.embedding=32"] if folder == "export" else []
    settings, _ = resolve(f"{recipe}+modernbert", words)
    with pytest.raises(SettingsError) as refused:
        pretrain(settings)
    says = "encoder.window is 6 there and 128 here: give encoder.window=6"
    assert says in str(refused.value) and "encoder.global_every" not in str(refused.value)
    assert not checkpoint_folders(tmp_path / "run" / "checkpoints")


def test_a_fine_tuned_model_is_no_discriminator(run, tmp_path):
    """One output, one label: its tensors have a discriminator's names and shapes."""
    table, out = tmp_path / "t.csv", tmp_path / "out"
    rows = [f"the barak walks {row},{row / 80}" for row in range(80)]
    table.write_text("review,replaced\n" + "\n".join(rows) + "\n")
    words = "text=review", "label=replaced", "kind=regression"
    done = electra("finetune", run, table, *words, *FAST, "--out", out)
    assert done.returncode == 0, done.stderr
    done = electra("detect", out / "t" / "seed-0", "The barak walks.")
    assert done.returncode == 3 and "holds no discriminator" in done.stderr, done.stdout


def write_reviews(path):
    rows = [f"the barak {'walks' if row % 2 else 'reads'} {row},{1 + row % 2}" for row in range(80)]
    path.write_text("review,stars\n" + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("start", [".", "export"])
def test_classification_from_a_run_and_from_its_export(run, start, tmp_path):
    table, out = write_reviews(tmp_path / "t.csv"), tmp_path / "out"
    longer = *FAST[:-1], "length=48"  # encoder.positions is 32, which is no table
    done = electra("finetune", run / start, table, "text=review", "label=stars", *longer, "--out", out)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "results.json").read_text())["tasks"]["t"]["median"] == 1.0
    model = out / "t" / "seed-0"
    described = json.loads((model / "task.json").read_text())
    assert (described["architecture"], described["length"]) == ("ModernBertForSequenceClassification", 48)
    assert load_task_folder(model).task.length == 48
    older = shutil.copytree(model, tmp_path / "older")
    (older / "task.json").write_text(json.dumps({key: described[key] for key in described if key != "length"}))
    (older / "MANIFEST.json").unlink()
    assert load_task_folder(older).task.length == 32
    done = electra("predict", model, table, "--probabilities", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(["the barak walks 1", "the barak reads 2"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = network(**inputs).logits.argmax(1).tolist()
    assert [network.config.id2label[index] for index in found] == ["2", "1"]


def test_tagging_and_a_head_that_transformers_lacks(run, tmp_path):
    rows = [
        {"tokens": ["the", noun, "walks", str(n)], "tags": ["O", f"B-{kind}", "O", "O"]}
        for n in range(60)
        for noun, kind in [(("barak", "PER"), ("lonute", "LOC"))[n % 2]]
    ]
    table = tmp_path / "tags.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = electra("finetune", run, table, *FAST, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    model = tmp_path / "out" / "tags" / "seed-0"
    assert json.loads((model / "config.json").read_text())["architectures"] == ["ModernBertForTokenClassification"]
    reviews = write_reviews(tmp_path / "t.csv")
    words = "text=review", "label=stars", "head=linear"
    done = electra("finetune", run, reviews, *words, *FAST, "--out", tmp_path / "own")
    assert done.returncode == 0 and "transformers has no class for this head" in done.stderr
    assert electra("evaluate", tmp_path / "own" / "t" / "seed-0", reviews).returncode == 0


def test_questions(run, tmp_path):
    rows = [
        {
            "id": str(n),
            "question": "who walks",
            "context": f"the {noun} walks {n}",
            "answers": [{"text": noun, "answer_start": 4}],
        }
        for n in range(40)
        for noun in [("barak", "lonute")[n % 2]]
    ]
    for split, part in (("train", rows[:30]), ("dev", rows[30:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    task = tmp_path / "who.toml"
    task.write_text(
        'kind = "span"\nmax_query_length = 8\ndoc_stride = 12\n[files]\ntrain = "train.jsonl"\ndev = "dev.jsonl"\n'
    )
    done = electra("finetune", run, task, f"data={tmp_path}", *FAST, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    described = json.loads((tmp_path / "out" / "who" / "seed-0" / "task.json").read_text())
    assert described["architecture"] == "ModernBertForQuestionAnswering"


def test_settings_without_a_kind_of_encoder_are_electras(run, recipe, prepared, tmp_path):
    """As in run folders of before there was a choice."""
    settings, _ = resolve(str(recipe), [f"data={prepared}", f"run={tmp_path / 'run'}"])
    assert settings.encoder.kind == "electra"
    tree = settings.model_dump()
    del tree["encoder"]["kind"]
    assert PretrainSettings.model_validate(tree) == settings
    encoder = load_network(run, "encoder").encoder
    assert encoder.settings.kind == "modernbert"


def test_keys_and_kinds_that_do_not_go_together_are_refused():
    with pytest.raises(
        SettingsError, match=r"encoder.window is for encoder.kind=modernbert: add that, or drop encoder.window"
    ):
        resolve("electra-small", ["data=x", "encoder.window=64"])
    with pytest.raises(SettingsError, match=r"encoder.initialisation is for encoder.kind=electra"):
        resolve("modernbert-small", ["data=x", "encoder.initialisation=normal"])
    with pytest.raises(SettingsError, match=r"encoder.kind: 'bert' is not one of electra, modernbert"):
        resolve("electra-small", ["data=x", "encoder.kind=bert"])


def test_its_operations_are_counted_also_by_the_paper_s_rules():
    done = electra("flops", "modernbert-small", "--json")
    counted = json.loads(done.stdout)
    assert set(counted["parts"]) == {"generator", "discriminator", "heads"}
    assert 6e7 < counted["token"] < 8e7

    # two passes instead of three; words as one-hot products; and a few operations that are no products
    settings, _ = resolve("modernbert-small", ["data=x"])
    tokens, sizes = counted["tokens"], settings.encoder
    small = sizes.scaled(settings.generator.width, settings.generator.depth)
    lookups = 2 * 2 * 2 * sizes.embedding * counted["vocabulary"] * tokens
    products = 2 / 3 * counted["run"] + lookups
    assert small.embedding == sizes.embedding and 1 < counted["paper_run"] / products < 1.03


def test_joined_to_a_recipe_it_keeps_the_sizes():
    settings, _ = resolve("tiny+modernbert", ["data=x"])
    assert (settings.encoder.kind, settings.encoder.layers, settings.encoder.hidden) == ("modernbert", 4, 64)


def test_modernbert_small_is_electra_small_but_for_its_layers():
    small, modern = (config.flatten(config.read_recipe(f"{name}-small")) for name in ("electra", "modernbert"))
    assert modern == small | {"encoder.kind": "modernbert", "encoder.intermediate": 704}
    (small, _), (modern, _) = (resolve(f"{name}-small", ["data=x", "run=x"]) for name in ("electra", "modernbert"))
    assert modern.model_copy(update={"encoder": small.encoder}) == small


# of ours, in millions with BERT's vocabulary: the discriminator, what the generator adds, ELECTRA's discriminator of that size
PARAMETERS = {
    "modernbert-small": (13.6, 0.65, "electra-small"),
    "modern-small": (13.6, 0.65, "electra-small"),
    "modern-base": (109.0, 7.7, "electra-base"),
    "modern-large": (331.2, 19.8, "electra-large"),
}


def discriminator_and_generator(recipe: str) -> tuple[float, float]:
    """Parameters in millions: of encoder and detection head, and those that the generator has for itself."""
    from electra.model import build_detection_head
    from electra.model.generators import build_pair

    settings, _ = resolve(recipe, ["data=x"])
    with torch.device("meta"):
        discriminator, generator = build_pair(settings.encoder, settings.generator, 30522, torch.zeros(30522))
        head = build_detection_head(settings.encoder)
    own = {id(p): p.numel() for part in (discriminator, head) for p in part.parameters()}
    return sum(own.values()) / 1e6, sum(p.numel() for p in generator.parameters() if id(p) not in own) / 1e6


@pytest.mark.parametrize("name", PARAMETERS)
def test_our_sizes_have_the_parameters_they_say_and_not_more_than_the_papers(name):
    *said, paper = PARAMETERS[name]
    assert discriminator_and_generator(name) == pytest.approx(said, rel=0.01)
    assert said[0] <= discriminator_and_generator(paper)[0] + 0.1
    comment = (resources.files("electra") / "recipes" / f"{name}.toml").read_text().partition("[")[0]
    assert f"{said[0]:.3g} M parameters and {said[1]:.3g} M" in comment.replace("more ", "")


def test_the_pages_say_which_of_our_generators_transformers_reads():
    """ "tied" would make all of them so, and was worse where it was measured (experiments/LOG.md)."""
    names, has_head = ("modern-tiny", "modern-small", "modern-base", "modern-large"), {True: [], False: []}
    for name in names:
        settings, _ = resolve(name, ["data=x"])
        small = settings.encoder.scaled(settings.generator.width, settings.generator.depth)
        has_head[has_form(small, "generator")].append(name)
        assert has_form(small.model_copy(update={"token_head": "tied"}), "generator")
    page = " ".join((Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8").split())
    (with_head,), (*others, last) = has_head[True], has_head[False]
    assert f"Of our recipes {with_head}'s generator is a ModernBertForMaskedLM." in page
    assert f"Those of {', '.join(others)} and {last} are encoders alone" in page


@pytest.mark.parametrize("name", ["modern-tiny", "modern-small", "modern-base", "modern-large"])
def test_our_own_recipes_name_their_block_and_are_as_good_at_any_length(name):
    """Without the kind a recipe is the paper's, and a warm-up in steps would swallow a short run."""
    tree = config.read_recipe(name)
    assert tree["encoder"]["kind"] == "modernbert" and tree["schedule"]["kind"] == "linear"
    assert 0 < tree["schedule"]["warmup"] < 1 and tree["optimizer"]["bias_correction"]
    settings, _ = resolve(name, ["data=x"])
    assert (settings.encoder.dropout, settings.encoder.attention_dropout, settings.rows.kind) == (0, 0, "packed")
