"""Wrappers act around any merge method, unit by unit: AIM, KnOTS and SVC.

    @merge_wrapper("halved")
    def halved(inner, tensors, base):
        '''One line that `moemerge ls wrappers` shows.'''
        return base + 0.5 * (inner(tensors, base) - base)

`inner` is the method, or the method inside the wrappers that the config lists before this one. The
other arguments are those of a method (see `moemerge.methods.method`); there is always a base, and
`statistics` are the base's, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from moemerge.config.parameters import BasePolicy, ParameterSpec, StatisticsKind, WrapperSchema
from moemerge.methods._spectra import Spectrum
from moemerge.methods.method import (
    DATA,
    Arguments,
    Function,
    Param,
    Tensors,
    UnitInfo,
    UnitStatistics,
    arguments_of,
    is_linear,
    is_unchanged,
    specifications,
    summary_of,
)
from moemerge.registry import Registry
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Inner = Callable[[Tensors, "Tensor"], "Tensor"]


@dataclass(frozen=True)
class MergeWrapper:
    """A registered wrapper: its function and its declaration."""

    schema: WrapperSchema
    function: Callable[..., Tensor]
    parameters: Mapping[str, ParameterSpec]  # by argument

    def arguments(
        self, models: Sequence[Mapping[str, Any]], options: Mapping[str, Any], key: str
    ) -> Arguments:
        return arguments_of(self.parameters, models, options)

    def around(
        self, inner: Inner, arguments: Arguments, unit: UnitInfo, known: UnitStatistics | None
    ) -> Inner:
        """Return `inner` inside this wrapper; `known` are the base's statistics of the unit."""
        wants = DATA & inspect.signature(self.function).parameters.keys()

        def wrapped(tensors: Tensors, base: Tensor) -> Tensor:
            data: dict[str, Any] = {
                "inner": inner, "tensors": tensors, "base": base, "unit": unit, "statistics": known
            }  # fmt: skip
            given = {name: data[name] for name in wants}
            return self.function(**given, **arguments).to(base.dtype).contiguous()

        return wrapped


WRAPPERS: Registry[MergeWrapper] = Registry("wrapper")


def merge_wrapper(
    name: str, *, statistics: StatisticsKind | None = None, turns: bool = False
) -> Callable[[Function], Function]:
    """Register a wrapper under the `name` that a config's `wrap:` uses.

    `turns` means that the method sees the models' changes in other coordinates than the weights'.
    """

    def register(function: Function) -> Function:
        summary, parameters = summary_of(function, f"wrapper {name!r}"), specifications(function)
        specs, base = tuple(parameters.values()), BasePolicy.REQUIRED
        schema = WrapperSchema(name, summary, base, 1, None, specs, statistics, turns=turns)
        WRAPPERS.add(name, MergeWrapper(schema, function, parameters))
        return function

    return register


@merge_wrapper("aim", statistics="activation")
def aim(
    inner: Inner,
    tensors: Tensors,
    base: Tensor,
    statistics: UnitStatistics | None,
    *,
    omega: Annotated[
        float,
        Param("fraction of the change that the most active input keeps", minimum=0, maximum=1),
    ] = 0.4,
) -> Tensor:
    """Let the merge change a weight the less, the more active its input is in the base.

    With D the merged change and s the mean |x| of each input channel in the base on general text,
    divided by its largest: θ_0 + D diag(1 - (1 - ω) s). Units without input statistics (norms,
    embeddings), and experts that no token of the base reached, keep the merged weights.
    """
    merged = inner(tensors, base)
    if statistics is None or statistics.tokens == 0:
        return merged
    activity = statistics.values.to(merged.dtype)  # (in,)
    largest = float(activity.max())
    if largest <= 0:
        return merged
    return base + (merged - base) * (1 - (1 - omega) * (activity / largest))


@merge_wrapper("knots", turns=True)
def knots(inner: Inner, tensors: Tensors, base: Tensor, unit: UnitInfo) -> Tensor:
    """Merge the models' changes in the output basis that all of them share.

    [τ_1 | … | τ_T] = U diag(s) [V_1ᵀ | … | V_Tᵀ]; the method merges the diag(s) V_iᵀ, with zeros as
    the base, and U maps the result back. Sums are unaffected; trimming and sign elections are not.
    Tensors other than linear layers are merged as without it.
    """
    if not is_linear(base, unit):
        return inner(tensors, base)
    deltas = [(tensor - base).double() for tensor in tensors]
    basis = Spectrum.of(torch.cat(deltas, dim=1)).left  # (out, rank)
    if not basis.shape[1]:
        return base
    aligned = [(basis.T @ delta).to(base.dtype).contiguous() for delta in deltas]  # (rank, in)
    return base + basis @ inner(aligned, torch.zeros_like(aligned[0])).double()


@merge_wrapper("svc")
def svc(
    inner: Inner,
    tensors: Tensors,
    base: Tensor,
    unit: UnitInfo,
    *,
    alpha: Annotated[
        float,
        Param(
            "lower limit of a model's share; below 1 a direction may also be strengthened", above=0
        ),
    ] = 1.0,
) -> Tensor:
    """Weaken singular directions of the merge that answer more than the models' own changes do.

    With D = U diag(σ) Vᵀ the merged change of a linear layer, s_ri = ⟨u_rᵀD, u_rᵀτ_i⟩/‖u_rᵀτ_i‖²
    is the fraction of model i's output in direction r that the merge contains, and
    σ_r ← σ_r T / Σ_i max(α, s_ri). T counts only the models that changed the weight.
    """
    merged = inner(tensors, base)
    if not is_linear(base, unit):
        return merged
    deltas = [tensor - base for tensor in tensors if not is_unchanged(tensor, base)]
    spectrum = Spectrum.of(merged - base)
    if not deltas or not len(spectrum.values):
        return merged
    shares = torch.zeros_like(spectrum.values)
    for delta in deltas:
        unit.check_stopped()
        shares += contained(spectrum, delta.double()).clamp_min(alpha)
    scaled = spectrum.values * (len(deltas) / shares)
    return base + (spectrum.left * scaled) @ spectrum.right.T


def contained(spectrum: Spectrum, delta: Tensor) -> Tensor:
    """Return s_r of one task vector, (rank,); 0 for directions that it does not have."""
    own = spectrum.left.T @ delta  # (rank, in): u_rᵀ τ
    merged = spectrum.values[:, None] * spectrum.right.T  # u_rᵀ D
    sizes = own.square().sum(1)
    # Far below the float32 rounding error of the largest, a direction is noise.
    present = sizes > sizes.max() * torch.finfo(torch.float32).eps ** 2
    shares = (merged * own).sum(1) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.where(present, shares, 0.0)
