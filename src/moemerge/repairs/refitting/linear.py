"""Refit one linear map, or the head, when all batches have stopped before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.repairs.refitting.job import RefitJob
from moemerge.repairs.refitting.least_squares import (
    Affine,
    Factor,
    Fit,
    FitSums,
    RidgeRule,
    fit_map,
)
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

# Values of one block of outputs.
BLOCK_VALUES = {"cpu": 2**23, "cuda": 2**27}
# (batch, rows, their inputs) -> residuals of the map (n, out), and the factor of its output
Missing = Callable[[Batch, slice, Tensor], tuple[Tensor, Tensor | float]]


@dataclass
class Inputs:
    """The inputs of a map, by batch; the Gram is summed once for maps that share them."""

    batches: Sequence[Batch]
    values: Sequence[Tensor]  # (tokens, in) by batch
    sums: tuple[FitSums, FitSums] | None = None  # of the first map, for all to share their Gram

    @property
    def width(self) -> int:
        return self.values[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.values[0].device


def sum_up(
    job: RefitJob, inputs: Inputs, outputs: int, missing: Missing
) -> tuple[FitSums, FitSums]:
    """Return sums over calibration rows and over held-out rows; rank 0 gets those of all ranks."""
    fresh = inputs.sums is None
    if inputs.sums is None:
        shape = outputs, inputs.width, inputs.device
        sums = inputs.sums = FitSums.empty(*shape), FitSums.empty(*shape)
    else:
        calibration, held = inputs.sums
        sums = calibration.sharing_gram(outputs), held.sharing_gram(outputs)
    for batch, x in zip(inputs.batches, inputs.values, strict=True):
        for rows in blocks(x.shape[0], max(outputs, inputs.width), x.device):
            part = x[rows]
            scale = torch.full((1,), job.scale(batch), dtype=torch.float64, device=x.device)
            residual, factor = missing(batch, rows, part)
            sums[batch.holdout].add(part, residual, scale, factor=factor, gram=fresh)
    for one in sums:
        one.add_up(job.ranks, gram=fresh)
    return sums


def blocks(tokens: int, width: int, device: torch.device) -> Iterator[slice]:
    size = max(1, BLOCK_VALUES.get(device.type, BLOCK_VALUES["cpu"]) // max(1, width))
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def fitted_by_lead(fit: Callable[[], tuple[Tensor, Fit]], ranks: Ranks) -> tuple[Tensor, Fit]:
    """Run a fit on rank 0, which alone has the sums, and return the result in every rank."""
    if ranks.count == 1:
        return fit()

    def made() -> tuple[Tensor, Fit]:
        weight, worth = fit()
        return weight.cpu(), worth

    return ranks.call_on_lead(made)


# --- the head: logits of the sources, from the merged model's final states ------------------------
# A vocabulary is large, so its rows are fitted in groups that share the Gram of their inputs.

GROUP = 8192  # rows of the vocabulary that are fitted together
SAMPLED = 2048  # rows, spread over the vocabulary, whose held-out error chooses λ


def fit_head(
    job: RefitJob,
    merged: Affine,
    sources: Mapping[str, Affine],
    inputs: Inputs,
    theirs: Mapping[int, Tensor],
    rule: RidgeRule,
    stored: torch.dtype,
) -> tuple[Tensor, Fit]:
    """Return the head's new weight. `theirs` are the sources' final states, by id of the batch."""

    def missing(rows_of: slice) -> Missing:
        now = _rows(merged, rows_of)
        wanted = {name: _rows(affine, rows_of) for name, affine in sources.items()}

        def of(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
            return wanted[batch.domain](theirs[id(batch)][rows]) - now(x), 1.0

        return of

    count = merged.weight.shape[0]
    sampled = []
    if rule.fixed is None:
        some = slice(0, count, max(1, count // SAMPLED))
        rows = len(range(*some.indices(count)))
        sampled = [sum_up(job, inputs, rows, missing(some))]
    ridge = job.ranks.call_on_lead(lambda: rule.choose("head", sampled))
    factor: Factor | None = None
    new, fits = torch.empty_like(merged.weight, dtype=stored), []
    for begin in range(0, count, GROUP):
        group = slice(begin, min(begin + GROUP, count))
        sums = sum_up(job, inputs, group.stop - group.start, missing(group))
        if not job.ranks.leads:
            continue
        factor = factor or Factor(sums[0].gram, ridge)
        new[group], fit = fit_map(merged.weight[group], *sums, factor, stored, keep=False)
        fits.append(fit)

    def chosen() -> tuple[Tensor, Fit]:
        fit = _together(fits)
        return merged.weight.to(stored) if fit.kept else new, fit

    return fitted_by_lead(chosen, job.ranks)


def _rows(affine: Affine, rows: slice) -> Affine:
    bias = None if affine.bias is None else affine.bias[rows]
    return Affine(affine.weight[rows], bias).widened()


def _together(fits: list[Fit]) -> Fit:
    """Combine groups of one map: errors add up, and all groups are kept or none is."""
    before, after = sum(f.before for f in fits), sum(f.after for f in fits)
    held_before = held_after = None
    kept = after > before
    if fits[0].held_tokens:
        held_before = sum(f.held_before or 0.0 for f in fits)
        held_after = sum(f.held_after or 0.0 for f in fits)
        kept = held_after >= held_before
    if kept:
        after, held_after = before, held_before
    return replace(
        fits[0],
        before=before,
        after=after,
        held_before=held_before,
        held_after=held_after,
        kept=kept,
    )
