"""Quantised checkpoints are recognised from headers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moemerge.architectures.reading import find_quantised
from moemerge.runtime.dtypes import Dtype


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", Dtype.UINT8, "MXFP4"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", Dtype.FLOAT32, "block-scaled"),
        ("model.layers.0.mlp.up_proj.weight", Dtype.FLOAT8_E4M3FN, "float8_e4m3fn"),
        ("model.layers.0.mlp.up_proj.qweight", Dtype.INT32, "GPTQ"),
        ("model.layers.0.mlp.up_proj.weight_packed", Dtype.INT32, "packed"),
    ],
)
def test_tensors(name: str, dtype: Dtype, words: str) -> None:
    found = find_quantised([{}], {name: SimpleNamespace(shape=(2, 2), dtype=dtype)})
    assert words in str(found)


def test_config_and_plain() -> None:
    plain = {"model.norm.weight": SimpleNamespace(shape=(2,), dtype=Dtype.BFLOAT16)}
    section = {"quantization_config": {"quant_method": "mxfp4"}}
    assert "mxfp4" in str(find_quantised([section], plain))
    assert find_quantised([{}], plain) is None
