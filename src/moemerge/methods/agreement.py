"""Methods that compare models element by element: consensus, PCB, RAM, SCE and Arcee Fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import by_chunks, chunks, flat, gram
from moemerge.methods._selection import keep_largest_, kept_count, ordered_at
from moemerge.methods._sparsify import Deltas, Sparsified, Thinning, trimming
from moemerge.methods._task_vectors import (
    TaskVector,
    Thinned,
    add_elected,
    flat_difference,
    task_vector,
)
from moemerge.methods.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ConsensusParams:
    weight: float = param(1.0, help="this model's share of the sum")
    threshold: float = param(
        0.4, minimum=0, help="an element matters to this model where |δ_i| > threshold·|Δ - δ_i|"
    )


@dataclass(frozen=True)
class ConsensusTiesParams(ConsensusParams, Thinned):
    density: float = param(
        0.2, minimum=0, maximum=1, help="fraction of the task vector's elements that is kept"
    )


@dataclass(frozen=True)
class ConsensusOptions:
    k: int = param(2, minimum=1, help="how many models an element must matter to")
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


@merge_method(
    "consensus_ta",
    base=BasePolicy.REQUIRED,
    per_model=ConsensusParams,
    options=ConsensusOptions,
    models=(2, None),
    elementwise=True,
)
def consensus_ta(
    inputs: Sequence[ModelTensor], base: Tensor, options: ConsensusOptions, unit: UnitInfo
) -> Tensor:
    """Keep the elements of the task vectors' sum that at least k models find important.

    With Δ = Σ w_i δ_i, element by element: θ_0 + λ Δ·[#{i : |δ_i| > t_i |Δ - δ_i|} ≥ k]. Intended
    for three models or more. With two models, k = 2 keeps elements that both changed similarly.
    """
    vectors = [task_vector(i, base) for i in inputs]
    total = torch.zeros_like(vectors[0].values)
    for vector in vectors:
        total.add_(vector.values, alpha=vector.weight)
    deltas = [v.values for v in vectors]
    return _where_agreed(base, total, deltas, [i.params.threshold for i in inputs], options)


def _trim(
    deltas: Deltas, params: ConsensusTiesParams, options: object, position: int, unit: UnitInfo
) -> Thinning:
    return trimming(deltas, params.density, 0.0, rescale=False)


def _elected_where_agreed(
    inputs: Sequence[ModelTensor],
    base: Tensor,
    vectors: Sequence[TaskVector],
    options: ConsensusOptions,
) -> Tensor:
    total = flat(add_elected(torch.zeros_like(base), vectors, normalize=False, factor=1.0))
    deltas = [flat_difference(i.tensor, base) for i in inputs]  # masks use untrimmed vectors
    return _where_agreed(base, total, deltas, [i.params.threshold for i in inputs], options)


TRIMMED = Sparsified(_trim, _elected_where_agreed)


@merge_method(
    "consensus_ties",
    base=BasePolicy.REQUIRED,
    per_model=ConsensusTiesParams,
    options=ConsensusOptions,
    models=(2, None),
    in_runs=TRIMMED,
)
def consensus_ties(
    inputs: Sequence[ModelTensor], base: Tensor, options: ConsensusOptions, unit: UnitInfo
) -> Tensor:
    """As `consensus_ta`, with the task vectors merged by TIES (trimmed, signs elected, summed)."""
    return TRIMMED.whole(inputs, base, options, unit)


def _where_agreed(
    base: Tensor,
    total: Tensor,
    deltas: Sequence[Tensor],
    thresholds: Sequence[float],
    options: ConsensusOptions,
) -> Tensor:
    """Return θ_0 + λ Δ for elements that enough models find important."""

    def keep(origin: Tensor, changes: list[Tensor]) -> Tensor:
        total, *deltas = changes
        votes = torch.zeros_like(origin, dtype=torch.int8)
        for delta, threshold in zip(deltas, thresholds, strict=True):
            votes += delta.abs() > threshold * (total - delta).abs()
        kept = torch.where(votes >= options.k, total, 0.0)
        return torch.add(origin, kept, alpha=options.lambda_)

    return by_chunks(base, [total, *deltas], keep)


_LEAST_DIVISOR = 1e-12


@dataclass(frozen=True)
class PcbOptions:
    density: float = param(
        0.1, minimum=0, maximum=1, help="fraction of each task vector's elements that competes"
    )
    clip: float = param(
        1e-4, minimum=0, maximum=0.5, help="share of the elements clipped at each end beforehand"
    )
    lambda_: float = param(1.2, key="lambda", help="factor on the merged task vector")


@merge_method("pcb", base=BasePolicy.REQUIRED, options=PcbOptions)
def pcb(inputs: Sequence[ModelTensor], base: Tensor, options: PcbOptions, unit: UnitInfo) -> Tensor:
    """Weigh each element by its size within its model and its agreement with the others.

    With a_i the squares of |δ_i| scaled to [0, 1] and T models, an element scores
    exp(T a_i)·tanh(δ_i Σ_j δ_j). Each model's lowest scores count as the cut at `density`; scaled
    to [0, 1] the scores are weights w_i, and the result is θ_0 + λ Σ w_i δ_i / Σ w_i.
    All cuts and scales are per unit; the paper takes them over the whole model.
    """
    origin = flat(base)
    deltas = [_clipped(flat(i.tensor) - origin, options.clip) for i in inputs]
    total = deltas[0].clone()
    for delta in deltas[1:]:
        total += delta
    weighted, weights = torch.zeros_like(origin), torch.zeros_like(origin)
    for delta in deltas:
        if not bool(delta.any()):
            continue  # a model that did not change this weight
        # In place, to avoid temporaries as large as the unit.
        score = _to_unit_(delta.abs()).square_().mul_(len(deltas)).exp_()
        score.mul_((delta * total).tanh_())
        weight = _to_unit_(score.clamp_min_(_cut(score, options.density)))
        weighted.addcmul_(weight, delta)
        weights += weight
    merged = weighted.div_(weights.clamp_min_(_LEAST_DIVISOR))
    return (origin + merged.mul_(options.lambda_)).view(base.shape)


def _clipped(values: Tensor, share: float) -> Tensor:
    """Clip a fraction of the elements at either end."""
    count = int(share * values.numel())
    if count == 0:
        return values
    low, high = ordered_at(values, [count, values.numel() - 1 - count])
    return values.clamp_(low, high)


def _to_unit_(values: Tensor) -> Tensor:
    """Scale to [0, 1] in place; set all to one if they are equal."""
    low, high = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
    if not bool(high > low):
        return values.fill_(1.0)
    return values.sub_(low).div_(high - low)


def _cut(score: Tensor, density: float) -> float:
    """Return the smallest score among the leading `density` of the elements.

    It is exactly one of the scores, so that its weight is zero and not rounding error.
    """
    kept = max(1, kept_count(density, score.numel()))
    return ordered_at(score, [score.numel() - kept])[0]


@dataclass(frozen=True)
class RamOptions:
    epsilon: float = param(1e-5, minimum=0, help="a change counts beyond this size")


@dataclass(frozen=True)
class RamPlusOptions(RamOptions):
    r: float = param(0.1, minimum=0, help="gain on changes that a model alone made")
    alpha: float = param(0.2, minimum=0, help="upper limit of the ratio of shared to own changes")


@merge_method("ram", base=BasePolicy.REQUIRED, options=RamOptions, elementwise=True)
def ram(inputs: Sequence[ModelTensor], base: Tensor, options: RamOptions, unit: UnitInfo) -> Tensor:
    """Keep changes of one model alone, average changes that several made.

    Element by element, over the models with |δ_i| > epsilon: θ_0 + mean δ_i. Intended for models
    trained by reinforcement learning, whose changes are sparse.
    """
    return _by_overlap(inputs, base, options.epsilon, [1.0] * len(inputs))


@merge_method("ramplus_tl", base=BasePolicy.REQUIRED, options=RamPlusOptions)
def ramplus_tl(
    inputs: Sequence[ModelTensor], base: Tensor, options: RamPlusOptions, unit: UnitInfo
) -> Tensor:
    """As `ram`, with each model's own changes amplified, more so the more changes it shares.

    Elements that model i alone changed are multiplied by 1 + r·min(shared_i / own_i, alpha), with
    the numbers of elements of this tensor that it changed together with others, and alone.
    """
    deltas = [flat(i.tensor) - flat(base) for i in inputs]
    changed = [delta.abs() > options.epsilon for delta in deltas]
    count = torch.stack(changed).sum(0)
    factors = []
    for mask in changed:
        own = int((mask & (count == 1)).sum())
        shared = int((mask & (count > 1)).sum())
        ratio = shared / own if own else 0.0
        factors.append(1 + options.r * min(ratio, options.alpha))
    return _by_overlap(inputs, base, options.epsilon, factors)


def _by_overlap(
    inputs: Sequence[ModelTensor], base: Tensor, epsilon: float, factors: Sequence[float]
) -> Tensor:
    """Merge element by element; `factors` multiply changes that one model alone made."""

    def add(origin: Tensor, tensors: list[Tensor]) -> Tensor:
        total, own, count = (torch.zeros_like(origin) for _ in range(3))
        for tensor, factor in zip(tensors, factors, strict=True):
            delta = tensor - origin
            changed = delta.abs() > epsilon
            delta *= changed
            total += delta
            own.add_(delta, alpha=factor)
            count += changed
        return origin + torch.where(count > 1, total / count.clamp_min(1), own)

    return by_chunks(base, [i.tensor for i in inputs], add)


_LEAST_SHARE = 1e-6  # smallest divisor, as in mergekit


@dataclass(frozen=True)
class SceOptions:
    select_topk: float = param(
        1.0, minimum=0, maximum=1, help="fraction of the varying elements that is kept"
    )
    int8_mask: bool = param(False, help="accepted for mergekit's configs; has no effect here")


@merge_method("sce", base=BasePolicy.REQUIRED, options=SceOptions)
def sce(inputs: Sequence[ModelTensor], base: Tensor, options: SceOptions, unit: UnitInfo) -> Tensor:
    """Keep where task vectors vary most, weigh models by their size there, erase minority signs.

    An element on which all models agree does not vary, so below `select_topk` 1 it is never kept:
    a tensor that is equal in all models becomes the base's.
    """
    deltas = [flat_difference(i.tensor, base) for i in inputs]
    if options.select_topk < 1:
        _select_(deltas, options.select_topk)
    sizes = [gram([d]).item() for d in deltas]
    total = sum(sizes)
    if total == 0:
        return base.clone(memory_format=torch.contiguous_format)
    return add_elected(
        base,
        [TaskVector(d, size / total) for d, size in zip(deltas, sizes, strict=True)],
        normalize=True,
        factor=1.0,
        election="unweighted",
        floor=_LEAST_SHARE,
    )


def _select_(deltas: Sequence[Tensor], fraction: float) -> None:
    """Zero all but the given fraction of the elements whose variance over models is largest."""
    variance = _variance(deltas)
    varying = int(torch.count_nonzero(variance))
    keep_largest_(variance, int(varying * fraction))
    for at in chunks(variance):
        dropped = variance[at] == 0
        for delta in deltas:
            delta[at].masked_fill_(dropped, 0.0)


def _variance(deltas: Sequence[Tensor]) -> Tensor:
    """Return the biased variance over models, per element; exactly zero if they agree."""
    share = 1 / len(deltas)

    def spread(first: Tensor, deltas: list[Tensor]) -> Tensor:
        mean, variance = torch.zeros_like(first), torch.zeros_like(first)
        # Subtract the first model: the mean of three equal numbers may differ from them by
        # rounding, but their variance must be zero.
        for delta in deltas[1:]:
            mean.add_(delta - first, alpha=share)
        for delta in deltas:
            deviation = (delta - first).sub_(mean)
            variance.addcmul_(deviation, deviation, value=share)
        return variance

    return by_chunks(deltas[0], deltas, spread)


_ELEMENTS = 2**20  # compared at once
_SPREAD = 1.5  # threshold above the median, in interquartile ranges


@merge_method("arcee_fusion", base=BasePolicy.REQUIRED, options=NoParams, models=(1, 1))
def arcee_fusion(
    inputs: Sequence[ModelTensor], base: Tensor, options: NoParams, unit: UnitInfo
) -> Tensor:
    """Move the base's elements to the model's where the change is unusually important.

    An element's importance is |θ - θ_0| times the divergence KL(softmax θ ‖ softmax θ_0) of its
    row; elements at or above the median plus 1.5 interquartile ranges are taken from the model.
    """
    tensor = inputs[0].tensor
    if base.numel() == 0 or base.dim() == 0:
        return base.clone(memory_format=torch.contiguous_format)
    importance = _importance(tensor, base)
    low, middle, high = _quartiles(importance.flatten())
    kept = importance >= middle + _SPREAD * (high - low)
    return torch.where(kept, tensor, base).contiguous()


def _importance(tensor: Tensor, base: Tensor) -> Tensor:
    """Return the importance of every element in float64; nearby rows diverge in second order."""
    rows, step = base.reshape(-1, base.shape[-1]), max(1, _ELEMENTS // max(1, base.shape[-1]))
    others = tensor.reshape(rows.shape)
    importance = torch.empty(rows.shape, dtype=torch.float64, device=base.device)
    for start in range(0, len(rows), step):
        p, q = others[start : start + step], rows[start : start + step]
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, keepdim=True)
        torch.mul((p - q).abs(), divergence, out=importance[start : start + step])
    return importance.view(base.shape)


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    """Return the quartiles by linear interpolation, with the lower median."""
    last = len(values) - 1
    places = [share * last for share in (0.25, 0.75)]
    around = [[int(place), min(int(place) + 1, last)] for place in places]
    *ends, middle = ordered_at(values, [*around[0], *around[1], last // 2])
    low, high = (
        below * (1 - place % 1) + above * (place % 1)
        for place, below, above in zip(places, ends[::2], ends[1::2], strict=True)
    )
    return low, middle, high
