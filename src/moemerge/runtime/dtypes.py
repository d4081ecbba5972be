"""Dtypes of stored tensors, without importing torch."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from moemerge.errors import UsageError
from moemerge.registry import did_you_mean

if TYPE_CHECKING:
    import torch


class Dtype(Enum):
    """A dtype by torch's name, with safetensors' label and the size in bytes."""

    label: str  # empty: safetensors cannot store it
    itemsize: int
    is_floating_point: bool

    def __new__(cls, name: str, label: str, itemsize: int) -> Dtype:
        """A member's value is its name; the rest are its attributes."""
        member = object.__new__(cls)
        member._value_ = name
        member.label, member.itemsize = label, itemsize
        member.is_floating_point = "float" in name
        return member

    BOOL = "bool", "BOOL", 1
    UINT8 = "uint8", "U8", 1
    INT8 = "int8", "I8", 1
    UINT16 = "uint16", "U16", 2
    INT16 = "int16", "I16", 2
    UINT32 = "uint32", "U32", 4
    INT32 = "int32", "I32", 4
    UINT64 = "uint64", "U64", 8
    INT64 = "int64", "I64", 8
    FLOAT16 = "float16", "F16", 2
    BFLOAT16 = "bfloat16", "BF16", 2
    FLOAT32 = "float32", "F32", 4
    FLOAT64 = "float64", "F64", 8
    COMPLEX32 = "complex32", "", 4
    COMPLEX64 = "complex64", "C64", 8
    COMPLEX128 = "complex128", "", 16
    FLOAT8_E4M3FN = "float8_e4m3fn", "F8_E4M3", 1
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz", "F8_E4M3FNUZ", 1
    FLOAT8_E5M2 = "float8_e5m2", "F8_E5M2", 1
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz", "F8_E5M2FNUZ", 1
    FLOAT8_E8M0FNU = "float8_e8m0fnu", "F8_E8M0", 1
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2", "F4", 1

    __hash__ = object.__hash__  # faster than Enum's; members are unique

    def __str__(self) -> str:
        return str(self._value_)

    @classmethod
    def of(cls, dtype: Dtype | torch.dtype) -> Dtype:
        """torch.bfloat16 -> Dtype.BFLOAT16."""
        return dtype if isinstance(dtype, Dtype) else _BY_NAME[dtype_name(dtype)]

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype; imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, str(self))
        return dtype

    @property
    def pack(self) -> int:
        """Stored elements along the last axis per torch element."""
        return 2 if self is Dtype.FLOAT4_E2M1FN_X2 else 1


_BY_NAME: Final = {str(dtype): dtype for dtype in Dtype}
# Dtypes for merging, computing and writing weights.
FLOATS: Final = (Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT64)
FLOAT_NAMES: Final = tuple(map(str, FLOATS))


def dtype_name(dtype: Dtype | torch.dtype) -> str:
    """torch.bfloat16 -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> Dtype:
    """Parse `bfloat16` or `torch.bfloat16`; raise UsageError for any but FLOATS."""
    short = name.removeprefix("torch.")
    if short not in FLOAT_NAMES:
        raise UsageError(
            f"unknown dtype {name!r}{did_you_mean(short, FLOAT_NAMES)}",
            hint=f"known: {', '.join(FLOAT_NAMES)}",
        )
    return _BY_NAME[short]
