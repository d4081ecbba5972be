"""Refit the head: logits of the sources, from the merged model's final states.

A vocabulary is long, so its rows are fitted in groups; they share the Gram of what they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from moemerge.refitting.domains import Affine, DomainScales
from moemerge.refitting.linear import Inputs, Missing, fitted_by_lead, sum_up
from moemerge.refitting.ridge import Factor, Fit, RidgeRule, fit_map
from moemerge.runtime import ranks
from moemerge.text.batches import Batch

GROUP = 8192  # rows of the vocabulary that are fitted together
SAMPLED = 2048  # rows, spread over the vocabulary, whose held-out error chooses λ


def fit_head(
    merged: Affine,
    sources: Mapping[str, Affine],
    inputs: Inputs,
    theirs: Mapping[int, Tensor],
    scales: DomainScales,
    rule: RidgeRule,
    stored: torch.dtype,
) -> tuple[Tensor, Fit]:
    """The head's new weight. `theirs` are the sources' final states, by id of the batch."""

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
        sampled = [sum_up(inputs, rows, missing(some), scales)]
    ridge = ranks.made_by_lead(lambda: rule.choose("head", sampled))
    factor: Factor | None = None
    new, fits = torch.empty_like(merged.weight, dtype=stored), []
    for begin in range(0, count, GROUP):
        group = slice(begin, min(begin + GROUP, count))
        sums = sum_up(inputs, group.stop - group.start, missing(group), scales)
        if not ranks.leads():
            continue
        factor = factor or Factor(sums[0].gram, ridge)
        new[group], fit = fit_map(merged.weight[group], *sums, factor, stored, keep=False)
        fits.append(fit)

    def chosen() -> tuple[Tensor, Fit]:
        fit = _together(fits)
        return merged.weight.to(stored) if fit.kept else new, fit

    return fitted_by_lead(chosen)


def _rows(affine: Affine, rows: slice) -> Affine:
    bias = None if affine.bias is None else affine.bias[rows]
    return Affine(affine.weight[rows], bias).widened()


def _together(fits: list[Fit]) -> Fit:
    """Groups of one map: errors add up, and all of them stay as merged or none does."""
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
