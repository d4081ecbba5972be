"""One layer's router solve: moemerge beside a plain reference written from the paper, same data.

    python benchmarks/solver.py --threads 2 --json solver.json

The reference is Proposition 1 and Algorithm 2 as they stand, in float32: every application
recomputes the routing probabilities and the diagonal, and CG is not preconditioned. Both solve to
1e-6; the reference judges itself by its recurrence, as in the paper. The true residuals of both
are recomputed in float64 by the reference's operator. Features are synthetic: a decaying spectrum
of its own for each domain, a few outlier dimensions, source routers that share a base.

Wall time is what counts; processor time is shown beside it, as it betrays a busy machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate, Score
from moemerge.routing import Domain, Preconditioner, SolveSettings
from moemerge.routing.solve import build_operator, solve_system

ALPHA = 0.9
RTOL = 1e-6
GOAL = 10.0


@dataclass(frozen=True)
class Row:
    name: str
    seconds: float
    cpu_seconds: float
    steps: int
    residual: float  # true, float64
    product_ms: float


def synthetic(tokens: int, width: int, experts: int, domains: int, seed: int) -> list[Domain]:
    """Domains of float32 features that look like a normalised residual stream."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(randn(width, width)).Q
    spectrum = torch.arange(1, width + 1).float() ** -0.5
    norm_scale = torch.exp(0.3 * randn(width))
    norm_scale[torch.randperm(width, generator=generator)[:4]] *= 4.0  # outlier dimensions
    base = randn(experts, width) / width**0.5
    made = []
    for index in range(domains):
        own = spectrum * torch.exp(0.5 * randn(width))
        x = (randn(tokens // domains, width) * own) @ basis.T
        x = x / x.square().mean(dim=1, keepdim=True).sqrt() * norm_scale
        router = base + 0.3 * randn(experts, width) / width**0.5
        made.append(Domain(f"domain{index}", [x.contiguous()], router))
    return made


def reference_product(domains: Sequence[Domain], w: Tensor) -> Tensor:
    """Σ_i Σ_reg,i w by Proposition 1, in the dtype of w."""
    out = torch.zeros_like(w)
    for domain in domains:
        x = domain.features[0].to(w.dtype)
        r = torch.softmax(x @ domain.router.to(w.dtype).T, dim=-1)  # (tokens, experts)
        z = x @ w.T
        u = r * z - r * (r * z).sum(dim=-1, keepdim=True)
        dense = u.T @ x
        diagonal = (r * (1 - r)).T @ (x * x) * w
        out += (ALPHA * dense + (1 - ALPHA) * diagonal) / x.shape[0]
    return out


def reference_rhs(domains: Sequence[Domain], dtype: torch.dtype) -> Tensor:
    parts = [reference_product([domain], domain.router.to(dtype)) for domain in domains]
    return torch.stack(parts).sum(dim=0)


def reference_cg(domains: Sequence[Domain], start: Tensor, max_steps: int) -> tuple[Tensor, int]:
    """Algorithm 2."""
    b = reference_rhs(domains, start.dtype)
    w = start.clone()
    r = b - reference_product(domains, w)
    p, rho, scale = r.clone(), torch.sum(r * r), float(b.norm())
    steps = 0
    while float(r.norm()) / scale > RTOL and steps < max_steps:
        q = reference_product(domains, p)
        step = rho / torch.sum(p * q)
        w += step * p
        r -= step * q
        rho, old = torch.sum(r * r), rho
        p = r + rho / old * p
        steps += 1
    return w, steps


def true_residual(domains: Sequence[Domain], w: Tensor, b: Tensor) -> float:
    return float((b - reference_product(domains, w.double())).norm() / b.norm())


def run(args: argparse.Namespace) -> dict[str, object]:
    domains = synthetic(args.tokens, args.width, args.experts, args.domains, args.seed)
    gate = Gate(Score.SOFTMAX, min(8, args.experts))
    start = torch.stack([domain.router for domain in domains]).mean(dim=0)
    start += (
        0.2
        * torch.randn(start.shape, generator=torch.Generator().manual_seed(1))
        / (args.width**0.5)
    )
    b = reference_rhs(domains, torch.float64)
    rows = []
    for kind in args.preconditioners:
        settings = SolveSettings(alpha=ALPHA, rtol=RTOL, preconditioner=Preconditioner(kind))
        begin, cpu = time.perf_counter(), time.process_time()
        operator = build_operator(gate, domains, settings)  # statistics, right-hand side
        solution = solve_system(operator, start, settings)  # preconditioner, CG, refinement
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        name = f"moemerge, {kind}" + (f" ({solution.preconditioner})" if kind == "auto" else "")
        product_ms = 1e3 * _timed(lambda op=operator: op.mv(start))
        residual = true_residual(domains, solution.weight, b)
        rows.append(Row(name, seconds, cpu, solution.cg.steps, residual, product_ms))
        _print_row(rows[-1])
    begin, cpu = time.perf_counter(), time.process_time()
    w, steps = reference_cg(domains, start, args.max_steps)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    product_ms = 1e3 * _timed(lambda: reference_product(domains, start))
    rows.append(Row("reference", seconds, cpu, steps, true_residual(domains, w, b), product_ms))
    _print_row(rows[-1])
    speedup = rows[-1].seconds / rows[0].seconds
    print(f"{rows[0].name}: {speedup:.1f}x faster than the reference (goal {GOAL:.0f}x)")
    return {
        "shape": {key: getattr(args, key) for key in ("tokens", "width", "experts", "domains")},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "rtol": RTOL,
        "alpha": ALPHA,
        "rows": [row.__dict__ for row in rows],
        "speedup": speedup,
    }


def _timed(call: object, repeats: int = 5) -> float:
    assert callable(call)
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def _print_row(row: Row) -> None:
    print(
        f"{row.name:32s} {row.seconds:8.2f} s (cpu {row.cpu_seconds:7.1f}) {row.steps:6d} steps   "
        f"true residual {row.residual:.1e}   one product {row.product_ms:7.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--domains", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=1000, help="of the reference")
    parser.add_argument("--preconditioners", nargs="+", default=["auto"])
    parser.add_argument("--json", type=Path, default=Path("solver.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.json.write_text(json.dumps(run(args), indent=2) + "\n")


if __name__ == "__main__":
    main()
