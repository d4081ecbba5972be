"""Faults of a config, and validation that reports them in our own words.

A file's faults are reported together, but a broken part hides what depends on it. So a broken part
is noted, removed from a working copy, and the rest is validated again.
"""

from __future__ import annotations

import copy
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


class WorkingCopy:
    """Raw data from which parts are removed, while every path keeps its original name."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data: Any = _plain_copy(data)
        self.removed: set[Path] = set()  # of broken parts, in original places
        self._numbers: dict[int, list[int]] = {}  # list (by id) -> original index of each entry

    def original(self, path: Path) -> Path:
        """Return the path in the file of a `path` in the working copy."""
        node: Any = self.data
        result: list[str | int] = []
        for step in path:
            if isinstance(node, list) and isinstance(step, int) and step < len(node):
                result.append(self._indices(node)[step])
                node = node[step]
            else:
                result.append(step)
                node = node.get(step) if isinstance(node, dict) else None
        return tuple(result)

    def lost(self, *places: Path, but: str | None = None) -> bool:
        """Return whether a broken part was removed from one of `places`, or together with it.

        Parts inside a key called `but` do not count.
        """
        return any(
            but not in path and path[: len(place)] == place[: len(path)]
            for path in self.removed
            for place in places
        )

    def caused(self, place: Path) -> bool:
        """Return whether `place` is missing or wrong only since its broken parts were removed."""
        return bool(place) and any(path[: len(place)] == place for path in self.removed)

    def remove(self, faults: Sequence[Fault], fill: Mapping[str, object]) -> bool:
        """Remove the faulty parts, or the parent of a missing one.

        Keys in `fill` get that value instead. Return False if nothing would be left to validate.
        """
        targets: set[Path] = set()
        for fault in faults:
            if fault.path[:1] and fault.path[0] in fill:
                self.data[fault.path[0]] = fill[str(fault.path[0])]
                self.removed.add(fault.path[:1])
                continue
            target = self.existing(fault.path)
            if target[-1:] == ("filter",) and "value" in self._at(target[:-1]):
                target = target[:-1]  # its value would count for everything without it
            if not target:
                return False
            targets.add(target)
            if not fault.ignorable:
                self.removed.add(self.original(target))
        for target in sorted(targets, key=_last_first):
            self._delete(target)
        return True

    def existing(self, path: Path) -> Path:
        """Return the nearest existing parent: a missing key makes its parent faulty."""
        node: Any = self.data
        for depth, step in enumerate(path):
            inside = isinstance(node, dict) and step in node
            inside |= isinstance(node, list) and isinstance(step, int) and step < len(node)
            if not inside:
                return path[:depth]
            node = node[step]
        return path

    def _indices(self, node: list[Any]) -> list[int]:
        return self._numbers.setdefault(id(node), list(range(len(node))))

    def _at(self, path: Path) -> Any:
        node: Any = self.data
        for step in path:
            node = node[step]
        return node

    def _delete(self, path: Path) -> None:
        node = self._at(path[:-1])
        if isinstance(node, list) and isinstance(path[-1], int):
            del self._indices(node)[path[-1]]
        del node[path[-1]]


def _last_first(path: Path) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    """Sort deep before shallow and the end of a list before its start, so indices stay valid."""
    key = tuple((-s, 0, "") if isinstance(s, int) else (0, 1, s) for s in path)
    return -len(path), key


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_copy(item) for item in value]
    return copy.copy(value)


def validate(
    model: type[M],
    work: WorkingCopy,
    note: Callable[[Fault], None],
    *,
    fill: Mapping[str, object] | None = None,
) -> M | None:
    """Build `model`, noting every fault at its original path; None if too little is valid.

    A broken top-level key in `fill` is replaced by the value there, so that the rest is checked.
    """
    while True:
        try:
            return model.model_validate(work.data)
        except ValidationError as error:
            faults = faults_of(error)
        for fault in faults:
            place = work.original(fault.path)
            if not work.caused(place):
                note(replace(fault, path=place))
        if not work.remove(faults, fill or {}):
            return None


def parse_settings(
    model: type[M], values: Mapping[str, Any], where: str, spelled: Callable[[str], str] = str
) -> M:
    """Build settings from Python or command-line values, all faults in one `ConfigError`.

    `spelled` returns how a setting's name is written by the caller.
    """
    faults: list[Fault] = []
    built = validate(model, WorkingCopy(values), faults.append)
    if faults or built is None:
        texts = [f"{spelled(path_text(p.path))}: {p.message}" for p in faults]
        raise ConfigError.from_problems(where, texts)
    return built
