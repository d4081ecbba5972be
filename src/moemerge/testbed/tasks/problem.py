"""One problem of a domain, and which side of the train/test split it is on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

# One prompt of so many is kept for testing. A prompt's hash decides, so no seed, count or order
# can move a test problem into training.
TEST_SHARE = 5


@dataclass(frozen=True)
class Problem:
    """A model sees `prompt` and must go on with `answer` and the end of the text."""

    domain: str
    kind: str
    hard: bool
    prompt: str
    answer: str


@dataclass(frozen=True)
class ProblemKind:
    """One kind of problem: `draw` gives a prompt and its answer."""

    name: str
    hard: bool
    draw: Callable[[random.Random], tuple[str, str]]


def is_test(prompt: str) -> bool:
    """Whether a prompt belongs to the test split."""
    digest = blake2b(prompt.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % TEST_SHARE == 0
