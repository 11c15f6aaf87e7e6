"""Cards: read with the Hub's own parser, held against what the run folder says, their lines run, and no text breaks them."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from electra.base.errors import SettingsError
from electra.base.progress import literal
from electra.interop.card import (
    UNSAID,
    Card,
    Publication,
    facts,
    fenced,
    numbers,
    update_card,
    with_header,
    with_section,
)
from electra.pretraining.card import run_sections
from electra.pretraining.load import heldout_metrics, load_settings
from electra.train.log import read_metrics
from helpers import electra


@pytest.fixture(scope="module")
def exported(finished_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("card") / "out"
    words = ("--language", "en", "--language", "de", "--license", "apache-2.0", "--dataset", "somebody/texts")
    done = electra("export", finished_run, out, *words)
    assert done.returncode == 0, done.stderr
    return out


def rows_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))


def test_the_card_says_what_the_run_knows(exported, finished_run, prepared, recipe):
    card = ModelCard.load(exported / "discriminator" / "README.md", ignore_metadata_errors=False)
    assert card.data.to_dict() == {
        "language": ["en", "de"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["electra", "discriminator"],
        "datasets": ["somebody/texts"],
    }
    assert ModelCard.load(exported / "generator" / "README.md").data.pipeline_tag == "fill-mask"
    rows, manifest = rows_of(card.text), json.loads((prepared / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    assert rows["trained on"] == f"{train['documents']:,} documents, {train['tokens']:,} tokens"
    assert rows["text"] == f"{manifest['inputs']['bytes']:,} bytes, 1 file"
    records = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    heldout = [record for record in records if record["kind"] == "heldout"][-1]
    assert rows["steps"] == "40 of 8 rows of 24 tokens" and rows["seed"] == "3"
    assert rows["tokens seen"].startswith(f"{last['tokens']:,.0f}, ")
    assert rows["auc"] == f"{heldout['auc']:.4f}" and rows["rtd_loss"] == f"{heldout['rtd_loss']:.4f}"
    environment = json.loads((finished_run / "environment.json").read_text())
    assert rows["sha256 of the token shards' manifest"] == environment["data_manifest_sha256"]
    counted = json.loads(electra("flops", recipe, f"data={prepared}", "--json").stdout)
    assert rows["operations"].startswith(f"{counted['run']:.3g} FLOPs")
    assert rows["as the ELECTRA paper counts"] == f"{counted['paper_run']:.3g} FLOPs"
    if not environment["gpu"]:
        kilowatt_hours = 0.010 * environment["torch_threads"] * last["seconds"] / 3600 * 1.5
        assert rows["energy, an estimate"].startswith(f"{kilowatt_hours:.2g} kWh")


@pytest.mark.parametrize("logged", ["before", "after"])
def test_the_card_of_an_unfinished_run_is_of_the_step_of_its_weights(finished_run, tmp_path, logged):
    """A killed run has logged steps that it did not save, and saved steps that it did not evaluate."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    newest = sorted((run / "checkpoints").iterdir())[-1]
    records = read_metrics(run)
    if logged == "after":
        shutil.rmtree(newest)
        (newest,) = sorted((run / "checkpoints").iterdir())[-1:]
    else:
        records = [it for it in records if it["step"] < 40]
    step = int(newest.name.removeprefix("step-"))
    (run / "metrics.jsonl").write_text("".join(json.dumps(it) + "\n" for it in records))
    rows = rows_of("\n".join(run_sections(run, load_settings(run), heldout_metrics(run)).values()))
    assert rows["steps"].startswith(f"{step} of ")
    measured = {f"{it['auc']:.4f}" for it in records if (it["kind"], it["step"]) == ("heldout", step)}
    assert {rows[name] for name in ("auc",) if name in rows} == measured


@pytest.mark.parametrize(
    "damage",
    [
        '{"data": {"tokens": "many"}, "gpu": 3, "torch_threads": "x"}',
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("{", "[1]", "{}", None)),
    ],
)
def test_a_run_that_lost_its_environment_is_exported_without_it(damage, finished_run, tmp_path):
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    (run / "environment.json").unlink() if damage is None else (run / "environment.json").write_text(damage)
    done = electra("export", run, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "discriminator" / "README.md").read_text()
    assert "| trained on |" not in text and "tokens seen" in text and "\n# license: apache-2.0\n" in text
    assert damage is None or (run / "environment.json").read_text() == damage


def test_what_the_owner_says_is_a_code(finished_run, tmp_path):
    done = electra("export", finished_run, tmp_path / "out", "--license", "my own: licence")
    assert done.returncode == SettingsError.exit_code and "licence" in done.stderr and not (tmp_path / "out").exists()


def test_a_card_of_another_form_says_as_much_and_its_lines_run(exported, finished_run, tmp_path, monkeypatch, capsys):
    words = ("--format", "sentence-transformers", "--license", "mit", "--language", "ko")
    done = electra("export", finished_run, tmp_path / "out", *words)
    assert done.returncode == 0, done.stderr
    card = ModelCard.load(tmp_path / "out" / "README.md", ignore_metadata_errors=False)
    assert (card.data.library_name, card.data.license, card.data.language) == ("sentence-transformers", "mit", ["ko"])
    before = rows_of((exported / "discriminator" / "README.md").read_text())
    assert rows_of(card.text) == before and "energy, an estimate" in before
    assert card.text.count("## Use") == 1 and "## Limits" in card.text and "[optimizer]" in card.text
    monkeypatch.chdir(tmp_path / "out")
    (block,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(block.splitlines()) <= 5 and "SentenceTransformer" in block
    exec(block, {})
    assert "[" in capsys.readouterr().out


def test_a_card_of_others_keeps_its_words_and_takes_what_is_said():
    theirs = "---\r\nlicense: mit\r\nlanguage:\r\n- en\r\n- de\r\ntags:\r\n  - x\r\n---\r\n# Theirs\r\n\r\n## Use\r\n\r\nold\r\n\r\n## More\r\n\r\nwords\r\n"
    said = with_header(theirs, {**Publication(("ko",)).entries(), "library_name": "onnx", "tags": None})
    assert yaml.safe_load(said.split("---\n")[1]) == {"license": "mit", "language": ["ko"], "library_name": "onnx"}
    assert with_section(said, "Use", "new").endswith("---\n# Theirs\n\n## Use\n\nnew\n\n## More\n\nwords\n")
    assert with_section(said, "Use", "").endswith("---\n# Theirs\n\n## More\n\nwords\n")
    assert with_section(said, "More", "").endswith("## Use\n\nold\n")
    assert with_header("plain", UNSAID.entries()) == "plain"
    assert (
        with_section(with_header("plain", {"license": "mit"}), "Use", "new")
        == "---\nlicense: mit\n---\n\nplain\n\n## Use\n\nnew\n"
    )


def labels(number: int) -> dict[str, object]:
    return {"text": f"the lonute {number} walks", "label": "yes" if number % 2 else "no | <b>[x](http://y) ```"}


def spans(number: int) -> dict[str, object]:
    answers = [{"text": "lonute", "answer_start": 4}]
    return {"id": str(number), "question": "who walks", "context": f"the lonute {number} walks", "answers": answers}


@pytest.mark.parametrize("row", [labels, spans])
def test_a_fine_tuned_card_has_all_seeds_and_baselines_and_its_lines_run(row, toy_model, tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row(number)) + "\n" for number in range(60)))
    more = ("max_query_length=8",) if row is spans else ("long=windows",)
    words = ("finetune", toy_model, table, "epochs=1", "min_steps=0", *more, "--out", tmp_path / "out")
    assert (done := electra(*words)).returncode == 0, done.stderr
    folder = tmp_path / "out" / "table" / "seed-0"
    assert "mean of" not in (folder / "README.md").read_text()
    assert (done := electra(*words, "--seeds", "2")).returncode == 0, done.stderr
    card = ModelCard.load(folder / "README.md", ignore_metadata_errors=False)
    result = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["table"]
    scores = result["scores"]["dev"]
    assert {it.metric_type: it.metric_value for it in card.data.eval_results} == pytest.approx(
        scores["seed 0"], abs=1e-6
    )
    metric, mean = result["metric"], (scores["seed 0"][result["metric"]] + scores["seed 1"][result["metric"]]) / 2
    line = next(it for it in card.text.splitlines() if it.startswith("| dev | " + metric))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2] == f"{scores['seed 0'][metric]:.4f}" and cells[3].startswith(f"{mean:.4f} ± ")
    rows = rows_of(card.text)
    assert rows["sha256 of the train rows' file"] == hashlib.sha256(table.read_bytes()).hexdigest()
    assert (
        rows["hardware"]
        and re.match(r"\d:\d\d:\d\d$", rows["time"])
        and "kWh" in rows.get("energy, an estimate", "kWh")
    )
    baselines = result["baselines"].get("dev", {})
    assert cells[4:] == [f"{it[metric]:.4f}" for it in baselines.values()] and list(baselines) == (
        ["majority", "words"] if row is labels else ["words"]
    )
    assert electra("verify", folder).returncode == 0
    assert (
        " is cut." not in card.text
        and ("Contexts are read in windows of" if row is spans else "Text beyond") in card.text
    )
    assert "(guessed" in card.text  # the notes of results.md
    if row is labels:  # without the head its scores and limits are of nothing
        words = ("--format", "sentence-transformers", "--length", "16")
        assert (done := electra("export", folder, tmp_path / "st", *words)).returncode == 0, done.stderr
        alone = (tmp_path / "st" / "README.md").read_text()
        assert "## Scores" not in alone and "on dev" not in alone and "## Limits" in alone and "## Settings" in alone
        assert re.findall(r"(\d+) tokens", alone) == ["16"]
    monkeypatch.chdir(folder)
    (block,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(block.splitlines()) == 5
    exec(block, {})
    assert "tensor(" in capsys.readouterr().out


def test_a_card_that_somebody_edited_stays_and_one_cut_short_is_finished(finished_run, tmp_path):
    folder = tmp_path / "export"
    shutil.copytree(finished_run / "export", folder)
    update_card(folder, "newer")
    assert (folder / "README.md").read_text() == "newer" and electra("verify", folder).returncode == 0
    (folder / "README.md").write_text("newest")  # as a kill between both writes leaves it
    update_card(folder, "newest")
    assert electra("verify", folder).returncode == 0
    (folder / "README.md").write_text("mine")
    update_card(folder, "newer still")
    assert (folder / "README.md").read_text() == "mine"


@settings(max_examples=150)
@given(
    st.text(max_size=40),
    st.lists(st.text(max_size=20), max_size=3),
    st.text(alphabet="`~\n# -|<>[]()!*_\\&'\":{}xé\u2028\x85", max_size=60),
)
def test_no_text_breaks_a_card(name, labels, odd):
    results = [
        {
            "task": {"type": "text-classification"},
            "dataset": {"type": name, "name": odd},
            "metrics": [{"type": odd, "value": 0.5}],
        }
    ]
    sections = {"Data": facts([("labels", literal(", ".join(labels)))]), "Scores": numbers({odd: 0.5, name: 0.25})}
    card = Card(
        odd, "about", "use", ("electra", odd), "text-classification", sections, f"path = {odd}", results=results
    ).text()
    head, body = card.removeprefix("---\n").split("\n---\n", 1)
    header = yaml.safe_load(head)
    assert header["tags"] == list(dict.fromkeys(["electra", odd]))
    (entry,) = header["model-index"]
    assert entry["name"] == odd and entry["results"][0]["dataset"] == {"type": name, "name": odd}
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    headings = [tokens[place + 1].content for place, it in enumerate(tokens) if it.type == "heading_open"]
    assert headings[-4:] == ["Use", "Data", "Scores", "Settings"] and len(headings) <= 5
    inline = [child.type for it in tokens for child in it.children or ()]
    assert not {"link_open", "html_inline", "image", "em_open", "strong_open"} & set(inline)
    assert not any(it.type == "html_block" for it in tokens)
    assert [it.info for it in tokens if it.type == "fence"] == ["toml"] and tokens[-1].content.startswith("path =")
    assert ModelCard(card).data.pipeline_tag == "text-classification"


def test_a_fence_is_longer_than_what_it_holds():
    text = fenced("a\n`````\n# b", "toml")
    (token,) = MarkdownIt().parse(text)
    assert token.content == "a\n`````\n# b\n"


def test_publication_takes_codes():
    assert Publication(("ko", "zh-Hant"), "cc-by-4.0", ("org/name",)).license == "cc-by-4.0"
    with pytest.raises(SettingsError, match="en, apache-2.0"):
        Publication(datasets=("a/b/c",))
