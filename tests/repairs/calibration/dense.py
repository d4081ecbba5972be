"""Algorithm 1 written out: a whole model in transformers, explicit matrices, float64.

Nothing of the package is used here, so that it can be wrong in no common way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import zoo


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    with zoo._quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def gates(model: Any) -> dict[str, Any]:
    """The routers (`...mlp.gate`) of OLMoE and Qwen3-MoE by name, in order."""
    return {name: m for name, m in model.named_modules() if name.endswith("mlp.gate")}


def router_inputs(model: Any, gate: Any, rows: Sequence[Tensor]) -> Tensor:
    """x of every token, one row at a time: no batches, no padding. (tokens, d), float64"""
    seen: list[Tensor] = []
    hook = gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None], use_cache=False)
    hook.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).double()


def precision_matrix(x: Tensor, router: Tensor, curvature: str) -> Tensor:
    """Σ = mean H ⊗ x xᵀ, (K d, K d)."""
    r = torch.softmax(x @ router.T, dim=-1)  # (tokens, K)
    experts = router.shape[0]
    h = torch.diag_embed(r) - r.unsqueeze(2) * r.unsqueeze(1)  # (tokens, K, K)
    if curvature == "diagonal":
        h = torch.diag_embed(h.diagonal(dim1=1, dim2=2))
    elif curvature == "identity":
        h = torch.eye(experts, dtype=x.dtype).expand(len(x), -1, -1)
    size = experts * x.shape[1]
    sigma = torch.zeros(size, size, dtype=torch.float64)
    for token, h_token in zip(x, h, strict=True):
        sigma += torch.kron(h_token, torch.outer(token, token))
    return sigma / len(x)


def algorithm_one(
    features: Sequence[Tensor],
    routers: Sequence[Tensor],
    curvature: str = "full",
    *,
    alpha: float = 0.9,
    gamma: float | None = None,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """One router from the features and routers of its sources, by a dense solve in float64."""
    total, rhs = 0, 0
    for at, (x, w) in enumerate(zip(features, routers, strict=True)):
        x, w = x.double(), w.double()
        sigma = (1.0 if weights is None else weights[at]) * precision_matrix(x, w, curvature)
        own = torch.diag(sigma.diagonal())
        regular = alpha * sigma + (1 - alpha) * own if gamma is None else sigma + gamma * own
        total, rhs = total + regular, rhs + regular @ w.reshape(-1)
    return torch.linalg.solve(total, rhs).reshape(routers[0].shape)


def harc(
    merged: Path,
    sources: Mapping[str, Path],
    rows: Mapping[str, Sequence[Tensor]],
    weights: Mapping[str, float] | None = None,
    **settings: Any,
) -> dict[str, Tensor]:
    """The calibrated routers by their names on disk, float64 (rounded in the model alone)."""
    model = load(merged)
    routers = {name: zoo.tensors(folder) for name, folder in sources.items()}
    found = {}
    for path, gate in gates(model).items():
        name = f"{path}.weight"
        found[name] = algorithm_one(
            [router_inputs(model, gate, rows[source]) for source in sources],
            [routers[source][name] for source in sources],
            weights=[(weights or {}).get(source, 1.0) for source in sources],
            **settings,
        )
        with torch.no_grad():
            gate.weight.copy_(found[name].to(gate.weight.dtype))
    return found


def mean_kl(x: Tensor, source: Tensor, router: Tensor) -> float:
    """mean KL(softmax(source x) ‖ softmax(router x))."""
    log_r = torch.log_softmax(x @ source.double().T, dim=-1)
    log_p = torch.log_softmax(x @ router.double().T, dim=-1)
    return float((log_r.exp() * (log_r - log_p)).sum(dim=-1).mean())


def mismatch(x: Tensor, source: Tensor, router: Tensor, top_k: int) -> float:
    """The share of the source's Top-k experts that the router does not choose."""
    wanted = (x @ source.double().T).topk(top_k).indices
    chosen = (x @ router.double().T).topk(top_k).indices
    hits = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(wanted, chosen, strict=True))
    return 1 - hits / wanted.numel()
