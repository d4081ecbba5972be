"""Sums over tokens: all that the least-squares problem of one linear map needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.kernels import long_sums
from moemerge.runtime import ranks

HALF = (torch.bfloat16, torch.float16)
# Tokens that are widened to float64 at a time. Products are float64 whatever the inputs are: hidden
# states have channels far from zero, and of two such channels float32 sums leave the difference
# wrong by 1e-3, which a small λ hands on to the map; rounded inputs by ten times as much. Many bf16
# inputs on a GPU are counted by sums that are float32 over a few hundred tokens only (`long_sums`):
# three times as fast, and maps are off by less than a thousandth of their move, which is a small
# part of what storing them in bf16 rounds away.
CHUNK = {"cpu": 1024, "cuda": 8192}
# Terms of eight bits with which weighted inputs, and what is missing, count then.
TERMS = 2
# Columns of a Gram that are computed together; of two such groups only one product is. A GPU needs
# larger ones to be busy.
GRAM_COLUMNS = {"cpu": 512, "cuda": 1024}


@dataclass
class FitSums:
    """The problem min_Δ Σ_t s_t² ‖r_t − Δ x_t‖² of a map with inputs x and missing outputs r.

    gram = Σ s² x xᵀ (in, in), cross = Σ s² r xᵀ (out, in), energy = Σ s² ‖r‖²; float64. Their
    order is that of the tokens added, so the last bits depend on it.
    """

    gram: Tensor
    cross: Tensor
    energy: Tensor  # a scalar
    tokens: int = 0

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> FitSums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zeros(inputs, inputs), zeros(outputs, inputs), zeros())

    def sharing_gram(self, outputs: int) -> FitSums:
        """Sums of another map that reads the same inputs; its own part is still to be added."""
        inputs = self.gram.shape[0]
        fresh = FitSums.empty(outputs, inputs, self.gram.device)
        fresh.gram, fresh.tokens = self.gram, self.tokens
        return fresh

    def add(
        self,
        x: Tensor,
        missing: Tensor,
        scale: Tensor,
        *,
        factor: Tensor | float = 1.0,
        gram: bool = True,
    ) -> None:
        """Count tokens: x (n, in), `missing` (n, out), `scale` (n,) with s of each, or one for all.

        The map reads `factor` times x, (n, 1) or one for all. Without `gram`, the inputs were
        counted for another map already (`sharing_gram`).
        """
        if x.shape[0] == 0:
            return
        s = scale.reshape(-1, 1).double()
        if long_sums.serves(x):
            self._add_terms(x, missing, s, factor, gram=gram)
        else:
            self._add_wide(x, missing, s, factor, gram=gram)
        if gram:
            self.tokens += x.shape[0]

    def _add_wide(
        self, x: Tensor, missing: Tensor, s: Tensor, factor: Tensor | float, *, gram: bool
    ) -> None:
        """In float64."""
        inputs = s * factor
        for part in _chunks(x.shape[0], x.device):
            scaled_x, scaled_r = x[part].double() * _of(inputs, part), missing[part].double()
            scaled_r *= _of(s, part)
            self.energy += scaled_r.square().sum()
            self.cross.addmm_(scaled_r.T, scaled_x)
            if gram:
                add_gram(self.gram, scaled_x)

    def _add_terms(
        self, x: Tensor, missing: Tensor, s: Tensor, factor: Tensor | float, *, gram: bool
    ) -> None:
        """By `long_sums`: x is bf16 and stays as it is, all weights go to the other side."""
        # Of one token float32 will do; torch would write all of `missing` in float64 otherwise.
        sizes = torch.linalg.vector_norm(missing, dim=1, keepdim=True)
        self.energy += (s * sizes).square().sum()
        long_sums.add_product(self.cross, missing, x, TERMS, s.square() * factor)
        if gram:
            long_sums.add_gram(self.gram, x, TERMS, (s * factor).square())

    def add_up(self, owner: int = 0, *, gram: bool = True) -> None:
        """Over all ranks: rank `owner` has the sums then, and all the number of tokens."""
        if gram:
            self.tokens = ranks.total(self.tokens, self.gram.device)
        if self.tokens:
            ranks.add_up_for(owner, self.cross, self.energy, *([self.gram] if gram else []))

    def error(self, update: Tensor) -> float:
        """Σ s² ‖r − Δ x‖² at Δ = `update` (out, in)."""
        step = update.double()
        fit = (step @ self.gram - 2.0 * self.cross).mul_(step).sum()
        return max(0.0, float(self.energy + fit))


def add_gram(gram: Tensor, x: Tensor) -> None:
    """gram += xᵀ x of x (tokens, in): what lies above the diagonal is computed, then mirrored."""
    width, size = x.shape[1], GRAM_COLUMNS.get(x.device.type, GRAM_COLUMNS["cpu"])
    groups = [(b, min(b + size, width)) for b in range(0, width, size)]
    for begin, end in groups:
        gram[:end, begin:end].addmm_(x[:, :end].T, x[:, begin:end])
    for begin, end in groups:
        gram[begin:end, :begin] = gram[:begin, begin:end].T


def _of(weights: Tensor, part: slice) -> Tensor:
    return weights if weights.shape[0] == 1 else weights[part]


def _chunks(tokens: int, device: torch.device) -> list[slice]:
    size = CHUNK.get(device.type, CHUNK["cpu"])
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]
