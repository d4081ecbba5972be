"""Compile all kernels of a solve in parallel, by launching each on a few tokens.

A kernel is compiled at its first launch, unless Triton's cache on disk has it. Compilers hold
Python's lock for a small part of their time, so many kernels take hardly longer than the slowest. A
solve of a small problem would compile only some of them, one after the other.

`tests/routing/test_compilation.py` checks that solves request no product that is not listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from moemerge.architectures.rules import Gate
from moemerge.errors import ResourceError
from moemerge.kernels.fused import Shift
from moemerge.routing.gates import Curvature, TokenWeights, token_weights
from moemerge.routing.leading import sketch_size
from moemerge.routing.measure import measure_routers
from moemerge.routing.preconditioners import direction_count, few_direction_count
from moemerge.routing.products import (
    DomainFeatures,
    Features,
    Precision,
    features_of,
    working_dtype,
)
from moemerge.runtime.process import run_in_threads
from moemerge.runtime.ranks import SINGLE

TOKENS = 512  # at least a tile of every kernel
Launch = Callable[[], object]


def compile_kernels(
    gate: Gate, domain: DomainFeatures, curvature: Curvature = Curvature.FULL
) -> None:
    """Compile the kernels that solving for a router of the domain's shape may need."""
    domain.check()
    few = replace(domain, features=[domain.features[0][:TOKENS]], targets=None, ranks=SINGLE)
    launches = list(_launches(gate, few, curvature))
    with suppress(ResourceError):  # too many threads: then each is compiled at its first use
        run_in_threads(launches, "compilers")


def _launches(gate: Gate, domain: DomainFeatures, curvature: Curvature) -> Iterator[Launch]:
    """Yield a launch of every kernel, slowest compilation first."""
    (x,) = domain.features
    router = domain.router.to(x.device, torch.float64)  # (K, d)
    features = features_of(x, router.shape[1])
    z = torch.zeros(len(x), router.shape[0], dtype=working_dtype(x), device=x.device)
    weights = token_weights(gate, z.double(), curvature, z.dtype)
    yield lambda: measure_routers(
        replace(gate, selection_bias=None), domain, [router.to(domain.router.dtype)]
    )
    couples = weights.rank_one is not None
    many = direction_count(router.shape, couples=couples)
    for count in sorted({many, few_direction_count(router.shape)}, reverse=True):
        yield from _along_directions(features, weights, z, _rows(router, count))
    for precision in Precision:
        yield from _products(features, weights, router, precision)
    yield lambda: features.outer(z.double())
    yield lambda: features.squares(z)
    yield lambda: features.logits(router)
    yield lambda: features.working_logits(torch.cat([router, router]))  # a step's search (`exact`)
    yield from _sketching(features, _rows(router, sketch_size(router.shape, many)))


def _rows(router: Tensor, count: int) -> Tensor:
    """Return `count` directions of the features, (count, d)."""
    return router[:1].repeat(count, 1)


def _sketching(features: Features, rows: Tensor) -> Iterator[Launch]:
    """Yield the products of the search for directions (`leading`)."""
    along = torch.zeros(
        len(features.x), len(rows), dtype=working_dtype(features.x), device=rows.device
    )
    yield lambda: features.working_logits(rows)
    unweighted = TokenWeights(None, None)
    yield lambda: features.add_weighted(torch.zeros_like(rows), unweighted, along, None, 1.0)


def _products(
    features: Features, weights: TokenWeights, router: Tensor, precision: Precision
) -> Iterator[Launch]:
    v = features.representable(router, precision)
    yield lambda: features.add_curvature(torch.zeros_like(v), weights, v, precision, 1.0)
    if precision is not Precision.ACCURATE:
        yield lambda: features.solver_logits(v, precision)


def _along_directions(
    features: Features, weights: TokenWeights, z: Tensor, directions: Tensor
) -> Iterator[Launch]:
    """Yield the products of the correction along `directions`, (J, d) (`leading`)."""
    projected = z.new_zeros(len(z), len(directions))
    shift = Shift(projected, z.new_zeros(z.shape[1], len(directions), dtype=torch.float64))
    out = directions.new_zeros(z.shape[1], directions.shape[1])
    yield lambda: features.add_weighted(out, weights, z.clone(), shift, 1.0)
    yield lambda: features.moment(weights, z, projected)
    yield lambda: features.working_logits(directions)
