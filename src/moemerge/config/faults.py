"""Faults of a config, and pydantic's errors in our own words."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moemerge.errors import ConfigError
from moemerge.registry import did_you_mean

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. If `ignorable`, mergekit ignores it, so `lenient` only warns."""

    path: Path
    message: str
    ignorable: bool = False

    def under(self, prefix: Path) -> Fault:
        return replace(self, path=(*prefix, *self.path))


EMPTY = "must not be empty"


class FaultsError(ValueError):
    """Raised inside a pydantic validator: several faults, relative to the field."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__("; ".join(p.message for p in faults))
        self.faults = tuple(faults)

    @classmethod
    def one(cls, message: str, *path: str | int) -> FaultsError:
        return cls([Fault(path, message)])


def path_text(path: Iterable[str | int]) -> str:
    """`("models", 1, "parameters")` -> `models[1].parameters`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


def shown(value: object, limit: int = 60) -> str:
    """Return a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def suggested(name: str, known: Collection[str], what: str = "known") -> str:
    """Return `, did you mean 'ties'?`, or `; known: ...` with all names if none is similar."""
    return did_you_mean(name, known) or f"; {what}: {listed(known)}"


# --- validation ---------------------------------------------------------------------------------


M = TypeVar("M", bound=BaseModel)

_NUMBER = "must be a number, not {got}"
_WHOLE = "must be a whole number, not {got}"
_MAPPING = "expected keys and values, not {got}"
_LIST = "expected a list, not {got}"
_WORDS: Final[Mapping[str, str]] = {
    "missing": "is missing",
    "bool_type": "must be true or false, not {got}",
    "string_type": "must be text, not {got}: put it in quotes",
    "string_too_short": EMPTY,
    "float_type": _NUMBER,
    "finite_number": "must be a finite number, not {got}",
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": _WHOLE,
    "greater_than": "must be greater than {gt:.10g}, not {got}",
    "greater_than_equal": "must be at least {ge:.10g}, not {got}",
    "less_than": "must be less than {lt:.10g}, not {got}",
    "less_than_equal": "must be at most {le:.10g}, not {got}",
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
}
_QUOTED = re.compile(r"'([^']*)'")


def faults_of(error: ValidationError, prefix: Path = ()) -> list[Fault]:
    """Return every error of a validation, with its path and our message."""
    return [fault for item in error.errors() for fault in _reword(item, prefix)]


def _reword(item: ErrorDetails, prefix: Path) -> list[Fault]:
    path: Path = (*prefix, *item["loc"])
    context = item.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, FaultsError):
        return [fault.under(path) for fault in cause.faults]
    if isinstance(cause, ValidationError):  # a model validated inside a field's validator
        return faults_of(cause, path)
    got = shown(item["input"])
    if item["type"] == "literal_error":
        known = _QUOTED.findall(str(context.get("expected", "")))
        close = did_you_mean(item["input"], known) if isinstance(item["input"], str) else ""
        return [Fault(path, f"must be one of {listed(known)}, not {got}{close}")]
    words = _WORDS.get(item["type"], "cannot be {got}")
    return [Fault(path, words.format(got=got, **context))]


def parse_settings(
    model: type[M], values: Mapping[str, Any], where: str, spelled: Callable[[str], str] = str
) -> M:
    """Build settings from Python or command-line values, all faults in one `ConfigError`.

    `spelled` returns how a setting's name is written by the caller.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        texts = [f"{spelled(path_text(f.path))}: {f.message}" for f in faults_of(error)]
        raise ConfigError.from_problems(where, texts) from None
