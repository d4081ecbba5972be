"""Byte counts as people write them."""

from __future__ import annotations

import re
from typing import Final

from moemerge.errors import UsageError

_UNITS: Final[dict[str, int]] = {
    "": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "b": 10**9,  # mergekit's "5B": five billion
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(size: str | int) -> int:
    """`5GB`, `500MB`, `2GiB`, `5B` (five billion, as mergekit writes it) or a plain number."""
    match = _SIZE.fullmatch(str(size))
    if match is None or isinstance(size, bool) or match[2].lower() not in _UNITS:
        raise UsageError(
            f"{size!r} is not a size", hint="write a number of bytes, or e.g. 5GB, 500MB or 2GiB"
        )
    number, unit = match[1], _UNITS[match[2].lower()]
    # Whole numbers stay integers: a float would round sizes beyond 2**53.
    nbytes = int(float(number) * unit) if "." in number else int(number) * unit
    if nbytes < 1:
        raise UsageError(f"{size!r} is no usable size", hint="give at least one byte, e.g. 5GB")
    return nbytes


def format_size(nbytes: int) -> str:
    """`1.3 GB`, in powers of ten as disks are sold."""
    amount = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{nbytes} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
