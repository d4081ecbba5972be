"""Map embeddings and heads of models with different vocabularies to the output's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moemerge.checkpoint import locate
from moemerge.config.models import ModelRef
from moemerge.config.resolve import NormalisedMerge
from moemerge.config.schema import TokenizerSettings
from moemerge.errors import TokenizerError
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Role, Unit
from moemerge.merging.plan import Prepare
from moemerge.merging.tokenizer.plan import (
    MISSING,
    TokenizerPlan,
    plan_tokenizer,
    refuse_unlike_sizes,
)
from moemerge.merging.tokenizer.vocab import read_vocabulary
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_output_vocabulary(
    plan: TokenizerPlan, models: Sequence[ModelRef], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Map each model's (rows, width) tensor to (plan.output_rows, width), in its own dtype.

    Also maps biases of a head, (rows,). `models` must contain every model of the plan, because
    missing tokens are filled from other models.
    """
    embeddings = dict(zip(models, tensors, strict=True))
    _check(plan, embeddings)
    positions = torch.tensor(list(plan.fill), dtype=torch.long)
    filled = fill_rows(plan, embeddings)  # (fills, width)
    return [
        map_rows(tensor, plan.rows[model], plan.tokens, positions, filled, plan.output_rows)
        for model, tensor in zip(models, tensors, strict=True)
    ]


def fill_rows(plan: TokenizerPlan, embeddings: Mapping[ModelRef, Tensor]) -> Tensor:
    """Return (fills, width): for each entry of `plan.fill` the mean of its rows, or zero."""
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
    """Return one model's embedding in the output's vocabulary.

    Token k is in row tokens[k] and comes from embedding[rows[k]]. If rows[k] is MISSING, it comes
    from `filled`, whose rows belong to the k in `positions`. Rows without a token get the mean.
    """
    rows, tokens, positions = (t.to(embedding.device) for t in (rows, tokens, positions))
    values = embedding[rows.clamp(min=0)]  # (tokens, width)
    missing = rows[positions] == MISSING
    values[positions[missing]] = filled[missing].to(values.dtype)
    if len(tokens) == size:  # ascending and distinct: they are 0 ... size - 1
        return values
    mean = values.mean(0, dtype=_mean_dtype(values)).to(values.dtype)
    out = mean.expand(size, *mean.shape).clone()
    out[tokens] = values
    return out


def _mean_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype for means, which are then rounded to the input's dtype."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _check(plan: TokenizerPlan, embeddings: Mapping[ModelRef, Tensor]) -> None:
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


@dataclass(frozen=True)
class Vocabularies:
    """Maps tensors with a row per token. Without a plan, all vocabularies are equal."""

    models: Mapping[str, ModelRef]
    plan: TokenizerPlan | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        return () if self.plan is None else self.plan.warnings

    def spans(self, unit: Unit) -> bool:
        """Return whether this unit has a row per token and must be mapped."""
        if self.plan is None or not self.plan.changes or unit.layer is not None or not unit.shape:
            return False
        return unit.role in (Role.EMBEDDING, Role.HEAD) and "wpe." not in unit.key

    def shape(self, unit: Unit) -> tuple[int, ...]:
        """Return the output shape of a unit with a row per token."""
        assert self.plan is not None
        return (self.plan.output_rows, *unit.shape[1:])

    def prepare(self, unit: Unit, order: Sequence[str]) -> Prepare:
        """Return the function that maps the tensors of the models `order`."""
        assert self.plan is not None
        refs = [self.models[name] for name in order]
        absent = [str(m) for m in self.plan.rows if m not in refs]
        if absent:
            raise TokenizerError(
                f"{unit.tensor} is merged without {', '.join(absent)}, but the output's vocabulary "
                "is made of all models' tokens",
                hint="let every model take part in the first and the last slice, or leave "
                "`tokenizer` out",
            )
        return partial(to_output_vocabulary, self.plan, refs)


def plan_vocabularies(
    merge: NormalisedMerge, models: Mapping[str, OpenModel], settings: TokenizerSettings | None
) -> Vocabularies:
    """Read the tokenizers and plan the output's, or check that no mapping is needed."""
    rows = {merge.models[name]: _embedding_rows(model) for name, model in models.items()}
    known = {ref: count for ref, count in rows.items() if count is not None}
    if settings is None:
        refuse_unlike_sizes(known)
        return Vocabularies(merge.models)
    if len(known) < len(rows):
        raise TokenizerError(
            "a model has no embedding that the tokenizer's rows could belong to",
            hint="leave `tokenizer` and `tokenizer_source` out of the config",
        )
    vocabularies = {
        merge.models[name]: read_vocabulary(model.checkpoint.tokenizer_folder, model.label)
        for name, model in models.items()
    }
    donor = settings.source
    if isinstance(donor, ModelRef) and donor not in vocabularies:
        # A tokenizer may come from a model that is not merged; its weights are not read.
        vocabularies[donor] = read_vocabulary(locate(donor.path, donor.revision), str(donor))
    order = [merge.models[name] for name in models]
    plan = plan_tokenizer(
        settings, vocabularies, base=merge.base_model, order=order, embedding_rows=known
    )
    return Vocabularies(merge.models, plan)


def _embedding_rows(model: OpenModel) -> int | None:
    """Return the smaller number of rows of embedding and head."""
    names = model.architecture.embedding_names()
    tensors = model.checkpoint.tensors
    return min((tensors[n].shape[0] for n in (names.input, names.head) if n), default=None)
