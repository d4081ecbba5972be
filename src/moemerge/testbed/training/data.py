"""Training text as tensors: a pool of problems of every family, and which rows each step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from moemerge.testbed.tasks import DOMAINS, FAMILIES, Problem
from moemerge.testbed.tasks.drawing import draw
from moemerge.testbed.tokenizer import EOS, IDS, PAD, encode
from moemerge.testbed.training.presets import HARD_SHARE

# Rows of one family. The pool is the same for all seeds; what a seed decides is the order.
POOL_ROWS = 30_000
POOL_SEED = 0
# Tokens of a row: every problem fits, and what a model reads (one less) is a multiple of eight,
# which GPUs like.
LENGTH = 41


@dataclass(frozen=True)
class Pool:
    """Rows of tokens, padded at the end; `families` says which rows are whose."""

    tokens: Tensor  # (rows, LENGTH), uint8
    prompts: Tensor  # (rows,): tokens of the prompt
    lengths: Tensor  # (rows,): tokens of prompt, answer and end
    families: Mapping[tuple[str, str], range]  # (domain, family) -> rows

    def to(self, device: torch.device) -> Pool:
        return Pool(
            self.tokens.to(device), self.prompts.to(device), self.lengths.to(device), self.families
        )


@lru_cache(maxsize=2)
def pool_of(rows: int = POOL_ROWS) -> Pool:
    """`rows` training problems of every family, or as many as it has."""
    found: list[Problem] = []
    families: dict[tuple[str, str], range] = {}
    for domain in DOMAINS:
        for family in FAMILIES[domain]:
            own = islice(draw(domain, family, split="train", seed=POOL_SEED), rows)
            start = len(found)
            found.extend(own)
            families[domain, family.name] = range(start, len(found))
    return make_pool(found, families)


def make_pool(
    problems: Sequence[Problem], families: Mapping[tuple[str, str], range] | None = None
) -> Pool:
    """A pool of given problems, as one family unless told otherwise."""
    texts = [problem.prompt + problem.answer for problem in problems]
    longest = max(map(len, texts)) + 1
    assert longest <= LENGTH, f"a row of {longest} tokens, expected at most {LENGTH}"
    tokens = np.full((len(texts), LENGTH), IDS[PAD], dtype=np.uint8)
    lengths = np.fromiter((len(text) + 1 for text in texts), dtype=np.int64, count=len(texts))
    filled = np.arange(LENGTH) < lengths[:, None] - 1
    tokens[filled] = encode("".join(texts)).numpy()
    tokens[np.arange(len(texts)), lengths - 1] = IDS[EOS]
    prompts = np.fromiter((len(p.prompt) for p in problems), dtype=np.int64, count=len(texts))
    return Pool(
        torch.from_numpy(tokens),
        torch.from_numpy(prompts),
        torch.from_numpy(lengths),
        families or {("", ""): range(len(texts))},
    )


Mixture = Mapping[tuple[str, str], float]  # share of each family


def base_mixture(domains: Sequence[str]) -> Mixture:
    """All easy families, and a few hard ones; domains alike, families of a domain alike."""
    shares = {}
    for domain in domains:
        for hard, share in ((False, 1 - HARD_SHARE), (True, HARD_SHARE)):
            own = [family.name for family in FAMILIES[domain] if family.hard == hard]
            shares.update({(domain, name): share / len(own) / len(domains) for name in own})
    return shares


def specialist_mixture(domain: str) -> Mixture:
    """The hard families of one domain."""
    own = [family.name for family in FAMILIES[domain] if family.hard]
    return {(domain, name): 1 / len(own) for name in own}


def plan(pool: Pool, mixture: Mixture, *, steps: int, batch: int, seed: int) -> Tensor:
    """Rows that each step takes, (steps, batch)."""
    generator = torch.Generator().manual_seed(seed)
    ranges = [pool.families[name] for name in mixture]
    shares = torch.tensor(list(mixture.values()), dtype=torch.float64)
    family = torch.multinomial(shares, steps * batch, replacement=True, generator=generator)
    starts = torch.tensor([r.start for r in ranges])[family]
    counts = torch.tensor([len(r) for r in ranges], dtype=torch.float64)[family]
    places = torch.rand(steps * batch, generator=generator, dtype=torch.float64) * counts
    return (starts + places.long()).view(steps, batch)
