"""Load, override, validate and print a tree of settings.

The settings of a run are one frozen tree. A TOML recipe fills it, `key.path=value` overrides it, and the resolved tree is
written back as TOML that is itself a recipe. Every part of the tree is defined beside the code that it configures; this
module knows none of them.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from electra.base.errors import CorruptError, MachineError, SettingsError
from electra.base.files import read_bytes

MOST_TOML, MOST_SECTIONS, MOST_PROBLEMS, LARGEST = 1 << 22, 8, 20, 10**15
_UNWRITABLE = re.compile("[\x00\ud800-\udfff]")
GREATEST = 1e300
"""The largest measured value accepted: beyond it neither a difference nor an axis can be computed."""
Figure = Annotated[float, Field(ge=-GREATEST, le=GREATEST, allow_inf_nan=False)]


def auto_or(what: str, holds: Callable[[float], bool]) -> BeforeValidator:
    """A validator for a number for which something holds, or "auto": one error, where pydantic would have one for each type."""

    def check(value: Any) -> Any:
        with suppress(ValueError, TypeError):
            if value == "auto" or holds(float(value)):
                return value
        raise ValueError(f'must be {what}, or "auto"')

    return BeforeValidator(check)


class Settings(BaseModel):
    """Base of every part of the tree: frozen; unknown keys are errors; numbers are finite, and accepted as text (data=2024)."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def values_are_sane(self) -> "Settings":
        """Bound integers whose field has no bound of its own: 1e30 steps are a typo, and no machine integer. Text must be such
        that it can be written to a file and, as a path, opened."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for text in value if isinstance(value, tuple) else (value,):
                if isinstance(text, str) and _UNWRITABLE.search(text):
                    raise ValueError(f"{name}={short(text)} has a character that cannot be written to a file")
            has_bound = any(isinstance(it, annotated_types.Le | annotated_types.Lt) for it in field.metadata)
            if isinstance(value, int) and abs(value) > LARGEST and not has_bound:
                raise ValueError(f"{name}={short(value)} is beyond {LARGEST:,}")
        return self


Tree = TypeVar("Tree", bound=Settings)


def recipe_names(folder: str = "recipes") -> list[str]:
    entries = (resources.files("electra") / folder).iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml"))


def recipe_comment(name: str) -> str:
    """The first sentence of a shipped recipe's comment."""
    text = (resources.files("electra") / "recipes" / f"{name}.toml").read_text("utf-8")
    comment = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return comment.split(": ")[0].split(". ")[0].rstrip(".")


def read_recipe(name: str, folder: str = "recipes") -> dict[str, Any]:
    """Read a recipe: the name of a shipped one, the path of a TOML file (a run folder's config.toml is one), or several
    joined by +, where later ones override earlier ones: "tiny+masked-lm"."""
    is_file, known = os.path.isfile(name), recipe_names(folder)  # noqa: PTH113  (an error where it is too long)
    if name in known:
        return parse_toml((resources.files("electra") / folder / f"{name}.toml").read_text("utf-8"))
    if "+" in name and not is_file:
        parts = [flatten(read_recipe(part, folder)) for part in name.split("+")]
        return nest({key: value for part in parts for key, value in part.items()})
    if not is_file:
        near = difflib.get_close_matches(name, known, n=1) or [one for one in known if name in one.split("-")]
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Shipped are {', '.join(known)}."
        raise SettingsError(f"no recipe {short(name)}: it is neither a TOML file nor a shipped recipe. {hint}")
    try:
        return parse_toml(read_bytes(Path(name), MOST_TOML).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SettingsError(f"recipe {name} cannot be read: byte {error.start} is not UTF-8. Convert it.") from None
    except CorruptError as error:
        raise SettingsError(f"recipe {name} cannot be read: {str(error).rstrip('.')}.") from None
    except MachineError:
        raise
    except ValueError as error:
        raise SettingsError(f"recipe {name} is not valid TOML: {error}.") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; a ValueError if it is not valid. tomllib itself has no limit on nesting."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_value(text: str) -> Any:
    """Parse `3`, `1e-4`, `true`, `[1, 2]` and `"quoted"` as TOML does; anything else is a plain string."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:  # a list in a list in a list, a number of 5,000 digits
        raise SettingsError(f"{text[:20]}… is not a valid value for a setting: {error}.") from None
    return text if isinstance(value, date | time) else value


def parse_overrides(assignments: Sequence[str], kind: type[BaseModel] | None = None) -> dict[str, Any]:
    """`["train.steps=10", "data=shards"]` -> {"train.steps": 10, "data": "shards"}. What is text in a tree of this `kind` stays
    as it is: folder 1.10 is not folder 1.1. A key with two values is an error: whoever meant the other one would wait hours for
    the wrong run."""
    pairs = [assignment.partition("=") for assignment in assignments]
    if problems := ["".join(pair) for pair in pairs if not (pair[0] and pair[1])]:
        raise SettingsError("; ".join(f"{problem!r} is not of the form key=value" for problem in problems) + ".")
    if deep := [key for key, _, _ in pairs if key.count(".") > MOST_SECTIONS]:
        raise SettingsError(f"unknown key {deep[0][:60]}…: no setting is {MOST_SECTIONS} sections deep.")
    values: dict[str, Any] = {}
    for key, _, text in pairs:
        name, value = key.strip(), parse_value(text.strip())
        if not isinstance(value, str) and kind and is_text(kind, name):
            value = text.strip()
        if name in values and values[name] != value:
            raise SettingsError(f"{name} has two values, {short(values[name])} and {short(value)}. Give it once.")
        values[name] = value
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise SettingsError(f"{path}: {parent} is a value, not a section.")
        node[leaf] = value
    return tree


def resolve(
    kind: type[Tree], recipe: str, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None
) -> tuple[Tree, dict[str, str]]:
    """The validated tree, and for every key where its value came from: default, the recipe, or the command line.
    `defaults` are those that the settings classes cannot know."""
    from_recipe, from_command = flatten(read_recipe(recipe)), parse_overrides(overrides, kind)
    settings = validate(kind, nest({**(defaults or {}), **from_recipe, **from_command}))
    sources = {
        key: "command line" if key in from_command else recipe if key in from_recipe else "default"
        for key in flatten(dump(settings))
    }
    return settings, sources


ELSEWHERE = {
    "adam_epsilon": "eps",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "max_grad_norm": "clip",
    "max_length": "length",
    "max_seq_length": "length",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "num_train_steps": "steps",
    "num_warmup_steps": "warmup",
    "per_device_train_batch_size": "batch",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
}
"""Keys of transformers and of the original code, whose names here are not like them."""


def validate(kind: type[Tree], tree: Mapping[str, Any]) -> Tree:
    """The validated tree, or an error with every problem at once, one line each, and the nearest known key for an unknown one."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [describe(problem, kind) for problem in error.errors()[:MOST_PROBLEMS]]
        more = [f"… and {error.error_count() - MOST_PROBLEMS:,} more."] * (error.error_count() > MOST_PROBLEMS)
        raise SettingsError("\n".join([*dict.fromkeys(lines), *more])) from None


def describe(problem: Any, kind: type[BaseModel]) -> str:
    known = known_keys(kind)
    unknown = problem["type"] == "extra_forbidden"
    path = without_tags([str(part) for part in problem["loc"]], known, keep_last=unknown)
    section, _, name = path.rpartition(".")
    if unknown and path in known:
        return f"{path} is for {section}.kind={' or '.join(known[path])}: add that, or drop {path} or the recipe that sets it."
    if unknown:
        by_name = {key.rpartition(".")[2]: key for key in sorted(known, reverse=True)}
        same_name = [by_name[match] for match in difflib.get_close_matches(name, by_name, n=1)]
        elsewhere = [key for key in known if key.rpartition(".")[2] == ELSEWHERE.get(name)]
        near = sorted(elsewhere, key=len) or difflib.get_close_matches(path, known, n=1) or same_name
        return f"unknown key {path}." + (f" Did you mean {near[0]}?" if near else "")
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], int):
        return f"{path} has too few values (got {short(problem['input'])})."
    if problem["type"] == "missing":
        return f"{path} is not set. Give it in the recipe or as {path}=… on the command line."
    if problem["type"] == "union_tag_invalid":
        expected = problem["ctx"]["expected_tags"].replace("'", "")
        return f"{path}.kind: {short(problem['ctx']['tag'])} is not one of {expected}."
    inside = sorted(key for key in known if key.startswith(f"{path}."))
    if inside and problem["type"] in ("model_type", "model_attributes_type"):
        is_kind = isinstance(problem["input"], str) and f"{path}.kind" in known
        remedy = f"{path}.kind={problem['input']}" if is_kind else f"{inside[0]}=…"
        return f"{path} is a section of settings (got {short(problem['input'])}). Did you mean {remedy}?"
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if isinstance(problem["input"], dict) else f" (got {short(problem['input'])})"
    return f"{path}: {message}{value}." if path else f"{message}."


def short(value: Any) -> str:
    """A value as shown in a message, cut if it is long. An integer of thousands of digits is not even written out."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return f"an integer of about {value.bit_length() * 3 // 10:,} digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def without_tags(parts: list[str], known: Collection[str], keep_last: bool) -> str:
    """The key for a pydantic location. A union puts the kind into the location of a problem, but it is not part of the key.
    An unknown key, which is always last, stays."""
    kept: list[str] = []
    for number, part in enumerate(parts, 1):
        path = ".".join([*kept, part])
        if (keep_last and number == len(parts)) or any(f"{key}.".startswith(f"{path}.") for key in known):
            kept.append(part)
    return ".".join(kept)


def known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, list[str]]:
    """Every key of a tree, with the kinds of its section that have it."""
    known: dict[str, list[str]] = {}
    kind = model.model_fields["kind"].default if "kind" in model.model_fields else ""
    for name, field in model.model_fields.items():
        sections = list(nested_models(field.annotation))
        if not sections:
            known[f"{prefix}{name}"] = [str(kind)]
        for section in sections:
            for key, kinds in known_keys(section, f"{prefix}{name}.").items():
                known[key] = [*known.get(key, []), *kinds]
    return known


def is_text(model: type[BaseModel], path: str) -> bool:
    name, _, rest = path.partition(".")
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    return any(is_text(section, rest) for section in nested_models(annotation)) if rest else annotation is str


def nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from nested_models(argument)


def dump(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(mode="json")


def to_toml(settings: Settings) -> str:
    """The settings as TOML. Only handles what our trees hold: numbers, booleans, strings, lists of them, and nested tables."""

    def lines(tree: Mapping[str, Any], path: str) -> Iterator[str]:
        if path:
            yield f"\n[{path}]"
        yield from (f"{key} = {toml_value(value)}" for key, value in tree.items() if not isinstance(value, dict))
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from lines(value, f"{path}.{key}" if path else key)

    return "\n".join(lines(dump(settings), "")).strip() + "\n"


def toml_value(value: Any) -> str:
    """A value as TOML. Of what our trees hold, JSON writes only infinity differently."""
    assert value is not None, "TOML has no null"
    is_float = isinstance(value, float)  # numpy's numbers give ours as their item
    return repr(float(value)) if is_float else json.dumps(value, ensure_ascii=False, default=lambda it: it.item())


def differences(old: Mapping[str, Any], new: Mapping[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """`key: old -> new` for every key of two trees whose value differs."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in ignore
    ]
