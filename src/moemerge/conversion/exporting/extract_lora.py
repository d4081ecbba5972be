"""Write the difference of a model and its base as a LoRA: `moemerge extract-lora`."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from moemerge.checkpoint import TensorInfo, hub_ids, require_space
from moemerge.checkpoint.adapter import CONFIG, PEFT_LAYOUT, PREFIX
from moemerge.checkpoint.folder import ADAPTER_WEIGHTS
from moemerge.checkpoint.model_card import in_code, model_card, own_files
from moemerge.checkpoint.output import OutputFolder, check_output, writing
from moemerge.checkpoint.reader import AdaptedCheckpoint, as_ref
from moemerge.checkpoint.safetensors_file import build_header
from moemerge.checkpoint.tensors import as_bytes
from moemerge.config.job_settings import ExtractLoraSettings
from moemerge.config.models import ModelLike
from moemerge.config.yaml_lines import dump_document
from moemerge.conversion.exporting.targets import (
    Blocks,
    Factors,
    Kind,
    StoredUnits,
    Target,
    adapter_config,
    factor_names,
    factorise,
    find_targets,
)
from moemerge.errors import ArchitectureError, CheckpointError, NumericalError
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import WHOLE
from moemerge.repairs.routers import require_same_family
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import write_file
from moemerge.runtime.progress import Progress, counted, first_few

DEFAULT_RANK: Final = 16
BLOCK_BYTES: Final = 64 * 2**20  # of a matrix in float32 that is read at once
_WEIGHTS: Final = ADAPTER_WEIGHTS[0]


@dataclass(frozen=True)
class ExtractedParameter:
    """One parameter: its rank in the adapter and what the rank loses.

    `change` is ‖W - base‖ / ‖base‖, and `error` ‖W - base - BA‖ / ‖W - base‖.
    """

    name: str
    role: str
    rank: int | None  # None: stored whole, or not in the adapter
    norm: float  # ‖W - base‖
    change: float
    error: float


@dataclass(frozen=True)
class ExtractLoraReport:
    """What the adapter contains, and its error."""

    model: str
    base: str
    output: str
    settings: dict[str, Any]
    parameters: tuple[ExtractedParameter, ...]
    adapter_bytes: int
    notices: tuple[str, ...]
    seconds: float

    def error(self, role: str | None = None) -> float:
        """Return ‖error‖ / ‖change‖ of all parameters, or of those of one role."""
        rows = [row for row in self.parameters if role in (None, row.role)]
        norm = math.hypot(*(row.norm for row in rows))
        return math.hypot(*(row.norm * row.error for row in rows)) / norm if norm else 0.0

    def to_json(self) -> dict[str, Any]:
        roles = dict.fromkeys(row.role for row in self.parameters)
        return {
            **asdict(self),
            "error": self.error(),
            "error_by_role": {role: self.error(role) for role in roles},
            "seconds": round(self.seconds, 3),
        }


def extract_lora(
    model: ModelLike,
    base: ModelLike,
    out: Path,
    settings: ExtractLoraSettings,
    *,
    overwrite: bool,
    progress: Progress,
) -> ExtractLoraReport:
    """Write the adapter to `out`, which appears complete or not at all."""
    begin = time.perf_counter()
    tuned, origin = open_model(str(model), model), open_model(str(base), base)
    require_same_family(origin, tuned, hint="name the model that it was trained from")
    layers = [m.architecture.num_layers for m in (tuned, origin)]
    if layers[0] != layers[1]:
        raise CheckpointError(
            f"{tuned.label} has {layers[0]} layers, but {origin.label} has {layers[1]}",
            hint="name the model that it was trained from",
        )
    inputs = [folder for m in (tuned, origin) for folder in m.checkpoint.folders]
    check_output(out, overwrite=overwrite, inputs=inputs)
    if isinstance(origin.checkpoint, AdaptedCheckpoint):
        raise CheckpointError(
            f"{origin.label} is a base with an adapter, and a second adapter cannot be applied",
            hint="merge it first: `moemerge merge` with `merge_method: passthrough`",
        )
    if settings.rank is None and settings.energy is None:
        settings = settings.model_copy(update={"rank": DEFAULT_RANK})
    sides = StoredUnits(tuned), StoredUnits(origin)
    device = resolve_device(settings.device)
    # A tensor that both models do without is computed by the model itself.
    known = {key for side in sides for key in side.by_key}
    targets = [t for t in find_targets(origin, settings.layout) if t.units[0].key in known]
    for unit in (unit for target in targets for unit in target.units):
        for side in sides:
            side.find(unit)
    place = OutputFolder(out, overwrite=overwrite, inputs=inputs)
    try:
        with writing(out):
            _rehearse(origin, place.path, targets, settings)
            adapter = _AdapterWriter(*sides, settings, device, place.path)
            adapter.run(targets, progress)
            require_space(out, adapter.nbytes)
            names = [str(as_ref(one).as_named_in(out)) for one in (model, base)]
            adapter.finish(names[1])
            report = ExtractLoraReport(
                model=names[0],
                base=names[1],
                output=str(out),
                settings=settings.model_dump(exclude_none=True),
                parameters=tuple(adapter.rows),
                adapter_bytes=adapter.nbytes,
                notices=tuple(adapter.notices(targets)),
                seconds=time.perf_counter() - begin,
            )
            for name, data in _companions(report).items():
                place.add_bytes(name, data)
        for checkpoint in (tuned.checkpoint, origin.checkpoint):
            checkpoint.require_unchanged()
        place.commit()
    finally:
        place.abort()
    return report


@dataclass(frozen=True)
class _Change:
    """A changed parameter: the factors of each expert, and squared norms."""

    target: Target
    factors: Sequence[Factors | None]  # None for a zero matrix, or a parameter without factors
    change: float
    base: float
    error: float

    @property
    def rank(self) -> int | None:
        return max((found.a.shape[0] for found in self.factors if found is not None), default=None)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return A and B in PEFT's form: (experts * rank, in) and (out, rank * experts)."""
        (out, width), rank, count = self.target.matrix, self.rank or 0, len(self.factors)
        dtype = next(found.a.dtype for found in self.factors if found is not None)
        a = torch.zeros(count, rank, width, dtype=dtype)
        b = torch.zeros(out, rank, count, dtype=dtype)
        for expert, found in enumerate(self.factors):
            if found is not None:
                right, left = found.a.cpu(), found.b.cpu()
                if self.target.flipped:
                    right, left = left.T, right.T
                a[expert, : right.shape[0]] = right
                b[:, : right.shape[0], expert] = left
        return a.view(-1, width), b.view(out, -1)

    def row(self) -> ExtractedParameter:
        return ExtractedParameter(
            self.target.name,
            str(self.target.role),
            self.rank,
            math.sqrt(self.change),
            math.sqrt(self.change / self.base) if self.base else 1.0,
            math.sqrt(self.error / self.change),
        )


class _AdapterWriter:
    """Writes factors one after the other, and at the end the adapter's files."""

    def __init__(
        self,
        tuned: StoredUnits,
        origin: StoredUnits,
        settings: ExtractLoraSettings,
        device: torch.device,
        folder: Path,
    ) -> None:
        self._tuned, self._origin = tuned, origin
        self._settings = settings
        self._device = device
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._folder = folder
        self._spool = folder / f"{_WEIGHTS}.partial"  # a header needs all ranks, so it comes last
        self._infos: list[TensorInfo] = []
        self._written: list[Target] = []
        self.rows: list[ExtractedParameter] = []
        self.left_out: list[str] = []

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._infos)

    def run(self, targets: Sequence[Target], progress: Progress) -> None:
        progress.start("extracting", len(targets), unit="parameters")
        # The names of factors depend on which parameters of a module have changed.
        by_owner: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            by_owner[target.owner].append(target)
        with open(self._spool, "wb") as file:
            for group in by_owner.values():
                self._module(group, file)
                progress.advance(len(group))
        progress.finish()

    def _module(self, group: Sequence[Target], file: BinaryIO) -> None:
        changes = [change for change in map(self._change, group) if change is not None]
        names = factor_names([change.target for change in changes])
        for change in changes:
            self.rows.append(change.row())
            if change.target.low_rank:
                self._written.append(change.target)
                for name, tensor in zip(names[change.target.name], change.tensors(), strict=True):
                    self._write(name, tensor, file)
            elif change.target.kind is Kind.NONE:
                self.left_out.append(change.target.name)
        if any(change.target.kind is Kind.SAVED for change in changes):
            for target in group:  # PEFT replaces the whole module
                self._written.append(target)
                # In float32: norms near 1 would lose much of their change in 16 bits.
                tensor = self._tuned.assemble(target.units, target.shape, torch.float32)
                self._write(PREFIX + target.name, tensor, file)

    def _change(self, target: Target) -> _Change | None:
        """Compute the factors of a parameter; None if it has not changed."""
        factors: list[Factors | None] = []
        change = base = error = 0.0
        for expert in range(target.experts):
            blocks, found = self._blocks(target, expert), None
            if target.low_rank:
                shape = (target.shape[-2], target.shape[-1])
                most = min(self._settings.rank or max(shape), *shape)
                found = factorise(blocks, shape, most, self._settings.energy, self._dtype)
                if found is not None and not found.finite:
                    raise NumericalError(
                        f"{target.name}: the factors of its change do not fit into "
                        f"{self._settings.dtype}",
                        hint='use dtype="float32"',
                    )
            factors.append(found)
            start = 0
            for block, before in blocks():
                change += float(block.double().square().sum())
                base += float(before.double().square().sum())
                if found is not None:
                    rows = found.b[start : start + block.shape[0]]
                    block = block - rows.to(block.dtype) @ found.a.to(block.dtype)
                elif target.kind is Kind.SAVED:
                    block = (block + before).float().to(block.dtype) - before - block
                error += float(block.double().square().sum())
                start += len(block) if block.dim() else 1
        return _Change(target, factors, change, base, error) if change else None

    def _blocks(self, target: Target, expert: int) -> Blocks:
        """Return what yields a matrix (or a vector) of the change and of the base, row by row.

        A small matrix is read once, a large one in parts if it is a whole tensor in both models.
        """
        shape, sides = target.shape, (self._tuned, self._origin)
        step = max(1, BLOCK_BYTES // (4 * shape[1])) if len(shape) == 2 else 0
        slots = {side.find(unit).slot for unit in target.units for side in sides}
        if step and step < shape[0] and slots == {WHOLE}:
            spans = [(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]
            return lambda: (self._read(target, expert, span) for span in spans)
        whole = [self._read(target, expert, None)]
        return lambda: whole

    def _read(
        self, target: Target, expert: int, span: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return rows of the change and of the base, in the loaded model's layout."""
        after, before = (
            self._side(side, target, expert, span) for side in (self._tuned, self._origin)
        )
        change = after - before
        if not bool(change.isfinite().all()):
            raise NumericalError(
                f"{target.name} holds NaN or infinity in one of the models",
                hint="extract an adapter from sound models",
            )
        return change, before

    def _side(
        self, side: StoredUnits, target: Target, expert: int, span: tuple[int, int] | None
    ) -> Tensor:
        units, stacked = target.units_of(expert), target.stacked
        if units[0].slot == WHOLE:
            read = side.read(units[0], span)
            return read.to(self._device, torch.promote_types(read.dtype, torch.float32))
        shape = (1, *target.shape[1:]) if stacked else target.shape
        block = side.assemble(units, shape, torch.float32, expert)
        return (block.squeeze(0) if stacked else block).to(self._device)

    def _write(self, name: str, tensor: Tensor, file: BinaryIO) -> None:
        self._infos.append(TensorInfo.of(name, tensor.dtype, tuple(tensor.shape)))
        file.write(as_bytes(tensor.contiguous()))

    def finish(self, base: str) -> None:
        """Write the adapter's two files. Refuse models without a difference."""
        if not self._infos:
            raise CheckpointError(
                f"{self._tuned.model.label} and {self._origin.model.label} do not differ in "
                "anything that an adapter can change",
                hint="check which models were named",
            )
        ranks = {row.name: row.rank for row in self.rows if row.rank is not None}
        config = adapter_config(self._written, ranks, self._settings.layout, base)
        write_adapter(self._folder, config, self._infos, self._spool)
        self._spool.unlink()

    def notices(self, targets: Sequence[Target]) -> Iterator[str]:
        """Yield what the adapter does not contain."""
        if self.left_out:
            yield (
                f"{counted(len(self.left_out), 'changed tensor')} cannot be part of an adapter: "
                f"{first_few(self.left_out)}; the error includes them"
            )
        covered = {unit.key for target in targets for unit in target.units}
        unused = [unit.tensor for key, unit in self._tuned.by_key.items() if key not in covered]
        if unused:
            yield (
                f"{counted(len(unused), 'stored tensor')} are not part of the loaded model and "
                f"were not compared: {first_few(unused)}"
            )


def write_adapter(
    folder: Path, config: Mapping[str, Any], infos: Sequence[TensorInfo], data: Path | None
) -> None:
    """Write the config, and the weights: a header, then `data` or zeros."""
    write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    header, _ = build_header(infos, PEFT_LAYOUT)
    with open(folder / _WEIGHTS, "wb") as file:
        file.write(header)
        if data is None:
            file.truncate(len(header) + sum(info.nbytes for info in infos))
        else:
            with open(data, "rb") as source:
                shutil.copyfileobj(source, file, BLOCK_BYTES)


def _rehearse(
    base: OpenModel, folder: Path, targets: Sequence[Target], settings: ExtractLoraSettings
) -> None:
    """Refuse, before anything is computed, an adapter that could not be merged into its base."""
    names = factor_names(targets)
    infos = []
    for target in targets:
        if target.low_rank:
            out, width = target.matrix
            shapes = ((target.experts, width), (out, target.experts))
            infos += [
                TensorInfo.of(name, Dtype.FLOAT32, shape)
                for name, shape in zip(names[target.name], shapes, strict=True)
            ]
    kept = [target for target in targets if target.low_rank]
    config = adapter_config(kept, dict.fromkeys(names, 1), settings.layout, "")
    try:
        write_adapter(folder, config, infos, None)
        AdaptedCheckpoint(base.checkpoint.path, folder).close()
    except CheckpointError as error:
        raise ArchitectureError(
            f"{base.label}: an adapter in the layout {settings.layout!r} cannot be merged into it "
            f"({error.message})",
            hint="choose another `layout`",
        ) from error


def _companions(report: ExtractLoraReport) -> dict[str, bytes]:
    command = {"model": report.model, "base": report.base, **report.settings}
    config = dump_document({"extract-lora": command})
    words = (
        f"{counted(sum(row.rank is not None for row in report.parameters), 'matrix', 'matrices')} "
        f"or stacks have factors. The adapter misses {report.error():.3g} of the change's norm."
    )
    card = model_card(
        title=Path(report.output).name,
        summary=f"The difference of `{in_code(report.model)}` and `{in_code(report.base)}` as a "
        "LoRA.",
        hub_models=hub_ids(report.base),
        sections=[("Extraction", words)],
        config=config,
        tags=("lora", "peft", "moemerge"),
    )
    return own_files(config, card, extract_lora=report.to_json())
