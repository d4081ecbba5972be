"""Faults of a config: where, what, and whether mergekit passes over them in silence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong. `ignorable`: mergekit ignores it, so `lenient` only warns."""

    path: Path
    message: str
    ignorable: bool = False

    def under(self, prefix: Path) -> Fault:
        return replace(self, path=(*prefix, *self.path))


EMPTY = "must not be empty"


class FaultsError(ValueError):
    """Raised inside a pydantic validator: several faults, placed relative to the field."""

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
    """A value as it appears in a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
