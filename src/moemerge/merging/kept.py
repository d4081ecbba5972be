"""Keep what is needed to rebuild each model from a merge (`tasks:` of a config).

OUT/moemerge_tasks/tasks.json             the manifest: kind, base and models
OUT/moemerge_tasks/0/model.safetensors    the first model's masks, or its low-rank residual

With W the merged unit, W_0 the base's, W_i a model's, τ = W - W_0 and τ_i = W_i - W_0, in float32:

* tall: mask_i = [|τ_i| > t |τ - τ_i|];  W where mask_i, else W_0
* emr:  mask_i = [τ_i τ > 0];  W_0 + λ_i mask_i τ, with λ_i = Σ |τ_i| / Σ |mask_i τ| over the model
* twin: W plus the leading singular directions of W_i - W
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.checkpoint.folder import SINGLE
from moemerge.checkpoint.model_card import report_bytes
from moemerge.checkpoint.output import KEPT_FOLDER
from moemerge.checkpoint.patch import DEFAULT_SHARD_BYTES
from moemerge.config.models import ModelRef
from moemerge.config.schema import Keep, KeptModels
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Unit
from moemerge.merging.plan import MergePlan, UnitMerge
from moemerge.methods._spectra import Spectrum
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import file_digest
from moemerge.runtime.lazy import np, torch
from moemerge.statistics.provenance import model_fingerprint

if TYPE_CHECKING:
    from torch import Tensor


KEPT_MANIFEST = "tasks.json"
MASK, LEFT, RIGHT, REST = "mask", "left", "right", "rest"
Parts = Mapping[str, "Tensor"]
BITS = 8


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask of any shape as bytes of eight elements, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the mask that `pack_bits` packed."""
    bits = np.unpackbits(packed.numpy(), count=math.prod(shape), bitorder="little")
    return torch.from_numpy(bits).bool().view(shape)


def unit_parts(settings: KeptModels, unit: Unit, dtype: Dtype) -> dict[str, TensorInfo]:
    """Return the tensors that are kept of a unit of this stored dtype, by part."""
    shape, rank = unit.shape, None
    parts: dict[str, tuple[Dtype, Sequence[int]]]
    if settings.keep != "twin":
        parts = {MASK: (Dtype.UINT8, [-(-math.prod(shape) // BITS)])}
    elif (rank := twin_rank(settings, shape)) is None:
        parts = {REST: (dtype, shape)}
    else:
        parts = {LEFT: (dtype, [shape[0], rank]), RIGHT: (dtype, [shape[1], rank])}
    return {part: TensorInfo.of(part_name(unit.key, part), *how) for part, how in parts.items()}


def twin_rank(settings: KeptModels, shape: tuple[int, ...]) -> int | None:
    """Return the rank kept of a matrix; None if the whole residual is not larger."""
    if len(shape) != 2 or settings.rank * sum(shape) >= shape[0] * shape[1]:
        return None
    return settings.rank


def keep_unit(settings: KeptModels, own: Tensor, base: Tensor, merged: Tensor) -> dict[str, Tensor]:
    """Return the parts to keep of one model's unit."""
    if settings.keep == "tall":
        change, rest = own - base, merged - own
        return {MASK: pack_bits(change.abs() > settings.threshold * rest.abs())}
    if settings.keep == "emr":
        return {MASK: pack_bits((own - base) * (merged - base) > 0)}
    rank = twin_rank(settings, tuple(own.shape))
    rest = own - merged
    if rank is None:
        return {REST: rest}
    spectrum = Spectrum.of(rest, most=rank)
    root = spectrum.values.sqrt()
    left, right = own.new_zeros(own.shape[0], rank), own.new_zeros(own.shape[1], rank)
    left[:, : len(root)] = (spectrum.left * root).to(own.dtype)
    right[:, : len(root)] = (spectrum.right * root).to(own.dtype)
    return {LEFT: left, RIGHT: right}


def emr_norms(own: Tensor, base: Tensor, merged: Tensor) -> tuple[float, float]:
    """Return Σ |τ_i| and Σ |mask_i τ|, whose ratio is EMR's scale."""
    change, shared = own - base, merged - base
    agreed = shared.masked_fill(change * shared <= 0, 0.0)
    return float(change.abs().double().sum()), float(agreed.abs().double().sum())


def rebuild_unit(keep: Keep, parts: Parts, base: Tensor, merged: Tensor, scale: float) -> Tensor:
    """Return the approximation of a model's unit from its kept parts."""
    shape = tuple(merged.shape)
    if keep == "tall":
        return torch.where(unpack_bits(parts[MASK], shape), merged, base)
    if keep == "emr":
        mask = unpack_bits(parts[MASK], shape)
        return base + scale * torch.where(mask, merged - base, 0.0)
    if REST in parts:
        return merged + parts[REST].to(merged.dtype)
    return merged + parts[LEFT].to(merged.dtype) @ parts[RIGHT].to(merged.dtype).T


def kept_tensors(plan: MergePlan, settings: KeptModels) -> Iterator[TensorInfo]:
    """Yield the tensors that are stored for each model."""
    for block in plan.blocks:
        for merge in block.merges:
            yield from unit_parts(settings, merge.unit, plan.dtypes[merge.unit.tensor]).values()


def part_name(key: str, part: str) -> str:
    return f"{key}:{part}"


class ModelKeeper:
    """Writes the kept parts of every model. A thread-safe context manager."""

    def __init__(
        self, plan: MergePlan, settings: KeptModels, base: OpenModel, ref: ModelRef, folder: Path
    ) -> None:
        self._plan = plan
        self._settings = settings
        self._folder = folder / KEPT_FOLDER
        self._base = {
            "base": str(ref.as_named_in(self._folder)),
            "base_fingerprint": model_fingerprint(base.checkpoint, base.architecture),
        }
        self._lock = threading.Lock()
        merges = [merge for block in plan.blocks for merge in block.merges]
        self._models = list(dict.fromkeys(s.model for m in merges for s in m.inputs))
        self._totals = {model: [0.0, 0.0] for model in self._models}
        infos = list(kept_tensors(plan, settings))
        self.nbytes = sum(info.nbytes for info in infos)  # per model
        self._writers = {
            model: CheckpointWriter(
                self._folder / str(number), infos, shard_bytes=DEFAULT_SHARD_BYTES, overwrite=False
            )
            for number, model in enumerate(self._models)
        }

    def keep(self, merge: UnitMerge, tensors: Sequence[Tensor], base: Tensor, out: Tensor) -> None:
        """Write one unit's parts from the models' `tensors`, the base's and the merged `out`."""
        dtype = self._plan.dtypes[merge.unit.tensor]
        for source, own in zip(merge.inputs, tensors, strict=False):
            parts = keep_unit(self._settings, own, base, out)
            for part, info in unit_parts(self._settings, merge.unit, dtype).items():
                self._writers[source.model].write(info.name, parts[part].to(info.dtype.torch))
            if self._settings.keep == "emr":
                own_size, agreed = emr_norms(own, base, out)
                with self._lock:
                    self._totals[source.model][0] += own_size
                    self._totals[source.model][1] += agreed

    def commit(self) -> dict[str, Any]:
        """Flush all files inside the hidden folder of OUT, and return the manifest."""
        for writer in self._writers.values():
            writer.commit()
        kept = {
            model: {
                "folder": str(number),
                "model": self._plan.models[model].checkpoint.label,
                "scale": self._scale(model),
                "digest": file_digest(self._folder / str(number) / SINGLE),
                "bytes": self.nbytes,
            }
            for number, model in enumerate(self._models)
        }
        manifest = {**self._settings.model_dump(), **self._base, "tasks": kept}
        (self._folder / KEPT_MANIFEST).write_bytes(report_bytes(manifest))
        return manifest

    def _scale(self, model: str) -> float:
        own, agreed = self._totals[model]
        return own / agreed if agreed > 0 else 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.abort()
