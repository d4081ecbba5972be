"""Merge with several processes on one machine: each rank merges some tensors.

All ranks write into the hidden folder that rank 0 created. Every tensor has a fixed position there,
so the bytes equal those of a single process. Rank 0 then publishes OUT.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moemerge.checkpoint import CheckpointWriter, parse_size
from moemerge.checkpoint.requantise import QuantisingWriter
from moemerge.config.settings import MergeSettings
from moemerge.merging.execute import MergeOutcome
from moemerge.merging.plan import MergePlan
from moemerge.runtime.ranks import Ranks


def own_part(plan: MergePlan, ranks: Ranks) -> MergePlan:
    """Return the plan of this rank's tensors. All ranks get about the same amount of work."""
    if ranks.count == 1:
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
    plan: MergePlan, out: Path, settings: MergeSettings, ranks: Ranks
) -> CheckpointWriter:
    """Return the writer of OUT. Rank 0 creates the hidden folder, the others write into it."""

    def writer(folder: Path | None) -> CheckpointWriter:
        return CheckpointWriter(
            out,
            [part for info in plan.tensors for part in info.parts],
            shard_bytes=parse_size(settings.out_shard_size),
            overwrite=settings.overwrite,
            inputs=plan.input_folders,
            folder=folder,
        )

    if not ranks.leads:
        return writer(Path(ranks.broadcast_object("")))
    made = writer(None)
    try:
        ranks.broadcast_object(str(made.folder))
    except BaseException:
        made.abort()
        raise
    return made


def gather_results(
    writer: CheckpointWriter, outcome: MergeOutcome, target: QuantisingWriter, ranks: Ranks
) -> None:
    """Collect on rank 0 what the other ranks wrote and found."""
    if ranks.count == 1:
        return
    written = () if ranks.leads else writer.hand_over()
    own = (written, outcome.remarks.entries(), outcome.finite.noted, target.errors.sums)
    for names, remarks, noted, rounding in ranks.gather(own)[1:]:
        if ranks.leads:
            writer.take_over(names)
            for remark in remarks:
                outcome.remarks.add(*remark)
            outcome.finite.note(noted)
            target.errors.add(rounding)
