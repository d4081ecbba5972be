"""Every product that a solve requests was launched before, so that its kernels are compiled."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moemerge.errors import DataError
from moemerge.kernels.fused import Shift
from moemerge.routing import (
    Preconditioner,
    SolveSettings,
    measure_routers,
    minimise_divergence,
    solve_router,
)
from moemerge.routing.compilation import compile_kernels
from moemerge.routing.curvature import Curvature
from moemerge.routing.gates import TokenWeights
from moemerge.routing.products import PlainFeatures, Precision
from routing.problems import GATES, make_domains

ASKED = (
    *("logits", "working_logits", "solver_logits", "outer", "squares"),
    *("add_curvature", "moment", "add_weighted"),
)


@pytest.fixture
def asked(monkeypatch):
    """Products that features were asked for, with all of their arguments that a kernel is made
    for: rows of matrices, the kind of weights, the precision; tokens do not count."""
    seen = set()

    def heard(name, plain):
        def product(self, *arguments):
            tokens = self.x.shape[0]
            seen.add((name, *(trait for a in arguments for trait in traits(a, tokens))))
            return plain(self, *arguments)

        return product

    for name in ASKED:
        monkeypatch.setattr(PlainFeatures, name, heard(name, getattr(PlainFeatures, name)))
    return seen


def traits(argument, tokens):
    if isinstance(argument, Tensor):
        # (tokens, K) or (K, d): what counts is K.
        yield argument.shape[1] if argument.shape[0] == tokens else argument.shape[0]
    elif isinstance(argument, TokenWeights):
        same = argument.rank_one is argument.diagonal
        yield argument.diagonal is None, argument.rank_one is None, same
    elif isinstance(argument, Shift):
        yield "shift", argument.coefficients.shape[1]
    elif isinstance(argument, Precision):
        yield argument
    elif argument is None:
        yield None


def problem(*, bias, source_targets):
    return make_domains(
        2, experts=6, width=40, tokens=700, dtype=torch.float32, move=0.2,
        bias=bias, source_targets=source_targets,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gate", "curvature"),
    [
        *((gate, Curvature.FULL) for gate in GATES.values()),
        *((GATES["softmax"], kind) for kind in (Curvature.DIAGONAL, Curvature.IDENTITY)),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_solve_asks_for_nothing_else(gate, curvature, bias, asked):
    domains = problem(bias=bias, source_targets=bias)
    compile_kernels(gate, domains[0], curvature)
    compiled_products = set(asked)
    assert {name for name, *_ in compiled_products} == set(ASKED)
    asked.clear()
    plain = replace(gate, selection_bias=None)
    for kind in Preconditioner:
        if kind in (Preconditioner.NONE, Preconditioner.JACOBI):
            continue
        settings = SolveSettings(curvature=curvature, preconditioner=kind, max_steps=40)
        solution = solve_router(plain, domains, domains[0].router.double(), settings)
    measure_routers(plain, domains[0], [solution.weight])
    assert {name for name, *_ in asked} >= {"moment", "add_weighted", "working_logits"}
    assert asked <= compiled_products


def test_so_do_newtons_systems(asked):
    domains = problem(bias=False, source_targets=True)
    compile_kernels(GATES["softmax"], domains[0])
    compiled_products = set(asked)
    minimise_divergence(GATES["softmax"], domains, domains[0].router.double())
    assert asked <= compiled_products


def test_no_token_is_refused():
    (domain, _) = problem(bias=False, source_targets=False)
    with pytest.raises(DataError, match="has no token"):
        compile_kernels(GATES["softmax"], replace(domain, features=[domain.features[0][:0]]))


def test_a_system_without_threads_is_no_reason_to_fail(monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    compile_kernels(GATES["softmax"], problem(bias=False, source_targets=False)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_on_a_gpu_a_solve_compiles_nothing_more(bias):
    knobs = pytest.importorskip("triton.knobs")
    domains = [
        replace(
            d,
            features=[x.to("cuda", torch.bfloat16) for x in d.features],
            router=d.router.cuda(),
        )
        for d in make_domains(2, experts=16, width=64, tokens=5000, move=0.2, bias=bias)
    ]
    gate = GATES["softmax"]
    compile_kernels(gate, domains[0])
    compiled = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **options: compiled.append(str(options["src"].name))
    try:
        for kind in (Preconditioner.AUTO, Preconditioner.KRONECKER, Preconditioner.TWO_LEVEL):
            settings = SolveSettings(preconditioner=kind)
            solution = solve_router(gate, domains, domains[0].router.double(), settings)
        measure_routers(gate, domains[0], [solution.weight])
    finally:
        knobs.compilation.listener = before
    assert compiled == []
