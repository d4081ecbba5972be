"""A model as a user names it: `path[@revision][+lora[@revision][#layout]]`.

`path` and `lora` are folders or hub ids. `layout` describes LoRA factors of stacked experts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from moemerge.errors import ConfigError

FORM = "path[@revision][+lora[@revision][#layout]]"
# LoRA factors of a stack of experts: the order of B's columns, and the stack's axes. One of each.
LORA_LAYOUTS: Final = (("rank_major", "grouped_by_expert"), ("out_in", "in_out"))


@dataclass(frozen=True)
class ModelRef:
    """The location of a model: a folder or a hub id, with an optional LoRA adapter."""

    path: str
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    lora_layout: str | None = None  # one or two of LORA_LAYOUTS, with a comma

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Read `path@revision+lora@revision#layout`.

        If the whole text (or one side of its `+`) is an existing folder, it is that folder: `@` and
        `+` are legal in folder names.
        """
        text = text.strip()
        if os.path.exists(text):
            return cls(_present(text, text))
        base, lora = _split_lora(text)
        path, revision = _split_revision(base, text)
        if lora is None:
            return cls(path, revision)
        lora, layout = _split_layout(lora)
        return cls(path, revision, *_split_revision(lora, text), layout)

    @classmethod
    def from_mapping(cls, value: Mapping[str, object]) -> ModelRef:
        """Read `{path, revision}` or mergekit's `{model: {path, revision}, lora: ...}`."""
        if "model" not in value:
            return cls(*_path_and_revision(value))
        path, revision = _part(value["model"])
        if value.get("lora") is None:
            return cls(path, revision)
        lora = value["lora"]
        if isinstance(lora, Mapping):
            return cls(path, revision, *_path_and_revision(lora), _layout(lora.get("layout")))
        lora, layout = _split_layout(lora) if isinstance(lora, str) else (lora, None)
        return cls(path, revision, *_part(lora), layout)

    @property
    def label(self) -> str:
        """The last component of each path: the default name of a model."""
        paths = (self.path,) if self.lora is None else (self.path, self.lora)
        return "+".join(os.path.basename(path.rstrip("/")) or path for path in paths)

    def as_named_in(self, folder: Path) -> ModelRef:
        """Return the reference as a file in `folder` names this model: see `named_in`."""
        lora = None if self.lora is None else named_in(folder, self.lora, existing=True)
        return replace(self, path=named_in(folder, self.path, existing=True), lora=lora)

    def located(self, folder: Path) -> ModelRef:
        """Return the reference that a file in `folder` means."""
        lora = None if self.lora is None else located(self.lora, folder)
        return replace(self, path=located(self.path, folder), lora=lora)

    def __str__(self) -> str:
        text = _joined(self.path, self.revision)
        if self.lora is None:
            return text
        layout = f"#{self.lora_layout}" if self.lora_layout else ""
        return f"{text}+{_joined(self.lora, self.lora_revision)}{layout}"


ModelLike = str | Path | ModelRef  # a model as a caller gives it


# --- paths in files that moemerge writes ----------------------------------------------------------

CONFIG_NAME: Final = "moemerge_config.yml"  # its paths with ./ or ../ are relative to its folder


def named_in(folder: Path, path: str, *, existing: bool = False) -> str:
    """Return a path as a file in `folder` names it: with ./ or ../, relative to that folder.

    Absolute paths are unchanged, and so are hub ids: with `existing`, every other text that is not
    the path of an existing file.
    """
    if os.path.isabs(path) or path.startswith("~") or (existing and not os.path.exists(path)):
        return path
    relative = os.path.relpath(os.path.abspath(path), os.path.realpath(folder))
    return relative if relative.startswith("..") else os.path.join(".", relative)


def named(value: Any, folder: Path) -> Any:
    """Return plain data with relative paths, as `located` returns them, for a file in `folder`."""
    if isinstance(value, Mapping):
        return {key: named(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [named(item, folder) for item in value]
    relative = isinstance(value, str) and value.startswith(("./", "../"))
    return named_in(folder, value) if relative else value


def located(value: Any, folder: Path) -> Any:
    """Return plain data with the paths that `named_in` made relative to the working directory."""
    if isinstance(value, Mapping):
        return {key: located(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [located(item, folder) for item in value]
    if not isinstance(value, str) or not value.startswith(("./", "../")):
        return value
    relative = os.path.relpath(os.path.join(os.path.realpath(folder), value))
    return relative if relative.startswith("..") else os.path.join(".", relative)


def _joined(path: str, revision: str | None) -> str:
    return path if revision is None else f"{path}@{revision}"


def _present(part: str, text: str) -> str:
    if not part:
        raise ConfigError(f"model reference {text!r} lacks a name", hint=f"write {FORM}")
    return part


def _split_lora(text: str) -> tuple[str, str | None]:
    if "+" not in text:
        return text, None
    pieces = text.split("+")
    splits = [("+".join(pieces[:i]), "+".join(pieces[i:])) for i in range(1, len(pieces))]
    if len(splits) == 1:
        return splits[0]
    for base, lora in splits:  # a folder with `+` in its name stays whole
        if os.path.exists(base) or os.path.exists(lora):
            return base, lora
    raise ConfigError(f"model reference {text!r} has more than one '+'", hint=f"write {FORM}")


def _split_layout(lora: str) -> tuple[str, str | None]:
    """Split `lora#layout`; a folder with `#` in its name stays whole."""
    if os.path.exists(lora) or "#" not in lora:
        return lora, None
    lora, _, layout = lora.rpartition("#")
    return lora, _layout(layout)


def _layout(value: object) -> str | None:
    if value is None:
        return None
    words = value.split(",") if isinstance(value, str) else [""]
    chosen = [[word for word in words if word in pair] for pair in LORA_LAYOUTS]
    if max(map(len, chosen)) > 1 or sum(map(len, chosen)) < len(words):
        raise ConfigError(
            f"{value!r} is not a LoRA layout",
            hint=f"write {' or '.join(LORA_LAYOUTS[0])}, {' or '.join(LORA_LAYOUTS[1])}, or one of "
            "each with a comma",
        )
    return ",".join(words)


def _split_revision(part: str, text: str) -> tuple[str, str | None]:
    if os.path.exists(part) or "@" not in part:
        return _present(part, text), None
    path, revision = part.rsplit("@", 1)
    if "@" in path and not os.path.exists(path):
        raise ConfigError(
            f"model reference {text!r} has more than one '@' in {part!r}", hint=f"write {FORM}"
        )
    return _present(path, text), _present(revision, text)


def _part(value: object) -> tuple[str, str | None]:
    """One side of the mapping form: a `path@revision` string or `{path, revision}`."""
    if isinstance(value, str):
        return _split_revision(value.strip(), value)
    if isinstance(value, Mapping):
        return _path_and_revision(value)
    raise ConfigError(f"expected a model path or {{path, revision}}, not {value!r}")


def _path_and_revision(value: Mapping[str, object]) -> tuple[str, str | None]:
    path, revision = value.get("path"), value.get("revision")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"a model reference needs a `path`, got {dict(value)!r}")
    if revision is not None and not (isinstance(revision, str) and revision):
        raise ConfigError(f"`revision` must be text, not {revision!r}", hint="put it in quotes")
    return path, revision
