"""Write a checkpoint with some of its experts, in its own layout.

Stored tensors are copied in their own format, so a quantised model keeps its codes and scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moemerge.checkpoint import CheckpointWriter
from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.checkpoint.reader import AdaptedCheckpoint
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import ArchitectureError, UsageError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel
from moemerge.families.roles import ROUTING_ROLES, Role
from moemerge.repairs.routers import require_calibratable
from moemerge.runtime.files import read_object

if TYPE_CHECKING:
    from torch import Tensor

Kept = Mapping[int, Sequence[int]]  # the kept experts of each layer with a router, ascending
COPY_BYTES = 64 * 2**20
# transformers scores a group by the sum of its two best experts.
SMALLEST_GROUP = {"max": 1, "top2_sum": 2}


def pruned_routers(model: OpenModel) -> list[RouterInfo]:
    """Return the routers of the layers that the model runs."""
    return [r for r in model.architecture.routers() if r.layer < model.architecture.num_layers]


def kept_count(model: OpenModel, keep: float) -> int:
    """Return the number of experts to keep; refuse what the routing does not allow."""
    require_calibratable(model, "prune")
    routers = pruned_routers(model)
    label, layers = model.label, [router.layer for router in routers]
    refused = next((r for r in routers if not r.served or r.gate is None), None)
    if refused is not None:
        raise ArchitectureError(
            f"{label}: layer {refused.layer} cannot be pruned: {refused.reason}"
        )
    if len(set(layers)) != len(layers) or len({router.rows for router in routers}) != 1:
        raise ArchitectureError(
            f"{label}: its layers have different numbers of experts or several routers, and cannot "
            "be pruned"
        )
    gate, before = routers[0].gate, routers[0].rows
    assert gate is not None
    count = math.floor(keep * before / gate.groups + 0.5) * gate.groups
    each = count // gate.groups
    if count >= before:
        raise UsageError(f"keep is {keep:g}: all {before} experts would be kept")
    if count <= gate.top_k:
        raise UsageError(
            f"keep is {keep:g}: {count} of {before} experts would remain, but each token is routed "
            f"to {gate.top_k}",
            hint=f"keep more than {gate.top_k / before:.3g}",
        )
    if each < SMALLEST_GROUP[gate.group_score] or each * gate.top_groups < gate.top_k:
        raise UsageError(
            f"keep is {keep:g}: {each} experts would remain in each of {gate.groups} groups; each "
            f"token is routed to {gate.top_k} experts of {gate.top_groups} groups",
            hint="keep more",
        )
    return count


@dataclass(frozen=True)
class SlicedTensor:
    """One tensor of OUT: the source's stored tensor, or ranges of its leading axis."""

    info: TensorInfo
    source: str
    ranges: tuple[tuple[int, int], ...]
    columns: tuple[int, ...] | None = None  # chosen along the second axis
    encoded: bool = False  # a part of a quantised tensor, read as stored

    def write(self, model: OpenModel, writer: CheckpointWriter) -> None:
        """Copy the rows; never more than a block of them is in memory."""
        read = model.checkpoint.stored if self.encoded else model.checkpoint.read
        if not self.info.shape:
            writer.write(self.info.name, read(self.source))
            return
        row, step = 0, max(1, COPY_BYTES // max(1, self.info.row_bytes))
        for start, stop in self.ranges:
            for first in range(start, stop, step):
                block: Tensor = read(self.source, (first, min(first + step, stop)))
                if self.columns is not None:
                    block = block[:, list(self.columns)]
                writer.write(self.info.name, block, row)
                row += len(block)


def sliced_tensors(model: OpenModel, kept: Kept) -> list[SlicedTensor]:
    """Return every tensor of OUT. Layers that the model never runs are dropped."""
    architecture = model.architecture
    routers = {router.layer: router for router in architecture.routers() if router.layer in kept}
    tensors: list[SlicedTensor] = []
    for name, info in model.checkpoint.tensors.items():
        layer = architecture.layer_of(name)
        if layer is not None and layer >= architecture.num_layers:
            continue
        role = architecture.role(name)
        if (
            layer is None
            or layer not in kept
            or (role is not Role.EXPERT and role not in ROUTING_ROLES)
        ):
            encoded = isinstance(info, QuantisedInfo)
            tensors += [_whole(part, part, encoded=encoded) for part in _parts(info)]
        elif role is Role.EXPERT:
            tensors += _of_experts(model, info, kept[layer], routers[layer])
        else:
            tensors.append(_of_router(model, info, kept[layer], routers[layer]))
    return tensors


def _parts(info: TensorInfo) -> tuple[TensorInfo, ...]:
    return info.parts if isinstance(info, QuantisedInfo) else (info,)


def _whole(source: TensorInfo, target: TensorInfo, *, encoded: bool = False) -> SlicedTensor:
    return SlicedTensor(target, source.name, ((0, source.rows),), encoded=encoded)


def _of_experts(
    model: OpenModel, info: TensorInfo, kept: Sequence[int], router: RouterInfo
) -> Iterator[SlicedTensor]:
    """Yield the kept experts of a stack, or one expert's tensor under its new number."""
    encoded = isinstance(info, QuantisedInfo)
    units = model.architecture.units(info.name)
    experts = {unit.expert for unit in units}
    if None in experts:
        raise ArchitectureError(
            f"{model.label}: {info.name} contains experts that cannot be separated"
        )
    if not model.architecture.is_stack(info.name):
        (expert,) = experts
        if expert in kept:
            number = kept.index(expert)
            for part in _parts(info):
                renamed = replace(part, name=_renumbered(part.name, expert, number))
                yield _whole(part, renamed, encoded=encoded)
        return
    for part in _parts(info):
        if not part.shape or part.rows % router.rows:
            yield _whole(part, part, encoded=encoded)
            continue
        each = part.rows // router.rows  # more than 1 in flat layouts
        ranges = tuple((expert * each, (expert + 1) * each) for expert in kept)
        yield SlicedTensor(_resized(part, len(kept) * each), part.name, ranges, encoded=encoded)


def _resized(info: TensorInfo, rows: int) -> TensorInfo:
    return replace(
        info, shape=(rows, *info.shape[1:]), nbytes=info.nbytes // max(1, info.rows) * rows
    )


def _renumbered(name: str, expert: int | None, number: int) -> str:
    """Return one expert's tensor name with another number: the last one in the name."""
    head, found, tail = name.rpartition(f".{expert}.")
    if not found:
        raise ArchitectureError(f"{name}: the number of the expert is not part of the name")
    return f"{head}.{number}.{tail}"


def _of_router(
    model: OpenModel, info: TensorInfo, kept: Sequence[int], router: RouterInfo
) -> SlicedTensor:
    """Return the kept rows of a router, or entries of its biases; other tensors are unchanged."""
    shape, rows = info.shape, router.rows
    own = info.name in (router.weight, router.bias, router.selection_bias)
    if isinstance(info, QuantisedInfo):
        raise ArchitectureError(
            f"{model.label}: the router {info.name} is quantised",
            hint="dequantise the model first, and prune that",
        )
    if own and shape[0] > rows:
        raise ArchitectureError(
            f"{model.label}: {info.name} has {shape[0]} rows for {rows} experts; routers with rows "
            "that are not experts cannot be pruned"
        )
    if len(shape) == 2 and shape[0] == 1 and shape[1] == rows and own:
        sliced = replace(info, shape=(1, len(kept)), nbytes=info.nbytes // rows * len(kept))
        return SlicedTensor(sliced, info.name, ((0, 1),), columns=tuple(kept))
    if not own and rows not in shape:
        return _whole(info, info)
    if not own and (len(shape) != 1 or rows == model.architecture.hidden_size):
        raise ArchitectureError(
            f"{model.label}: {info.name} is part of the routing, and it is not known which of its "
            f"values belong to which expert, so {model.architecture.model_type} cannot be pruned"
        )
    ranges = tuple((expert, expert + 1) for expert in kept)
    return SlicedTensor(_resized(info, len(kept)), info.name, ranges)


def require_sliceable(model: OpenModel) -> None:
    """Refuse models whose stored tensors cannot be sliced."""
    checkpoint = model.checkpoint
    if checkpoint.quantisation is None:
        return
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise ArchitectureError(
            f"{model.label}: an adapter of a quantised model",
            hint="merge the adapter first, and prune the result",
        )
    section = str(read_object(checkpoint.path / "config.json").get("quantization_config"))
    if re.search(r"experts\.\d", section):
        raise ArchitectureError(
            f"{model.label}: the quantization_config names single experts, whose numbers would "
            "change",
            hint="dequantise it first, and prune that",
        )
