"""Several merges in one file, as YAML documents that use each other by name.

One merge is the result: the one without a `name`, or the only one that no other uses. All others
are intermediate models, which are merged first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from moemerge import merging
from moemerge.api.inputs import missing_inputs
from moemerge.api.listing import method_schemas, wrapper_schemas
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_folder, temporary_sibling
from moemerge.config.load import EarlierStages, LoadedConfig, check_document
from moemerge.config.settings import MergeSettings
from moemerge.config.yaml_lines import Document, read_documents
from moemerge.errors import ConfigError, UsageError
from moemerge.runtime.ranks import alone

MergeInto = Callable[[LoadedConfig, Path, MergeSettings], object]
VALIDATING = "moemerge-validate-"


@contextmanager
def staged(
    config: str | Path | Mapping[str, Any] | LoadedConfig,
    out: Path | None,
    settings: MergeSettings,
    merge: MergeInto | None = None,
) -> Iterator[LoadedConfig]:
    """Yield the last merge of a config; the models of earlier ones exist inside the block.

    `merge` makes them. Without it they are placeholders without weights, which suffice to plan
    with. All merges are planned in this way before the first is made.
    """
    if isinstance(config, LoadedConfig):
        yield config
        return
    stages = read_stages(config)
    if len(stages) == 1:
        yield check_config(stages[0].document, lenient=settings.lenient, inputs=True)
        return
    alone("a config of several merges")
    if out is not None:
        check_output(out, overwrite=settings.overwrite)
    with temporary_folder(VALIDATING, None) as folder:
        for last in _run(stages, Path(folder), settings, _write_placeholder):
            if merge is None or out is None:
                yield last
                return
            merging.plan_merge(last, settings, out)
    assert merge is not None
    assert out is not None
    with temporary_sibling(out) as place:
        yield from _run(stages, place, settings, merge)


def _run(
    stages: Sequence[Stage], folder: Path, settings: MergeSettings, merge: MergeInto
) -> Iterator[LoadedConfig]:
    """Merge all stages but the last into `folder`, and yield the last."""
    earlier = EarlierStages(f"{folder.resolve()}{os.sep}", ())
    for i, stage in enumerate(stages):
        document = stage.placed({name: earlier.prefix + name for name in stage.uses})
        loaded = check_config(document, lenient=settings.lenient, inputs=True)
        loaded = replace(loaded, earlier=earlier)
        if i == len(stages) - 1:
            yield loaded
            return
        if loaded.repairs:
            raise UsageError(
                f"the merge {stage.name!r} has a `{loaded.repairs[0].repair.key}:` block, and only "
                "the last merge of a file is repaired",
                hint="repair it by a file of its own, and name the result as a model",
            )
        merge(loaded, folder / stage.name, settings)
        for name in stage.uses - {used for later in stages[i + 1 :] for used in later.uses}:
            shutil.rmtree(folder / name)  # no later merge reads it
        seed = loaded.config.seed if settings.seed is None else settings.seed
        config = loaded.config.model_copy(update={"seed": seed or 0})
        earlier = replace(earlier, configs=(*earlier.configs, (stage.name, config)))


def _write_placeholder(loaded: LoadedConfig, out: Path, settings: MergeSettings) -> None:
    merging.write_placeholder(merging.plan_merge(loaded, settings), out)


def check_config(
    document: Document,
    *,
    lenient: bool | None = None,
    coefficients: bool = True,
    inputs: bool = False,
) -> LoadedConfig:
    """Check a config that has been read, for all methods and wrappers.

    `lenient` is None if the caller does not have this setting. With `inputs`, missing models and
    text files are reported with the other faults.
    """
    return check_document(
        replace(document, lenient=lenient),
        schemas=method_schemas(),
        wrappers=wrapper_schemas(),
        coefficients=coefficients,
        inputs=missing_inputs if inputs else None,
    )


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
        return replace(self.document, data=_replaced(self.document.data, "", folders))


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
        used = frozenset(_used(data, "", {*names} - {""}))
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
