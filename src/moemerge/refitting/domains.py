"""How much each domain's tokens count, and the models that say what they should give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moemerge.refitting.sums import HALF
from moemerge.text.batches import Batch


@dataclass(frozen=True)
class DomainScales:
    """√(ω_i / N_i) of every domain, for its calibration rows and for those held out."""

    scales: Mapping[tuple[str, bool], float]

    @classmethod
    def of(cls, batches: Sequence[Batch], weights: Mapping[str, float]) -> DomainScales:
        tokens: dict[tuple[str, bool], int] = {}
        for batch in batches:
            key = (batch.domain, batch.holdout)
            tokens[key] = tokens.get(key, 0) + batch.tokens
        return cls({key: math.sqrt(weights[key[0]] / count) for key, count in tokens.items()})

    def __call__(self, batch: Batch) -> float:
        return self.scales[batch.domain, batch.holdout]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Below each other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def parameter(model: nn.Module, name: str) -> Tensor:
    """A parameter by its name in memory, to be read or written in place."""
    return model.get_parameter(name).detach()


@dataclass(frozen=True)
class Affine:
    """y = W x + b with float32 accuracy at least, whatever the weights are stored in."""

    weight: Tensor  # (out, in)
    bias: Tensor | None  # (out,)

    @classmethod
    def of(cls, model: nn.Module, weight: str) -> Affine:
        """A linear module's map, by its weight's name in memory."""
        path, _, _ = weight.rpartition(".")
        bias = getattr(model.get_submodule(path), "bias", None)
        return cls(parameter(model, weight), bias.detach() if isinstance(bias, Tensor) else None)

    def widened(self) -> Affine:
        """On a CPU, the weight in float32 once for all tokens."""
        if self.weight.dtype in HALF and self.weight.device.type != "cuda":
            return Affine(self.weight.float(), self.bias)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, in) -> (tokens, out)."""
        if x.dtype in HALF and x.device.type == "cuda" and x.dtype == self.weight.dtype:
            y: Tensor = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            y = x.to(wide) @ self.weight.to(wide).T
        return y if self.bias is None else y + self.bias.to(y.dtype)
