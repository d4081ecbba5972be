"""Several merges in one file, as YAML documents that use each other by name.

One merge is the result: the one without a `name`, or the only one that no other uses. All others
are intermediate models, which are merged first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from moemerge.config.yaml_lines import Document, read_documents
from moemerge.errors import ConfigError

_NAME: Final = re.compile(r"\w[\w.-]*")
# Keys whose text, or list or mapping of texts, names models.
_MODELS: Final = frozenset(
    {"model", "models", "base_model", "path", "source", "sources", "tokenizer_source"}
)


@dataclass(frozen=True)
class Stage:
    """One merge of a file."""

    name: str  # empty if it has none
    document: Document  # without its name
    uses: frozenset[str]  # names of other stages

    def placed(self, folders: Mapping[str, str]) -> Document:
        """Return the document with folders in place of the names of stages."""
        data = _renamed(self.document.data, "", lambda name: folders.get(name, name))
        return replace(self.document, data=data)


def read_stages(source: str | Path | Mapping[str, Any]) -> list[Stage]:
    """Read all merges of a file, each after those that it uses; the result is the last."""
    documents = read_documents(source)
    if len(documents) == 1:
        return [Stage("", documents[0], frozenset())]
    names = [_name(document) for document in documents]
    for i, name in enumerate(names):
        if name in names[:i]:
            what = f"two merges are named {name!r}" if name else "two merges have no `name`"
            raise _error(documents[i], what, "only the result may be unnamed")
    stages = []
    for name, document in zip(names, documents, strict=True):
        data = {key: value for key, value in document.data.items() if key != "name"}
        used = frozenset(_mentioned(data)) & ({*names} - {""})
        stages.append(Stage(name, replace(document, data=data), used))
    return _ordered(stages)


def _name(document: Document) -> str:
    name = document.data.get("name")
    if name is None:
        return ""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"the name {name!r} is not a word"
        raise _error(document, what, "use letters, digits, `-`, `_` and `.`")
    return name


def _ordered(stages: list[Stage]) -> list[Stage]:
    used = frozenset(name for stage in stages for name in stage.uses)
    ends = [stage for stage in stages if stage.name not in used]
    if len(ends) != 1:
        faults = [repr(stage.name or "(unnamed)") for stage in ends]
        what = f"no merge uses {' and '.join(faults)}" if ends else "the merges use each other"
        raise _error(stages[-1].document, what, "exactly one must be the result")
    ordered: list[Stage] = []
    left = list(stages)
    while left:
        done = {stage.name for stage in ordered}
        ready = next((stage for stage in left if stage.uses <= done), None)
        if ready is None:
            what = f"the merges use each other: {', '.join(stage.name for stage in left)}"
            raise _error(left[0].document, what, "break the circle")
        left.remove(ready)
        ordered.append(ready)
    return ordered


def _error(document: Document, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{document.where}, line {document.line(()) or 1}: {what}", hint=hint)


def _mentioned(data: Any) -> list[str]:
    """Return all models that a config names."""
    names = []

    def note(name: str) -> str:
        names.append(name)
        return name

    _renamed(data, "", note)
    return names


def _renamed(value: Any, key: str, rename: Callable[[str], str]) -> Any:
    """Apply `rename` to every model that a part of a config names, with or without a LoRA."""
    if isinstance(value, str) and key in _MODELS:
        base, plus, lora = value.partition("+")
        return rename(base.strip()) + plus + lora
    if isinstance(value, Mapping):
        inner = ((k, v, key if k == "sources" else k) for k, v in value.items())
        return {k: _renamed(v, below, rename) for k, v, below in inner}
    if isinstance(value, list):
        # A list of sources names models of the config, which are no stages.
        listed = [key == "sources" and isinstance(one, str) for one in value]
        pairs = zip(value, listed, strict=True)
        return [one if named else _renamed(one, key, rename) for one, named in pairs]
    return value
