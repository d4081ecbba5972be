"""Write the difference of a model and its base as a LoRA: `moemerge extract-lora`."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from moemerge.checkpoint import TensorInfo, hub_ids, require_space
from moemerge.checkpoint.adapter import CONFIG, MISTAKEN, PEFT_LAYOUT, PREFIX
from moemerge.checkpoint.folder import ADAPTER_WEIGHTS
from moemerge.checkpoint.lora import TRANSPOSED_STACKS
from moemerge.checkpoint.model_card import in_code, model_card, own_files
from moemerge.checkpoint.output import OutputFolder, check_output, writing
from moemerge.checkpoint.reader import AdaptedCheckpoint, as_ref
from moemerge.checkpoint.safetensors_file import build_header
from moemerge.checkpoint.tensors import as_bytes
from moemerge.config.job_settings import ExtractLoraSettings, LoraLayout
from moemerge.config.models import ModelLike
from moemerge.config.yaml_lines import dump_document
from moemerge.conversion.units import StoredUnits
from moemerge.errors import ArchitectureError, CheckpointError, NumericalError
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import WHOLE, Role, Unit
from moemerge.forward.loading import loaded_architecture
from moemerge.repairs.routers import require_same_family
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import write_file
from moemerge.runtime.progress import Progress, counted, first_few

DEFAULT_RANK: Final = 16
BLOCK_BYTES: Final = 64 * 2**20  # of a matrix in float32 that is read at once


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
    hint = "name the model that it was trained from"
    require_same_family(origin, tuned, hint=hint)
    layers = [m.architecture.num_layers for m in (tuned, origin)]
    if layers[0] != layers[1]:
        raise CheckpointError(
            f"{tuned.label} has {layers[0]} layers, but {origin.label} has {layers[1]}", hint=hint
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
    pair = Pair(StoredUnits(tuned), StoredUnits(origin), resolve_device(settings.device))
    # A tensor that both models do without is computed by the model itself.
    known = {*pair.tuned.by_key, *pair.origin.by_key}
    targets = [t for t in find_targets(origin, settings.layout) if t.units[0].key in known]
    for unit in (unit for target in targets for unit in target.units):
        pair.tuned.find(unit)
        pair.origin.find(unit)

    place = OutputFolder(out, overwrite=overwrite, inputs=inputs)
    try:
        with writing(out):
            _require_mergeable(origin, place.path, targets, settings.layout)
        rows: list[ExtractedParameter] = []
        infos: list[TensorInfo] = []  # of the adapter's tensors
        written: list[Target] = []
        # The names of factors depend on which parameters of a module have changed.
        by_owner: dict[str, list[Target]] = defaultdict(list)
        for target in targets:
            by_owner[target.owner].append(target)
        spool = place.path / "factors.partial"  # a header needs all ranks, so it comes last
        progress.start("extracting", len(targets), unit="parameters")
        with writing(out), open(spool, "wb") as file:
            for group in by_owner.values():
                changes = [c for t in group if (c := measure_change(t, pair, settings)).norm]
                rows += [change.row() for change in changes]
                names = factor_names([change.target for change in changes])
                tensors: dict[str, Tensor] = {}
                for change in changes:
                    if change.target.low_rank:
                        written.append(change.target)
                        tensors |= zip(names[change.target.name], change.tensors(), strict=True)
                if any(change.target.kind is Kind.SAVED for change in changes):
                    for target in group:  # PEFT replaces the whole module
                        written.append(target)
                        # In float32: norms near 1 would lose much of their change in 16 bits.
                        whole = pair.tuned.assemble(target.units, target.shape, torch.float32)
                        tensors[PREFIX + target.name] = whole
                for name, tensor in tensors.items():
                    infos.append(TensorInfo.of(name, tensor.dtype, tuple(tensor.shape)))
                    file.write(as_bytes(tensor.contiguous()))
                progress.advance(len(group))
        progress.finish()
        if not infos:
            raise CheckpointError(
                f"{tuned.label} and {origin.label} do not differ in anything that an adapter can "
                "change",
                hint="check which models were named",
            )
        require_space(out, sum(info.nbytes for info in infos))
        references = [str(as_ref(one).as_named_in(out)) for one in (model, base)]
        ranks = {row.name: row.rank for row in rows if row.rank is not None}
        config = adapter_config(written, ranks, settings.layout, references[1])
        with writing(out):
            write_adapter(place.path, config, infos, spool)
            spool.unlink()
        report = ExtractLoraReport(
            model=references[0],
            base=references[1],
            output=str(out),
            settings=settings.model_dump(exclude_none=True),
            parameters=tuple(rows),
            adapter_bytes=sum(info.nbytes for info in infos),
            notices=tuple(_omissions(rows, targets, pair)),
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


def _omissions(
    rows: Sequence[ExtractedParameter], targets: Sequence[Target], pair: Pair
) -> list[str]:
    """Return notices of what the adapter does not contain."""
    notices = []
    impossible = {target.name for target in targets if target.kind is Kind.NONE}
    if left_out := [row.name for row in rows if row.name in impossible]:
        notices.append(
            f"{counted(len(left_out), 'changed tensor')} cannot be part of an adapter: "
            f"{first_few(left_out)}; the error includes them"
        )
    covered = {unit.key for target in targets for unit in target.units}
    if unused := [u.tensor for key, u in pair.tuned.by_key.items() if key not in covered]:
        notices.append(
            f"{counted(len(unused), 'stored tensor')} are not part of the loaded model and were "
            f"not compared: {first_few(unused)}"
        )
    return notices


# --- the change of one parameter ------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """The two models and the device for their decompositions."""

    tuned: StoredUnits
    origin: StoredUnits
    device: torch.device

    def read(
        self, target: Target, expert: int, span: tuple[int, int] | None
    ) -> tuple[Tensor, Tensor]:
        """Return rows of the change and of the base, in the loaded model's layout."""
        sides = []
        units, stacked = target.units_of(expert), target.stacked
        for side in (self.tuned, self.origin):
            if units[0].slot == WHOLE:
                read = side.read(units[0], span)
                side_rows = read.to(self.device, torch.promote_types(read.dtype, torch.float32))
            else:
                shape = (1, *target.shape[1:]) if stacked else target.shape
                block = side.assemble(units, shape, torch.float32, expert)
                side_rows = (block.squeeze(0) if stacked else block).to(self.device)
            sides.append(side_rows)
        change = sides[0] - sides[1]
        if not bool(change.isfinite().all()):
            raise NumericalError(
                f"{target.name} holds NaN or infinity in one of the models",
                hint="extract an adapter from sound models",
            )
        return change, sides[1]

    def blocks(self, target: Target, expert: int) -> Blocks:
        """Return what yields a matrix (or a vector) of the change and of the base, row by row.

        A small matrix is read once, a large one in parts if it is a whole tensor in both models.
        """
        shape = target.shape
        step = max(1, BLOCK_BYTES // (4 * shape[1])) if len(shape) == 2 else 0
        slots = {side.find(u).slot for u in target.units for side in (self.tuned, self.origin)}
        if step and step < shape[0] and slots == {WHOLE}:
            spans = [(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]
            return lambda: (self.read(target, expert, span) for span in spans)
        whole = [self.read(target, expert, None)]
        return lambda: whole


@dataclass(frozen=True)
class Change:
    """A parameter's change: the factors of each expert, and norms."""

    target: Target
    factors: Sequence[Factors | None]  # None for a zero matrix, or a parameter without factors
    norm: float  # of the change, of the base, and of what the factors miss
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
            self.norm,
            self.norm / self.base if self.base else 1.0,
            self.error / self.norm,
        )


def measure_change(target: Target, pair: Pair, settings: ExtractLoraSettings) -> Change:
    """Compute the factors of a parameter, and the norms of its change and of their error."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    factors: list[Factors | None] = []
    change = base = error = 0.0
    for expert in range(target.experts):
        blocks, found = pair.blocks(target, expert), None
        if target.low_rank:
            shape = (target.shape[-2], target.shape[-1])
            most = min(settings.rank or max(shape), *shape)
            found = factorise(blocks, shape, most, settings.energy, dtype)
        factors.append(found)
        if found and not (found.a.isfinite().all() and found.b.isfinite().all()):
            raise NumericalError(
                f"{target.name}: the factors of its change do not fit into {settings.dtype}",
                hint='use dtype="float32"',
            )
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
    return Change(target, factors, math.sqrt(change), math.sqrt(base), math.sqrt(error))


# Directions below this share of the largest squared singular value are rounding error.
_NOISE = 1e-14

# The rows of a matrix in order, each with something else; may be called twice.
Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Factors:
    """B A, the best approximation of its rank; the singular values are shared evenly."""

    b: Tensor  # (out, rank)
    a: Tensor  # (rank, in)


def factorise(
    blocks: Blocks, shape: tuple[int, int], most: int, energy: float | None, dtype: torch.dtype
) -> Factors | None:
    """Return the leading singular directions of a matrix in `dtype`; None for a zero matrix.

    They are eigenvectors of its smaller Gram matrix. In float64 these resolve everything in
    float32 inputs. Only a tall matrix may come in several blocks.
    """
    tall = shape[0] >= shape[1]
    changed = (block.double() for block, _ in blocks() if bool(block.any()))
    gram = sum(d.T @ d if tall else d @ d.T for d in changed)
    if not isinstance(gram, Tensor):
        return None
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0).clamp_min(0), vectors.flip(1)
    if not bool(squares[0] > 0):
        return None
    count = int((squares > _NOISE * squares[0]).sum())
    if energy is not None:
        kept = squares.cumsum(0) / squares.sum()
        count = min(count, 1 + int((kept < energy - _NOISE).sum()))
    count = min(count, most)
    short = vectors[:, :count]
    scale = squares[:count] ** 0.25  # the square root of the singular values
    if tall:
        b = torch.cat([(block.double() @ (short / scale)).float() for block, _ in blocks()])
        return Factors(b.to(dtype), (short * scale).T.float().to(dtype))
    ((block, _),) = blocks()
    a = (short / scale).T @ block.double()
    return Factors((short * scale).float().to(dtype), a.float().to(dtype))


# --- which parameters an adapter can change, and how PEFT names them ------------------------------

# Versions that read the expert stacks in this way; other readers decide by them.
_VERSIONS: Final[Mapping[LoraLayout, str]] = {
    "stacked": "0.19.1",
    "in-out": "0.18.1",
    "per-expert": "0.19.1",
}


class Kind(Enum):
    """How an adapter changes a parameter."""

    MODULE = "target_modules"
    PARAMETER = "target_parameters"
    EMBEDDING = "embedding"
    SAVED = "modules_to_save"  # stored whole
    NONE = "not possible"


@dataclass(frozen=True)
class Target:
    """A parameter of the loaded model, made of units."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    role: Role
    units: tuple[Unit, ...]
    flipped: bool = False  # PEFT reads the stored axes as (in, out)

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def stacked(self) -> bool:
        """Whether the leading axis counts experts."""
        return self.units[0].slot.squeeze and len(self.shape) == 3

    @property
    def experts(self) -> int:
        """The number of matrices, which share one rank."""
        return self.shape[0] if self.stacked else 1

    @property
    def low_rank(self) -> bool:
        return self.kind in (Kind.MODULE, Kind.PARAMETER, Kind.EMBEDDING)

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape (out, in) of each matrix, as PEFT reads it."""
        rows, columns = self.shape[-2:]
        return (columns, rows) if self.flipped else (rows, columns)

    @property
    def pattern(self) -> str:
        """The name that PEFT compares with rank_pattern."""
        return self.name if self.kind is Kind.PARAMETER else self.owner

    def units_of(self, expert: int) -> Sequence[Unit]:
        if not self.stacked:
            return self.units
        return [unit for unit in self.units if unit.slot.rows == (expert, expert + 1)]


def find_targets(base: OpenModel, layout: LoraLayout) -> list[Target]:
    """Return every parameter of the model, in its order."""
    return _modules(base) if layout == "per-expert" else _loaded(base, layout)


def _modules(base: OpenModel) -> list[Target]:
    """Return one module per matrix, under the names of the original checkpoints."""
    targets = []
    for unit in base.architecture.units_by_key.values():
        matrix = len(unit.shape) == 2 and unit.key.endswith(".weight")
        kind = Kind.MODULE if matrix else Kind.NONE
        if unit.role is Role.EMBEDDING and matrix:
            kind = Kind.EMBEDDING
        elif unit.role is Role.NORM and unit.key.endswith(".weight"):
            kind = Kind.SAVED
        targets.append(
            Target(unit.key, unit.shape, kind, unit.role, (unit,), kind is Kind.EMBEDDING)
        )
    return targets


def _loaded(base: OpenModel, layout: LoraLayout) -> list[Target]:
    """Return the parameters of transformers' model; stacks of experts stay stacks."""
    skeleton, architecture = loaded_architecture(base.checkpoint)
    parameters = {name for name, _ in skeleton.named_parameters()}
    tied = {n for n, _ in skeleton.named_parameters(remove_duplicate=False)} - parameters
    in_out = layout == "in-out" or architecture.model_type in TRANSPOSED_STACKS
    state = {n: v for n, v in skeleton.state_dict().items() if n not in tied}
    kinds = {
        name: _kind(skeleton, name, value.dim(), architecture.units(name)[0])
        if name in parameters
        else Kind.NONE
        for name, value in state.items()
    }
    adapted = {n.rpartition(".")[0] for n, k in kinds.items() if k is not Kind.NONE}
    targets = []
    for name, value in state.items():
        owner, kind = name.rpartition(".")[0], kinds[name]
        if kind is Kind.NONE and owner and owner not in adapted:
            module = skeleton.get_submodule(owner)
            kind = Kind.SAVED if not list(module.children()) else Kind.NONE
        flipped = kind is Kind.EMBEDDING or (value.dim() == 3 and in_out)
        targets.append(
            Target(
                name,
                tuple(value.shape),
                kind,
                architecture.role(name),
                architecture.units(name),
                flipped,
            )
        )
    return targets


def _kind(skeleton: nn.Module, name: str, axes: int, unit: Unit) -> Kind:
    owner = skeleton.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding):
        return Kind.EMBEDDING
    if isinstance(owner, nn.Linear) and axes == 2:
        mistaken = name.split(".")[-2] in MISTAKEN
        return Kind.PARAMETER if mistaken else Kind.MODULE
    stack = axes == 3 and unit.slot.squeeze
    return Kind.PARAMETER if stack or axes == 2 else Kind.NONE


def factor_names(targets: Iterable[Target]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted parameter.

    PEFT wraps the parameters of one module in each other: the last is the outermost, and each of
    them adds `.base_layer` to the names of those inside.
    """
    adapted = [target for target in targets if target.low_rank]
    wrapped: dict[str, list[str]] = {}
    for target in adapted:
        wrapped.setdefault(target.owner, []).append(target.name)
    names = {}
    for target in adapted:
        inside = wrapped[target.owner]
        depth = len(inside) - 1 - inside.index(target.name)
        root = f"{PREFIX}{target.owner}{'.base_layer' * depth}.lora_"
        embedding = target.kind is Kind.EMBEDDING
        ends = ("embedding_A", "embedding_B") if embedding else ("A.weight", "B.weight")
        names[target.name] = (root + ends[0], root + ends[1])
    return names


def adapter_config(
    targets: Sequence[Target], ranks: Mapping[str, int], layout: LoraLayout, base: str
) -> dict[str, Any]:
    """Return adapter_config.json for the targets that the adapter contains."""
    common = max(ranks.values(), key=list(ranks.values()).count) if ranks else 1
    others = {t.pattern: ranks[t.name] for t in targets if t.low_rank and ranks[t.name] != common}
    modules = [t.owner for t in targets if t.kind in (Kind.MODULE, Kind.EMBEDDING)]
    parameters = [t.name for t in targets if t.kind is Kind.PARAMETER]
    saved = sorted({t.owner for t in targets if t.kind is Kind.SAVED})
    return {
        "peft_type": "LORA",
        "peft_version": _VERSIONS[layout],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": common,
        "lora_alpha": common,
        "rank_pattern": {re.escape(name): rank for name, rank in others.items()},
        "alpha_pattern": {re.escape(name): rank for name, rank in others.items()},
        # With an empty list, PEFT would choose modules itself.
        "target_modules": modules or r"(?!)",
        "target_parameters": parameters or None,
        "modules_to_save": saved or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


# --- files ----------------------------------------------------------------------------------------


def write_adapter(
    folder: Path, config: Mapping[str, Any], infos: Sequence[TensorInfo], data: Path | None
) -> None:
    """Write the config, and the weights: a header, then `data` or zeros."""
    write_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    header, _ = build_header(infos, PEFT_LAYOUT)
    with open(folder / ADAPTER_WEIGHTS[0], "wb") as file:
        file.write(header)
        if data is None:
            file.truncate(len(header) + sum(info.nbytes for info in infos))
        else:
            with open(data, "rb") as source:
                shutil.copyfileobj(source, file, BLOCK_BYTES)


def _require_mergeable(
    base: OpenModel, folder: Path, targets: Sequence[Target], layout: LoraLayout
) -> None:
    """Refuse, before anything is computed, an adapter that could not be merged into its base."""
    names = factor_names(targets)
    kept = [target for target in targets if target.low_rank]
    infos = []
    for target in kept:
        out, width = target.matrix
        shapes = ((target.experts, width), (out, target.experts))
        infos += [
            TensorInfo.of(name, Dtype.FLOAT32, shape)
            for name, shape in zip(names[target.name], shapes, strict=True)
        ]
    try:
        write_adapter(
            folder, adapter_config(kept, dict.fromkeys(names, 1), layout, ""), infos, None
        )
        AdaptedCheckpoint(base.checkpoint.path, folder).close()
    except CheckpointError as error:
        raise ArchitectureError(
            f"{base.label}: an adapter in the layout {layout!r} cannot be merged into it "
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
