"""Small random calibration problems and their dense float64 twins, written from the definitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moemerge.families.rules import Gate, Score
from moemerge.routing.cg import LinearOperator
from moemerge.routing.curvature import (
    Curvature,
    DomainCurvature,
    DomainFeatures,
    RouterCurvature,
)

GATES = {
    "softmax": Gate(Score.SOFTMAX, 2),
    "softmax capped": Gate(Score.SOFTMAX, 2, soft_cap=3.0),
    "sigmoid": Gate(Score.SIGMOID, 2),
    "sigmoid capped": Gate(Score.SIGMOID, 2, soft_cap=2.0),
    "bernoulli": Gate(Score.SIGMOID, 2, normalised=False),
    "bernoulli capped": Gate(Score.SIGMOID, 2, normalised=False, soft_cap=2.0),
    "sqrt softplus": Gate(Score.SQRT_SOFTPLUS, 2),
    "softmax scaled": Gate(Score.SOFTMAX, 2, scale=0.4),
    "sigmoid scaled": Gate(Score.SIGMOID, 2, scale=0.4),
    "bernoulli scaled and capped": Gate(Score.SIGMOID, 2, False, soft_cap=2.0, scale=0.4),
}


def make_domains(
    count: int = 2,
    *,
    experts: int = 4,
    width: int = 5,
    tokens: int = 60,
    dtype: torch.dtype = torch.float64,
    bias: bool = False,
    source_targets: bool = False,
    move: float = 0.5,
    seed: int = 0,
) -> list[DomainFeatures]:
    """Domains of different size, in uneven blocks, with correlated features."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    base = randn(experts, width + bias)
    mixing = randn(width, width) / width**0.5
    domains = []
    for index in range(count):
        sizes = [tokens // 3 + index, 1, tokens - tokens // 3]
        features = [(randn(n, width) @ mixing + 0.3 * randn(width)).to(dtype) for n in sizes]
        router = (base + move * randn(experts, width + bias)).to(dtype)
        targets = None
        if source_targets:  # no router reaches these from the features
            own = [x.double() @ router[:, :width].double().T for x in features]
            targets = [(z + 0.4 * randn(*z.shape)).to(dtype) for z in own]
        domains.append(DomainFeatures(f"domain{index}", features, router, targets))
    return domains


def tokens_of(domain: DomainFeatures) -> tuple[Tensor, Tensor]:
    """All features with the bias' column of ones, and all target logits, in float64."""
    x = torch.cat(list(domain.features)).double()
    if domain.has_bias:
        x = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    if domain.targets is None:
        return x, x @ domain.router.double().T
    return x, torch.cat(list(domain.targets)).double()


def naive_scores(gate: Gate, z: Tensor) -> Tensor:
    """Scores of tokens before they are normalised, from the definition."""
    z = gate.scale * z
    if gate.soft_cap is not None:
        z = gate.soft_cap * torch.tanh(z / gate.soft_cap)
    if gate.score is Score.SOFTMAX:
        return z.exp()
    if gate.score is Score.SIGMOID:
        return torch.sigmoid(z)
    return torch.nn.functional.softplus(z).sqrt()


def naive_divergence(gate: Gate, target: Tensor, z: Tensor) -> Tensor:
    """KL of each token, differentiable, from the definition."""
    f, q = naive_scores(gate, target), naive_scores(gate, z)
    if gate.score is Score.SIGMOID and not gate.normalised:
        return (f * (f / q).log() + (1 - f) * ((1 - f) / (1 - q)).log()).sum(-1)
    p, q = f / f.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return (p * (p / q).log()).sum(-1)


def autograd_hessian(gate: Gate, z: Tensor) -> Tensor:
    """H of one token: the Hessian of KL(target ‖ model) in the model's logits, at the target."""
    hessian = torch.func.hessian(lambda v: naive_divergence(gate, z, v))
    return hessian(z).contiguous()  # type: ignore[no-any-return]


def dense_sigma(gate: Gate, domain: DomainFeatures, curvature: Curvature) -> tuple[Tensor, Tensor]:
    """Σ_i and mean H z xᵀ (flattened), with every Kronecker product written out."""
    x, targets = tokens_of(domain)
    experts = targets.shape[1]
    sigma = torch.zeros(experts * x.shape[1], experts * x.shape[1], dtype=torch.float64)
    pull = torch.zeros(experts, x.shape[1], dtype=torch.float64)
    for token, z in zip(x, targets, strict=True):
        h = autograd_hessian(gate, z)
        if curvature is Curvature.DIAGONAL:
            h = torch.diag(h.diagonal())
        elif curvature is Curvature.IDENTITY:
            h = torch.eye(experts, dtype=torch.float64)
        sigma += torch.kron(h, torch.outer(token, token))
        pull += torch.outer(h @ z, token)
    return sigma / len(x), pull.reshape(-1) / len(x)


def dense_system(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    curvature: Curvature,
    dense: float,
    diagonal: float,
) -> tuple[Tensor, Tensor]:
    """A and b of the whole problem."""
    a, b = 0.0, 0.0
    for domain in domains:
        sigma, pull = dense_sigma(gate, domain, curvature)
        own = torch.diag(sigma.diagonal())
        a = a + dense * sigma + diagonal * own
        b = b + dense * pull + diagonal * own @ domain.router.double().reshape(-1)
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return a, b


def as_matrix(operator: LinearOperator) -> Tensor:
    """The dense matrix of an operator, row-major in (K, d)."""
    basis = torch.eye(operator.shape[0] * operator.shape[1], dtype=torch.float64)
    return torch.stack([operator.mv(e.reshape(operator.shape)).reshape(-1) for e in basis], dim=1)


def operator_of(
    domains: list[DomainFeatures],
    gate: Gate = GATES["softmax"],
    curvature: Curvature = Curvature.FULL,
    *,
    dense: float = 0.9,
    diagonal: float = 0.1,
) -> RouterCurvature:
    curvatures = [DomainCurvature(gate, domain, curvature) for domain in domains]
    return RouterCurvature(curvatures, dense=dense, diagonal=diagonal)
