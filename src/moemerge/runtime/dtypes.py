"""Dtypes by name, for rooms that must not wait for torch."""

from __future__ import annotations

from typing import Final

# What weights can be merged in, computed in and written in.
FLOATS: Final = ("float32", "float16", "bfloat16", "float64")
