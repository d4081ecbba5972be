"""A merge by several processes of one machine: each merges some tensors, rank 0 puts OUT in place.

All write into the hidden folder that rank 0 has made. Every tensor has its place there, so the
bytes are those of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moemerge.checkpoint import CheckpointWriter, parse_size
from moemerge.checkpoint.requantise import QuantisingWriter, stored_tensors
from moemerge.config.settings import MergeSettings
from moemerge.merging.execute import MergeOutcome
from moemerge.merging.method import Facts, Remark
from moemerge.merging.plan import MergePlan
from moemerge.runtime import ranks


def own_part(plan: MergePlan) -> MergePlan:
    """The tensors that this rank merges: about as much work as every other rank has."""
    if ranks.count() == 1:
        return plan
    work: dict[str, int] = {}
    for block in plan.blocks:
        work[block.tensor] = work.get(block.tensor, 0) + block.working_bytes
    names = list(work)
    [places] = ranks.share([list(work.values())])
    own = {names[place] for place in places}
    return replace(
        plan,
        tensors=tuple(info for info in plan.tensors if info.name in own),
        blocks=tuple(block for block in plan.blocks if block.tensor in own),
    )


def open_writer(
    plan: MergePlan, out: Path, settings: MergeSettings, *, temporary: bool
) -> CheckpointWriter:
    """OUT in the making: rank 0 makes it, the others write into it."""

    def writer(folder: Path | None) -> CheckpointWriter:
        return CheckpointWriter(
            out,
            list(stored_tensors(plan.tensors)),
            shard_bytes=parse_size(settings.out_shard_size),
            overwrite=settings.overwrite,
            inputs=[folder for model in plan.models for folder in model.checkpoint.folders],
            direct=not temporary,
            folder=folder,
        )

    if not ranks.leads():
        return writer(Path(ranks.from_lead("")))
    made = writer(None)
    try:
        ranks.from_lead(str(made.folder))
    except BaseException:
        made.abort()
        raise
    return made


@dataclass(frozen=True)
class _Done:
    """What one rank has to tell when its tensors are written."""

    written: Sequence[str]
    remarks: Sequence[tuple[str, Remark, Facts]]
    noted: Mapping[str, Sequence[str]]
    rounding: Mapping[str, tuple[float, float, int]]


def put_together(writer: CheckpointWriter, outcome: MergeOutcome, target: QuantisingWriter) -> None:
    """All ranks meet: rank 0 knows then what the others have written and have to say."""
    if ranks.count() == 1:
        return
    written = () if ranks.leads() else writer.hand_over()
    own = _Done(written, outcome.remarks.said(), outcome.finite.noted, target.errors.sums)
    for done in ranks.gathered(own)[1:]:
        if ranks.leads():
            writer.take_over(done.written)
            for remark in done.remarks:
                outcome.remarks.add(*remark)
            outcome.finite.note(done.noted)
            target.errors.add(done.rounding)
