"""Batches hold every row once, within the budget, of one domain and split."""

from __future__ import annotations

import pytest
import torch

from moemerge.errors import DataError, UsageError
from moemerge.text.batches import BATCH_VALUES, gpu_batch_tokens, make_batches
from moemerge.text.domains import Domain


def domain(name: str, lengths: list[int], held: tuple[int, ...] = ()) -> Domain:
    generator = torch.Generator().manual_seed(len(name))

    def row(length: int) -> torch.Tensor:
        return torch.randint(5, 100, (length,), generator=generator)

    return Domain(name, tuple(map(row, lengths)), tuple(map(row, held)))


def test_every_row_comes_back() -> None:
    domains = [domain("math", [3, 9, 1, 9, 4, 7], (5, 2)), domain("code", [8, 2, 2])]
    batches = make_batches(domains, batch_tokens=20)
    found: dict[tuple[str, bool, int], torch.Tensor] = {}
    for batch in batches:
        assert batch.input_ids.numel() <= 20
        assert bool((batch.input_ids[~batch.mask] == 0).all())
        assert batch.padded == bool((~batch.mask).any())
        for at, place in enumerate(batch.places):
            key = (batch.domain, batch.holdout, place)
            assert key not in found
            found[key] = batch.input_ids[at][batch.mask[at]]
            assert bool(batch.mask[at, 0])  # padding is on the right
    expected = {
        (d.name, holdout, place): row
        for d in domains
        for holdout, rows in ((False, d.rows), (True, d.holdout))
        for place, row in enumerate(rows)
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], row) for key, row in expected.items())
    assert sum(batch.tokens for batch in batches) == sum(len(row) for row in expected.values())


def test_longest_first_and_a_long_row_alone() -> None:
    batches = make_batches([domain("math", [2, 50, 3, 4])], batch_tokens=12)
    assert [batch.places for batch in batches] == [(1,), (3, 2, 0)]


def test_same_input_same_batches() -> None:
    for _ in range(2):
        batches = make_batches([domain("math", [5, 5, 5, 3, 5])], batch_tokens=10)
        assert [batch.places for batch in batches] == [(0, 1), (2, 4), (3,)]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="batch_tokens is 0"):
        make_batches([domain("math", [1])], batch_tokens=0)
    with pytest.raises(DataError, match="must differ"):
        make_batches([domain("math", [1]), domain("math", [1])])


def test_smaller_gpus_take_smaller_batches() -> None:
    sizes = {gb: gpu_batch_tokens(2048, gb * 10**9) for gb in (12, 24, 25, 48, 80, 85, 150)}
    assert sizes == {12: 8192, 24: 16384, 25: 16384, 48: 32768, 80: 65536, 85: 65536, 150: 65536}
    assert gpu_batch_tokens(4096, 150 * 10**9) == BATCH_VALUES // 4096
    assert gpu_batch_tokens(2**40, 0) == 1
