"""Several merges in one file, as YAML documents that use each other by name.

One merge is the result: the one without a `name`, or the only one that no other uses. All others
are intermediate models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    where: str  # for messages
    document: Document  # without its name
    uses: frozenset[str]  # names of other stages

    def placed(self, folders: Mapping[str, str]) -> Document:
        """Return the document with folders in place of the names of stages."""
        return replace(self.document, data=_replaced(self.document.data, "", folders))


def read_stages(source: str | Path | Mapping[str, Any]) -> list[Stage]:
    """Read all merges of a file, each after those that it uses; the result is the last."""
    where, documents = read_documents(source)
    if len(documents) == 1:
        return [Stage("", where, documents[0], frozenset())]
    names = [_name(document, where) for document in documents]
    for i, name in enumerate(names):
        if name in names[:i]:
            what = f"two merges are named {name!r}" if name else "two merges have no `name`"
            raise _error(where, documents[i], what, "only the result may be unnamed")
    stages = []
    for name, document in zip(names, documents, strict=True):
        data = {key: value for key, value in document.data.items() if key != "name"}
        used = frozenset(_used(data, "", {*names} - {""}))
        stages.append(Stage(name, where, replace(document, data=data), used))
    return _ordered(stages)


def _name(document: Document, where: str) -> str:
    name = document.data.get("name")
    if name is None:
        return ""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"the name {name!r} is not a word"
        raise _error(where, document, what, "use letters, digits, `-`, `_` and `.`")
    return name


def _ordered(stages: list[Stage]) -> list[Stage]:
    used = frozenset(name for stage in stages for name in stage.uses)
    ends = [stage for stage in stages if stage.name not in used]
    if len(ends) != 1:
        faults = [repr(stage.name or "(unnamed)") for stage in ends]
        what = f"no merge uses {' and '.join(faults)}" if ends else "the merges use each other"
        raise _error(stages[0].where, stages[-1].document, what, "exactly one must be the result")
    ordered: list[Stage] = []
    left = list(stages)
    while left:
        done = {stage.name for stage in ordered}
        ready = next((stage for stage in left if stage.uses <= done), None)
        if ready is None:
            what = f"the merges use each other: {', '.join(stage.name for stage in left)}"
            raise _error(left[0].where, left[0].document, what, "break the circle")
        left.remove(ready)
        ordered.append(ready)
    return ordered


def _error(where: str, document: Document, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{where}, line {document.line(()) or 1}: {what}", hint=hint)


def _used(value: Any, key: str, names: set[str]) -> set[str]:
    """Return the stages that a part of a config names as models, with or without a LoRA."""
    if isinstance(value, str):
        base = value.partition("+")[0].strip()
        return {base} & names if key in _MODELS else set()
    if isinstance(value, Mapping):
        inner = ((v, k if key != "sources" else key) for k, v in value.items())
        return {name for v, k in inner for name in _used(v, k, names)}
    if isinstance(value, list):
        return {name for one in value for name in _used(one, _item_key(key, one), names)}
    return set()


def _replaced(value: Any, key: str, folders: Mapping[str, str]) -> Any:
    if isinstance(value, str) and key in _MODELS:
        base, plus, lora = value.partition("+")
        return folders.get(base.strip(), base) + plus + lora
    if isinstance(value, Mapping):
        return {k: _replaced(v, k if key != "sources" else key, folders) for k, v in value.items()}
    if isinstance(value, list):
        return [_replaced(one, _item_key(key, one), folders) for one in value]
    return value


def _item_key(key: str, item: object) -> str:
    """Return the key that a list's item counts under: a list of sources names merged models."""
    return "" if key == "sources" and isinstance(item, str) else key
