"""Time the solve of one router at 1e-6, next to a plain reference written from the paper.

    python benchmarks/solver.py --features kind hard hard-sure --preconditioners auto jacobi
    python benchmarks/solver.py --device cuda --json solver.json
    MOEMERGE_TRITON=0 python benchmarks/solver.py --device cuda

The reference is Proposition 1 and Algorithm 2 in float32: every application recomputes the routing
probabilities and the diagonal, and CG is not preconditioned. It is solved on --reference-tokens of
the tokens, and scaled to all of them. True residuals of both are recomputed in float64.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import router_inputs
from moemerge.families.rules import Gate, Score
from moemerge.routing import DomainFeatures, minimise_divergence, solve

ALPHA, RTOL = 0.9, 1e-6
ROWS = 65536  # tokens converted to float64 at a time
TOKENS = {"cpu": 20_000, "cuda": 1 << 20}


def reference_product(domains: Sequence[DomainFeatures], w: Tensor) -> Tensor:
    """Σ_i Σ_reg,i w by Proposition 1, in the dtype of w."""
    out = torch.zeros_like(w)
    for domain in domains:
        for part in torch.split(domain.features[0], ROWS):
            x = part.to(w.dtype)
            r = torch.softmax(x @ domain.router.to(w.dtype).T, dim=-1)  # (tokens, experts)
            z = x @ w.T
            u = r * z - r * (r * z).sum(dim=-1, keepdim=True)
            diagonal = (r * (1 - r)).T @ (x * x) * w
            out += (ALPHA * (u.T @ x) + (1 - ALPHA) * diagonal) / domain.tokens
    return out


def reference_rhs(domains: Sequence[DomainFeatures], dtype: torch.dtype) -> Tensor:
    parts = [reference_product([domain], domain.router.to(dtype)) for domain in domains]
    return torch.stack(parts).sum(dim=0)


def reference_cg(
    domains: Sequence[DomainFeatures], start: Tensor, max_steps: int
) -> tuple[Tensor, int]:
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


def seconds_since(begin: float, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(name: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Solve on one kind of features; return a row for each solver."""
    if name == router_inputs.TRAINED:
        domains = router_inputs.trained(layer=1, seed=args.seed)
    else:
        domains = router_inputs.synthetic(
            router_inputs.KINDS[name],
            tokens=args.tokens,
            width=args.width,
            experts=args.experts,
            device=args.device,
            seed=args.seed,
        )
    device = domains[0].features[0].device
    start = torch.stack([domain.router for domain in domains]).mean(dim=0)
    noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)).to(device)
    start = start.add(noise, alpha=0.2 / start.shape[1] ** 0.5)
    gate = Gate(Score.SOFTMAX, min(8, start.shape[0]))
    b = reference_rhs(domains, torch.float64)
    rows: list[dict[str, object]] = []

    def add(solver: str, seconds: float, steps: int, w: Tensor, on: list[DomainFeatures]) -> None:
        truth = b if on is domains else reference_rhs(on, torch.float64)
        residual = float((truth - reference_product(on, w.double())).norm() / truth.norm())
        row = {"features": name, "solver": solver, "seconds": seconds, "steps": steps}
        rows.append({**row, "tokens": sum(d.tokens for d in on), "residual": residual})
        print(
            f"{name:14s} {solver:22s} {seconds:8.3f} s {steps:5d} steps   "
            f"true residual {residual:.1e}",
            flush=True,
        )

    if device.type == "cuda":  # compile kernels and load libraries
        solve(gate, domains, start)
    for kind in args.preconditioners:
        begin = time.perf_counter()
        solution = solve(gate, domains, start, alpha=ALPHA, rtol=RTOL, preconditioner=kind)
        add(kind, seconds_since(begin, device), solution.steps, solution.weight, domains)
        if args.exact:
            begin = time.perf_counter()
            exact = minimise_divergence(gate, domains, solution.weight, preconditioner=kind)
            print(
                f"{'':14s} {kind + ', exact':22s} {seconds_since(begin, device):8.3f} s "
                f"{exact.inner_steps:5d} steps   {exact.status}, KL {exact.kl[-1]:.6g}"
            )
    if args.reference_tokens:
        share = args.reference_tokens // len(domains)
        few = [replace(d, features=[d.features[0][:share].float()]) for d in domains]
        begin = time.perf_counter()
        w, steps = reference_cg(few, start, args.max_steps)
        add("reference", seconds_since(begin, device), steps, w, few)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tokens", type=int, help="default: 20 000, on a GPU 2^20")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--features", nargs="+", default=["kind"], choices=router_inputs.NAMES)
    parser.add_argument("--preconditioners", nargs="+", default=["auto"])
    parser.add_argument("--exact", action="store_true", help="also minimise the divergence itself")
    parser.add_argument("--reference-tokens", type=int, default=0, help="0: no reference")
    parser.add_argument("--max-steps", type=int, default=1000, help="of the reference")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    args.tokens = args.tokens or TOKENS[args.device.type]
    rows = [row for name in args.features for row in measure(name, args)]
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
