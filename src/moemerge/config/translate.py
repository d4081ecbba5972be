"""Validation in our own words: pydantic finds what is wrong, this says it.

A file's faults are wanted all at once, but a broken part hides what depends on it. So a broken
part is noted, taken out of a working copy, and the rest is validated again, until it stands.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from moemerge.config.faults import EMPTY, Fault, FaultsError, Path, listed, path_text, shown
from moemerge.errors import ConfigError
from moemerge.registry import did_you_mean

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
    "greater_than": "must be greater than {gt:g}, not {got}",
    "greater_than_equal": "must be at least {ge:g}, not {got}",
    "less_than": "must be less than {lt:g}, not {got}",
    "less_than_equal": "must be at most {le:g}, not {got}",
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
}
_QUOTED = re.compile(r"'([^']*)'")


def faults_of(error: ValidationError, prefix: Path = ()) -> list[Fault]:
    """Every error of a validation, placed and reworded."""
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
    """Raw data from which parts are taken out while every place keeps its original name."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data: Any = _plain_copy(data)
        self.removed: set[Path] = set()  # of broken parts, in original places
        self._numbers: dict[int, list[int]] = {}  # list (by id) -> original index of each entry

    def original(self, path: Path) -> Path:
        """Where `path` of the working copy was in the file."""
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
        """Whether a broken part was taken out of one of `places`, or with it.

        Parts inside a key called `but` do not count.
        """
        return any(
            but not in path and path[: len(place)] == place[: len(path)]
            for path in self.removed
            for place in places
        )

    def caused(self, place: Path) -> bool:
        """Whether `place` is missing or wrong only since its broken parts were taken out."""
        return bool(place) and any(path[: len(place)] == place for path in self.removed)

    def remove(self, faults: Sequence[Fault], fill: Mapping[str, object]) -> bool:
        """Take out what the faults name, or what should have held it where it is missing.

        Keys in `fill` get that value instead. False when nothing would be left to validate.
        """
        targets: set[Path] = set()
        for fault in faults:
            if fault.path[:1] and fault.path[0] in fill:
                self.data[fault.path[0]] = fill[str(fault.path[0])]
                self.removed.add(fault.path[:1])
                continue
            target = self.existing(fault.path)
            if target[-1:] == ("filter",):  # its value would count for everything without it
                target = target[:-1]
            if not target:
                return False
            targets.add(target)
            if not fault.ignorable:
                self.removed.add(self.original(target))
        for target in sorted(targets, key=_last_first):
            self._delete(target)
        return True

    def existing(self, path: Path) -> Path:
        """A key that is missing breaks what should have held it."""
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

    def _delete(self, path: Path) -> None:
        node: Any = self.data
        for step in path[:-1]:
            node = node[step]
        if isinstance(node, list) and isinstance(path[-1], int):
            del self._indices(node)[path[-1]]
        del node[path[-1]]


def _last_first(path: Path) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    """Deep before shallow and the end of a list before its start: indices stay valid."""
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
    """Build `model`, noting every fault in its original place; None when too little is sound.

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

    `spelled` is how a setting's name is written where the values come from.
    """
    faults: list[Fault] = []
    built = validate(model, WorkingCopy(values), faults.append)
    if faults or built is None:
        texts = [f"{spelled(path_text(p.path))}: {p.message}" for p in faults]
        raise ConfigError.from_problems(where, texts)
    return built
