from __future__ import annotations

import pytest

from moemerge.checkpoint import format_size, parse_size
from moemerge.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("5B", 5 * 10**9),
        ("2GiB", 2 * 2**30),
        ("1.5 gb", 15 * 10**8),
        ("12345", 12345),
        ("4k", 4000),
        ("9007199254740993", 9007199254740993),
        (7, 7),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "five", "5XB", "-5GB", "0", "0.1", "GB", True, "5 G B", "9" * 5000, f"{10**400}.5"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="5GB"):
        parse_size(text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (12, 1500, 13 * 10**8)] == ["12 bytes", "1.5 kB", "1.3 GB"]
