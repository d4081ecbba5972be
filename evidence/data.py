"""Presets, and training text as tensors: a pool of problems and the rows of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from evidence.layout import EOS, IDS, PAD, Shape, encode
from moemerge.lab.testbed.tasks import DOMAINS, KINDS, Problem
from moemerge.lab.testbed.tasks.drawing import draw


@dataclass(frozen=True)
class Preset:
    """A model's size and training schedule."""

    name: str
    hidden: int
    width: int  # of an expert
    experts: int
    top_k: int
    layers: int
    heads: int
    base_steps: int
    specialist_steps: int
    batch: int = 128  # sequences per step
    base_lr: float = 2e-3
    specialist_lr: float = 1e-3
    dtype: torch.dtype = torch.float32  # of the checkpoints

    def shape(self, arch: str) -> Shape:
        """Return the shape; Qwen3-MoE gets half as many key heads."""
        olmoe = arch == "olmoe"
        return Shape(
            arch=arch,
            hidden=self.hidden,
            width=self.width,
            experts=self.experts,
            top_k=self.top_k,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads if olmoe else self.heads // 2,
            eps=1e-5 if olmoe else 1e-6,
            theta=10_000.0,
            normalised=not olmoe,
        )


@dataclass(frozen=True)
class Regime:
    """How specialists are fine-tuned: factors on learning rates and the load-balancing loss.

    `soft` changes routers much and other weights little, so that merging breaks the routing.
    `plain` is ordinary fine-tuning.
    """

    weights: float  # on the learning rate
    routers: float  # on the routers' learning rate, in addition
    balance: float  # on the load-balancing loss


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("tiny", 64, 24, 16, 2, 3, 4, base_steps=2500, specialist_steps=500, batch=64),
        Preset("small", 128, 48, 32, 4, 6, 4, base_steps=5000, specialist_steps=600),
        Preset(
            "demo", 96, 32, 24, 3, 5, 4,
            base_steps=5000, specialist_steps=600, dtype=torch.bfloat16,
        ),
    )
}  # fmt: skip
REGIMES: dict[str, Regime] = {
    "soft": Regime(weights=0.35, routers=15.0, balance=5.0),
    "plain": Regime(weights=1.0, routers=1.0, balance=1.0),
}
BALANCE = 0.02  # weight of the load-balancing loss in pretraining
HARD_SHARE = 0.15  # share of hard problems in pretraining
PROMPT_SHARE = 0.5  # share of pretraining steps whose loss includes the prompts
WARMUP = 100  # steps
FINAL_LR = 0.05  # as a share of the full rate; linear decay
CLIP = 1.0  # gradient norm per model


# Rows per kind. The pool is the same for all seeds; the seed decides the order.
POOL_ROWS = 30_000
POOL_SEED = 0
# Tokens per row: every problem fits, and the input length (one less) is a multiple of eight.
LENGTH = 41


@dataclass(frozen=True)
class Pool:
    """Rows of tokens, padded at the end, grouped by kind of problem."""

    tokens: Tensor  # (rows, LENGTH), uint8
    prompts: Tensor  # (rows,): prompt length
    lengths: Tensor  # (rows,): length of prompt, answer and end token
    kinds: Mapping[tuple[str, str], range]  # (domain, kind) -> rows

    def to(self, device: torch.device) -> Pool:
        return Pool(
            self.tokens.to(device), self.prompts.to(device), self.lengths.to(device), self.kinds
        )


@lru_cache(maxsize=2)
def pool_of(rows: int = POOL_ROWS) -> Pool:
    """Return a pool of at most `rows` training problems of every kind."""
    drawn: list[Problem] = []
    kinds: dict[tuple[str, str], range] = {}
    for domain in DOMAINS:
        for kind in KINDS[domain]:
            own = islice(draw(domain, kind, split="train", seed=POOL_SEED), rows)
            start = len(drawn)
            drawn.extend(own)
            kinds[domain, kind.name] = range(start, len(drawn))
    return make_pool(drawn, kinds)


def make_pool(
    problems: Sequence[Problem], kinds: Mapping[tuple[str, str], range] | None = None
) -> Pool:
    """Return a pool of the problems, as one kind by default."""
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
        kinds or {("", ""): range(len(texts))},
    )


Mixture = Mapping[tuple[str, str], float]  # share of each kind


def base_mixture(domains: Sequence[str]) -> Mixture:
    """Return equal shares of all domains, mostly of easy kinds."""
    shares = {}
    for domain in domains:
        for hard, share in ((False, 1 - HARD_SHARE), (True, HARD_SHARE)):
            own = [kind.name for kind in KINDS[domain] if kind.hard == hard]
            shares.update({(domain, name): share / len(own) / len(domains) for name in own})
    return shares


def specialist_mixture(domain: str) -> Mixture:
    """Return equal shares of the hard kinds of one domain."""
    own = [kind.name for kind in KINDS[domain] if kind.hard]
    return {(domain, name): 1 / len(own) for name in own}


def plan(pool: Pool, mixture: Mixture, *, steps: int, batch: int, seed: int) -> Tensor:
    """Return the rows of each step, (steps, batch)."""
    generator = torch.Generator().manual_seed(seed)
    ranges = [pool.kinds[name] for name in mixture]
    shares = torch.tensor(list(mixture.values()), dtype=torch.float64)
    kind = torch.multinomial(shares, steps * batch, replacement=True, generator=generator)
    starts = torch.tensor([r.start for r in ranges])[kind]
    counts = torch.tensor([len(r) for r in ranges], dtype=torch.float64)[kind]
    places = torch.rand(steps * batch, generator=generator, dtype=torch.float64) * counts
    return (starts + places.long()).view(steps, batch)
