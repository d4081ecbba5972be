"""Sums over tokens: all that the least-squares problem of one linear map needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
# Tokens whose products are summed in float32; float64 goes on from there. A GPU's matrix unit cuts
# bits off at every step: 1024 tokens are wrong by 3e-6, 4096 by 1e-5.
CHUNK = {"cpu": 1024, "cuda": 4096}


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

    def add(self, x: Tensor, missing: Tensor, scale: Tensor, *, gram: bool = True) -> None:
        """Count tokens: x (n, in), `missing` (n, out), `scale` (n,) with s of each, or one for all.

        Without `gram`, the inputs were counted for another map already (`sharing_gram`).
        """
        if x.shape[0] == 0:
            return
        weights = scale.reshape(-1, 1)
        half = x.dtype in HALF
        narrow = x.dtype if half and x.device.type == "cuda" else None
        for part in _chunks(x.shape[0], x.device):
            s = weights if weights.shape[0] == 1 else weights[part]
            # Scaled in float32 and rounded once: an exact sum over inputs that are off by half a
            # unit in the last place, never a sum that is not positive semidefinite.
            scaled_x = x[part] * s if narrow is None else (x[part].float() * s).to(narrow)
            scaled_r = missing[part] * s
            self.energy += scaled_r.square().sum(dtype=torch.float64)
            if narrow is not None:
                scaled_r = scaled_r.to(narrow)
            self.cross += transposed_product(scaled_r, scaled_x, half=half)
            if gram:
                self.gram += transposed_product(scaled_x, scaled_x, half=half)
        if gram:
            self.tokens += x.shape[0]

    def error(self, update: Tensor) -> float:
        """Σ s² ‖r − Δ x‖² at Δ = `update` (out, in)."""
        step = update.double()
        fit = (step @ self.gram - 2.0 * self.cross).mul_(step).sum()
        return max(0.0, float(self.energy + fit))


def transposed_product(a: Tensor, b: Tensor, *, half: bool) -> Tensor:
    """aᵀ b of (tokens, m) and (tokens, n).

    What a model computes in half precision is summed in float32, as its values are not better than
    that. Sums of others are float64: a small λ makes 1e-7 of G a thousandth of a map's move.
    """
    if a.dtype in HALF and a.device.type == "cuda":
        product: Tensor = torch.mm(a.T, b, out_dtype=torch.float32)
        return product
    wide = torch.float32 if half else torch.float64
    return a.to(wide).T @ b.to(wide)


def _chunks(tokens: int, device: torch.device) -> list[slice]:
    size = CHUNK.get(device.type, CHUNK["cpu"])
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]
