"""Next-token loss over batches, against one row at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moemerge.features import losses as job
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches, rows_of
from moemerge.text.domains import Domain

VOCABULARY = 11


def logits_of(ids: torch.Tensor) -> torch.Tensor:
    """A "model": logits that depend on the token alone, (..., vocabulary)."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return table[ids]


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_padding_and_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LOSS_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 9, 1, 2, 7)
    rows = tuple(torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths)
    found = job.NextTokenLoss(SINGLE)
    for batch in make_batches([Domain("math", rows)], batch_tokens=20):
        found.add(batch, logits_of(batch.input_ids))
    terms = [-torch.log_softmax(logits_of(a), -1)[b] for r in rows for a, b in pairwise(r)]
    assert found.mean("math") == pytest.approx(float(torch.stack(terms).mean()), rel=1e-6)


def test_prompts_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = tuple(torch.randint(VOCABULARY, (n,), generator=generator) for n in (5, 9, 4))
    answers = tuple(
        torch.arange(len(row)) >= start for row, start in zip(rows, (2, 7, 0), strict=True)
    )
    domain = Domain("math", (), rows, holdout_answers=answers).held_out
    found = job.NextTokenLoss(SINGLE)
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


def test_text_without_a_next_token_has_no_loss() -> None:
    found = job.NextTokenLoss(SINGLE)
    for batch in make_batches([Domain("math", (torch.tensor([3]), torch.tensor([4])))]):
        found.add(batch, logits_of(batch.input_ids))
    assert found.mean("math") is None
