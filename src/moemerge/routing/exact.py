"""Minimise the routing divergence itself, Σ_i mean KL(r_i ‖ p(Wx)), by Newton-CG.

The objective is the divergence without a regulariser. Each Newton system has a Levenberg term
λ diag(H), which shortens steps in directions with little curvature and does not move the minimum.
From the quadratic solution, two or three full steps with a tiny λ usually suffice; if they fail, λ
grows. Such systems are as ill-conditioned as the features, so the preconditioner decides their
cost. Its directions are found once, since curvature hardly changes between steps.

For a softmax the objective is convex (multinomial logistic regression with soft targets) and H is
its Hessian. Adding one row to all experts' rows does not change it; steps are projected so that
this null direction keeps its start value. For other normalised gates, H omits a term that vanishes
at the target (Gauss-Newton). It is positive semidefinite, and the line search makes every step a
descent, so the divergence never rises. The infimum of such a gate may be at infinity; then the step
limit ends the descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moemerge.errors import UsageError
from moemerge.families.rules import Gate, Score
from moemerge.routing.cg import Preconditioner, Status, cg
from moemerge.routing.curvature import DomainCurvature, RouterCurvature
from moemerge.routing.gates import divergence
from moemerge.routing.products import DomainFeatures, chunks_of, features_of, rows_at_once
from moemerge.routing.solve import preconditioners
from moemerge.routing.two_level import TwoLevel

ARMIJO = 1e-4
HALVINGS = 12
# Factors of λ: after a full step, after one cut below a half, and after one cut to almost nothing.
DAMPING_SHRINK, DAMPING_GROWTH, DAMPING_LEAP = 0.1, 10.0, 1000.0
SHORT, NOTHING = 0.5, 0.05
# Above this damping, steps are so short that a small predicted decrease means nothing.
TELLING_DAMPING = 1e-4
# A step with this much damping that does not descend is the last.
MOST_DAMPING = 1e5
# Saturated gates have gradients without curvature. An expert's diagonal is at least this share of
# the mean over experts; otherwise damping would not limit its rows.
DIAGONAL_FLOOR = 1e-2
# Newton systems need no more accuracy than their model of the objective. CG ends when the residual
# has fallen by FORCING, and its last steps add less than a share of the predicted decrease, or of
# the decrease that ends the descent. The residual alone does not suffice: with a weak
# preconditioner it may be small while the step is far from complete.
FORCING = 0.1
ENERGY_RTOL = 0.02
NEGLIGIBLE = 0.02
# With fewer tokens than features, every target can be met, and each step divides the divergence
# again without end. Below this share of the initial divergence, progress is relative to that share.
VANISHING = 0.01


@dataclass(frozen=True)
class ExactResult:
    """The minimiser and its history; `kl` is the sum of the domains' mean divergences."""

    weight: Tensor  # (K, d), float64
    status: Status
    steps: int
    inner_steps: int
    kl: tuple[float, ...]
    gradient: tuple[float, ...]  # norms

    @property
    def converged(self) -> bool:
        return self.status is Status.CONVERGED


def minimise_divergence(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    start: Tensor,
    *,
    fallback: Tensor | None = None,
    damping: float = 1e-5,
    preconditioner: str = "auto",
    decrease_rtol: float = 1e-3,
    max_steps: int = 30,
    max_inner_steps: int = 200,
) -> ExactResult:
    """Run Newton-CG with an Armijo line search from the better of `start` and `fallback`.

    `damping` is the initial and the smallest λ. It stops after a step whose predicted decrease is
    below the share `decrease_rtol` of the divergence. The remaining divergence is then a few per
    cent of that prediction.
    """
    if not 0.0 < damping <= TELLING_DAMPING:
        raise UsageError(f"damping must be in (0, {TELLING_DAMPING:g}], got {damping:g}")
    if max_steps < 0 or max_inner_steps < 1:
        raise UsageError("max_steps must be >= 0 and max_inner_steps >= 1")
    domains = [_with_targets(domain) for domain in domains]
    w = start.to(domains[0].features[0].device, torch.float64)
    here = _Point.at(gate, domains, w)
    kl, gradient, steps, inner_steps = [here.kl], [here.gradient_norm], 0, 0
    if fallback is not None:
        other = fallback.to(w.device, torch.float64)
        there = _Point.at(gate, domains, other)
        if there.kl < here.kl:
            w, here = other, there
            kl.append(here.kl)
            gradient.append(here.gradient_norm)
    has_null_direction = gate.score is Score.SOFTMAX and gate.soft_cap is None
    kept: Preconditioner | None = None
    least, status = damping, Status.MAX_STEPS
    for _ in range(max_steps):
        if here.kl == 0.0 or here.gradient_norm == 0.0:
            status = Status.CONVERGED
            break
        enough = decrease_rtol * max(here.kl, VANISHING * kl[0])
        operator = RouterCurvature(
            here.curvatures, dense=1.0, diagonal=damping, floor=DIAGONAL_FLOOR
        )
        if isinstance(kept, TwoLevel):
            kept.update(operator)
        step, kept, finished, taken = _newton_step(
            operator, here.descent, preconditioner, kept, NEGLIGIBLE * enough, max_inner_steps
        )
        inner_steps += taken
        if has_null_direction:
            step = step - step.mean(dim=0, keepdim=True)
        promise = float(torch.sum(here.descent * step))  # = −gᵀs
        length = _line_search(gate, domains, w, step, here.kl, promise)
        there = _Point.at(gate, domains, w + length * step) if length > 0.0 else here
        descended, tried = there.kl < here.kl, damping
        if descended:
            w, here, steps = w + length * step, there, steps + 1
            kl.append(here.kl)
            gradient.append(here.gradient_norm)
        if descended and length == 1.0:
            damping = max(damping * DAMPING_SHRINK, least)
        else:
            kept = None  # its curvature was misleading
            if not descended or length < SHORT:
                small = not descended or length <= NOTHING
                damping *= DAMPING_LEAP if small else DAMPING_GROWTH
        if finished and tried <= TELLING_DAMPING and 0.5 * promise <= enough:
            status = Status.CONVERGED
            break
        rounding = torch.finfo(here.curvatures[0].working).eps * here.kl
        at_rounding = tried <= TELLING_DAMPING and 0.5 * promise <= rounding
        if at_rounding or (not descended and tried >= MOST_DAMPING):
            status = Status.STAGNATED
            break
    return ExactResult(w, status, steps, inner_steps, tuple(kl), tuple(gradient))


def _newton_step(
    operator: RouterCurvature,
    descent: Tensor,
    kind: str,
    kept: Preconditioner | None,
    negligible: float,
    max_steps: int,
) -> tuple[Tensor, Preconditioner, bool, int]:
    """Solve (Σ + λ diag Σ) s ≈ −gradient, with the previous step's preconditioner if it is kept.

    Return s, the preconditioner, whether CG converged, and its steps.
    """
    taken, step = 0, None
    for one in [kept] if kept is not None else preconditioners(operator, kind):
        result = cg(
            operator,
            descent,
            start=step,
            preconditioner=one,
            rtol=FORCING,
            max_steps=max_steps,
            check_every=operator.check_every,
            at_rest=partial(_is_at_rest, atol=negligible),
        )
        step, taken = result.weight, taken + result.steps
        if result.status in (Status.CONVERGED, Status.MAX_STEPS):
            break
    assert step is not None  # there is always a preconditioner
    if not float(torch.sum(descent * step)) > 0.0:  # CG failed: use the preconditioned gradient
        step = one.direction(operator, descent)[0]
    return step, one, result.converged, taken


def _is_at_rest(gains: Sequence[float], atol: float) -> bool:
    """Return whether the energy hardly decreases any more.

    That is if the last third of the steps (at least three) lowered it by at most `atol`, or by at
    most ENERGY_RTOL of the decrease of all steps.
    """
    last = max(3, len(gains) // 3)
    return len(gains) > last and sum(gains[-last:]) <= max(atol, ENERGY_RTOL * sum(gains))


@dataclass(frozen=True)
class _Point:
    """The objective and its derivatives at one router."""

    curvatures: tuple[DomainCurvature, ...]
    kl: float
    descent: Tensor  # minus the gradient, (K, d)
    gradient_norm: float

    @classmethod
    def at(cls, gate: Gate, domains: Sequence[DomainFeatures], w: Tensor) -> _Point:
        curvatures = tuple(DomainCurvature(gate, domain, at=w) for domain in domains)
        descent = torch.stack([s.pull for s in curvatures]).sum(dim=0)
        return cls(
            curvatures,
            sum(s.kl for s in curvatures),
            descent,
            float(torch.linalg.vector_norm(descent)),
        )


def _line_search(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    w: Tensor,
    step: Tensor,
    kl: float,
    promise: float,
) -> float:
    """Return the largest of 1, ½, ¼, … with sufficient decrease, or 0.

    Logits are linear in the step length, so one product each with w and the step suffices.
    """
    pairs = [list(_logit_pairs(domain, w, step)) for domain in domains]
    divisors = [domain.divisor for domain in domains]
    length = 1.0
    for _ in range(HALVINGS):
        values = []
        for chunks in pairs:
            sums = [
                divergence(gate, target.double(), z.double() + length * dz.double()).sum()
                for target, z, dz in chunks
            ]
            values.append(torch.stack(sums).sum())
        sums_of_domains = torch.stack(values)
        domains[0].ranks.all_reduce(sums_of_domains)
        shares = zip(sums_of_domains.tolist(), divisors, strict=True)
        value = sum(number / divisor for number, divisor in shares)
        if value <= kl - ARMIJO * length * promise:
            return length
        length *= 0.5
    return 0.0


def _logit_pairs(
    domain: DomainFeatures, w: Tensor, step: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (target, w x, step x) of each chunk, all (tokens, K)."""
    both = torch.cat([w, step])
    pairs = []
    for x, target in chunks_of(domain):
        z, dz = features_of(x, both.shape[1]).working_logits(both).chunk(2, dim=1)
        assert target is not None  # set by `_with_targets`
        pairs.append((target, z, dz))
    return pairs


def _with_targets(domain: DomainFeatures) -> DomainFeatures:
    """Return the domain with its target logits, which do not change between steps."""
    domain.check()
    if domain.targets is not None:
        return domain
    targets = []
    for block in domain.features:
        router = domain.router.to(block.device)
        parts = torch.split(block, rows_at_once(block.device))
        logits = [features_of(x, router.shape[1]).working_logits(router) for x in parts]
        targets.append(torch.cat(logits))
    return replace(domain, targets=targets)
