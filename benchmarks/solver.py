"""One layer's router solve: moemerge beside a plain reference written from the paper, same data.

    python benchmarks/solver.py --threads 2
    python benchmarks/solver.py --device cuda --json build/solver.json
    python benchmarks/solver.py --features kind hard hard-sure trained --preconditioners auto jacobi

The reference is Proposition 1 and Algorithm 2 as they stand, in float32: every application
recomputes the routing probabilities and the diagonal, and CG is not preconditioned. Both solve to
1e-6; the reference judges itself by its recurrence, as in the paper. The true residuals of both
are recomputed in float64 by the reference's operator. `router_inputs` has the kinds of features.

On a GPU the features are bf16 and a million, and the reference solves on --reference-tokens of them
only; what it would take on all is told from one product on all and the steps that it took. The
product's times stand beside the card's own limits, measured in the same run: one read of the
features, and the products' arithmetic at the rate of a large bf16 matrix product.

Wall time is what counts; processor time is shown beside it, as it betrays a busy machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import router_inputs
from moemerge.families.rules import Gate, Score
from moemerge.routing import DomainFeatures, Preconditioner, SolveSettings, measure_routers
from moemerge.routing.cg import COARSE_STEPS
from moemerge.routing.curvature import RouterCurvature
from moemerge.routing.preconditioners import build
from moemerge.routing.products import Features, Precision
from moemerge.routing.solve import build_operator, solve_system

ALPHA = 0.9
RTOL = 1e-6
GOAL = 10.0
ROWS = 65536  # of a GPU's features made, or taken through float64, at once
MATRIX = 8192  # side of the matrix product that measures a card's rate
TOKENS = {"cpu": 20_000, "cuda": 1 << 20}
REFERENCE_TOKENS = 1 << 16  # on a GPU
# Calls shorter than this (in seconds, two of them) are timed several in a row, as a solver makes
# them: the host runs ahead of the device.
SHORT, AT_ONCE = 0.02, 10


@dataclass(frozen=True)
class Row:
    name: str
    tokens: int
    seconds: float
    cpu_seconds: float
    steps: int
    residual: float  # true, float64
    product_ms: float


@dataclass(frozen=True)
class Timing:
    name: str
    ms: float
    floor_ms: float | None = None
    error: float | None = None  # relative to float64


# --- data ---------------------------------------------------------------------------------------


def router_inputs_of(name: str, args: argparse.Namespace) -> list[DomainFeatures]:
    """The features of one kind; those of a trained model have its own size."""
    if name == router_inputs.TRAINED:
        domains = router_inputs.trained(layer=args.layer, seed=args.seed)
        return [
            replace(
                domain,
                features=[x.to(args.device) for x in domain.features],
                router=domain.router.to(args.device),
            )
            for domain in domains
        ]
    return router_inputs.synthetic(
        router_inputs.KINDS[name],
        tokens=args.tokens,
        width=args.width,
        experts=args.experts,
        device=args.device,
        seed=args.seed,
    )


def starting_point(domains: Sequence[DomainFeatures]) -> Tensor:
    start = torch.stack([domain.router for domain in domains]).mean(dim=0)
    noise = torch.randn(start.shape, generator=torch.Generator().manual_seed(1)).to(start.device)
    return start.add(noise, alpha=0.2 / start.shape[1] ** 0.5)


def shortened(domains: Sequence[DomainFeatures], tokens: int) -> list[DomainFeatures]:
    """The first tokens of every domain, in float32."""
    share = tokens // len(domains)
    return [replace(d, features=[d.features[0][:share].float()]) for d in domains]


# --- the reference ------------------------------------------------------------------------------


def reference_product(
    domains: Sequence[DomainFeatures], w: Tensor, rows: int | None = None
) -> Tensor:
    """Σ_i Σ_reg,i w by Proposition 1, in the dtype of w; `rows` tokens at once (default: all)."""
    out = torch.zeros_like(w)
    for domain in domains:
        for part in torch.split(domain.features[0], rows or domain.tokens):
            x = part.to(w.dtype)
            r = torch.softmax(x @ domain.router.to(w.dtype).T, dim=-1)  # (tokens, experts)
            z = x @ w.T
            u = r * z - r * (r * z).sum(dim=-1, keepdim=True)
            dense = u.T @ x
            diagonal = (r * (1 - r)).T @ (x * x) * w
            out += (ALPHA * dense + (1 - ALPHA) * diagonal) / domain.tokens
    return out


def reference_rhs(
    domains: Sequence[DomainFeatures], dtype: torch.dtype, rows: int | None = None
) -> Tensor:
    parts = [reference_product([domain], domain.router.to(dtype), rows) for domain in domains]
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


def true_residual(domains: Sequence[DomainFeatures], w: Tensor, b: Tensor) -> float:
    return float((b - reference_product(domains, w.double(), ROWS)).norm() / b.norm())


# --- what is measured ---------------------------------------------------------------------------


def solve_row(
    kind: str, domains: Sequence[DomainFeatures], start: Tensor, b: Tensor
) -> tuple[Row, RouterCurvature]:
    """Statistics, preconditioner, CG and refinement with one kind of preconditioner."""
    gate = gate_of(start)
    settings = SolveSettings(alpha=ALPHA, rtol=RTOL, preconditioner=Preconditioner(kind))
    begin, cpu = clock(start.device), time.process_time()
    operator = build_operator(gate, domains, settings)
    solution = solve_system(operator, start, settings)
    seconds, cpu = clock(start.device) - begin, time.process_time() - cpu
    name = f"moemerge, {kind}" + (f" ({solution.preconditioner})" if kind == "auto" else "")
    product_ms = timed(lambda: operator.mv(start), start.device)
    residual = true_residual(domains, solution.weight, b)
    tokens = sum(domain.tokens for domain in domains)
    row = Row(name, tokens, seconds, cpu, solution.cg.steps, residual, product_ms)
    if len(solution.trials) > 1:
        print(f"{solution.detour}; residuals", *(f"{r:.1e}" for r in solution.cg.residuals))
    return row, operator


def reference_row(
    domains: Sequence[DomainFeatures], start: Tensor, args: argparse.Namespace
) -> tuple[Row, float]:
    """The reference's solve, and the milliseconds of one of its products on all tokens."""
    used = domains
    if args.reference_tokens < args.tokens:
        used = shortened(domains, args.reference_tokens)
    b = reference_rhs(used, torch.float64, ROWS)
    begin, cpu = clock(start.device), time.process_time()
    w, steps = reference_cg(used, start, args.max_steps)
    seconds, cpu = clock(start.device) - begin, time.process_time() - cpu
    product_ms = timed(lambda: reference_product(used, start), start.device)
    tokens = sum(domain.tokens for domain in used)
    residual = true_residual(used, w, b)
    row = Row("reference", tokens, seconds, cpu, steps, residual, product_ms)
    if used is domains:
        return row, product_ms
    whole = timed(lambda: reference_product(domains, start, ROWS), start.device, repeats=2)
    return row, whole


def as_one(domains: Sequence[DomainFeatures]) -> DomainFeatures:
    """The features of all domains, which lie behind each other, under the first one's router."""
    first = domains[0].features[0]
    tokens = sum(domain.tokens for domain in domains)
    whole = first.as_strided((tokens, first.shape[1]), first.stride())
    return DomainFeatures("all", [whole], domains[0].router)


def operator_timings(domains: Sequence[DomainFeatures], start: Tensor) -> list[Timing]:
    """The product against what the card can do; GPUs only."""
    device, settings = start.device, SolveSettings(alpha=ALPHA)
    operator = build_operator(gate_of(start), [as_one(domains)], settings)
    apart = build_operator(gate_of(start), domains, settings)
    blocks = [x for s in operator.curvatures for x, _ in s.parts]
    read = timed(lambda: [x.view(torch.int64).sum() for x in blocks], device)
    square = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    rate = 2 * MATRIX**3 / timed(lambda: square @ square, device)  # operations in a millisecond
    experts, width = operator.shape
    arithmetic = 4 * sum(len(x) for x in blocks) * experts * width / rate  # of one term
    v = torch.randn_like(start).double()
    plain, exact = (PlainOperator(operator, p) for p in (Precision.FAST, Precision.ACCURATE))
    rows = [
        Timing("one read of the features", read),
        Timing(f"one term's arithmetic at {rate / 1e9:.0f} TFLOP/s", arithmetic),
    ]
    for name, used in (
        ("product inside CG", operator.coarse() or operator),
        (f"the same, {len(domains)} domains apart", apart.coarse() or apart),
        (f"product inside CG after step {COARSE_STEPS}", operator),
        ("product for true residuals", operator.accurate()),
    ):
        seen = used.representable(v)  # CG's directions are such
        terms = used.precision.terms
        floor = max(read, (terms.vector + terms.weighted) / 2 * arithmetic)
        ms = timed(lambda used=used, seen=seen: used.mv(seen), device)  # type: ignore[misc]
        truth = None if used.curvatures is apart.curvatures else exact.mv(seen)
        error = None if truth is None else float((used.mv(seen) - truth).norm() / truth.norm())
        rows.append(Timing(name, ms, floor, error))
    ms = timed(lambda: plain.mv(v), device)
    rows.append(Timing("product inside CG, plain torch, float32", ms))
    return rows


class PlainOperator:
    """The same operator with every product in plain torch."""

    def __init__(self, operator: RouterCurvature, precision: Precision) -> None:
        self.operator = operator
        self.precision = precision

    def mv(self, v: Tensor) -> Tensor:
        out = self.operator.damping * self.operator.sum_diagonal * v
        for domain in self.operator.curvatures:
            for features, weights in domain.chunks():
                plain = Features(features.x, features.columns)
                factor = self.operator.dense / domain.tokens
                plain.add_curvature(out, weights, v, self.precision, factor)
        return out


def layer_timings(
    domains: Sequence[DomainFeatures], start: Tensor, operator: RouterCurvature
) -> list[Timing]:
    """The parts of a layer's work beside the solver's steps; GPUs only."""
    device, gate = start.device, gate_of(start)
    settings = SolveSettings(alpha=ALPHA)
    kind = Preconditioner.AUTO
    preconditioner = build(operator, kind).operator
    v = operator.rhs()
    return [
        Timing("statistics", timed(lambda: build_operator(gate, domains, settings), device, 3)),
        Timing("preconditioner", timed(lambda: build(operator, kind), device, 3)),
        Timing("one application of it", timed(lambda: preconditioner.mv(v), device)),
        Timing(
            "metrics of two routers",
            timed(
                lambda: [measure_routers(gate, d, [start, d.router]) for d in domains], device, 3
            ),
        ),
    ]


def gate_of(router: Tensor) -> Gate:
    return Gate(Score.SOFTMAX, min(8, router.shape[0]))


def clock(device: torch.device) -> float:
    """Wall time once the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(call: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Milliseconds of the fastest call (CPU), or the median of a few in a row (GPU)."""
    if device.type == "cuda":
        return timed_on_gpu(call, device, repeats)
    times = []
    for _ in range(repeats):
        begin = clock(device)
        call()
        times.append(clock(device) - begin)
    return 1e3 * min(times)


def timed_on_gpu(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """By the device's own clock; a call before the first keeps it busy while more are sent."""
    begin = clock(device)
    call()
    call()
    at_once = AT_ONCE if clock(device) - begin < SHORT else 1
    times: list[float] = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        call()
        first.record()
        for _ in range(at_once):
            call()
        last.record()
        torch.cuda.synchronize(device)
        times.append(first.elapsed_time(last) / at_once)
    return sorted(times)[repeats // 2]


# --- the run ------------------------------------------------------------------------------------


def run(name: str, args: argparse.Namespace) -> dict[str, object]:
    """Everything on one kind of features: solves, the parts' times, the reference."""
    domains = router_inputs_of(name, args)
    start = starting_point(domains)
    b = reference_rhs(domains, torch.float64, ROWS)
    on_gpu = args.device.type == "cuda"
    if on_gpu:  # kernels are compiled and libraries loaded by a solve that does not count
        solve_row(args.preconditioners[0], domains, start, b)
    rows: list[Row] = []
    timings: list[Timing] = []
    for kind in args.preconditioners:
        row, operator = solve_row(kind, domains, start, b)
        rows.append(row)
        print_row(row)
        if on_gpu and not timings:
            timings = operator_timings(domains, start) + layer_timings(domains, start, operator)
    for timing in timings:
        print_timing(timing)
    row, whole_ms = reference_row(domains, start, args)
    rows.append(row)
    print_row(row)
    seconds = row.seconds if row.tokens == rows[0].tokens else row.steps * whole_ms / 1e3
    speedup = seconds / rows[0].seconds
    if row.tokens != rows[0].tokens:
        print(f"reference on all tokens: {whole_ms:.1f} ms a product, so about {seconds:.1f} s")
    print(f"{rows[0].name}: {speedup:.1f}x faster than the reference (goal {GOAL:.0f}x)")
    return {
        "features": name,
        "shape": {key: getattr(args, key) for key in ("tokens", "width", "experts", "seed")},
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": machine(args.device),
        "rtol": RTOL,
        "alpha": ALPHA,
        "rows": [asdict(row) for row in rows],
        "timings": [asdict(timing) for timing in timings],
        "reference_product_ms": whole_ms,
        "speedup": speedup,
    }


def survey(args: argparse.Namespace) -> dict[str, object]:
    """The solves alone, on many kinds of features."""
    rows: dict[str, list[dict[str, object]]] = {}
    for name in args.features:
        domains = router_inputs_of(name, args)
        start = starting_point(domains)
        b = reference_rhs(domains, torch.float64, ROWS)
        if args.device.type == "cuda" and not rows:
            solve_row(args.preconditioners[0], domains, start, b)
        rows[name] = []
        for kind in args.preconditioners:
            row, _ = solve_row(kind, domains, start, b)
            rows[name].append(asdict(row))
            print(f"{name:14s} ", end="")
            print_row(row)
        del domains
    return {"machine": machine(args.device), "torch": torch.__version__, "rows": rows}


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def print_row(row: Row) -> None:
    print(
        f"{row.name:32s} {row.tokens:8d} tokens {row.seconds:8.3f} s (cpu {row.cpu_seconds:7.1f}) "
        f"{row.steps:5d} steps   true residual {row.residual:.1e}   "
        f"one product {row.product_ms:8.2f} ms",
        flush=True,
    )


def print_timing(timing: Timing) -> None:
    floor = "" if timing.floor_ms is None else f"   floor {timing.floor_ms:6.2f} ms"
    error = "" if timing.error is None else f"   error {timing.error:.1e}"
    print(f"  {timing.name:42s} {timing.ms:8.2f} ms{floor}{error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tokens", type=int, help="default: 20 000, on a GPU 2^20")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument(
        "--features",
        nargs="+",
        default=["kind"],
        metavar="NAME",
        help=f"of {', '.join(router_inputs.NAMES)}, or all; several give a table of solves",
    )
    parser.add_argument("--layer", type=int, default=1, help="of the trained model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=1000, help="of the reference")
    parser.add_argument(
        "--reference-tokens", type=int, help="default: all of them, on a GPU at most 65 536"
    )
    parser.add_argument("--preconditioners", nargs="+", default=["auto"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    args = parser.parse_args()
    args.tokens = args.tokens or TOKENS[args.device.type]
    most = REFERENCE_TOKENS if args.device.type == "cuda" else args.tokens
    args.reference_tokens = min(args.tokens, args.reference_tokens or most)
    torch.set_num_threads(args.threads)
    if args.features == ["all"]:
        args.features = list(router_inputs.NAMES)
    unknown = [name for name in args.features if name not in router_inputs.NAMES]
    if unknown:
        parser.error(f"no features {unknown[0]!r}; there are {', '.join(router_inputs.NAMES)}")
    document = run(args.features[0], args) if len(args.features) == 1 else survey(args)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
