"""Registries of named entries, spelling suggestions, and loaded plugins."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from moemerge.errors import UsageError

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'ties'?` if a similar name is known, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


_plugins: dict[str, str] = {}  # plugin files as the user named them, by module


def add_plugin(module: str, file: str) -> None:
    _plugins[module] = file


def loaded_plugins() -> list[str]:
    return [file for module, file in _plugins.items() if module in sys.modules]


class Registry(Generic[T]):
    """Entries by unique name; the error for an unknown name suggests a similar one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise UsageError(
                f"{self.kind} {name!r} is registered already",
                hint="choose another name; an existing one cannot be replaced",
            )
        self._entries[name] = entry
        return entry

    def get(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise UsageError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self._entries)}",
                hint=f"known: {', '.join(sorted(self._entries))}",
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
