"""Task vectors δ = θ - θ_0, and the two ways of adding them to the base."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.families.roles import Role
from moemerge.methods._arithmetic import (
    ZERO_SUM,
    Weighted,
    average,
    bits,
    chunk_size,
    chunks,
    flat,
    scratch,
    sign_bit,
    weight_sum,
)
from moemerge.methods.method import ModelTensor, UnitInfo, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Thinned(Weighted):
    """A model's weight, and the density of its task vector."""

    density: float = param(
        1.0, minimum=0, maximum=1, help="fraction of the task vector's elements that is kept"
    )


@dataclass(frozen=True)
class SumOptions:
    """Options of every sum of task vectors. Each method declares its own defaults."""

    normalize: bool = param(False, help="divide by the sum of the weights")
    rescale: bool = param(False, help="rescale the kept elements to the original L1 norm")
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")
    int8_mask: bool = param(False, help="accepted for mergekit's configs; has no effect here")


@dataclass
class TaskVector:
    """δ of one model, flat in (out, in) order; functions may change it in place.

    The task vector is `scale`·values; `weight` is the model's weight.
    """

    values: Tensor
    weight: float
    scale: float = 1.0


def flat_difference(tensor: Tensor, base: Tensor) -> Tensor:
    """Return θ - θ_0 as a new flat tensor in (out, in) order."""
    return torch.sub(flat(tensor), flat(base))


def task_vector(model: ModelTensor, base: Tensor) -> TaskVector:
    """Return a model's difference from the base, with the model's weight."""
    return TaskVector(flat_difference(model.tensor, base), model.params.weight)


def add_weighted(
    base: Tensor, vectors: Sequence[TaskVector], *, normalize: bool, factor: float
) -> Tensor:
    """Return θ_0 + factor·Σ w_i δ_i [/ Σ w_i]. Overwrites the task vectors."""
    origin = flat(base)
    out = vectors[0].values  # read before it is written, chunk by chunk
    if normalize:
        factor /= weight_sum([v.weight for v in vectors])
    (total,) = scratch(origin, 1)
    for at in chunks(origin):
        acc = total[: at.stop - at.start]
        _sum_([v.values[at] for v in vectors], [v.weight * v.scale for v in vectors], out=acc)
        torch.add(origin[at], acc, alpha=factor, out=out[at])
    return out.view(base.shape)


def add_elected(
    base: Tensor,
    vectors: Sequence[TaskVector],
    *,
    normalize: bool,
    factor: float,
    election: str = "weighted",
    floor: float | None = None,
) -> Tensor:
    """Return θ_0 + factor·Δ; in each element only task vectors of the elected sign count.

    s = sign(Σ v_i), 0 -> +1, with v_i = w_i δ_i (`weighted`) or δ_i (`unweighted`);
    m_i = [sign(v_i) = s];  Δ = Σ w_i δ_i m_i [/ Σ w_i m_i, zero replaced by 1].
    `floor` is the smallest divisor, if any. Overwrites the task vectors.
    """
    origin = flat(base)
    out = vectors[0].values  # read before it is written, chunk by chunk
    weights, scales = [v.weight for v in vectors], [v.scale for v in vectors]
    gains = weights
    if election == "weighted":  # the votes are what is summed
        scales = [w * s for w, s in zip(weights, scales, strict=True)]
        gains = [1.0] * len(vectors)
    step = chunk_size(origin.device) // 2  # all buffers should fit into the cache
    buffers = origin.new_empty(len(vectors) + 2, min(step, origin.numel()))
    for start in range(0, origin.numel(), step):
        at = slice(start, min(start + step, origin.numel()))
        here = buffers[:, : at.stop - at.start]
        every, total, agreed = here[:-2], here[-2], here[-1]
        votes = every.unbind()
        for vote, vector, scale in zip(votes, vectors, scales, strict=True):
            torch.mul(vector.values[at], scale, out=vote)
        _sum_(votes, [1.0] * len(votes), out=total)
        # Exact cancellation yields +0 and elects plus. Only zeros yield -0.
        flip = bits(total).bitwise_and_(sign_bit(total.dtype))
        bits(every).bitwise_xor_(flip)
        every.clamp_min_(0)  # magnitudes of the values with the elected sign
        _sum_(votes, gains, out=agreed)
        if normalize:
            every.sign_()
            divisor = votes[0]
            _sum_(votes, weights, out=divisor)
            agreed.div_(_nonzero_(divisor, weights, floor))
        bits(agreed).bitwise_xor_(flip)
        torch.add(origin[at], agreed, alpha=factor, out=out[at])
    return out.view(base.shape)


def _sum_(terms: Sequence[Tensor], weights: Sequence[float], *, out: Tensor) -> None:
    """Compute Σ w_i x_i from left to right."""
    first, *rest = zip(terms, weights, strict=True)
    if first[1] == 1 and rest:  # saves a pass
        torch.add(first[0], rest[0][0], alpha=rest[0][1], out=out)
        del rest[0]
    else:
        torch.mul(*first, out=out)
    for term, weight in rest:
        out.add_(term, alpha=weight)


def _nonzero_(divisor: Tensor, weights: Sequence[float], floor: float | None) -> Tensor:
    """Replace zeros of a sum of some of the weights in place, and return it."""
    if floor is not None:
        return divisor.clamp_min_(floor)
    if min(weights) < 0:
        return divisor.masked_fill_(divisor.abs() < ZERO_SUM, 1.0)
    # With positive weights, a nonzero sum is at least the smallest weight.
    return divisor.clamp_min_(min((w for w in weights if w > 0), default=1.0))


# --- methods for linear layers --------------------------------------------------------------------

# Matrices that are not linear layers: rows are looked up or scaled, not multiplied with inputs.
NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})


@dataclass(frozen=True)
class OthersOptions:
    """How tensors other than linear layers are merged."""

    others: str = param(
        "average",
        choices=("average", "base"),
        help="norms, embeddings, heads and biases: average of the models, or the base's own",
    )


@dataclass(frozen=True)
class SpectralOptions(OthersOptions):
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


def is_linear(base: Tensor, unit: UnitInfo) -> bool:
    return base.dim() == 2 and base.numel() > 0 and unit.role not in NOT_LINEAR


def changes(inputs: Sequence[ModelTensor], base: Tensor) -> list[Tensor]:
    """Return the task vectors of the models that changed this weight.

    Experts that no token reached in fine-tuning keep the base's weights, up to rounding to the
    stored dtype. Methods that normalise would otherwise amplify this rounding error.
    """
    return [i.tensor - base for i in inputs if not _is_unchanged(i.tensor, base)]


def of_task_vectors(
    function: Callable[[Tensor, list[Tensor], Any, UnitInfo], Tensor],
) -> Callable[[Sequence[ModelTensor], Tensor, Any, UnitInfo], Tensor]:
    """Make a merge function of a linear layer's base and `changes`, of which there is at least one.

    Norms, embeddings, heads and biases are merged as the option `others` states.
    """

    @functools.wraps(function)
    def merge(inputs: Sequence[ModelTensor], base: Tensor, options: Any, unit: UnitInfo) -> Tensor:
        linear = is_linear(base, unit)
        if not linear and options.others == "average":
            return average(inputs)
        vectors = changes(inputs, base) if linear else []
        if not vectors:
            return base.clone(memory_format=torch.contiguous_format)
        return function(base, vectors, options, unit)

    return merge


def _is_unchanged(tensor: Tensor, base: Tensor) -> bool:
    """Return whether the tensors are equal, or one is the other rounded to a narrower dtype."""
    if torch.equal(tensor, base):
        return True
    for dtype in (torch.bfloat16, torch.float16):
        a, b = tensor.to(dtype), base.to(dtype)
        if not torch.equal(a, b):
            continue
        if torch.equal(a.to(tensor.dtype), tensor) or torch.equal(b.to(base.dtype), base):
            return True
    return False
