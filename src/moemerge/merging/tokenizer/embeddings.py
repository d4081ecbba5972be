"""Embeddings and heads brought to the output's vocabulary, before a method sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from moemerge.config.models import ModelRef
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.plan import MISSING, TokenizerPlan

# Means over models and over a vocabulary are taken in this precision, then rounded to the input's.
MEAN_DTYPE: Final = torch.float32


def to_output_vocabulary(
    plan: TokenizerPlan, embeddings: Mapping[ModelRef, Tensor]
) -> dict[ModelRef, Tensor]:
    """Each model's (rows, width) tensor as (plan.output_rows, width), in its own dtype.

    Also takes biases of a head, (rows,). `embeddings` must have every model of the plan: a token
    that one lacks is filled from the others.
    """
    _check(plan, embeddings)
    positions = torch.tensor(list(plan.fill), dtype=torch.long)
    filled = fill_rows(plan, embeddings)  # (fills, width)
    return {
        model: map_rows(
            embedding, plan.rows[model], plan.tokens, positions, filled, plan.output_rows
        )
        for model, embedding in embeddings.items()
    }


def preparer(
    plan: TokenizerPlan, models: Sequence[ModelRef]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """`to_output_vocabulary` for tensors that come as a list, one for each of `models`."""

    def prepare(tensors: Sequence[Tensor]) -> list[Tensor]:
        mapped = to_output_vocabulary(plan, dict(zip(models, tensors, strict=True)))
        return [mapped[model] for model in models]

    return prepare


def fill_rows(plan: TokenizerPlan, embeddings: Mapping[ModelRef, Tensor]) -> Tensor:
    """(fills, width): for each entry of `plan.fill` the mean of the rows it names, or zero."""
    like = next(iter(embeddings.values()))
    total = torch.zeros(
        (len(plan.fill), *like.shape[1:]), dtype=_mean_dtype(like), device=like.device
    )
    counts = torch.tensor([max(len(rows), 1) for rows in plan.fill.values()], device=like.device)
    for model, embedding in embeddings.items():
        pairs = [
            (at, row)
            for at, rows in enumerate(plan.fill.values())
            for source, row in rows
            if source == model
        ]
        if pairs:
            at, row = torch.tensor(pairs, device=embedding.device).unbind(1)
            total.index_add_(0, at, embedding[row].to(total.dtype))
    return total / counts.view(-1, *[1] * (total.dim() - 1))


def map_rows(
    embedding: Tensor, rows: Tensor, tokens: Tensor, positions: Tensor, filled: Tensor, size: int
) -> Tensor:
    """One model's embedding in the output's vocabulary.

    Token k stands in row tokens[k] and comes from embedding[rows[k]]; where rows[k] is MISSING,
    from `filled`, whose rows belong to the k in `positions`. Rows without a token get the mean.
    """
    rows, tokens, positions = (t.to(embedding.device) for t in (rows, tokens, positions))
    found = embedding[rows.clamp(min=0)]  # (tokens, width)
    lacking = rows[positions] == MISSING
    found[positions[lacking]] = filled[lacking].to(found.dtype)
    if len(tokens) == size:  # ascending and distinct: they are 0 ... size - 1
        return found
    mean = found.mean(0, dtype=_mean_dtype(found)).to(found.dtype)
    out = mean.expand(size, *mean.shape).clone()
    out[tokens] = found
    return out


def _mean_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, MEAN_DTYPE)


def _check(plan: TokenizerPlan, embeddings: Mapping[ModelRef, Tensor]) -> None:
    missing = [str(m) for m in plan.rows if m not in embeddings]
    unknown = [str(m) for m in embeddings if m not in plan.rows]
    if missing or unknown:
        raise TokenizerError(
            f"an embedding needs every model of the tokenizer's plan; missing: {missing}, "
            f"unexpected: {unknown}",
            hint="models that share a vocabulary must all take part in embedding and head",
        )
    widths = {str(m): tuple(e.shape[1:]) for m, e in embeddings.items()}
    if len(set(widths.values())) > 1:
        raise TokenizerError(
            f"embeddings of different width cannot be merged: {widths}",
            hint="merge models of one size only",
        )
    for model, embedding in embeddings.items():
        needed = int(plan.rows[model].max()) + 1
        if embedding.shape[0] < needed:
            raise TokenizerError(
                f"{model}: an embedding of {embedding.shape[0]} rows, {needed} expected",
                hint="its embedding and head disagree in size; the checkpoint is damaged",
            )
