"""NVIDIA ModelOpt's NVFP4 and FP8: `quant_method: modelopt`, or a `hf_quant_config.json`.

NVFP4: `X.weight` holds two four-bit floats per byte, `X.weight_scale` an eight-bit float for each
16 of them, and `X.weight_scale_2` one factor for all scales. FP8: `X.weight_scale` is one number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.quantised.scheme import E4M3, Scheme, largest
from moemerge.checkpoint.quantised.tensor import (
    LARGEST_SCALES,
    Headers,
    QuantisedInfo,
    nvfp4,
    require_scales,
    siblings,
)
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import read_object

FILE: Final = "hf_quant_config.json"
READABLE: Final = frozenset({"NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION"})
_CODES: Final = (Dtype.UINT8, Dtype.FLOAT8_E4M3FN)


def section_of(folder: Path) -> dict[str, Any]:
    """Return a quantization_config from the file that older versions write instead of it."""
    if not os.path.isfile(folder / FILE):
        return {}
    stated = read_object(folder / FILE, "fetch it again").get("quantization")
    if not isinstance(stated, Mapping):
        return {}
    section = {"quant_method": "modelopt", **stated}
    section["ignore"] = section.pop("exclude_modules", [])
    return {"quantization_config": section}


def find(headers: Headers, dtype: Dtype) -> Iterator[QuantisedInfo]:
    """Yield every tensor in this format."""
    for name, info in headers.items():
        if not name.endswith(".weight") or info.dtype not in _CODES:
            continue
        if info.dtype is Dtype.UINT8:
            yield nvfp4(name, dtype, info, headers, factor=".weight_scale_2", divides=False)
            continue
        scales = headers.get(f"{name}_scale")
        if scales is None:
            raise CheckpointError(
                f"{name!r} is stored as {info.dtype}, but there is no {name}_scale",
                hint="its download is incomplete, or it was saved without its scales",
            )
        height = None if scales.shape in ((), (1,)) else 1
        yield require_scales(
            QuantisedInfo(
                name,
                dtype,
                info.shape,
                TensorInfo.of(name, dtype, info.shape).nbytes,
                Scheme(E4M3, height, None, largest, scales.dtype),
                info,
                scales,
                others=siblings(name, LARGEST_SCALES, headers),
                stacked=len(info.shape) == 3,
            )
        )
