"""Rebuild one model from a merge that kept it: `moemerge extract`."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge.checkpoint import Checkpoint, CheckpointPatch, check_output, require_space
from moemerge.checkpoint.folder import SINGLE, is_weights
from moemerge.checkpoint.model_card import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    model_card,
    report_file,
)
from moemerge.checkpoint.output import KEPT_FOLDER
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.checkpoint.tensors import RowRange
from moemerge.config.documents import KeptDocument, parse_document
from moemerge.config.models import ModelRef
from moemerge.config.yaml_lines import config_for
from moemerge.errors import CheckpointError, NumericalError, UsageError
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import Unit
from moemerge.merging.kept import KEPT_MANIFEST, LEFT, MASK, REST, RIGHT, part_name, rebuild_unit
from moemerge.merging.matching import UnitIndex, require_one_family, require_shape
from moemerge.registry import did_you_mean
from moemerge.runtime.checksums import CHECKSUMS, verify_checksums
from moemerge.runtime.files import file_digest, read_object
from moemerge.runtime.lazy import torch
from moemerge.runtime.progress import Progress
from moemerge.statistics.provenance import model_fingerprint

if TYPE_CHECKING:
    from torch import Tensor

_HINT = "it is written by a merge whose config has `tasks: {keep: ...}`"


@dataclass(frozen=True)
class ExtractReport:
    """The report of an extraction."""

    shared: str
    task: str  # the model's name
    keep: str
    base: str
    scale: float
    units: int  # number of rebuilt units
    output: str
    task_bytes: int  # size of what is kept of this model
    output_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


def extract_model(
    shared: str | Path | ModelRef,
    name: str,
    out: Path,
    *,
    base: str | Path | ModelRef | None,
    overwrite: bool,
    progress: Progress,
) -> ExtractReport:
    """Write the kept model `name` to `out`, which appears complete or not at all."""
    begin = time.perf_counter()
    ours = open_model(str(shared), shared)
    folder = ours.checkpoint.path / KEPT_FOLDER
    document = read_object(folder / KEPT_MANIFEST, _HINT)
    kept = parse_document(KeptDocument, document, str(folder / KEPT_MANIFEST), _HINT)
    if name not in kept.tasks:
        raise UsageError(
            f"{ours.label} keeps no model {name!r}{did_you_mean(name, kept.tasks)}",
            hint=f"its models: {', '.join(kept.tasks)}",
        )
    reference = ModelRef.parse(kept.base).located(folder) if base is None else base
    origin = open_model("base", reference)
    require_one_family([ours, origin])
    _require_base(kept, origin)
    inputs = [path for m in (ours, origin) for path in m.checkpoint.folders]
    check_output(out, overwrite=overwrite, inputs=inputs)
    require_space(out, ours.checkpoint.total_bytes)
    entry = kept.tasks[name]
    _require_parts(ours, document, folder / entry.folder / SINGLE, entry.digest)
    with closing(SafetensorsFile(folder / entry.folder / SINGLE)) as parts:
        extraction = _Extraction(UnitIndex(ours), UnitIndex(origin), parts, kept.keep, entry.scale)
        with CheckpointPatch(ours.checkpoint, out, overwrite=overwrite, inputs=inputs) as patch:
            units = extraction.write(patch, progress)
            report = ExtractReport(
                shared=ours.label,
                task=name,
                keep=kept.keep,
                base=origin.label,
                scale=entry.scale,
                units=units,
                output=str(out),
                task_bytes=sum(info.nbytes for info in parts.tensors.values()),
                output_bytes=ours.checkpoint.total_bytes,
                seconds=time.perf_counter() - begin,
            )
            for file, data in _companions(ours.checkpoint, report).items():
                patch.add_bytes(file, data)
            patch.commit()
    return report


def _require_base(kept: KeptDocument, base: OpenModel) -> None:
    """Refuse another base than that of the merge. Older merges do not name theirs."""
    found = model_fingerprint(base.checkpoint, base.architecture)
    if kept.base_fingerprint not in (None, found):
        raise CheckpointError(
            f"{base.label} is not the base of this merge: its weights differ",
            hint=f"the merge used {kept.base}; name it, or an exact copy: `base=MODEL`",
        )


def _require_parts(
    shared: OpenModel, manifest: Mapping[str, Any], file: Path, digest: str | None
) -> None:
    """Refuse parts of another model or merge, changed ones, and changed merged weights."""
    file_of_report = shared.checkpoint.path / REPORT_NAME
    report = read_object(file_of_report) if os.path.exists(file_of_report) else {}
    merge = report.get("merge")
    stated = merge.get("tasks") if isinstance(merge, dict) else None
    if (stated and stated != manifest) or digest not in (None, file_digest(file)):
        raise CheckpointError(
            f"{file.parent} is not what this merge wrote: it is of another model, or was changed",
            hint="restore it, or make the merge again",
        )
    if CHECKSUMS in report:
        files = verify_checksums(shared.checkpoint.path).changed
        changed = [name for name in files if is_weights(name) and "/" not in name]
        if changed:
            raise CheckpointError(
                f"{shared.checkpoint.path / changed[0]} was changed after the merge, so the masks "
                "and residuals of its models do not fit it",
                hint="restore it, or make the merge again",
            )


def _companions(checkpoint: Checkpoint, report: ExtractReport) -> dict[str, bytes]:
    """Return a report and a card that describe the extracted model instead of the merge."""
    config = checkpoint.path / CONFIG_NAME
    text = config_for(config, Path(report.output)) if os.path.isfile(config) else ""
    card = model_card(
        title=Path(report.output).name,
        summary=f"The model `{report.task}`, taken out of `{report.shared}` ({report.keep}).",
        hub_models=[],
        sections=[],
        config=text,
    )
    return {REPORT_NAME: report_file(extract=report.to_json()), CARD_NAME: card.encode()}


@dataclass(frozen=True)
class _Extraction:
    shared: UnitIndex
    base: UnitIndex
    parts: SafetensorsFile
    keep: Any
    scale: float

    def write(self, patch: CheckpointPatch, progress: Progress) -> int:
        """Write every unit with kept parts; all other units keep the merged weights."""
        count = 0
        progress.start("extracting", len(self.shared.by_tensor), unit="tensors")
        for name, units in self.shared.by_tensor.items():
            blocks: dict[RowRange | None, list[Unit]] = defaultdict(list)
            for unit in units:
                blocks[unit.slot.rows].append(unit)
            for rows, block in blocks.items():
                written = self._block(name, rows, block)
                if written is not None:
                    patch.write(name, written, row=0 if rows is None else rows[0])
                    count += len(block)
            progress.advance(1)
        progress.finish()
        if not count:
            raise CheckpointError(
                f"nothing that is kept of the model fits {self.shared.model.label}", hint=_HINT
            )
        return count

    def _parts_of(self, key: str) -> dict[str, Tensor]:
        names = {part: part_name(key, part) for part in (MASK, LEFT, RIGHT, REST)}
        return {p: self.parts.read(n) for p, n in names.items() if n in self.parts.tensors}

    def _block(self, name: str, rows: RowRange | None, units: list[Unit]) -> Tensor | None:
        kept = {unit.key: self._parts_of(unit.key) for unit in units}
        if not any(kept.values()):
            return None
        stored = self.shared.model.checkpoint.read(name, rows)
        result = stored.clone()
        for unit in units:
            if not kept[unit.key]:
                continue
            own = self.base.find(unit)
            if own is None:
                label = self.base.model.label
                raise CheckpointError(f"{label} has no {unit.key}", hint="name its base")
            require_shape(unit, self.shared, own, self.base)
            read = self.base.model.checkpoint.read(own.tensor, own.slot.rows)
            origin, merged = own.slot.take(read), unit.slot.take(stored)
            wide = torch.promote_types(merged.dtype, torch.float32)
            made = rebuild_unit(
                self.keep, kept[unit.key], origin.to(wide), merged.to(wide), self.scale
            )
            unit.slot.take(result).copy_(made)
        if not bool(result.isfinite().all()):
            raise NumericalError(f"{name} would hold values that {result.dtype} cannot")
        return result
