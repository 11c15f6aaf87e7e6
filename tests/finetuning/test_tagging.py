"""Tagging: every word exactly one answer, the network of transformers, and problems of the data found before training."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example as with_example
from hypothesis import given, strategies
from tokenizers import Tokenizer

from electra.base import config
from electra.base.batch import Batch
from electra.base.errors import SettingsError
from electra.data.corpus import Corpus
from electra.data.tables import Row
from electra.data.tokenizer import TokenizerSettings, adopt_vocabulary, train_tokenizer
from electra.finetuning import Example, Outputs, Task
from electra.finetuning.tagging import IGNORED, Span, Tagging, TaggingSettings, from_spans, legal, split_words, to_spans
from electra.interop.formats import HEADS, encoder_from_transformers, our_names, renamed_back
from electra.model import initialise
from electra.model.electra import ElectraEmbeddings, ElectraEncoder, ElectraEncoderSettings

TASKS = Path(config.__file__).parents[1] / "recipes" / "tasks"
TEXT = "Ada Lovelace met Mary Somerville in London . 日本語 の 東京 へ 行く 。 안녕하세요 서울 에서 Zürich naïve 3.14"
ROWS: list[Row] = [
    {"tokens": ["Ada", "Lovelace", "met", "Mary"], "tags": ["B-PER", "I-PER", "O", "B-PER"]},
    {"tokens": ["London", "."], "tags": ["B-LOC", "O"]},
]


def trained(folder: Path, **settings: object) -> Tokenizer:
    (folder / "in.txt").write_text(f"{TEXT}\n\n" * 40, "utf-8")
    return train_tokenizer(Corpus([folder / "in.txt"]), TokenizerSettings(vocab_size=300, **settings))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return trained(tmp_path_factory.mktemp("tokenizer"), lowercase=False)


def build(tokenizer: Tokenizer, rows: Sequence[Row] = ROWS, length: int = 64, **settings: object) -> Tagging:
    return TaggingSettings(**settings).build(tokenizer, length, {"train": rows})


def read(path: Path) -> list[dict]:
    with pa.CompressedInputStream(str(path), "zstd") as stream:
        return [json.loads(line) for line in stream.read().splitlines()]


def collate(task: Task, examples: Sequence[Example], pad: int = 0) -> Batch:
    width = max(len(example.ids) for example in examples)
    ids = torch.tensor([[*example.ids, *[pad] * (width - len(example.ids))] for example in examples])
    is_real = torch.tensor([[place < len(example.ids) for place in range(width)] for example in examples])
    return Batch.of_rows(ids, torch.zeros_like(ids), is_real, task.targets(examples, width))


def perfect(task: Tagging, examples: Sequence[Example], padding: int = 3) -> list[Outputs]:
    """A network that knows the target of every first token, and says something wrong everywhere else."""
    outputs = []
    for example in examples:
        logits = np.zeros((len(example.ids) + padding, len(task.labels)), np.float32)
        logits[:, -1] = 9
        for place, label in enumerate(example.target):
            if label != IGNORED:
                logits[place] = 0
                logits[place, label] = 5
        outputs.append({"logits": logits})
    return outputs


def answers(task: Tagging, rows: Sequence[Row]) -> list[dict]:
    examples, _ = task.encode(rows)
    return task.predict(rows, examples, perfect(task, examples))


# The network


def test_logits_and_loss_equal_those_of_transformers(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = tokenizer.get_vocab_size()
    theirs = transformers.ElectraForTokenClassification(
        transformers.ElectraConfig(
            vocab_size=vocabulary,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            num_labels=5,
        )
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    settings = ElectraEncoderSettings(layers=2, hidden=32, heads=2, intermediate=64, embedding=16, positions=64)
    encoder = ElectraEncoder(settings, ElectraEmbeddings(settings, vocabulary)).eval()
    task: Task = build(tokenizer)
    head = task.head(settings).eval()
    tensors = theirs.state_dict()
    encoder.load_state_dict(encoder_from_transformers(encoder.settings, tensors))
    table = our_names(HEADS["ElectraForTokenClassification"])
    head.load_state_dict(renamed_back(tensors, table))

    inputs = collate(task, task.encode(ROWS)[0])
    assert not inputs.is_real.all()
    with torch.no_grad():
        outputs = head(encoder(inputs.ids, inputs.segments, inputs.is_real), inputs)
        expected = theirs(inputs.ids, attention_mask=inputs.is_real.long(), labels=inputs.targets["tags"])
    assert f"Electra{task.architecture}" == type(theirs).__name__
    assert (outputs["logits"] - expected.logits)[inputs.is_real].abs().max() < 1e-5
    assert task.loss(outputs, inputs.targets).item() == pytest.approx(expected.loss.item(), abs=1e-5)


def test_a_small_network_learns_a_rule(tokenizer: Tokenizer) -> None:
    """Capitals are spans, and their type depends on the word before the span: context has to be used."""
    rng = random.Random(0)
    nouns, verbs = ["Ada", "Mary", "London", "Zürich"], ["met", "in", "naïve", "."]

    def row() -> Row:
        words = ["."]
        spans = []
        while len(words) < 10:
            words.append(rng.choice(verbs))
            kind = "LOC" if words[-1] == "in" else "PER"
            start = len(words)
            words += rng.choices(nouns, k=rng.randint(1, 2))
            spans.append(Span(kind, start, len(words)))
        return {"tokens": words, "tags": from_spans(spans, len(words), "iob2")}

    rows, dev = [row() for _ in range(200)], [row() for _ in range(50)]
    task = build(tokenizer, rows, train_scheme="bioes")
    settings = ElectraEncoderSettings(
        layers=2, hidden=32, heads=2, intermediate=64, embedding=32, positions=64,
        dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    encoder = ElectraEncoder(settings, ElectraEmbeddings(settings, tokenizer.get_vocab_size()))
    head = task.head(settings)
    initialise(encoder, settings, seed=1)
    initialise(head, settings, seed=2)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-3)
    examples, cut = task.encode(rows)
    assert cut == 0
    for _ in range(40):
        rng.shuffle(examples)
        for start in range(0, len(examples), 20):
            inputs = collate(task, examples[start : start + 20])
            outputs = head(encoder(inputs.ids, inputs.segments, inputs.is_real), inputs)
            task.loss(outputs, inputs.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    dev_examples, _ = task.encode(dev)
    inputs = collate(task, dev_examples)
    with torch.no_grad():
        logits = head(encoder(inputs.ids, inputs.segments, inputs.is_real), inputs)["logits"].numpy()
    scores = task.scores(dev, task.predict(dev, dev_examples, [{"logits": its} for its in logits]))
    assert scores["f1"] > 0.9 and scores["f1 LOC"] > 0.9


# Words to tokens and back


@pytest.mark.parametrize("vocabulary", ["cased", "uncased"])
def test_every_word_of_conll_2003_has_one_first_token_and_one_answer(shared_data: Path, vocabulary: str) -> None:
    file = shared_data / "vocab" / f"bert-base-{vocabulary}-vocab.txt"
    tokenizer = adopt_vocabulary(file, lowercase=vocabulary == "uncased")
    rows = read(shared_data / "tokens" / "conll2003-dev.jsonl.zst")
    task = build(tokenizer, rows, length=32, tags="ner_tags")
    examples, cut = task.encode(rows)
    assert cut == 0 and max(len(example.ids) for example in examples) <= 32
    assert len(examples) > len(rows)
    labelled = sum(int((example.target != IGNORED).sum()) for example in examples)
    assert labelled == sum(len(row["tokens"]) for row in rows)
    seen = [[0] * len(row["tokens"]) for row in rows]
    for example in examples:
        start, positions = example.notes
        for word, position in enumerate(positions, start):
            seen[example.row][word] += 1
            text = rows[example.row]["tokens"][word]
            assert example.ids[position] == tokenizer.encode(text, add_special_tokens=False).ids[0]
    assert all(count == 1 for row in seen for count in row)
    predictions = task.predict(rows, examples, perfect(task, examples))
    assert [it["prediction"] for it in predictions] == [row["ner_tags"] for row in rows]


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_words_of_any_script_are_tokenised_as_their_text(tmp_path: Path, kind: str) -> None:
    tokenizer = trained(tmp_path, kind=kind, lowercase=kind == "wordpiece")
    words = [*TEXT.split(), "[SEP]", "New York", "\x00", "\u200b", " ", "", "\ud800", "龘"]
    row: Row = {"tokens": words, "tags": ["X" if place % 2 else "Y" for place in range(len(words))]}
    task = build(tokenizer, [row], length=128, scheme="none")
    (example,), cut = task.encode([row])
    assert cut == 0
    _, positions = example.notes
    assert len(positions) == len(words)
    for word, start, stop in zip(words, positions, [*positions[1:], len(example.ids) - 1], strict=True):
        clean = word.replace("\ud800", "?")
        expected = tokenizer.encode(clean, add_special_tokens=False).ids
        assert list(example.ids[start:stop]) == (expected or [tokenizer.token_to_id("[UNK]")])
    sep = tokenizer.token_to_id("[SEP]")
    assert list(example.ids).count(sep) == 1 and example.ids[-1] == sep
    assert answers(task, [row])[0]["prediction"] == row["tags"]


def test_a_word_longer_than_the_limit_keeps_its_place_and_is_counted(tokenizer: Tokenizer) -> None:
    rows: list[Row] = [
        {"tokens": ["in", "-" * 50, "London", "."], "tags": ["O", "B-LOC", "I-LOC", "O"]},
        {"tokens": ["London"], "tags": ["B-LOC"]},
    ]
    task = build(tokenizer, rows, length=12)
    examples, cut = task.encode(rows)
    assert cut == 1
    assert all(len(example.ids) <= 12 for example in examples)
    assert [it["prediction"] for it in task.predict(rows, examples, perfect(task, examples))] == [
        r["tags"] for r in rows
    ]


@given(
    strategies.integers(1, 40).flatmap(
        lambda room: strategies.tuples(
            strategies.lists(strategies.integers(1, room) | strategies.integers(1, min(3, room)), max_size=120),
            strategies.just(room),
        )
    )
)
@with_example(([7, 5, 4, 1, 1, 5, 4, 1, 2, 1, 1, 4], 8))  # one part would own nothing
def test_parts_fit_cover_all_words_and_give_each_its_best_context(given_: tuple[list[int], int]) -> None:
    sizes, room = given_
    parts = split_words(sizes, room)
    assert [word for part in parts for word in part.own] == list(range(len(sizes)))
    assert len(parts) < 2 or sum(sizes[parts[-1].start - 1 :]) > room, "the last part is as full as can be"
    for part in parts:
        assert sum(sizes[part.start : part.end]) <= room
        assert part.start <= part.own.start < part.own.stop <= part.end

    def context(word: int, start: int, end: int) -> int:
        return min(sum(sizes[start:word]), sum(sizes[word + 1 : end]))

    for part in parts:
        for word in part.own:
            best = max(context(word, it.start, it.end) for it in parts if it.start <= word < it.end)
            assert context(word, part.start, part.end) == best


def test_words_inside_a_long_sentence_see_a_quarter_of_the_room_on_both_sides() -> None:
    parts = split_words([1] * 1000, 100)
    for part in parts:
        for word in part.own:
            assert word - part.start >= 24 or part.start == 0
            assert part.end - word > 24 or part.end == 1000
    assert len(parts) <= 20


def test_short_sentences_are_one_part() -> None:
    assert split_words([2, 3], 5) == [(0, 2, range(2))]
    assert split_words([], 5) == []


# Answers


def test_answers_are_legal_spans_in_the_scheme_of_the_file(tokenizer: Tokenizer) -> None:
    for scheme in ("iob1", "iob2", "bioes"):
        for learned in ("as read", "bioes", "iob1"):
            rows = [{**row, "tags": legal(row["tags"], scheme)} for row in ROWS]
            task = build(tokenizer, rows, scheme=scheme, train_scheme=learned)
            assert [it["prediction"] for it in answers(task, rows)] == [row["tags"] for row in rows]
    assert answers(task, rows)[0]["spans"] == [
        {"type": "PER", "start": 0, "end": 2, "text": "Ada Lovelace"},
        {"type": "PER", "start": 3, "end": 4, "text": "Mary"},
    ]


def test_labels_that_make_no_legal_spans_are_repaired_as_conlleval_reads_them(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    said = ["I-PER", "I-PER", "I-LOC", "O"]
    logits = np.eye(len(task.labels), dtype=np.float32)[[task.labels.index(tag) for tag in said]]
    answer = task._answer(ROWS[0], logits)
    assert answer["prediction"] == ["B-PER", "I-PER", "B-LOC", "O"]
    assert [span["text"] for span in answer["spans"]] == ["Ada Lovelace", "met"]


def test_probabilities_are_by_word(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    answer, _ = answers(task, ROWS)
    assert len(answer["probabilities"]) == 4
    for tag, shares in zip(ROWS[0]["tags"], answer["probabilities"], strict=True):
        assert tuple(shares) == task.labels and sum(shares.values()) == pytest.approx(1)
        assert max(shares, key=shares.__getitem__) == tag
    assert json.loads(json.dumps(answer)) == answer


def test_rows_without_tags_and_empty_sentences_can_be_predicted(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    rows: list[Row] = [{"tokens": []}, {"tokens": ["London"]}]
    examples, _ = task.encode(rows)
    (example,) = examples
    assert example.target is None and example.row == 1
    assert (task.targets(examples, 5)["tags"] == IGNORED).all()
    outputs = [{"logits": np.eye(8, len(task.labels), dtype=np.float32)}]
    empty, london = task.predict(rows, examples, outputs)
    assert empty["prediction"] == [] and empty["spans"] == [] and empty["probabilities"] == []
    assert len(london["prediction"]) == 1


@pytest.mark.parametrize("words", ["Ada met Mary", None, ["Ada", 3]])
def test_what_is_no_list_of_words_is_found_before_predicting(tokenizer: Tokenizer, words: object) -> None:
    from electra.finetuning.predict import input_problems

    rows: list[Row] = [{"tokens": ["London"]}, {"tokens": words}]
    (problem,) = map(str, input_problems(build(tokenizer), rows, 10))
    assert problem.startswith("row 12: 'tokens' is ") and problem.endswith("not a list of texts")


@pytest.mark.parametrize("tags", ["O O", [1, 2], ["O"], None])
def test_tags_that_cannot_be_used_do_not_hinder_predicting(tokenizer: Tokenizer, tags: object) -> None:
    (example,), _ = build(tokenizer).encode([{"tokens": ["Ada", "met"], "tags": tags}])
    assert example.target is None


def test_a_word_without_an_answer_is_never_passed_over(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    examples, _ = task.encode(ROWS)
    with pytest.raises(AssertionError, match="without an answer"):
        task.predict(ROWS, examples[:1], perfect(task, examples[:1]))


def test_scores_put_the_headline_first(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    said = [{"prediction": ["B-PER", "I-PER", "O", "O"]}, {"prediction": ["B-PER", "O"]}]
    scores = task.scores(ROWS, said)
    assert next(iter(scores)) == "f1"
    shares = {"precision": 1 / 2, "recall": 1 / 3, "f1": 0.4, "accuracy": 4 / 6, "f1 LOC": 0, "f1 PER": 0.5}
    assert scores == pytest.approx(shares)
    assert task.scores(ROWS[:1], said[:1]).keys() == scores.keys(), "also where a type does not occur"
    assert task.tables(ROWS, said)["per_class"] == [
        {"label": "LOC", "precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1},
        {"label": "PER", "precision": 0.5, "recall": 0.5, "f1": 0.5, "rows": 2},
    ]
    by_accuracy = build(tokenizer, metric="accuracy").scores(ROWS, said)
    assert next(iter(by_accuracy)) == "accuracy"
    plain: list[Row] = [{"tokens": ["a", "b"], "tags": ["DET", "-LRB-"]}]
    task = build(tokenizer, plain, scheme="none")
    assert task.labels == ("-LRB-", "DET")
    assert task.scores(plain, [{"prediction": ["DET", "DET"]}]) == {"accuracy": 0.5}
    assert task.tables(plain, [{"prediction": ["DET", "DET"]}])["per_class"] == [
        {"label": "-LRB-", "precision": 0.0, "recall": 0.0, "f1": 0.0, "rows": 1},
        {"label": "DET", "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "rows": 1},
    ]


# Settings and data


def test_labels_follow_from_the_types_and_come_back_with_the_settings(tokenizer: Tokenizer) -> None:
    """CoNLL-2000 has I-LST in its test part only."""
    task = build(tokenizer)
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    again = TaggingSettings.model_validate(config.dump(task.settings)).build(tokenizer, 64, {})
    assert again.labels == task.labels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheme": "none", "metric": "f1"}, "has no spans"),
        ({"scheme": "none", "train_scheme": "bioes"}, "has no spans"),
        ({"labels": ["O"]}, "at least two"),
        ({"labels": ["O", "PER"]}, "'PER' is not a tag of iob2"),
        ({"labels": ["O", "S-PER"], "train_scheme": "iob2"}, "'S-PER' is not a tag of iob2"),
        ({"scheme": "bilou"}, "scheme"),
        ({"tag": "ner"}, "Did you mean tags"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        config.validate(TaggingSettings, settings)


def test_columns_of_column_files_are_settings() -> None:
    settings = TaggingSettings(tokens="form", tags="upos", scheme="none", token_column=1, tag_column=3)
    assert settings.file_columns == {"form": 1, "upos": 3}


def test_plain_tags_are_scored_by_accuracy_unasked() -> None:
    assert TaggingSettings(scheme="none").metric == "accuracy"


def row(words: object, tags: object) -> Row:
    return {"tokens": words, "tags": tags}


@pytest.mark.parametrize(
    ("scheme", "bad", "message"),
    [
        ("iob2", row(["a", "b"], ["O"]), "2 words but 1 tag (words: 'a b'). Give each word one tag."),
        ("iob2", row(["a", "Smith"], ["O", "I-PER"]), "tag 'I-PER' of word 2 ('Smith') after O must be B-PER"),
        ("iob2", row(["Smith"], ["I-PER"]), "tag 'I-PER' of word 1 ('Smith') at the start must be B-PER"),
        ("iob2", row(["a", "b"], ["B-LOC", "I-PER"]), "after B-LOC must be B-PER in iob2"),
        ("iob1", row(["a", "b"], ["O", "B-PER"]), "must be I-PER in iob1"),
        ("bioes", row(["a", "b"], ["B-PER", "O"]), "tag 'B-PER' of word 1 ('a') at the start must be S-PER"),
        ("bioes", row(["a", "b"], ["O", "E-PER"]), "must be S-PER in bioes"),
        ("iob2", row(["a"], ["PER"]), "'PER' of word 1 ('a') is not a tag of iob2 (O, B-TYPE, I-TYPE)"),
        ("iob2", row(["a"], ["S-PER"]), "is not a tag of iob2"),
        ("iob2", row(["a"], [3]), "'tags' has 3 for word 1, not valid text"),
        ("iob2", row(["a", 1984], ["O", "O"]), "'tokens' has 1984 for word 2, not valid text"),
        ("iob2", row("a b", ["O", "O"]), "'tokens' is 'a b', not a list"),
        ("iob2", row(["a"], None), "'tags' is None, not a list"),
        ("iob2", {"tokens": ["a"]}, "'tags' is None, not a list"),
        ("iob2", row([], []), "no words. Remove the row."),
        ("iob2", row(["\ud83d"], ["O"]), r"'tokens' has '\ud83d' for word 1, not valid text"),
    ],
)  # fmt: skip
def test_every_kind_of_wrong_row_is_found_with_its_number(
    tokenizer: Tokenizer, scheme: str, bad: Row, message: str
) -> None:
    good = [{**it, "tags": legal(it["tags"], scheme)} for it in ROWS]
    rows = [*good, bad, *good]
    found = list(map(str, build(tokenizer, rows, scheme=scheme).problems({"train": rows, "dev": good})))
    assert len(found) == 1
    assert found[0].startswith("train row 3: ") and message in found[0]
    assert "\n" not in found[0] and found[0].endswith(".")


def test_a_tag_that_train_has_not_is_found_in_dev(tokenizer: Tokenizer) -> None:
    dev = [*ROWS, row(["Paris"], ["B-GPE"])]
    (found,) = map(str, build(tokenizer).problems({"train": ROWS, "dev": dev}))
    assert found.startswith("dev row 3: tag 'B-GPE' of word 1 ('Paris') is not among 'O, B-LOC")
    labels = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER", "B-GPE", "I-GPE"]
    assert build(tokenizer, labels=labels).problems({"train": ROWS, "dev": dev}) == []


def test_problems_of_whole_splits_are_found_together(tokenizer: Tokenizer) -> None:
    one = [row(["a", "b"], ["O", "O"])]
    found = build(tokenizer, one).problems({"train": one, "dev": [{"words": [], "ner": []}], "test": []})
    assert list(map(str, found)) == [
        "dev: no column 'tokens' (there are words, ner). Name the columns of your table.",
        "dev: no column 'tags' (there are words, ner). Name the columns of your table.",
        "test: no rows. Give at least one.",
        "train: every word has the tag 'O'. Give at least two different tags to learn.",
    ]


def test_a_test_split_needs_no_tags(tokenizer: Tokenizer) -> None:
    task = build(tokenizer)
    assert task.problems({"test": [{"tokens": ["a"]}]}) == []
    assert len(task.problems({"test": [{"tokens": ["a"]}, *ROWS]})) == 1


@pytest.mark.parametrize("name", ["conll2003_ner", "conll2000_chunk", "ud_ewt_pos"])
def test_shipped_tasks_fit_their_data_and_lose_nothing(shared_data: Path, name: str) -> None:
    recipe = config.read_recipe(str(TASKS / f"{name}.toml"))
    official = recipe.pop("rows")
    settings = config.validate(TaggingSettings, recipe)
    assert settings.name == name and {"train", "dev"} <= settings.files.keys()
    whole = {split: read(shared_data / "tokens" / f"{file}.jsonl.zst") for split, file in settings.files.items()}
    assert {split: len(rows) for split, rows in whole.items()} == official
    splits = {split: rows[:1500] for split, rows in whole.items()}
    tokenizer = adopt_vocabulary(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    task = settings.build(tokenizer, 48, splits)
    assert task.problems(splits) == []
    predictions = answers(task, splits["dev"])
    scores = task.scores(splits["dev"], predictions)
    assert next(iter(scores)) == settings.metric
    assert {scores[name] for name in scores if " " not in name} == {1.0}
    if settings.spans:
        spans = [[(s["type"], s["start"], s["end"]) for s in it["spans"]] for it in predictions]
        assert spans == [[*map(tuple, to_spans(row[settings.tags]))] for row in splits["dev"]]
