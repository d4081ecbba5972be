"""Counts as people write them."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """`1 row`, `2 rows`, `12,000 rows`; `several` where more than an s is to be added."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"
