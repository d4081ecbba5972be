"""Losses of documents: their mean and the error of it."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from moemerge.features.losses import DocumentLosses, NextTokenLoss
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain


def test_equal_documents_have_the_usual_standard_error() -> None:
    losses = [1.0, 2.0, 4.0, 3.5]
    mean = DocumentLosses(tuple(10 * one for one in losses), (10,) * 4).mean
    assert mean.value == pytest.approx(statistics.mean(losses))
    assert mean.error == pytest.approx(statistics.stdev(losses) / math.sqrt(4))


def test_long_documents_count_by_their_tokens_and_one_has_no_error() -> None:
    mean = DocumentLosses((30.0, 1.0), (10, 1)).mean
    assert mean.value == pytest.approx(31 / 11)
    # e = sum - mean * tokens: (+20/11, -20/11)
    assert mean.error == pytest.approx(math.sqrt(2 * 2 * (20 / 11) ** 2) / 11)
    assert DocumentLosses((30.0,), (10,)).mean.error is None


def test_differences_are_paired() -> None:
    first = DocumentLosses((10.0, 40.0, 20.0), (10, 20, 10))
    second = DocumentLosses((11.0, 42.0, 21.0), (10, 20, 10))
    change = second.minus(first).mean
    assert change.value == pytest.approx(0.1)
    assert change.error == pytest.approx(0.0, abs=1e-12)


def test_rows_of_one_group_are_one_document() -> None:
    rows = tuple(torch.arange(length) % 7 for length in (4, 1, 6, 3))
    domain = Domain("math", rows, groups=("a", "b", "a", "c"))
    found = NextTokenLoss(SINGLE)
    for batch in make_batches([domain], batch_tokens=8):
        found.add(batch, torch.zeros(*batch.input_ids.shape, 7))
    documents = found.documents(domain)
    assert documents is not None
    assert documents.tokens == (3 + 5, 2)  # the row of one token predicts nothing
    assert documents.mean.value == pytest.approx(math.log(7))
    alone = found.documents(Domain("math", rows))
    assert alone is not None
    assert alone.tokens == (3, 5, 2)
