"""Statistics files for tests, with made-up inputs or gradients behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.config.models import ModelRef
from moemerge.config.parameters import StatisticsKind
from moemerge.families.architecture import Architecture
from moemerge.families.roles import Role, Unit
from moemerge.statistics import Provenance
from moemerge.statistics.file import pack_symmetric, packed_size
from moemerge.statistics.provenance import family_name, model_fingerprint, tokenizer_fingerprint
from moemerge.statistics.writer import StatisticsWriter

NOT_LINEAR = (Role.NORM, Role.EMBEDDING, Role.ROUTER_BIAS, Role.SELECTION_BIAS)
SEQUENCES = 5
# Projections that read the same input share one tensor of the file.
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "w3": "w1"}


@dataclass
class Gathered:
    """A model's made-up inputs (tokens, in) or Fisher values, by unit."""

    file: Path
    inputs: dict[str, Tensor] = field(default_factory=dict)
    fisher: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0


def open_model(folder: Path | str) -> tuple[Checkpoint, Architecture]:
    checkpoint = Checkpoint.open(ModelRef.parse(str(folder)))
    return checkpoint, Architecture.of(checkpoint.config, checkpoint.tensors)


def is_linear(unit: Unit) -> bool:
    return len(unit.shape) == 2 and unit.role not in NOT_LINEAR


def gather(
    folder: Path | str,
    out: Path,
    kind: StatisticsKind = "gram",
    *,
    seed: int = 0,
    tokens: int = 120,
    visits: Mapping[str, int] | None = None,
    notices: Sequence[str] = (),
    **changed: object,
) -> Gathered:
    """Write `out`; `visits` says how many tokens the units with that part in their key get."""
    checkpoint, architecture = open_model(folder)
    units = architecture.units_by_key
    provenance = Provenance(
        model=checkpoint.label,
        family=family_name(architecture),
        model_fingerprint=model_fingerprint(checkpoint, architecture),
        tokenizer_fingerprint=tokenizer_fingerprint(checkpoint.tokenizer_folder),
        data_fingerprint="made up",
        tokens=tokens,
        sequences=SEQUENCES,
        seed=seed,
        version="test",
        dtype="float32",
        device="cpu",
    )
    provenance = provenance.model_copy(update=changed)
    found = Gathered(out, tokens=tokens)
    with StatisticsWriter(out, kind=kind, provenance=provenance, keys=units) as writer:
        if kind == "gram":
            _grams(writer, units, found, visits or {}, seed)
        else:
            _fishers(writer, units, found, visits or {}, seed)
        writer.commit(sequences=SEQUENCES, notices=notices)
    return found


def regmean(
    weights: Sequence[Tensor],
    grams: Sequence[tuple[Tensor, int]],
    lengths: Sequence[int],
    factor: float = 0.9,
) -> Tensor:
    """RegMean term by term, from each model's mean x xᵀ with its tokens, and its text's length.

    Of an expert with fewer than 16 tokens, G̃ has as much of all models' inputs as the model with
    the fewest tokens lacks.
    """
    counts = [tokens for _, tokens in grams]
    few = max(0, 16 - min(counts)) if min(counts) < min(lengths) else 0
    mean_length = sum(lengths) / len(lengths)
    pooled = sum(tokens * gram for gram, tokens in grams) / max(1, sum(counts))
    left, right = torch.zeros(()), torch.zeros(())
    for weight, (gram, tokens), length in zip(weights, grams, lengths, strict=True):
        term = tokens / length * gram + few / mean_length * pooled
        term = factor * term + (1 - factor) * torch.diag(term.diagonal())
        left, right = left + term, right + term @ weight.T
    if not left.any():
        return sum(weights) / len(weights)
    return torch.linalg.solve(left, right).T


def _count(unit: Unit, tokens: int, visits: Mapping[str, int]) -> int:
    for part, count in visits.items():
        if part in unit.key:
            return count
    return tokens // 3 if unit.expert is not None else tokens


def _grams(writer, units, found, visits, seed) -> None:
    groups: dict[str, list[Unit]] = {}
    for unit in units.values():
        if is_linear(unit):
            last = unit.key.rsplit(".", 2)[-2] if "." in unit.key else unit.key
            groups.setdefault(unit.key.replace(last, SHARED.get(last, last)), []).append(unit)
    for number, (name, group) in enumerate(sorted(groups.items())):
        width = group[0].shape[-1]
        g = torch.Generator().manual_seed(1000 * seed + number)
        mix = torch.randn(width, width, generator=g, dtype=torch.float64) / width**0.5
        count = _count(group[0], found.tokens, visits)
        x = torch.randn(count, width, generator=g, dtype=torch.float64) @ mix
        gram = (x.T @ x / max(1, count)).float()
        shapes = {unit.key: unit.shape for unit in group}
        writer.add(name, [packed_size(width)], pack_symmetric(gram), units=shapes, tokens=count)
        found.inputs.update({key: x for key in shapes})


def _fishers(writer, units, found, visits, seed) -> None:
    for number, unit in enumerate(sorted(units.values(), key=lambda u: u.key)):
        g = torch.Generator().manual_seed(1000 * seed + number)
        count = _count(unit, found.tokens, visits)
        value = torch.randn(unit.shape, generator=g).square() * 1e-6 * (count > 0)
        writer.add(unit.key, unit.shape, value, units={unit.key: unit.shape}, tokens=count)
        found.fisher[unit.key] = value


def unit_tensors(folder: Path | str) -> dict[str, Tensor]:
    """Every unit of a checkpoint as (out, in), by key, in float64."""
    checkpoint, architecture = open_model(folder)
    return {
        key: unit.slot.take(checkpoint.read(unit.tensor, unit.slot.rows)).double()
        for key, unit in architecture.units_by_key.items()
    }
