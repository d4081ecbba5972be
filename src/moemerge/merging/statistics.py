"""Open and check the models' saved statistics for a plan, and read them unit by unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge.config.parameters import StatisticsKind
from moemerge.config.requests import StatisticsRequest
from moemerge.errors import CheckpointError, MoeMergeError, NumericalError
from moemerge.families.opened import OpenModel
from moemerge.merging.plan import MergePlan, UnitInput, UnitMerge
from moemerge.methods.method import Remark, UnitInfo
from moemerge.statistics.file import Statistics, UnitStatistics, stored_shape

if TYPE_CHECKING:
    from torch import Tensor

StatisticsFiles = Mapping[str, Sequence[str | Path]]


def open_statistics(
    needs: Mapping[str, Sequence[StatisticsKind]],
    files: StatisticsFiles,
    models: Mapping[str, OpenModel],
) -> dict[tuple[str, StatisticsKind], Statistics]:
    """Open the statistics of every model and kind. One error reports all that do not fit."""
    statistics: dict[tuple[str, StatisticsKind], Statistics] = {}
    wrong: list[MoeMergeError] = []
    for name, kinds in needs.items():
        try:
            opened = _open_all(name, kinds, files[name], models[name])
            statistics |= {(name, kind): opened[kind] for kind in kinds}
        except MoeMergeError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise CheckpointError("\n".join(["the statistics cannot be used:", *map(str, wrong)]))
    return statistics


def _open_all(
    name: str, kinds: Sequence[StatisticsKind], files: Sequence[str | Path], model: OpenModel
) -> dict[StatisticsKind, Statistics]:
    """Return a model's statistics by kind. Refuse files that lack one of `kinds`."""
    opened: dict[StatisticsKind, Statistics] = {}
    for file in files:
        statistics = Statistics.open(file)
        if statistics.kind in opened:
            raise CheckpointError(
                f"{name!r} has two files of {statistics.kind} statistics, the second is {file}",
                hint="name one of each kind",
            )
        statistics.check_fits(name, model.checkpoint, model.architecture)
        opened[statistics.kind] = statistics
    for kind in kinds:
        if kind not in opened:
            raise CheckpointError(
                f"the statistics of {name!r} ({', '.join(map(str, files))}) are of kind "
                f"{', '.join(opened)}, but the merge needs {kind}",
                hint=f"make them with `moemerge stats MODEL FILE --data TEXT --kind {kind}`",
            )
    return opened


def pending_bytes(wanted: StatisticsRequest, models: Mapping[str, OpenModel]) -> int:
    """Estimate the disk space of the statistics that are computed before the merge.

    On average two units have the same input and share a Gram matrix.
    """
    total = 0
    for name in wanted.data:
        model = models[name]
        units = (u for t in model.checkpoint.tensors for u in model.architecture.units(t))
        for out, width in (unit.shape for unit in units if len(unit.shape) == 2):
            for kind in wanted.needs[name]:
                size = 4 * math.prod(stored_shape(kind, (out, width)))
                total += size if kind in ("fisher", "sensitivity") else size // 2
    return total


def describe_statistics(
    wanted: StatisticsRequest, opened: Mapping[tuple[str, StatisticsKind], Statistics]
) -> dict[str, Any]:
    """Return, by model and kind, the file or text and the provenance, if already computed."""
    described: dict[str, Any] = {}
    for name, kinds in wanted.needs.items():
        described[name] = {}
        for kind in kinds:
            saved = name in wanted.files
            statistics = opened.get((name, kind))
            described[name][kind] = {
                "file": str(statistics.path) if saved and statistics is not None else None,
                "computed_from": None if saved else list(wanted.data[name]),
                **({} if statistics is None else statistics.provenance.model_dump()),
            }
    return described


def read_statistics(
    plan: MergePlan,
    merge: UnitMerge,
    source: UnitInput,
    tensor: Tensor,
    unit: UnitInfo,
    kind: StatisticsKind | None,
) -> UnitStatistics | None:
    """Return one model's statistics of a unit, on the tensor's device; None if it has none."""
    if kind is None or source.statistics is None:
        return None
    found = plan.statistics[source.model, kind].read(kind, source.statistics, tensor.device)
    if found is None:
        return None
    if kind == "fisher" and merge.prepare is not None:
        # Rows mapped to another vocabulary have no counterpart in the statistics.
        unit.remark(Remark.AVERAGED, {"why": "its rows were brought to another vocabulary"})
        return None
    width = tensor.shape[-1]
    shapes: dict[str, tuple[int, ...]] = {"gram": (width, width), "fisher": tuple(tensor.shape)}
    _check(found.values, shapes.get(kind, (width,)), source.statistics, source.model)
    return replace(found, values=found.values.to(tensor.device))


def _check(values: Tensor, expected: tuple[int, ...], key: str, model: str) -> None:
    if tuple(values.shape) != expected:
        raise CheckpointError(
            f"the statistics of {model!r} have shape {list(values.shape)} for {key}, "
            f"expected {list(expected)}",
            hint="make them again from this very model",
        )
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise NumericalError(
            f"the statistics of {model!r} hold non-finite values for {key}",
            hint="make them again; the model may overflow in the dtype it was run in",
        )
