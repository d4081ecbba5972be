"""Minimise the routing divergence itself, Σ_i mean KL(r_i ‖ p(Wx)), by Newton-CG.

The objective is the pure divergence: no regulariser. What α or γ add to the quadratic problem
appears here only as a Levenberg term λ diag(H) inside each Newton system, which shortens steps in
directions the tokens hardly see and moves no minimum; λ starts at c/a and shrinks as steps succeed.

For a softmax the objective is convex (multinomial logistic regression with soft targets) and H is
its Hessian. It does not change when one row is added to all experts' rows; steps are projected so
that this null direction stays where the start had it. For the other normalised gates H leaves out
a term that vanishes at the target (Gauss-Newton); it is positive semidefinite, and the line search
makes every step a descent all the same. The divergence therefore never rises; but such a gate may
have its infimum at infinity, where the step limit ends the descent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate, Score
from moemerge.errors import UsageError
from moemerge.linalg.cg import Status, cg
from moemerge.routing.curvature import DomainStatistics, RouterCurvature
from moemerge.routing.domains import Domain, chunks_of, rows_at_once
from moemerge.routing.gates import divergence
from moemerge.routing.preconditioners import Preconditioner, prepare
from moemerge.routing.products import features_of

ARMIJO = 1e-4
HALVINGS = 12
DAMPING_SHRINK = 0.1
DAMPING_GROWTH = 10.0
DAMPING_FLOOR = 1e-4
# Newton systems need no more accuracy than their model of the objective has.
FORCING = 0.05
# With fewer tokens than features every target can be met, and each step divides the divergence
# again without end. Below this share of the start's, it is the start's that progress counts by.
VANISHING = 0.01


@dataclass(frozen=True)
class ExactSettings:
    """`decrease_rtol`: stop once a step promises less than this share of the divergence."""

    damping: float = 1.0 / 9.0  # c / a at α = 0.9
    preconditioner: Preconditioner = Preconditioner.AUTO
    decrease_rtol: float = 1e-5
    max_steps: int = 30
    max_inner_steps: int = 200

    def __post_init__(self) -> None:
        if not self.damping > 0.0:
            raise UsageError(f"damping must be positive, got {self.damping}")
        if self.max_steps < 0 or self.max_inner_steps < 1:
            raise UsageError("max_steps must be >= 0 and max_inner_steps >= 1")


@dataclass(frozen=True)
class ExactResult:
    """The minimiser and its history; `kl` sums the domains' mean divergences, start included."""

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
    gate: Gate, domains: Sequence[Domain], start: Tensor, settings: ExactSettings | None = None
) -> ExactResult:
    """Newton-CG with an Armijo line search from `start`."""
    settings = settings or ExactSettings()
    domains = [_with_targets(domain) for domain in domains]
    w = start.to(domains[0].features[0].device, torch.float64)
    damping = settings.damping
    here = _Point.at(gate, domains, w)
    kl, gradient, inner = [here.kl], [here.gradient_norm], 0
    status = Status.MAX_STEPS
    for _ in range(settings.max_steps):
        if here.kl == 0.0 or here.gradient_norm == 0.0:
            status = Status.CONVERGED
            break
        step, used = _newton_step(gate, here, damping, settings)
        inner += used
        promise = float(torch.sum(here.descent * step))  # = −gᵀs
        if 0.5 * promise <= settings.decrease_rtol * max(here.kl, VANISHING * kl[0]):
            status = Status.CONVERGED
            break
        length = _line_search(gate, domains, w, step, here.kl, promise)
        damping = _next_damping(damping, length)
        there = None if length == 0.0 else _Point.at(gate, domains, w + length * step)
        if there is None or not there.kl < here.kl:
            status = Status.STAGNATED
            break
        w, here = w + length * step, there
        kl.append(here.kl)
        gradient.append(here.gradient_norm)
    return ExactResult(w, status, len(kl) - 1, inner, tuple(kl), tuple(gradient))


@dataclass(frozen=True)
class _Point:
    """The objective and its derivatives at one router."""

    statistics: tuple[DomainStatistics, ...]
    kl: float
    descent: Tensor  # minus the gradient, (K, d)
    gradient_norm: float

    @classmethod
    def at(cls, gate: Gate, domains: Sequence[Domain], w: Tensor) -> _Point:
        statistics = tuple(DomainStatistics(gate, domain, at=w) for domain in domains)
        descent = torch.stack([s.pull for s in statistics]).sum(dim=0)
        return cls(
            statistics,
            sum(s.kl for s in statistics),
            descent,
            float(torch.linalg.vector_norm(descent)),
        )


def _newton_step(
    gate: Gate, here: _Point, damping: float, settings: ExactSettings
) -> tuple[Tensor, int]:
    """(Σ + λ diag Σ) s = −gradient, roughly; and the CG steps it took."""
    operator = RouterCurvature(here.statistics, dense=1.0, diagonal=damping)
    prepared = prepare(operator, settings.preconditioner)
    result = cg(
        operator,
        here.descent,
        preconditioner=prepared.operator,
        accurate=operator.accurate(),
        rtol=FORCING,
        max_steps=settings.max_inner_steps,
        check_every=operator.check_every,
    )
    step = result.solution
    if not float(torch.sum(here.descent * step)) > 0.0:  # CG got nowhere: scaled descent instead
        step = prepared.operator.mv(here.descent)
    if gate.score is Score.SOFTMAX and gate.soft_cap is None:
        step = step - step.mean(dim=0, keepdim=True)
    return step, result.steps


def _next_damping(damping: float, length: float) -> float:
    if length == 1.0:
        return max(damping * DAMPING_SHRINK, DAMPING_FLOOR)
    return damping if length >= 0.5 else damping * DAMPING_GROWTH


def _line_search(
    gate: Gate, domains: Sequence[Domain], w: Tensor, step: Tensor, kl: float, promise: float
) -> float:
    """The longest of 1, ½, ¼, … with sufficient decrease, or 0.

    Logits are linear in the step's length, so one product for each of w and the step serves all.
    """
    pairs = [list(_logit_pairs(domain, w, step)) for domain in domains]
    length = 1.0
    for _ in range(HALVINGS):
        value = 0.0
        for domain, chunks in zip(domains, pairs, strict=True):
            sums = [
                divergence(gate, target.double(), z.double() + length * dz.double()).sum()
                for target, z, dz in chunks
            ]
            value += float(torch.stack(sums).sum()) / domain.tokens
        if value <= kl - ARMIJO * length * promise:
            return length
        length *= 0.5
    return 0.0


def _logit_pairs(domain: Domain, w: Tensor, step: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(target, w x, step x) of each chunk, all (tokens, K)."""
    both = torch.cat([w, step])
    pairs = []
    for x, target in chunks_of(domain):
        z, dz = features_of(x, both.shape[1]).working_logits(both).chunk(2, dim=1)
        assert target is not None  # `_with_targets` gave every domain its logits
        pairs.append((target, z, dz))
    return pairs


def _with_targets(domain: Domain) -> Domain:
    """The domain with its target logits written out: they do not change between steps."""
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
