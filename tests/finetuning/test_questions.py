"""Questions answered by a span: windows, heads, decoding, and that the whole of it learns."""

import json
import random
import tomllib
from dataclasses import replace
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest
import span_reference as reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import SPECIAL, TINY, VOCABULARY, make_batch
from electra.base.batch import Batch
from electra.base.config import validate
from electra.base.errors import SettingsError
from electra.data.corpus import Corpus
from electra.data.tokenizer import TokenizerSettings, adopt_vocabulary, special_ids, train_tokenizer
from electra.finetuning import Task, question_heads
from electra.finetuning.question_heads import ContextWindow, JointHead, PlainHead, pointable, span_loss
from electra.finetuning.questions import (
    SpanSettings,
    SpanTask,
    TrueAnswer,
    read_squad,
    target_in,
    token_span,
    true_answers,
)
from electra.interop.formats import HEADS, config_json, encoder_to_transformers, our_names, renamed
from electra.model import initialise, question_head
from electra.model.electra import ElectraEmbeddings, ElectraEncoder, ElectraEncoderSettings
from helpers import write_corpus

WORDS = [
    "red", "green", "blue", "old", "new", "big", "small", "tree", "house", "river", "road", "hill", "north", "south",
    "east", "west", "walks", "sleeps",
]  # fmt: skip
UNITS = ["miles", "pounds", "years", "days"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every word of the tests is a piece; any other is spelled."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,?[]-"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *UNITS, *letters, *(f"##{it}" for it in letters)]
    path.write_text("\n".join(pieces) + "\n")
    return adopt_vocabulary(path)


def task_of(tokenizer, length: int = 64, **more) -> SpanTask:
    settings = SpanSettings(name="test", **({"max_query_length": 8, "doc_stride": 8} | more))
    return SpanTask(settings, tokenizer, length)


def row(context: str, *answers: str, name: str = "q", question: str = "big ?", **more):
    places = [{"text": text, "answer_start": context.index(text)} for text in answers]
    return {"id": name, "question": question, "context": context, "answers": places, **more}


# Windows


@given(st.integers(1, 300), st.integers(1, 60), st.integers(1, 80))
def test_every_token_is_in_a_window_and_none_is_too_large(tokens, room, stride):
    places = question_heads.window_places(tokens, room, stride)
    assert {token for first, size in places for token in range(first, first + size)} == set(range(tokens))
    assert all(1 <= size <= room for _, size in places)
    assert all(b[0] - a[0] == min(stride, room) for a, b in pairwise(places))


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 40))
def test_a_token_belongs_to_the_window_that_sees_most_around_it(tokens, room, stride):
    places = question_heads.window_places(tokens, room, stride)
    for token, owner in enumerate(question_heads.owners(tokens, places)):
        context = {
            number: min(token - first, first + size - 1 - token) + 0.01 * size
            for number, (first, size) in enumerate(places)
            if first <= token < first + size
        }
        assert owner == max(context, key=lambda number: (context[number], -number))


def test_windows_hold_the_question_their_part_and_the_answer(tokenizer):
    """8 tokens of context a window; "tree house" is cut in two by the first border, "hill" is in the second window."""
    task, context = task_of(tokenizer, length=13, max_query_length=2), " ".join(WORDS)
    examples, cut = task.encode([row(context, "tree house", "hill", question="old big ?"), row("red tree", "tree")])
    special, ids = special_ids(tokenizer), [tokenizer.token_to_id(word) for word in WORDS]
    before = [special.cls, tokenizer.token_to_id("old"), tokenizer.token_to_id("big"), special.sep]
    assert cut == 1
    assert [example.row for example in examples] == [0, 0, 0, 1]
    for number, example in enumerate(examples[:3]):
        assert example.ids == [*before, *ids[8 * number : 8 * number + 8], special.sep]
        assert example.first == example.notes.position == 4
        assert example.notes.offsets[0, 0] == context.index(WORDS[8 * number])
    assert [example.target for example in examples] == [(0, 0), (7, 7), (0, 0), (5, 5)]


def test_the_first_answer_that_is_whole_in_the_window_is_the_target():
    spans = [None, (3, 9), (6, 7), (4, 4)]
    assert target_in(spans, first=4, size=5, position=10) == (12, 13)
    assert target_in(spans, first=0, size=20, position=10) == (13, 19)
    assert target_in(spans, first=7, size=1, position=10) == (0, 0)
    assert target_in([], first=0, size=20, position=10) == (0, 0)


def test_rows_without_answers_have_no_target_and_impossible_ones_point_at_zero(tokenizer):
    task = task_of(tokenizer)
    unknown = {"id": 1, "question": "big ?", "context": "red tree"}
    rows = [unknown, {**unknown, "is_impossible": True}, {**unknown, "answers": []}]
    assert [example.target for example in task.encode(rows)[0]] == [None, (0, 0), (0, 0)]


def test_a_context_that_spells_special_tokens_gets_none(tokenizer):
    (example,), _ = task_of(tokenizer).encode([row("red [SEP] [MASK] tree", "tree")])
    special = special_ids(tokenizer)
    assert example.ids.count(special.sep) == 2 and special.mask not in example.ids


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece"])
def test_answers_come_back_exactly_with_every_kind_of_tokenizer(kind, tmp_path):
    """Also where tokens carry the space before them, and with characters of several bytes or none."""
    corpus = Corpus([write_corpus(tmp_path / "text.txt", documents=40)])
    task = task_of(train_tokenizer(corpus, TokenizerSettings(kind=kind, vocab_size=400)), length=400)
    context = "Ünder the  Äthericus, 東京 was\nbuilt in １９９９ (by “Ánna\u0301”)\u200b for £5 😀 each."
    for text in (
        "the",
        "the  Äthericus",
        "by",
        "Äthericus",
        "東京",
        "１９９９",
        "“Ánna\u0301”",
        "Ánna\u0301",
        "£5",
        "built in １９９９",
        "Ünder",
        "each.",
    ):
        (example,), _ = task.encode([row(context, text)])
        outputs = certain(example, *example.target)
        (told,) = task.predict([row(context)], [example], [outputs])
        start, end = example.target
        unknown = task.special.unk in example.ids[start : end + 1]  # may reach further than the answer
        assert told["prediction"] == text or (kind == "unigram" and unknown and text in told["prediction"])
        assert context[told["n_best"][0]["start"] : told["n_best"][0]["end"]] == told["prediction"]


def certain(example, start: int, end: int) -> dict[str, np.ndarray]:
    """What a plain head that is sure of one span would have said."""
    logits = np.zeros((2, len(example.ids)), np.float32)
    logits[0, start] = logits[1, end] = 10
    return {"start_logits": logits[0], "end_logits": logits[1]}


def test_every_answer_of_squad_is_cut_out_exactly(shared_data):
    """Except for 68 that begin or end inside a word ("Japan" in "Japanese"): those get the whole word."""
    tokenizer = adopt_vocabulary(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    rows = read_squad(shared_data / "squad" / "squad1.1-dev.json.zst")
    task = SpanTask(SpanSettings(name="squad1"), tokenizer, 512)
    assert task.problems({"dev": rows}) == []
    examples, cut = task.encode(rows)
    assert cut == 0 and len(examples) == 10650 and max(len(example.ids) for example in examples) == 512
    exact: dict[tuple[int, int], bool] = {}
    for example in examples:
        context, offsets = rows[example.row]["context"], example.notes.offsets
        for number, answer in enumerate(true_answers(rows[example.row])):
            if offsets[0, 0] <= answer.start and answer.start + len(answer.text) <= offsets[-1, 1]:
                first, last = token_span(offsets, answer)
                text = context[offsets[first, 0] : offsets[last, 1]]
                exact[example.row, number] = text == answer.text
                assert answer.text in text and len(text) < len(answer.text) + 20
    assert len(exact) == sum(len(row["answers"]) for row in rows) == 34726
    assert list(exact.values()).count(False) == 68
    assert len({example.row for example in examples if example.target != (0, 0)}) == len(rows)


def test_an_answer_gets_the_tokens_it_shares_a_character_with():
    offsets = np.array([[0, 1], [1, 3], [4, 8], [8, 12], [12, 13]])  # ( by anna lena )
    for text, start, expected in (("by", 1, (1, 1)), ("anna", 4, (2, 2)), ("nale", 6, (2, 3)), (" a", 3, (2, 2))):
        assert token_span(offsets, TrueAnswer(text, start)) == expected
    assert token_span(offsets, TrueAnswer(" ", 3)) is None


# Heads


def inputs_of(batch, targets=None) -> Batch:
    return Batch.of_rows(batch.ids, batch.segments, batch.is_real, targets)


def test_only_the_context_and_position_zero_can_be_pointed_at():
    batch = make_batch(rows=2, length=10)
    found = pointable(inputs_of(batch))
    assert found.tolist() == ((batch.segments == 1) | (torch.arange(10) == 0)).tolist()
    careless = replace(inputs_of(batch), segments=torch.where(batch.is_real, batch.segments, 1))
    assert torch.equal(pointable(careless), found)  # whatever segment padding has
    assert pointable(replace(careless, is_real=torch.ones_like(batch.is_real))).sum() > found.sum()


def test_plain_logits_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs the hf extra")
    encoder, head, batch = (
        ElectraEncoder(TINY, ElectraEmbeddings(TINY, VOCABULARY)),
        PlainHead(question_head(TINY)),
        make_batch(),
    )
    for module in (encoder, head):
        initialise(module, TINY, seed=1)
        module.eval()
    config = config_json(TINY, VOCABULARY, SPECIAL, "discriminator")
    config = transformers.ElectraConfig(**{key: it for key, it in config.items() if key != "model_type"})
    theirs = transformers.ElectraForQuestionAnswering(config).eval()
    body = {
        f"electra.{name}": it for name, it in encoder_to_transformers(encoder.settings, encoder.state_dict()).items()
    }
    table = our_names(HEADS["ElectraForQuestionAnswering"])
    theirs.load_state_dict({**body, **renamed(head.state_dict(), table)})
    with torch.no_grad():
        ours = head(encoder(batch.ids, batch.segments, batch.is_real), inputs_of(batch))
        expected = theirs(batch.ids, batch.is_real.long(), batch.segments)
    for name in ("start_logits", "end_logits"):
        logits = expected[name]
        assert (ours[name] - logits)[batch.is_real].abs().max() <= 1e-5
        assert logits[batch.is_real].std() > 0.05


def beam_of(outputs, one: int) -> dict[tuple[int, int], float]:
    """{(start, end): score} of what can be pointed at at all."""
    starts, ends, scores = (outputs[name][one].tolist() for name in ("starts", "ends", "scores"))
    return {
        (start, end): score
        for start, its_ends, its_scores in zip(starts, ends, scores, strict=True)
        for end, score in zip(its_ends, its_scores, strict=True)
        if score != 0
    }


@pytest.fixture
def joint():
    """A joint head with random biases too, hidden states and the weights as numpy arrays, all in float64."""
    torch.manual_seed(0)
    head = JointHead(hidden=12, beam=4, answerability=True).double().eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden = torch.randn(5, 20, 12, dtype=torch.float64)
    weights = {name: it.detach().numpy() for name, it in head.state_dict().items()}
    return head, hidden, make_batch(rows=5, length=20), weights


def test_joint_loss_and_logits_equal_the_reference(joint):
    head, hidden, batch, weights = joint
    targets = {"start": torch.tensor([11, 0, 12, 9, 0]), "end": torch.tensor([13, 0, 12, 10, 0])}
    inputs = inputs_of(batch, targets)
    outputs = head(hidden, inputs)
    allowed = pointable(inputs).numpy()
    losses = []
    for one in range(5):
        h, a, start, end = hidden[one].numpy(), allowed[one], targets["start"][one], targets["end"][one]
        for name, expected in (
            ("start_logits", reference.start_logits(weights, h, a)),
            ("end_logits", reference.end_logits(weights, h, a, start)),
            ("null", reference.null_logit(weights, h, a)),
        ):
            np.testing.assert_allclose(outputs[name][one].detach().numpy(), expected, rtol=0, atol=1e-10)
        losses.append(reference.loss(weights, h, a, start, end, weight=0.5))
    loss = span_loss(outputs, targets, answerability=0.5)
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-10)
    loss.backward()
    assert all(it.grad is not None and it.grad.isfinite().all() for it in head.parameters())


def test_the_beam_equals_the_reference(joint):
    head, hidden, batch, weights = joint
    inputs = inputs_of(batch)
    with torch.no_grad():
        outputs = head(hidden, inputs)
    for one in range(5):
        expected = reference.beam(weights, hidden[one].numpy(), pointable(inputs)[one].numpy(), width=4)
        assert beam_of(outputs, one) == pytest.approx(expected, abs=1e-10)


def test_a_plain_loss_looks_only_at_what_can_be_pointed_at():
    logits = torch.tensor([[0.0, 9.0, 1.0, 2.0]])
    outputs = {"start_logits": logits, "end_logits": logits, "allowed": torch.tensor([[True, False, True, True]])}
    targets = {"start": torch.tensor([2]), "end": torch.tensor([3])}
    total = np.log(np.exp(0) + np.exp(1) + np.exp(2))
    assert span_loss(outputs, targets, 0.5).item() == pytest.approx(total - 1.5, abs=1e-6)


@pytest.mark.parametrize("head", ["plain", "joint"])
def test_weights_are_glorots_and_padding_changes_nothing(tokenizer, head):
    module = task_of(tokenizer, head=head, has_unanswerable=True).head(TINY)
    initialise(module, TINY, seed=3)
    for name, weight in module.named_parameters():
        if name.endswith("weight"):
            bound = (6 / sum(weight.shape)) ** 0.5
            assert 0.8 * bound < weight.abs().max() <= bound
    batch = make_batch(rows=3, length=24)
    hidden = torch.randn(3, 24, TINY.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = module.eval()(hidden, inputs_of(batch))
        alone = module(
            hidden[2:, :20], Batch.of_rows(batch.ids[2:, :20], batch.segments[2:, :20], batch.is_real[2:, :20])
        )
    if head == "joint":
        assert beam_of(together, 2) == pytest.approx(beam_of(alone, 0), abs=1e-5)
        assert len(beam_of(alone, 0)) == 10 * 10  # of 20 × 20: nine tokens of segment 1, and position 0
        assert all(it.isfinite().all() for it in together.values())
        assert together["null"][2].item() == pytest.approx(alone["null"].item(), abs=1e-5)
    else:
        for name in ("start_logits", "end_logits", "allowed"):
            assert torch.allclose(together[name][2, :20].float(), alone[name][0].float(), atol=1e-5)
        assert not together["allowed"][2, 20:].any()


# From outputs to answers


def outputs_of(example, rng) -> dict[str, np.ndarray]:
    size = len(example.ids)
    return {name: rng.normal(size=size).astype(np.float32) for name in ("start_logits", "end_logits")}


def test_plain_decoding_finds_the_best_of_all_allowed_spans(tokenizer):
    """Against a search through every pair of positions of every window."""
    task = task_of(tokenizer, length=20, max_answer_length=3, n_best=5, doc_stride=4)
    rng = np.random.default_rng(0)
    context = " ".join(WORDS + UNITS)
    examples, _ = task.encode([row(context)])
    assert len(examples) > 2
    for _ in range(20):
        outputs = [outputs_of(example, rng) for example in examples]
        (told,) = task.predict([row(context)], examples, outputs)
        spans = []
        for example, output in zip(examples, outputs, strict=True):
            window = example.notes
            for s in range(window.position, len(example.ids) - 1):
                for e in range(s, min(s + 3, len(example.ids) - 1)):
                    if window.owned[s - window.position]:
                        begin, end = (window.offsets[s - window.position, 0], window.offsets[e - window.position, 1])
                        spans.append((output["start_logits"][s] + output["end_logits"][e], context[begin:end]))
        best = sorted(spans, reverse=True)[:5]
        assert [answer["text"] for answer in told["n_best"]] == [text for _, text in best]
        assert sum(answer["probability"] for answer in told["n_best"]) == pytest.approx(1)
        ratio = told["n_best"][0]["probability"] / told["n_best"][4]["probability"]
        assert ratio == pytest.approx(np.exp(best[0][0] - best[4][0]), rel=1e-5)
        assert told["prediction"] == best[0][1] and told["score"] == told["n_best"][0]["probability"]


def test_a_token_in_two_windows_is_judged_by_the_one_that_sees_more(tokenizer):
    task = task_of(tokenizer, length=20, doc_stride=6)
    context = " ".join(WORDS)
    examples, _ = task.encode([row(context)])
    first, second = examples
    token, later = 13, 15  # near the end of the first window but well inside the second; in the second only
    assert not first.notes.owned[token] and second.notes.owned[token - 6]
    sure = certain(first, *2 * [first.notes.position + token])
    unsure = certain(second, *2 * [second.notes.position + later - 6])
    (told,) = task.predict([row(context)], examples, [sure, {**unsure, "start_logits": unsure["start_logits"] / 2}])
    assert told["prediction"] == WORDS[later]


def test_the_same_text_is_listed_once_with_its_best_place(tokenizer):
    task = task_of(tokenizer)
    context = "red tree old red tree"
    (example,), _ = task.encode([row(context)])
    position = example.notes.position
    outputs = certain(example, position + 3, position + 4)
    (told,) = task.predict([row(context)], [example], [outputs])
    assert told["n_best"][0] == pytest.approx(
        {"text": "red tree", "start": 13, "end": 21, "probability": told["score"], "logit": 20}
    )
    texts = [answer["text"] for answer in told["n_best"]]
    assert len(texts) == len(set(texts)) and all(context[a["start"] : a["end"]] == a["text"] for a in told["n_best"])


def test_the_beam_gives_up_spans_that_cannot_be():
    window = ContextWindow(4, np.array([[0, 3], [4, 8], [9, 12]]), np.array([True, False, True]))
    outputs = {
        "starts": np.array([0, 4, 5, 6]),
        "ends": np.array([[0, 4], [4, 6], [5, 6], [5, 6]]),
        "scores": np.array([[9.0, 9], [1, 2], [8, 8], [7, 3]]),
    }
    found = question_heads.beam_spans(window, outputs, longest=3)
    assert sorted(zip(*map(np.ndarray.tolist, found), strict=True)) == [(1, 0, 3), (2, 0, 12), (3, 9, 12)]
    assert len(question_heads.beam_spans(window, outputs, longest=2).scores) == 2
    as_floats = {name: it.astype(np.float32) for name, it in outputs.items()}
    assert [it.tolist() for it in question_heads.beam_spans(window, as_floats, longest=3)] == [
        it.tolist() for it in found
    ]
    with pytest.raises(AssertionError, match="not by mean outputs"):
        question_heads.beam_spans(window, {**outputs, "starts": outputs["starts"] + 0.5}, longest=3)
    nothing = {**outputs, "scores": np.full((4, 2), -np.inf)}
    assert len(question_heads.beam_spans(window, nothing, longest=3).scores) == 0


def test_a_plain_null_score_is_that_of_the_window_least_sure_of_it(tokenizer):
    task = task_of(tokenizer, length=20, has_unanswerable=True)
    context = " ".join(WORDS)
    examples, _ = task.encode([row(context)])
    assert len(examples) == 2
    outputs = [certain(example, 0, 0) for example in examples]  # null score 20
    outputs[1]["start_logits"][0] = -3  # … and 7
    outputs[0]["start_logits"][6] = 4
    (told,) = task.predict([row(context)], examples, outputs)
    assert told["null_score_difference"] == pytest.approx(7 - 4)
    assert told["prediction"] == "" and told["span"] == told["n_best"][0]["text"] != ""
    lenient = task_of(tokenizer, length=20, has_unanswerable=True, null_threshold=3.5)
    (kept,) = lenient.predict([row(context)], examples, outputs)
    assert kept["prediction"] == told["span"]


def test_a_joint_null_score_is_the_smallest_logit_of_the_classifier(tokenizer):
    task = task_of(tokenizer, length=20, has_unanswerable=True, head="joint")
    context = " ".join(WORDS)
    examples, _ = task.encode([row(context)])
    position = examples[0].notes.position
    beam = {"starts": np.array([position]), "ends": np.array([[position]]), "scores": np.array([[-0.1]])}
    outputs = [{**beam, "null": np.float32(2.0)}, {**beam, "null": np.float32(-1.0)}]
    (told,) = task.predict([row(context)], examples, outputs)
    assert told["null_score_difference"] == -1 and told["prediction"] == "red"


def test_where_nothing_can_be_cut_there_is_no_answer(tokenizer):
    task = task_of(tokenizer, has_unanswerable=True)
    rows = [row("\u200b"), row("red")]
    examples, _ = task.encode(rows)
    told = task.predict(rows, examples, [certain(example, 0, 0) for example in examples])
    assert (told[0]["prediction"], told[0]["n_best"], told[0]["score"]) == ("", [], 0)
    assert told[0]["null_score_difference"] == question_heads.NOTHING_FOUND
    assert json.loads(json.dumps(told)) == told
    assert "null_score_difference" not in task_of(tokenizer).predict(rows, [], [])[0]


def test_scores_put_the_headline_first_and_use_the_threshold(tokenizer):
    rows = [row("red tree", "tree"), row("old hill", is_impossible=True)]
    told = [
        {"prediction": "red tree", "span": "red tree", "null_score_difference": -1.0},
        {"prediction": "", "span": "hill", "null_score_difference": 1.0},
    ]
    scores = task_of(tokenizer, metric="exact", has_unanswerable=True).scores(rows, told)
    assert next(iter(scores)) == "exact" and scores["exact"] == 0.5
    assert (scores["f1"], scores["no_answer_f1"]) == (pytest.approx(5 / 6), 1)
    strict = task_of(tokenizer, metric="exact", has_unanswerable=True, null_threshold=-2.0)
    assert strict.scores(rows, told)["has_answer_f1"] == 0
    fitting = task_of(tokenizer, metric="exact", has_unanswerable=True, null_threshold="dev")
    fitted = fitting.fitted(fitting.scores([rows[1], rows[0]], [told[0], told[1]]))  # nothing should be let through
    assert fitted.settings.null_threshold < -1 and fitted.predict(rows, [], [])[0]["prediction"] == ""
    assert fitting.scores(rows, told)["exact"] == fitting.scores(rows, told)["best_exact"] == 0.5
    assert strict.fitted({}) is strict
    scores = task_of(tokenizer).scores(rows[:1], told[:1])
    assert list(scores.items()) == [("f1", pytest.approx(2 / 3)), ("exact", 0)]


def test_an_ensemble_averages_probabilities():
    def member(null: float, **probabilities: float):
        answers = [
            {"text": text, "probability": p, "start": 0, "end": 1, "logit": 0.0} for text, p in probabilities.items()
        ]
        return [question_heads.prediction(answers, null, 0.0)]

    members = [member(1, x=0.6, y=0.4), member(-2, y=0.9, z=0.1)]
    (told,) = question_heads.average(members, most=2, threshold=0.0)
    assert [(answer["text"], answer["probability"]) for answer in told["n_best"]] == [
        ("y", pytest.approx(0.65)),
        ("x", pytest.approx(0.3)),
    ]
    assert (told["prediction"], told["score"], told["null_score_difference"]) == ("y", pytest.approx(0.65), -0.5)


def test_perfect_logits_reach_nearly_all_of_squad_2(shared_data):
    """What tokens, windows and the limit on an answer's length cost, with a network that is always right."""
    tokenizer = adopt_vocabulary(shared_data / "vocab" / "bert-base-uncased-vocab.txt")
    rows = read_squad(shared_data / "squad" / "squad2.0-dev.json.zst")[::10]
    task = SpanTask(SpanSettings(name="squad2", has_unanswerable=True), tokenizer, 192)
    examples, _ = task.encode(rows)
    assert len(examples) > 1.2 * len(rows)
    told = task.predict(rows, examples, [certain(example, *example.target) for example in examples])
    scores = task.scores(rows, told)
    assert scores["exact"] > 0.998 and scores["f1"] > 0.999


# Learning


def made_up_rows(count: int, rng: random.Random, impossible: bool) -> list[dict]:
    """The answer to "how …" is the number with its unit; a context may have none."""
    rows = []
    for number in range(count):
        words = rng.choices(WORDS, k=rng.randint(8, 20))
        text = f"{rng.randint(0, 9)} {rng.choice(UNITS)}"
        has_answer = not impossible or number % 3
        words.insert(rng.randrange(len(words)), text if has_answer else rng.choice(WORDS))
        rows.append(row(" ".join(words), *[text] * bool(has_answer), name=str(number)))
    return rows


def batch_of(task: SpanTask, examples, with_targets: bool) -> Batch:
    length = max(len(example.ids) for example in examples)
    ids = torch.zeros(len(examples), length, dtype=torch.long)
    segments, is_real = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for place, example in enumerate(examples):
        size = len(example.ids)
        ids[place, :size] = torch.tensor(example.ids)
        segments[place, example.first :] = 1
        is_real[place, :size] = True
    return Batch.of_rows(ids, segments, is_real, task.targets(examples, length) if with_targets else {})


def score(task: SpanTask, encoder, head, rows) -> dict[str, float]:
    examples, _ = task.encode(rows)
    inputs = batch_of(task, examples, with_targets=False)
    with torch.no_grad():
        outputs = head.eval()(encoder.eval()(inputs.ids, inputs.segments, inputs.is_real), inputs)
    each = [{name: it[place].numpy() for name, it in outputs.items()} for place in range(len(examples))]
    return task.scores(rows, task.predict(rows, examples, each))


@pytest.mark.parametrize(("head", "impossible"), [("plain", False), ("joint", False), ("plain", True), ("joint", True)])
def test_both_heads_learn_to_point(tokenizer, head, impossible):
    sizes = ElectraEncoderSettings(layers=1, hidden=32, heads=2, intermediate=64, embedding=32, positions=32, dropout=0)
    task: Task = task_of(tokenizer, length=24, head=head, has_unanswerable=impossible)  # some need two windows
    rng = random.Random(0)
    train, dev = made_up_rows(60, rng, impossible), made_up_rows(30, rng, impossible)
    assert task.problems({"train": train, "dev": dev}) == []
    torch.manual_seed(0)
    encoder, module = (ElectraEncoder(sizes, ElectraEmbeddings(sizes, tokenizer.get_vocab_size())), task.head(sizes))
    for part in (encoder, module):
        initialise(part, sizes, seed=0)
    before = score(task, encoder, module, dev)
    assert before["f1"] < 0.4
    examples, _ = task.encode(train)
    assert len(examples) > len(train)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *module.parameters()], lr=3e-3)
    for _ in range(8):
        encoder.train(), module.train()
        rng.shuffle(examples)
        for first in range(0, len(examples), 8):
            inputs = batch_of(task, examples[first : first + 8], with_targets=True)
            loss = task.loss(module(encoder(inputs.ids, inputs.segments, inputs.is_real), inputs), inputs.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    after = score(task, encoder, module, dev)
    assert after["f1"] > 0.8, f"{before} -> {after}"
    if impossible:
        assert after["no_answer_f1"] > 0.6


# Settings


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_the_shipped_tasks_are_valid(name):
    text = (resources.files("electra") / "recipes" / "tasks" / f"{name}.toml").read_text("utf-8")
    tree = tomllib.loads(text)
    assert (
        tree.pop("rows") == {"squad1": {"train": 87599, "dev": 10570}, "squad2": {"train": 130319, "dev": 11873}}[name]
    )  # the sizes of the official sets, for whoever reads the files
    settings = validate(SpanSettings, tree)
    assert settings.name == name and set(settings.files) == {"train", "dev"}
    assert settings.has_unanswerable is (name == "squad2")


def test_only_the_plain_head_claims_to_load_in_transformers(tokenizer):
    assert task_of(tokenizer).architecture == "ForQuestionAnswering"
    assert task_of(tokenizer, head="joint").architecture == ""


def test_a_length_without_room_for_the_context_is_refused(tokenizer):
    with pytest.raises(SettingsError, match="length 40 .* max_query_length 64. Set max_query_length to 10"):
        task_of(tokenizer, length=40, max_query_length=64)
