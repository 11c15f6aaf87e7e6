"""The server: every route calls one public function, and the page is one client among others."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

import electra
from electra.base.errors import DataError, ElectraError, MachineError, SettingsError
from electra.base.files import json_text
from electra.inspector import Model
from electra.inspector.batching import Batcher, BusyError, characters_of
from electra.inspector.detect import Scored
from electra.inspector.gallery import Gallery, describe_model, is_finetuned
from electra.inspector.guard import HEAD_SECONDS, MOST_HEAD, Guard, GuardedProtocol, listen, token_for
from electra.inspector.results import result_view, results_view, wrong_rows
from electra.inspector.watch import follow, run_view, runs_view

MOST_TEXTS, LONGEST_QUESTION = 256, 100_000
MOST_LISTENERS, MOST_FOLLOWED = 32, 8  # pages, and runs on each
MOST_READERS = 2  # folders at a time
MOST_PLACES = 256  # masked tokens of a request, each of which is a pass of the generator
ANSWER_SECONDS = 120.0
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Number = Annotated[int, Field(ge=0, le=100_000, description="the number that GET /api/models gives it")]
Text = Annotated[str, Field(max_length=LONGEST_QUESTION)]
QuestionTexts = Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
TokenPlace = Annotated[int, Field(ge=0, le=LONGEST_QUESTION, description="a token, counted from 0")]


class Question(BaseModel, extra="forbid"):
    model: Number = 0


class TextsQuestion(Question):
    texts: QuestionTexts


class EmbedQuestion(TextsQuestion):
    pooling: Literal["mean", "cls"] = "mean"


class PredictQuestion(Question):
    """Rows with the columns of the task, or plain texts where it reads one text."""

    rows: Annotated[list[Text | dict[str, Text | list[Text]]], Field(min_length=1, max_length=MOST_TEXTS)]


class FillItem(BaseModel, extra="forbid"):
    text: Text
    places: Annotated[list[TokenPlace], Field(min_length=1, max_length=64)]
    replacements: dict[TokenPlace, Text] = Field(default_factory=dict)


class FillQuestion(Question):
    """The tokens at `places` are masked; `replacements` are other tokens that stand in the text already."""

    items: Annotated[list[FillItem], Field(min_length=1, max_length=MOST_TEXTS)]
    top: Annotated[int, Field(ge=1, le=100)] = 10


class CorruptQuestion(TextsQuestion):
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    seed: Annotated[int, Field(ge=0, le=2**53)] = 0


class ReplaceItem(BaseModel, extra="forbid"):
    text: Text
    replacements: dict[TokenPlace, Text]


class ReplaceQuestion(Question):
    items: Annotated[list[ReplaceItem], Field(min_length=1, max_length=MOST_TEXTS)]


def as_json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_text(content, default=plain_data).encode(), status, headers, "application/json")


def plain_data(answer: object) -> object:
    """A model's answer as data that JSON has."""
    match answer:
        case np.ndarray():
            return answer.tolist()
        case Scored():
            return {"score": answer.score, **vars(answer)}
    return vars(answer)


def failure(status: int, reason: object, headers: dict[str, str] | None = None) -> Response:
    return as_json({"error": " ".join(str(reason).split())}, status, headers)


def page_files() -> dict[str, tuple[bytes, str]]:
    """All files of the page, read once, so that no name in a request is ever used as a path."""
    folder = resources.files("electra.inspector") / "page"
    files = (it for it in folder.iterdir() if it.is_file() and Path(it.name).suffix in MEDIA_TYPES)
    return {it.name: (it.read_bytes(), f"{MEDIA_TYPES[Path(it.name).suffix]}; charset=utf-8") for it in files}


class Desk:
    """Passes questions on to models and folders, and waits for the answers."""

    def __init__(self, gallery: Gallery):
        self.gallery, self.batcher, self.listeners = gallery, Batcher(), 0
        self.readers = asyncio.Semaphore(MOST_READERS)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.is_over: Callable[[], bool] = lambda: False

    async def read(self, content: Callable[[], dict[str, Any]]) -> Response:
        """Answers from the content of folders, few requests at a time, because the metrics of a long run are large."""
        async with self.readers:
            return as_json(await asyncio.to_thread(content))

    async def ask(
        self, number: int, items: Sequence[Any], options: tuple[Any, ...], answer: Callable[[Model, Sequence[Any]], Any]
    ) -> Response:
        """Asks a model. Only requests with the same `options` are answered together."""
        found, size = self.gallery.at("models", number), characters_of(list(items))
        if size > LONGEST_QUESTION:
            return failure(413, f"{size:,} characters of text at once; at most {LONGEST_QUESTION:,} are read.")

        def answers(items: Sequence[Any]) -> Sequence[Any]:
            return list(answer(self.gallery.model(number), items))

        async with asyncio.timeout(ANSWER_SECONDS):
            content = await self.batcher.ask((number, *options), items, size, answers)
        return as_json({"model": found.name, "answers": content})


def build_app(desk: Desk) -> FastAPI:
    gallery, files = desk.gallery, page_files()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        desk.batcher.start()
        yield
        await desk.batcher.stop()

    app = FastAPI(
        title="electra",
        version=electra.__version__,
        description="Models and runs of electra, asked over HTTP. Answers are in the order of what was sent.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(ANSWERED_ERRORS, answer_error),
    )

    # the page

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(*files["index.html"][:1], media_type=files["index.html"][1])

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file.")
        return Response(files[name][0], media_type=files[name][1])

    # models

    @app.get("/api/models")
    async def models() -> Response:
        """Every model with its number."""

        def entries() -> dict[str, Any]:
            gallery.look()
            numbered = enumerate(gallery.models)
            return {"models": [{"number": n, "name": it.name, "is_finetuned": is_finetuned(it)} for n, it in numbered]}

        return await desk.read(entries)

    @app.get("/api/models/{number}")
    async def model(number: Number) -> Response:
        """What a model is, and what it can be asked. Loads it if it is not in memory."""
        return await desk.ask(
            number, [None], ("describe",), lambda model, items: [describe_model(model) for _ in items]
        )

    @app.post("/api/detect")
    async def detect(question: TextsQuestion) -> Response:
        """P(replaced) of every token, with its place in the text."""
        return await desk.ask(
            question.model, question.texts, ("detect",), lambda model, texts: model.detect(list(texts))
        )

    @app.post("/api/score")
    async def score(question: TextsQuestion) -> Response:
        """Electric models: the pseudo-log-likelihood of each text and of each of its tokens."""
        return await desk.ask(question.model, question.texts, ("score",), lambda model, texts: model.score(list(texts)))

    @app.post("/api/embed")
    async def embed(question: EmbedQuestion) -> Response:
        """A vector for each text."""
        return await desk.ask(
            question.model,
            question.texts,
            ("embed", question.pooling),
            lambda model, texts: model.embed(list(texts), question.pooling),
        )

    @app.post("/api/predict")
    async def predict(question: PredictQuestion) -> Response:
        """Fine-tuned models: the answer to each row, with probabilities."""
        return await desk.ask(
            question.model, question.rows, ("predict",), lambda model, rows: model.predict(list(rows))
        )

    @app.post("/api/fill")
    async def fill(question: FillQuestion) -> Response:
        """What the generator would put at some places of a text."""
        if (places := sum(len(item.places) for item in question.items)) > MOST_PLACES:
            return failure(413, f"{places:,} places at once; at most {MOST_PLACES} are filled.")
        return await desk.ask(
            question.model,
            [item.model_dump() for item in question.items],
            ("fill", question.top),
            lambda model, items: [
                model.fill(it["text"], it["places"], question.top, it["replacements"]) for it in items
            ],
        )

    @app.post("/api/corrupt")
    async def corrupt(question: CorruptQuestion) -> Response:
        """Texts with some tokens replaced by the generator, and what the discriminator says about them."""
        return await desk.ask(
            question.model,
            question.texts,
            ("corrupt", question.share, question.seed),
            lambda model, texts: [model.corrupt(text, question.share, question.seed) for text in texts],
        )

    @app.post("/api/replace")
    async def replace(question: ReplaceQuestion) -> Response:
        """What the discriminator says about texts with other tokens at some places."""
        return await desk.ask(
            question.model,
            [item.model_dump() for item in question.items],
            ("replace",),
            lambda model, items: [model.replace(it["text"], it["replacements"]) for it in items],
        )

    # runs and results

    @app.get("/api/runs")
    async def runs() -> Response:
        """Every pre-training run with its number and how far it is."""
        return await desk.read(lambda: runs_view(gallery))

    @app.get("/api/runs/{number}")
    async def run(number: Number) -> Response:
        """Metrics, alarms, settings, and what both networks did with a few held-out rows at every evaluation."""
        found = gallery.at("runs", number)
        return await desk.read(lambda: {"name": found.name, **run_view(found.path)})

    @app.get("/api/events")
    async def events(run: Annotated[list[Number], Query(min_length=1, max_length=MOST_FOLLOWED)]) -> Response:
        """Follows runs: server-sent events history, records, state, samples, each with the number of its run as id."""
        folders = {number: gallery.at("runs", number).path for number in run}
        if desk.listeners >= MOST_LISTENERS:
            return failure(503, f"{MOST_LISTENERS} pages are already following runs, the limit.", {"retry-after": "30"})

        async def listened() -> AsyncIterator[bytes]:
            desk.listeners += 1
            try:
                async for event in follow(folders, desk.is_over):
                    yield event
            finally:
                desk.listeners -= 1

        return StreamingResponse(listened(), media_type="text/event-stream")

    @app.get("/api/results")
    async def results() -> Response:
        """Every finished fine-tuning, comparison and speed-run with its number."""
        return await desk.read(lambda: results_view(gallery))

    @app.get("/api/results/{number}")
    async def result(number: Number) -> Response:
        """Scores of all seeds, confusion matrices, alarms."""
        found = gallery.at("results", number)
        return await desk.read(lambda: {"name": found.name, **result_view(found.path)})

    @app.get("/api/results/{number}/wrong/{task}")
    async def wrong(number: Number, task: Number) -> Response:
        """The dev rows that the ensemble of a task, by its number, got wrong, the surest first."""
        folder = gallery.at("results", number).path
        return await desk.read(lambda: {"rows": wrong_rows(folder, task)})

    # for machines

    @app.get("/health")
    async def health() -> Response:
        return as_json({"status": "ok", "version": electra.__version__})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(prometheus(desk), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


ANSWERED_ERRORS = (ElectraError, LookupError, BusyError, TimeoutError, RequestValidationError, HTTPException, Exception)


async def answer_error(request: Request, error: Exception) -> Response:
    """Turns every error into one line of JSON, without sending back the whole input."""
    match error:
        case DataError() | SettingsError():
            return failure(400, error)
        case ElectraError():
            return failure(500, error)
        case LookupError():
            return failure(404, error.args[0] if error.args else error)
        case BusyError():
            return failure(503, error, {"retry-after": str(error.seconds)})
        case TimeoutError():
            return failure(503, f"no answer within {ANSWER_SECONDS:.0f} s. Send less text.", {"retry-after": "30"})
        case RequestValidationError():
            return failure(422, validation_line(error))
        case HTTPException():
            return failure(error.status_code, error.detail)
    return failure(500, f"{type(error).__name__}: a bug in electra.")


def validation_line(error: RequestValidationError) -> str:
    """Of what may be one of several things, what is wrong with the one that fits best."""
    first = max(error.errors(), key=lambda it: len(it["loc"]))
    where = ".".join(str(part)[:40] for part in first["loc"] if part != "body" and "constrained-str" not in str(part))
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return f"{where}: {first['msg']}{more}" if where else f"{first['msg']}{more}"


def prometheus(desk: Desk) -> str:
    counts = desk.batcher.counts
    numbers = {
        "electra_groups_total": ("counter", "groups of requests that were computed together", counts.groups),
        "electra_answers_total": ("counter", "requests that a model answered", counts.requests),
        "electra_items_total": ("counter", "texts and rows in them", counts.items),
        "electra_refused_total": ("counter", "requests that found the queue full", counts.refused),
        "electra_model_seconds_total": ("counter", "seconds of computing", counts.seconds),
        "electra_waiting": ("gauge", "requests in the queue", len(desk.batcher.waiting)),
        "electra_listeners": ("gauge", "pages that follow a run", desk.listeners),
        "electra_models_loaded": ("gauge", "models in memory", len(desk.gallery.loaded)),
    }
    lines = []
    for name, (kind, meaning, value) in numbers.items():
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    lines += ["# HELP electra_requests_total requests by route and status", "# TYPE electra_requests_total counter"]
    for (route, status), count in sorted(desk.statuses.items()):
        lines.append(f'electra_requests_total{{route="{route}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the token that clients must send. `origin`: another site whose pages may ask too."""

    host: str = "127.0.0.1"
    port: int = 8420
    token: str | None = None
    origin: str = ""


@dataclass(frozen=True)
class Running:
    """A server that is ready to run: `server.run(sockets=[socket])`."""

    server: uvicorn.Server
    socket: Any
    url: str
    desk: Desk


def build_server(paths: Sequence[Path], address: Address) -> Running:
    """Builds a server that is bound to its port and has found everything that it shows."""
    if not address.host:
        raise SettingsError("an empty host means every address: write 0.0.0.0 for that, or 127.0.0.1.", ("host",))
    if address.origin and not re.fullmatch(r"https?://[^/\s]+", address.origin):
        raise SettingsError(f"{address.origin!r} is not an origin. Give https://NAME and no more.", ("allow_origin",))
    desk, token = Desk(Gallery(paths)), token_for(address.host, address.token)
    application: Any = Guard(build_app(desk), address.host, token, address.origin, desk.statuses)  # type: ignore[arg-type]
    try:
        own = listen(address.host, address.port)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(
            f"cannot listen on {address.host} port {address.port}: {reason}. Choose another one; 0 picks a free one.",
            ("port",),
        ) from None
    server = uvicorn.Server(
        uvicorn.Config(
            application,
            http=GuardedProtocol,
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=MOST_HEAD,
            timeout_keep_alive=int(HEAD_SECONDS),
            timeout_graceful_shutdown=4,
        )
    )
    desk.is_over = lambda: server.should_exit
    host = f"[{address.host}]" if ":" in address.host else address.host
    url = f"http://{host}:{own.getsockname()[1]}/" + (f"?token={token}" if token else "")
    return Running(server, own, url, desk)
