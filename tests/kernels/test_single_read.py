"""The kernel that reads features once, against a dense float64 twin and against itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import twins
from kernels.twins import KINDS, error
from moemerge.kernels import fused, single_read
from moemerge.kernels.splitting import ACCURATE, COARSE, FAST, representable

BINDINGS = single_read.has_bindings()
runs_kernel = pytest.mark.skipif(
    not (torch.cuda.is_available() and BINDINGS), reason="needs a CUDA device and cuda.bindings"
)
TOLERANCE = 1e-5  # u has two bf16 terms
SHAPES = [  # tokens, d, experts, bias
    (1, 2048, 64, True),  # one tile, hardly filled
    (33, 2048, 64, False),
    (5000, 1536, 8, True),  # the narrowest, and the last rank has nothing
    (40_001, 1984, 36, True),
    (300_000, 2048, 64, False),  # every cluster works, and sums go to memory more than once
]


def features(tokens: int, width: int) -> Tensor:
    return torch.randn(tokens, width, device="cuda").bfloat16()


def product(x: Tensor, h: twins.Weights, v: Tensor) -> Tensor:
    assert single_read.serves(x, v, COARSE, "softmax")
    out = torch.zeros_like(v)
    fused.add_product(out, x, *h, v, terms=COARSE)
    return out


def direction(experts: int, columns: int) -> Tensor:
    v = torch.randn(experts, columns, device="cuda", dtype=torch.float64)
    return representable(v, COARSE.vector)


def problem(tokens: int) -> tuple[Tensor, twins.Weights, Tensor]:
    torch.manual_seed(0)
    h = twins.weights("softmax", tokens, 64, "cuda")
    return features(tokens, 2048), h, direction(64, 2048)


@runs_kernel
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_equals_its_dense_twin(shape: tuple[int, int, int, bool], kind: str) -> None:
    tokens, width, experts, bias = shape
    torch.manual_seed(tokens)
    x, h = features(tokens, width), twins.weights(kind, tokens, experts, "cuda")
    v = direction(experts, width + bias)
    got, want = product(x, h, v), twins.product(x, h, v)
    assert error(got, want) <= TOLERANCE
    if bias:
        assert error(got[:, width], want[:, width]) <= TOLERANCE


@runs_kernel
@pytest.mark.gpu
def test_every_run_gives_the_same_bits() -> None:
    x, h, v = problem(100_000)
    first = product(x, h, v)
    for _ in range(5):
        assert torch.equal(product(x, h, v), first)


@runs_kernel
@pytest.mark.gpu
def test_more_tokens_than_float32_should_add_up_take_more_clusters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, h, v = problem(70_000)
    monkeypatch.setattr(single_read, "ROWS_PER_CLUSTER", 320)
    assert error(product(x, h, v), twins.product(x, h, v)) <= TOLERANCE


@runs_kernel
@pytest.mark.gpu
def test_a_view_of_a_wider_matrix_is_read_in_place() -> None:
    torch.manual_seed(0)
    x = features(900, 4096)[100:801, 1024:2816]
    h, v = twins.weights("softmax", len(x), 16, "cuda"), direction(16, x.shape[1])
    assert error(product(x, h, v), twins.product(x, h, v)) <= TOLERANCE


@runs_kernel
@pytest.mark.gpu
def test_other_shapes_are_left_to_the_kernels_that_read_twice() -> None:
    def served(tokens: int, width: int, experts: int, terms: fused.Terms = COARSE) -> bool:
        v = torch.zeros(experts, width, device="cuda", dtype=torch.float64)
        return single_read.serves(features(tokens, width), v, terms, "softmax")

    assert served(10, 2048, 64)
    assert not served(0, 2048, 64)
    assert not served(10, 2048, 128)
    assert not served(10, 2048, 62)
    assert not served(10, 1024, 64)
    assert not served(10, 4096, 64)
    assert not served(10, 2000, 64)
    assert not served(10, 2048, 64, FAST)
    assert not served(10, 2048, 64, ACCURATE)


def test_weights_are_read_as_aligned_float32() -> None:
    whole = torch.rand(9, 8)
    assert single_read.readable(whole) is whole  # no copy of what needs none
    ragged = whole.flatten()[1:65].view(8, 8)
    for weights in (whole.double(), whole.T, ragged):
        got = single_read.readable(weights)
        assert got.dtype == torch.float32
        assert got.is_contiguous()
        assert got.data_ptr() % 16 == 0
        assert torch.equal(got, weights.float())


def test_features_on_a_cpu_are_not_its_business() -> None:
    x = torch.zeros(10, 2048, dtype=torch.bfloat16)
    assert not single_read.serves(x, torch.zeros(64, 2048), COARSE, "softmax")


@pytest.mark.skipif(BINDINGS, reason="cuda.bindings are installed")
def test_without_bindings_there_is_no_kernel_and_no_complaint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert single_read._kernel(torch.device("cuda", 0), "softmax", False) is None
    assert not caplog.records


def test_the_source_comes_with_the_package() -> None:
    assert b'extern "C" __global__' in single_read.source()


@pytest.mark.skipif(not BINDINGS, reason="needs cuda.bindings")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_compiles(kind: str, has_bias: bool) -> None:
    assert len(single_read._binary(kind, has_bias)) > 0
