"""Next-token loss over batches against one row at a time; losses of documents."""

import math
import statistics
from itertools import pairwise

import pytest
import torch

from moemerge.forward import losses
from moemerge.forward.losses import DocumentLosses, NextTokenLoss
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches, rows_of
from moemerge.text.domains import Domain


def test_equal_documents_have_the_usual_standard_error():
    each = [1.0, 2.0, 4.0, 3.5]
    mean = DocumentLosses(tuple(10 * one for one in each), (10,) * 4).mean
    assert mean.value == pytest.approx(statistics.mean(each))
    assert mean.error == pytest.approx(statistics.stdev(each) / math.sqrt(4))


def test_long_documents_count_by_their_tokens_and_one_has_no_error():
    mean = DocumentLosses((30.0, 1.0), (10, 1)).mean
    assert mean.value == pytest.approx(31 / 11)
    # e = sum - mean * tokens: (+20/11, -20/11)
    assert mean.error == pytest.approx(math.sqrt(2 * 2 * (20 / 11) ** 2) / 11)
    assert DocumentLosses((30.0,), (10,)).mean.error is None


def test_differences_are_paired():
    first = DocumentLosses((10.0, 40.0, 20.0), (10, 20, 10))
    second = DocumentLosses((11.0, 42.0, 21.0), (10, 20, 10))
    change = second.minus(first).mean
    assert change.value == pytest.approx(0.1)
    assert change.error == pytest.approx(0.0, abs=1e-12)


def test_rows_of_one_group_are_one_document():
    rows = tuple(torch.arange(length) % 7 for length in (4, 1, 6, 3))
    domain = Domain("math", rows, groups=("a", "b", "a", "c"))
    found = NextTokenLoss(SINGLE)
    for batch in make_batches([domain], batch_tokens=8):
        found.add(batch, torch.zeros(*batch.input_ids.shape, 7))
    documents = found.documents(domain)
    assert documents.tokens == (3 + 5, 2)  # the row of one token predicts nothing
    assert documents.mean.value == pytest.approx(math.log(7))
    alone = found.documents(Domain("math", rows))
    assert alone.tokens == (3, 5, 2)


VOCABULARY = 11


def logits_of(ids):
    """A "model": logits that depend on the token alone, (..., vocabulary)."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return table[ids]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_padding_and_chunks_change_nothing(chunk, monkeypatch):
    monkeypatch.setattr(losses, "LOSS_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 9, 1, 2, 7)
    rows = tuple(torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths)
    found = NextTokenLoss(SINGLE)
    for batch in make_batches([Domain("math", rows)], batch_tokens=20):
        found.add(batch, logits_of(batch.input_ids))
    terms = [-torch.log_softmax(logits_of(a), -1)[b] for r in rows for a, b in pairwise(r)]
    assert found.mean("math") == pytest.approx(float(torch.stack(terms).mean()), rel=1e-6)


def test_prompts_do_not_count():
    generator = torch.Generator().manual_seed(0)
    rows = tuple(torch.randint(VOCABULARY, (n,), generator=generator) for n in (5, 9, 4))
    answers = tuple(
        torch.arange(len(row)) >= start for row, start in zip(rows, (2, 7, 0), strict=True)
    )
    domain = Domain("math", rows, answers=answers)
    found = NextTokenLoss(SINGLE)
    for batch in make_batches([domain], batch_tokens=20):
        for part in (slice(0, 1), slice(1, None)):
            piece = rows_of(batch, part)
            found.add(piece, logits_of(piece.input_ids))
    terms = [
        -torch.log_softmax(logits_of(row[at - 1]), -1)[row[at]]
        for row, mask in zip(rows, answers, strict=True)
        for at in range(1, len(row))
        if mask[at]
    ]
    assert len(terms) == 3 + 2 + 3
    assert found.mean("math") == pytest.approx(float(torch.stack(terms).mean()), rel=1e-6)


def test_text_without_a_next_token_has_no_loss():
    found = NextTokenLoss(SINGLE)
    for batch in make_batches([Domain("math", (torch.tensor([3]), torch.tensor([4])))]):
        found.add(batch, logits_of(batch.input_ids))
    assert found.mean("math") is None
