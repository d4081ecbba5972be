"""Run each source over its own text and store its next-token distributions on disk.

Sources are streamed one layer at a time and one after the other, so the device never holds a whole
teacher. The student reads the stored distributions while it trains.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from moemerge.checkpoint.output import writing
from moemerge.families.opened import OpenModel
from moemerge.forward.settings import StreamSettings
from moemerge.forward.stream import ModelStream
from moemerge.runtime.files import write_file
from moemerge.runtime.progress import Progress
from moemerge.text.batches import DEFAULT_BATCH_TOKENS, Batch, make_batches
from moemerge.text.domains import Domain

COMPLETE: Final = "complete"
# A batch's logits, (tokens, vocabulary), may take this much in the forward dtype.
LOGITS_BYTES: Final = 2**31
# Positions whose logits are widened to float32 at once.
POSITIONS_AT_ONCE: Final = 1024


@dataclass(frozen=True)
class TeacherRows:
    """One domain's rows with its teacher's stored distributions."""

    domain: Domain
    starts: Mapping[bool, list[int]]  # by holdout: each row's first position
    tokens: np.ndarray[Any, Any]  # (positions, k) int32
    log_probs: np.ndarray[Any, Any]  # (positions, k) float32

    @classmethod
    def open(cls, domain: Domain, folder: Path) -> TeacherRows:
        """Map the files of a folder that `run_teacher` filled."""
        tokens, log_probs = (np.load(folder / name, mmap_mode="r") for name in FILES)
        return cls(domain, row_starts(domain), tokens, log_probs)

    def row(self, at: int, *, holdout: bool) -> TopTokens:
        """Return the distributions after each token of a row but its last."""
        rows = self.domain.holdout if holdout else self.domain.rows
        begin = self.starts[holdout][at]
        part = slice(begin, begin + positions(rows[at]))
        return TopTokens(
            torch.from_numpy(np.array(self.tokens[part])),
            torch.from_numpy(np.array(self.log_probs[part])),
        )


FILES: Final = ("tokens.npy", "log_probs.npy")


def positions(row: Tensor) -> int:
    """Return how many tokens of a row have a next one."""
    return max(0, len(row) - 1)


def row_starts(domain: Domain) -> dict[bool, list[int]]:
    """Return each row's first position: rows trained on come before those held out."""
    starts: dict[bool, list[int]] = {False: [], True: []}
    at = 0
    for holdout, rows in ((False, domain.rows), (True, domain.holdout)):
        for row in rows:
            starts[holdout].append(at)
            at += positions(row)
    return starts


def run_teacher(
    teacher: OpenModel,
    domain: Domain,
    folder: Path,
    stream: StreamSettings,
    *,
    k: int,
    vocabulary: int,
    progress: Progress,
) -> TeacherRows:
    """Fill `folder` with the teacher's distributions on the domain, unless it holds them."""
    if not os.path.exists(folder / COMPLETE):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _fill(teacher, domain, folder, stream, min(k, vocabulary), vocabulary, progress)
            write_file(folder / COMPLETE, b"")
    return TeacherRows.open(domain, folder)


def _fill(
    teacher: OpenModel,
    domain: Domain,
    folder: Path,
    stream: StreamSettings,
    k: int,
    vocabulary: int,
    progress: Progress,
) -> None:
    count = sum(positions(row) for row in (*domain.rows, *domain.holdout))
    tokens, log_probs = (
        np.lib.format.open_memmap(folder / name, mode="w+", dtype=dtype, shape=(count, k))
        for name, dtype in zip(FILES, (np.int32, np.float32), strict=True)
    )
    starts = row_starts(domain)

    def store(batch: Batch, logits: Tensor) -> None:
        """`logits` are (rows, length, vocabulary), padded on the right."""
        for number, at in enumerate(batch.places):
            length = int(batch.mask[number].sum()) - 1
            begin = starts[batch.holdout][at]
            for first in range(0, length, POSITIONS_AT_ONCE):
                last = min(first + POSITIONS_AT_ONCE, length)
                top = top_tokens(logits[number, first:last], k)
                tokens[begin + first : begin + last] = top.tokens.cpu().numpy()
                log_probs[begin + first : begin + last] = top.log_probs.cpu().numpy()

    fitting = LOGITS_BYTES // (vocabulary * stream.dtype.itemsize)
    batches = make_batches([domain], batch_tokens=max(1, min(DEFAULT_BATCH_TOKENS, fitting)))
    with ModelStream(
        teacher.checkpoint, batches, stream, output="logits", on_output=store, progress=progress
    ) as running:
        for _ in running:
            pass
    tokens.flush()
    log_probs.flush()


# --- targets --------------------------------------------------------------------------------------

# The probability of the remaining tokens never falls below this: log(0) has no gradient.
LEAST_REST = 1e-7


@dataclass(frozen=True)
class TopTokens:
    """The most probable next tokens of each position, with their log-probabilities.

    The other tokens form one group.
    """

    tokens: Tensor  # (positions, k) int32 or int64
    log_probs: Tensor  # (positions, k) float32

    def to(self, device: torch.device) -> TopTokens:
        return TopTokens(
            self.tokens.to(device, torch.int64, non_blocking=True),
            self.log_probs.to(device, non_blocking=True),
        )


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    """Return the `k` most probable tokens of logits (positions, vocabulary)."""
    wide = logits.float()
    values, tokens = wide.topk(min(k, wide.shape[-1]), dim=-1)
    log_probs = values - torch.logsumexp(wide, dim=-1, keepdim=True)
    return TopTokens(tokens.to(torch.int32), log_probs)


def divergence(logits: Tensor, teacher: TopTokens) -> Tensor:
    """Return KL(teacher ‖ student) at each position, (positions,), from the student's logits.

    It is that of the two distributions over the k stored tokens and the group of the others:

        KL(p ‖ q) = Σ_{i in top k} p_i (log p_i − log q_i) + p_rest (log p_rest − log q_rest)

    This is a lower bound of the full divergence, and equal to it if k is the vocabulary's size.
    """
    wide = logits.float()
    log_q = wide.gather(-1, teacher.tokens.long()) - torch.logsumexp(wide, dim=-1, keepdim=True)
    log_p = teacher.log_probs
    p = log_p.exp()
    rest_p = (1.0 - p.sum(-1)).clamp_min(LEAST_REST)
    rest_q = (1.0 - log_q.exp().sum(-1)).clamp_min(LEAST_REST)
    rest = rest_p * (rest_p.log() - rest_q.log())
    return (p * (log_p - log_q)).sum(-1) + (rest if wide.shape[-1] > p.shape[-1] else 0.0)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the tokens (positions,) that follow, (positions,)."""
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none")
