"""Keeping each model's part while a merge runs: a folder a model, inside OUT in the making.

OUT/moemerge_tasks/tasks.json                 what was kept, of which base and models
OUT/moemerge_tasks/0/model.safetensors        the first model's masks (or low-rank rest)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.checkpoint.output import KEPT_FOLDER
from moemerge.config.schema import KeptModels
from moemerge.merging.kept.kinds import keep_unit, part_specs, sizes
from moemerge.merging.plan import MergePlan, UnitMerge
from moemerge.report.files import report_bytes
from moemerge.runtime.dtypes import Dtype

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "tasks.json"
SHARD_BYTES = 5 * 10**9


def part_name(key: str, part: str) -> str:
    return f"{key}:{part}"


class ModelKeeper:
    """Writes what is kept of every model; fed by many threads at once. A context manager."""

    def __init__(self, plan: MergePlan, settings: KeptModels, base: str, folder: Path) -> None:
        self._plan = plan
        self._settings = settings
        self._base = base
        self._folder = folder / KEPT_FOLDER
        self._lock = threading.Lock()
        merges = [merge for block in plan.blocks for merge in block.merges]
        self._models = list(dict.fromkeys(s.model for m in merges for s in m.inputs))
        self._totals = {model: [0.0, 0.0] for model in self._models}
        self._writers: dict[int, CheckpointWriter] = {}
        infos = list(kept_tensors(plan, settings))
        self.nbytes = sum(info.nbytes for info in infos)  # of one model
        for number, model in enumerate(self._models):
            self._writers[model] = CheckpointWriter(
                self._folder / str(number), infos, shard_bytes=SHARD_BYTES, overwrite=False
            )

    def keep(self, merge: UnitMerge, tensors: Sequence[Tensor], base: Tensor, out: Tensor) -> None:
        """Of one unit: the models' own tensors, the base's and the merge."""
        for source, own in zip(merge.inputs, tensors, strict=False):
            parts = keep_unit(self._settings, own, base, out)
            writer = self._writers[source.model]
            for spec in part_specs(self._settings, merge.unit.shape, self._dtype(merge)):
                name = part_name(merge.unit.key, spec.name)
                writer.write(name, parts[spec.name].to(spec.dtype.torch))
            if self._settings.keep == "emr":
                own_size, agreed = sizes(own, base, out)
                with self._lock:
                    self._totals[source.model][0] += own_size
                    self._totals[source.model][1] += agreed

    def _dtype(self, merge: UnitMerge) -> Dtype:
        return stored_dtype(self._plan, merge)

    def commit(self) -> dict[str, Any]:
        """Make all of it durable inside the folder that is to become OUT; gives the manifest."""
        for writer in self._writers.values():
            writer.commit()
        kept = {
            self._plan.models[model].name: {
                "folder": str(number),
                "model": self._plan.models[model].checkpoint.label,
                "scale": self._scale(model),
                "bytes": self.nbytes,
            }
            for number, model in enumerate(self._models)
        }
        manifest = {**self._settings.model_dump(), "base": self._base, "tasks": kept}
        (self._folder / MANIFEST).write_bytes(report_bytes(manifest))
        return manifest

    def _scale(self, model: int) -> float:
        own, agreed = self._totals[model]
        return own / agreed if agreed > 0 else 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abort()


def kept_tensors(plan: MergePlan, settings: KeptModels) -> Iterator[TensorInfo]:
    """What is stored of each model."""
    for block in plan.blocks:
        for merge in block.merges:
            for spec in part_specs(settings, merge.unit.shape, stored_dtype(plan, merge)):
                yield TensorInfo.of(part_name(merge.unit.key, spec.name), spec.dtype, spec.shape)


def stored_dtype(plan: MergePlan, merge: UnitMerge) -> Dtype:
    return plan.dtypes[merge.unit.tensor]
