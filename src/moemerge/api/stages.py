"""Merge the intermediate models of a config that consists of several merges."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moemerge import merging
from moemerge.api.listing import method_schemas, wrapper_schemas
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_folder, temporary_sibling
from moemerge.config.dump import dump_config
from moemerge.config.load import EarlierStages, LoadedConfig, check_document
from moemerge.config.settings import MergeSettings
from moemerge.config.stages import Stage, read_stages
from moemerge.config.yaml_lines import Document, FaultReporter
from moemerge.errors import UsageError
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
        yield _load(stages[0], stages[0].document, settings)
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
        loaded = replace(_load(stage, document, settings), earlier=earlier)
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
        text = f"name: {stage.name}\n" + loaded.shown(dump_config(config, absolute=True))
        earlier = replace(earlier, documents=(*earlier.documents, text))


def _write_placeholder(loaded: LoadedConfig, out: Path, settings: MergeSettings) -> None:
    merging.write_placeholder(merging.plan_merge(loaded, settings), out)


def _load(stage: Stage, document: Document, settings: MergeSettings) -> LoadedConfig:
    reporter = FaultReporter(stage.where, document, settings.lenient)
    return check_document(reporter, schemas=method_schemas(), wrappers=wrapper_schemas())
