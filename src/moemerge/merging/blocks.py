"""How an output tensor is cut into pieces that are read, computed and written at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from moemerge.architectures.roles import WHOLE, Slot
from moemerge.checkpoint import TensorInfo
from moemerge.merging.plan import Block, UnitMerge

# Elementwise methods take large tensors in runs of this many elements (64 MB in float32).
RUN_ELEMENTS = 2**24


def split_into_blocks(info: TensorInfo, merges: list[UnitMerge]) -> Iterator[Block]:
    """The units of a tensor, grouped by the rows they share; large elementwise ones in runs."""
    if len(merges) == 1 and _splits(merges[0]):
        yield from _runs(info, merges[0])
        return
    by_rows: dict[tuple[int, int] | None, list[UnitMerge]] = defaultdict(list)
    for merge in merges:
        by_rows[merge.unit.slot.rows].append(merge)
    for rows, group in by_rows.items():
        yield Block(info.name, rows, info.block_shape(rows), tuple(group))


def _splits(merge: UnitMerge) -> bool:
    whole = all(s.slot == WHOLE for s in merge.sources)
    return whole and merge.method.elementwise and merge.prepare is None and bool(merge.unit.shape)


def _runs(info: TensorInfo, merge: UnitMerge) -> Iterator[Block]:
    step = max(1, RUN_ELEMENTS * info.rows // max(1, info.nbytes // info.dtype.itemsize))
    for start in range(0, info.rows, step):
        rows = (start, min(start + step, info.rows))
        slot = Slot(rows=rows)
        part = replace(
            merge,
            unit=replace(merge.unit, slot=slot),
            inputs=tuple(replace(s, slot=slot) for s in merge.inputs),
            base=None if merge.base is None else replace(merge.base, slot=slot),
        )
        yield Block(info.name, rows, info.block_shape(rows), (part,))
