"""Which parameters of a loaded model an adapter can change, and how PEFT names them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn

from moemerge.checkpoint.adapter import MISTAKEN, PREFIX
from moemerge.checkpoint.lora import TRANSPOSED_STACKS
from moemerge.config.job_settings import LoraLayout
from moemerge.errors import CheckpointError
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Role, Unit
from moemerge.forward.loading import loaded_architecture

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


# --- units by key, which are the same in every layout ---------------------------------------------


@dataclass(frozen=True)
class StoredUnits:
    """The units of a checkpoint by key."""

    model: OpenModel

    @property
    def by_key(self) -> Mapping[str, Unit]:
        return self.model.architecture.units_by_key

    def find(self, unit: Unit) -> Unit:
        """Return this model's counterpart of a unit. Refuse one that is missing or differs."""
        own = self.by_key.get(unit.key)
        if own is None or own.shape != unit.shape:
            found = "is missing" if own is None else f"has shape {list(own.shape)}"
            raise CheckpointError(
                f"{self.model.label}: {unit.key} {found}, expected {list(unit.shape)}",
                hint="both models must be of one size, and their downloads complete",
            )
        return own

    def read(self, unit: Unit, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a unit as an (out, in) view; `rows` only for one that is a whole tensor."""
        own = self.find(unit)
        return own.slot.take(self.model.checkpoint.read(own.tensor, rows or own.slot.rows))

    def assemble(
        self, units: Sequence[Unit], shape: Sequence[int], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        """Return a tensor of another layout, or its rows from `start` on: one expert of a stack."""
        block = torch.empty(tuple(shape), dtype=dtype)
        for unit in units:
            rows = unit.slot.rows
            part = block if rows is None else block[rows[0] - start : rows[1] - start]
            unit.slot.take(part).copy_(self.read(unit))
        return block


# --- truncated singular value decompositions ------------------------------------------------------

# Directions below this share of the largest squared singular value are rounding error.
_NOISE = 1e-14

# The rows of a matrix in order, each with something else; may be called twice.
Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Factors:
    """B A, the best approximation of its rank; the singular values are shared evenly."""

    b: Tensor  # (out, rank)
    a: Tensor  # (rank, in)

    @property
    def finite(self) -> bool:
        return bool(self.a.isfinite().all()) and bool(self.b.isfinite().all())


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
