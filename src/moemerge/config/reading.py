"""YAML files that users write: what they hold, and how faults in them are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Final

from moemerge.config.faults import Fault, path_text
from moemerge.config.yaml_lines import Document, read_yaml
from moemerge.errors import ConfigError

_UNNAMED: Final = "config"
_MOST_BYTES: Final = 2**24  # no config has so many; /dev/zero has


@dataclass(frozen=True)
class FaultReporter:
    """Says what is wrong with a config, with the file's name and lines."""

    where: str
    document: Document
    lenient: bool

    def judge(self, faults: Sequence[Fault]) -> tuple[str, ...]:
        """One error for all faults; those that `lenient` forgives come back as warnings."""
        unique = dict.fromkeys(faults)  # a fault met twice is said once
        ordered = sorted(unique, key=lambda f: self.document.line(f.path) or 0)
        wrong = [f for f in ordered if not (self.lenient and f.ignorable)]
        if wrong:
            raise ConfigError.from_problems(self.where, [self._text(f) for f in wrong])
        return tuple(f"{self._text(f)} (ignored)" for f in ordered)

    def _text(self, fault: Fault) -> str:
        place = self.document.place(fault.path)
        parts = [place] if place is not None else []
        parts += [path_text(fault.path)] if fault.path else []
        return ": ".join([*parts, fault.message])


def read_document(source: str | FilePath | Mapping[str, Any]) -> tuple[str, Document]:
    """A config's name for messages, and what it says."""
    if isinstance(source, Mapping):
        return _UNNAMED, Document(data=source)
    if isinstance(source, str) and "\n" in source:
        return _UNNAMED, read_yaml(source, _UNNAMED)
    where = str(source)
    try:
        with open(source, "rb") as file:  # a pipe will do
            text = file.read(_MOST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read config {where!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: not UTF-8 text (byte {error.start})", hint="a config is a YAML file"
        ) from None
    return where, read_yaml(text, where)
