"""Dtypes without torch agree with torch's."""

from __future__ import annotations

import pytest
import torch

from moemerge.errors import UsageError
from moemerge.runtime.dtypes import FLOATS, Dtype, dtype_name, parse_dtype


@pytest.mark.parametrize("dtype", Dtype)
def test_a_dtype_is_what_torch_says(dtype: Dtype) -> None:
    assert dtype.itemsize == dtype.torch.itemsize
    assert dtype.is_floating_point == dtype.torch.is_floating_point
    assert Dtype.of(dtype.torch) is Dtype.of(dtype) is dtype
    assert str(dtype) == f"{dtype}" == dtype_name(dtype.torch) == dtype_name(dtype)


def test_names_that_weights_can_have() -> None:
    assert parse_dtype("torch.bfloat16") is parse_dtype("bfloat16") is Dtype.BFLOAT16
    assert [d.torch for d in FLOATS] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ]
    for wrong in ("int8", "float8_e5m2", "bf17"):
        with pytest.raises(UsageError, match=f"unknown dtype '{wrong}'"):
            parse_dtype(wrong)
