"""Every code has the value that torch or the format's table gives it, and values round to it."""

from __future__ import annotations

import pytest
import torch

from moemerge.checkpoint.quantised import scheme as kinds
from moemerge.checkpoint.quantised.scheme import Codes
from moemerge.runtime.dtypes import Dtype

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
BYTES = torch.arange(256, dtype=torch.uint8)
VALUES = {
    "e4m3": (kinds.E4M3, BYTES.view(torch.float8_e4m3fn).to(torch.float32)),
    "e5m2": (kinds.E5M2, BYTES.view(torch.float8_e5m2).to(torch.float32)),
    "int8": (kinds.INT8, BYTES.view(torch.int8).to(torch.float32)),
    "packed int8": (kinds.PACKED_INT8, torch.arange(-128.0, 128.0)),
    "fp4": (kinds.FP4, torch.tensor(FP4)),
    "packed int4": (kinds.PACKED_INT4, torch.arange(-8.0, 8.0)),
}


@pytest.fixture(params=VALUES)
def kind(request: pytest.FixtureRequest) -> tuple[Codes, torch.Tensor]:
    return VALUES[request.param]


@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_rows_of_codes(kind: tuple[Codes, torch.Tensor], columns: int) -> None:
    codes, values = kind
    rng = torch.Generator().manual_seed(columns)
    chosen = torch.randint(len(values), (5, columns), generator=rng)
    packed = codes.pack(chosen.to(torch.uint8))
    assert packed.shape == (5, -(-columns * codes.bits // 8))
    read = codes.decode(packed, columns)
    assert read.shape == (5, columns)
    expected = values[chosen]
    assert torch.equal(read.view(torch.int32), expected.view(torch.int32))  # signs of zero, NaN
    assert torch.equal(codes.values_of(chosen.to(torch.uint8)).nan_to_num(), expected.nan_to_num())


def test_rounds_to_the_nearest_and_ties_to_even(kind: tuple[Codes, torch.Tensor]) -> None:
    codes, values = kind
    finite = values[values.isfinite()].unique().double()
    middles = (finite[1:] + finite[:-1]) / 2
    rng = torch.Generator().manual_seed(0)
    between = torch.rand(4000, generator=rng, dtype=torch.float64)
    between = finite[0] + (finite[-1] - finite[0]) * between
    small = 2.0 * torch.randn(4000, generator=rng, dtype=torch.float64)
    for given in (finite, middles, between, small, finite * 1.5):
        given = given.float().double()
        read = codes.values_of(codes.round(given.float())).double()
        best = (given[:, None] - finite).abs().amin(1)
        assert torch.equal((given - read).abs(), best)
    exact = middles[middles.float().double() == middles]
    chosen = codes.round(exact.float()).int() + codes.offset
    assert bool((chosen % 2 == 0).all())


@pytest.mark.parametrize("known", list(kinds._ERRORS))
def test_known_rounding_errors_are_the_measured_ones(known) -> None:
    scheme = kinds.Scheme(*known, Dtype.FLOAT32)
    assert kinds.relative_error(scheme) == pytest.approx(kinds._measured_error(scheme), abs=1e-4)
