"""The wrappers and their interface. A wrapper acts around any merge method, unit by unit.

    @merge_wrapper("halved", options=MyOptions)
    def halved(inner, inputs, base, options, unit):
        '''One line that `moemerge ls wrappers` shows.'''
        return base.tensor + 0.5 * (inner(inputs, base.tensor) - base.tensor)

`inner` is the method, or the method inside the wrappers that the config lists before this one. A
wrapper may change the inputs or the result. There is always a base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moemerge.config.parameters import BasePolicy, StatisticsKind, WrapperSchema
from moemerge.errors import UsageError
from moemerge.methods._spectra import Spectrum
from moemerge.methods._task_vectors import changes, is_linear
from moemerge.methods.method import ModelTensor, NoParams, UnitInfo, param, parameter_specs
from moemerge.registry import Registry
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


Inner = Callable[[Sequence[ModelTensor], "Tensor"], "Tensor"]
WrapperFunction = Callable[[Inner, Sequence[ModelTensor], ModelTensor, Any, UnitInfo], "Tensor"]


@dataclass(frozen=True)
class MergeWrapper:
    """A registered wrapper: its function and its declaration."""

    schema: WrapperSchema
    function: WrapperFunction
    options: type


@dataclass(frozen=True)
class Wrap:
    """A wrapper and its options for one unit."""

    wrapper: MergeWrapper
    options: Any


WRAPPERS: Registry[MergeWrapper] = Registry("wrapper")


def merge_wrapper(
    name: str,
    *,
    options: type = NoParams,
    statistics: StatisticsKind | None = None,
    turns: bool = False,
) -> Callable[[WrapperFunction], WrapperFunction]:
    """Register a wrapper under the `name` that a config's `wrap:` uses.

    With `statistics`, the base carries its statistics of the unit if there are any. `turns` means
    that the method sees the models' changes in other coordinates than the weights'.
    """

    def register(function: WrapperFunction) -> WrapperFunction:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        if not summary:
            raise UsageError(f"wrapper {name!r} needs a docstring: its first line is shown")
        specs = tuple(parameter_specs(options, per_model=False))
        base = BasePolicy.REQUIRED
        schema = WrapperSchema(name, summary, base, 1, None, specs, statistics, turns=turns)
        WRAPPERS.add(name, MergeWrapper(schema, function, options))
        return function

    return register


BaseAs = Callable[["StatisticsKind | None"], ModelTensor]


def around(inner: Inner, wraps: Sequence[Wrap], base_as: BaseAs, unit: UnitInfo) -> Inner:
    """Return `inner` inside the wrappers. The first wrapper is the innermost.

    `base_as` returns the base with its statistics of a kind.
    """
    if not wraps:
        return inner
    *inside, wrap = wraps

    def call(inputs: Sequence[ModelTensor], base: Tensor) -> Tensor:
        # An outer wrapper may have changed the base's coordinates.
        mine = replace(base_as(wrap.wrapper.schema.statistics), tensor=base)
        within = around(inner, inside, base_as, unit)
        return wrap.wrapper.function(within, inputs, mine, wrap.options, unit)

    return call


@dataclass(frozen=True)
class AimOptions:
    omega: float = param(
        0.4, minimum=0, maximum=1, help="fraction of the change that the most active input keeps"
    )


@merge_wrapper("aim", options=AimOptions, statistics="activation")
def aim(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: AimOptions,
    unit: UnitInfo,
) -> Tensor:
    """Let the merge change a weight the less, the more active its input is in the base.

    With D the merged change and s the mean |x| of each input channel in the base on general text,
    divided by its largest: θ_0 + D diag(1 - (1 - ω) s). Units without input statistics (norms,
    embeddings), and experts that no token of the base reached, keep the merged weights.
    """
    merged = inner(inputs, base.tensor)
    known = base.statistics
    if known is None or known.tokens == 0:
        return merged
    activity = known.values.to(merged.dtype)  # (in,)
    largest = float(activity.max())
    if largest <= 0:
        return merged
    kept = 1 - (1 - options.omega) * (activity / largest)
    return base.tensor + (merged - base.tensor) * kept


@merge_wrapper("knots", turns=True)
def knots(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: NoParams,
    unit: UnitInfo,
) -> Tensor:
    """Merge the models' changes in the output basis that all of them share.

    [τ_1 | … | τ_T] = U diag(s) [V_1ᵀ | … | V_Tᵀ]; the method merges the diag(s) V_iᵀ, with zeros as
    the base, and U maps the result back. Sums are unaffected; trimming and sign elections are not.
    Tensors other than linear layers are merged as without it.
    """
    if not is_linear(base.tensor, unit):
        return inner(inputs, base.tensor)
    vectors = [(i.tensor - base.tensor).double() for i in inputs]
    basis = Spectrum.of(torch.cat(vectors, dim=1)).left  # (out, rank)
    if not basis.shape[1]:
        return base.tensor.clone(memory_format=torch.contiguous_format)
    dtype = base.tensor.dtype
    aligned = [
        replace(i, tensor=(basis.T @ vector).to(dtype).contiguous())  # diag(s) V_iᵀ: (rank, in)
        for i, vector in zip(inputs, vectors, strict=True)
    ]
    merged = inner(aligned, torch.zeros_like(aligned[0].tensor))
    return (base.tensor + basis @ merged.double()).to(dtype).contiguous()


@dataclass(frozen=True)
class SvcOptions:
    alpha: float = param(
        1.0,
        minimum=0,
        exclusive_minimum=True,
        help="lower limit of a model's share; below 1 a direction may also be strengthened",
    )


@merge_wrapper("svc", options=SvcOptions)
def svc(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: SvcOptions,
    unit: UnitInfo,
) -> Tensor:
    """Weaken singular directions of the merge that answer more than the models' own changes do.

    With D = U diag(σ) Vᵀ the merged change of a linear layer, s_ri = ⟨u_rᵀD, u_rᵀτ_i⟩/‖u_rᵀτ_i‖²
    is the fraction of model i's output in direction r that the merge contains, and
    σ_r ← σ_r T / Σ_i max(α, s_ri). T counts only the models that changed the weight.
    """
    merged = inner(inputs, base.tensor)
    if not is_linear(base.tensor, unit):
        return merged
    vectors = changes(inputs, base.tensor)
    spectrum = Spectrum.of(merged - base.tensor)
    if not vectors or not len(spectrum.values):
        return merged
    shares = torch.zeros_like(spectrum.values)
    for vector in vectors:
        unit.check_stopped()
        shares += contained(spectrum, vector.double()).clamp_min(options.alpha)
    scaled = spectrum.values * (len(vectors) / shares)
    change = (spectrum.left * scaled) @ spectrum.right.T
    return (base.tensor + change).to(merged.dtype).contiguous()


def contained(spectrum: Spectrum, vector: Tensor) -> Tensor:
    """Return s_r of one task vector, (rank,); 0 for directions that it does not have."""
    own = spectrum.left.T @ vector  # (rank, in): u_rᵀ τ
    merged = spectrum.values[:, None] * spectrum.right.T  # u_rᵀ D
    sizes = own.square().sum(1)
    # Far below the float32 rounding error of the largest, a direction is noise.
    present = sizes > sizes.max() * torch.finfo(torch.float32).eps ** 2
    shares = (merged * own).sum(1) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.where(present, shares, 0.0)
