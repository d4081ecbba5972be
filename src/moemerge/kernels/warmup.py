"""Compile kernels before they are needed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from moemerge.kernels import agreement, fused
from moemerge.kernels.splitting import ACCURATE, COARSE, FAST

THREADS = 4
TOKENS = 64


def warm_up(
    experts: int,
    columns: int,
    width: int,
    device: torch.device,
    *,
    top_k: int | None = None,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Compile what a softmax router of this shape needs: a few seconds, once on a machine.

    `top_k` and `bounds` as in `agreement`; without, the metrics' kernel is left out. May run in a
    thread of its own, while the features are not there yet. Does nothing where nothing compiles.
    """
    x = torch.zeros(TOKENS, width, dtype=torch.bfloat16, device=device)
    if not fused.usable(x):
        return
    p = torch.zeros(TOKENS, experts, device=device)
    v = torch.zeros(experts, columns, dtype=torch.float64, device=device)
    out = torch.zeros_like(v)
    fused.logits(x, v, terms=ACCURATE.vector)  # alone: the first launch sets Triton up
    with ThreadPoolExecutor(THREADS) as pool:
        jobs: list[Future[Any]] = [
            pool.submit(fused.add_product, out, x, p, p, v, terms=COARSE),
            pool.submit(fused.add_product, out, x, p, p, v, terms=FAST),
            pool.submit(fused.add_product, out, x, p, p, v, terms=ACCURATE),
            pool.submit(fused.outer, p, x, columns, terms=FAST.weighted, square=True),
            pool.submit(fused.weigh, p, None, None, terms=ACCURATE.weighted, like=x),
        ]
        if top_k is not None and agreement.usable(p, p):
            jobs.append(pool.submit(agreement.agreement, p, p, top_k, bounds))
    for job in jobs:
        job.result()
