from __future__ import annotations

import pytest
import torch

from moemerge.kernels.splitting import representable, split


@pytest.mark.parametrize(("terms", "bits"), [(1, 8), (2, 16), (3, 24)])
def test_each_term_adds_eight_bits(terms: int, bits: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(500, dtype=torch.float64) * torch.logspace(-20, 20, 500)
    parts = split(values, terms)
    assert parts.shape == (terms, 500)
    assert parts.dtype is torch.bfloat16
    error = (parts.double().sum(0) - values).abs() / values.abs()
    assert float(error.max()) <= 2.0**-bits
    assert torch.equal(representable(values, terms), parts.double().sum(0))


def test_three_terms_hold_a_float32_whole() -> None:
    torch.manual_seed(0)
    values = torch.randn(1000)
    assert torch.equal(split(values, 3).double().sum(0).float(), values)


def test_what_is_representable_stays() -> None:
    values = representable(torch.randn(4, 9, dtype=torch.float64), 2)
    assert torch.equal(representable(values, 2), values)
