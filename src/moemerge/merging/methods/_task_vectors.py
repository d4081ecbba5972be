"""Task vectors δ = θ - θ_0, thinned out or not, and the two ways of adding them to the base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.merging.method import ModelTensor, param
from moemerge.merging.methods._arithmetic import bits, chunks, flat, scratch, sign_bit
from moemerge.merging.methods._weights import ZERO_SUM, Weighted, weight_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Thinned(Weighted):
    """A model's share, and how much of its task vector survives."""

    density: float = param(
        1.0, minimum=0, maximum=1, help="fraction of the task vector's elements that is kept"
    )


@dataclass(frozen=True)
class SumOptions:
    """What every sum of task vectors understands. Each method states its own defaults."""

    normalize: bool = param(False, help="divide by the sum of the weights")
    rescale: bool = param(False, help="scale what is kept back to the whole's L1 norm")
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")
    int8_mask: bool = param(False, help="accepted for mergekit's configs; has no effect here")


ELECTION_HELP = "what votes on an element's sign: task vectors times weight, or as they are"


@dataclass
class TaskVector:
    """δ of one model, flat in canonical order and free to be changed.

    What counts is `scale`·values; `weight` is the model's share.
    """

    values: Tensor
    weight: float
    scale: float = 1.0


def difference(tensor: Tensor, base: Tensor) -> Tensor:
    """θ - θ_0 as a new flat tensor in canonical order."""
    return torch.sub(flat(tensor), flat(base))


def task_vector(model: ModelTensor, base: Tensor) -> TaskVector:
    """A model's difference from the base, with the model's weight."""
    return TaskVector(difference(model.tensor, base), model.params.weight)


def add_weighted(
    base: Tensor, vectors: Sequence[TaskVector], *, normalize: bool, factor: float
) -> Tensor:
    """θ_0 + factor·Σ w_i δ_i [/ Σ w_i]. Uses up the task vectors."""
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
    """θ_0 + factor·Δ, where per element only the task vectors of the elected sign count.

    s = sign(Σ v_i), 0 -> +1, with v_i = w_i δ_i (`weighted`) or δ_i (`unweighted`);
    m_i = [sign(v_i) = s];  Δ = Σ w_i δ_i m_i [/ Σ w_i m_i, zero replaced by 1].
    `floor` is the least divisor where a method states one. Uses up the task vectors.
    """
    origin = flat(base)
    out = vectors[0].values  # read before it is written, chunk by chunk
    shares = _Shares.of(vectors, weighted=election == "weighted")
    buffers = scratch(origin, len(vectors) + 3)
    for at in chunks(origin):
        *votes, total, agreed, divisor = (x[: at.stop - at.start] for x in buffers)
        flip = _vote(votes, total, [v.values[at] for v in vectors], shares.vote)
        for vote in votes:
            bits(vote).bitwise_xor_(flip)
            vote.clamp_min_(0)  # what agrees with the elected sign, turned positive
        _sum_(votes, shares.gain, out=agreed)
        if normalize:
            for vote in votes:
                vote.sign_()
            _sum_(votes, shares.divisor, out=divisor)
            agreed.div_(shares.guard_(divisor, floor))
        bits(agreed).bitwise_xor_(flip)
        torch.add(origin[at], agreed, alpha=factor, out=out[at])
    return out.view(base.shape)


def _vote(
    votes: Sequence[Tensor], total: Tensor, values: Sequence[Tensor], scales: Sequence[float]
) -> Tensor:
    """Fill `votes` with the scaled values; return the elected sign's bit, inside `total`."""
    for vote, value, scale in zip(votes, values, scales, strict=True):
        torch.mul(value, scale, out=vote)
    _sum_(votes, [1.0] * len(votes), out=total)
    # An exact cancellation gives +0, which elects plus as it should; -0 comes of zeros alone.
    return bits(total).bitwise_and_(sign_bit(total.dtype))


def _sum_(terms: Sequence[Tensor], weights: Sequence[float], *, out: Tensor) -> None:
    """Σ w_i x_i, left to right."""
    torch.mul(terms[0], weights[0], out=out)
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        out.add_(term, alpha=weight)


@dataclass(frozen=True)
class _Shares:
    """Per model: what its values are multiplied with to vote, to be summed, and to divide."""

    vote: tuple[float, ...]
    gain: tuple[float, ...]
    divisor: tuple[float, ...]

    @classmethod
    def of(cls, vectors: Sequence[TaskVector], *, weighted: bool) -> _Shares:
        weights = tuple(v.weight for v in vectors)
        scales = tuple(v.scale for v in vectors)
        if weighted:
            votes = tuple(w * s for w, s in zip(weights, scales, strict=True))
            return cls(votes, (1.0,) * len(weights), weights)
        return cls(scales, weights, weights)

    def guard_(self, divisor: Tensor, floor: float | None) -> Tensor:
        """The divisor with zero replaced, in place."""
        if floor is not None:
            return divisor.clamp_min_(floor)
        if min(self.divisor) < 0:
            return divisor.masked_fill_(divisor.abs() < ZERO_SUM, 1.0)
        # Positive weights: a sum of any of them is at least the least, or zero over zero.
        return divisor.clamp_min_(min((w for w in self.divisor if w > 0), default=1.0))
