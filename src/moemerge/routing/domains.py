"""One source's tokens at one layer, and how they are walked through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.errors import DataError

# Rows handled at once. On a CPU the (rows, experts) temporaries stay in a core's cache; a GPU
# wants long products and has the memory for them.
CPU_ROWS = 2048
GPU_ROWS = 65536


@dataclass(frozen=True)
class DomainFeatures:
    """One source's tokens at one layer: the merged model's features and what to aim for."""

    name: str
    features: Sequence[Tensor]  # blocks of (tokens, d), any floating dtype, one device
    router: Tensor  # (K, d), or (K, d + 1) with the router's bias as last column
    targets: Sequence[Tensor] | None = (
        None  # blocks of (tokens, K) logits; None: router on features
    )
    weight: float = 1.0  # how much this domain counts beside the others

    @property
    def tokens(self) -> int:
        return sum(block.shape[0] for block in self.features)

    @property
    def divisor(self) -> float:
        """What a sum over the tokens is divided by to become the domain's share of the whole."""
        return self.tokens / self.weight

    @property
    def has_bias(self) -> bool:
        return self.router.shape[1] == self.features[0].shape[1] + 1

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.tokens == 0:
            raise DataError(
                f"domain {self.name!r} has no token",
                hint="give it calibration text, or leave the domain out",
            )
        experts, columns = self.router.shape
        for index, block in enumerate(self.features):
            if columns - block.shape[1] not in (0, 1):
                raise DataError(
                    f"domain {self.name!r}: features of width {block.shape[1]} for a router "
                    f"with {columns} columns"
                )
            if self.targets is None:
                continue
            if len(self.targets) != len(self.features) or self.targets[index].shape != (
                block.shape[0],
                experts,
            ):
                raise DataError(
                    f"domain {self.name!r}: target logits must be one ({block.shape[0]}, "
                    f"{experts}) block for each block of features"
                )


def rows_at_once(device: torch.device) -> int:
    """How many tokens a chunk holds."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def chunks_of(domain: DomainFeatures) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The domain's features (and target logits) in chunks."""
    for index, block in enumerate(domain.features):
        rows = rows_at_once(block.device)
        for begin in range(0, block.shape[0], rows):
            chunk = slice(begin, begin + rows)
            yield block[chunk], None if domain.targets is None else domain.targets[index][chunk]


def working_dtype(features: Tensor) -> torch.dtype:
    """float32, or float64 where the features are."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def augmented(x: Tensor, columns: int) -> Tensor:
    """x with a column of ones where the router carries a bias."""
    if x.shape[1] == columns:
        return x
    return torch.cat([x, x.new_ones(x.shape[0], 1)], dim=1)


def logits_of(x: Tensor, router: Tensor) -> Tensor:
    """W x (+ b where the router has one more column than x), (tokens, experts), in x's dtype."""
    width = x.shape[1]
    z = x @ router[:, :width].T.to(x.dtype)
    return z if router.shape[1] == width else z + router[:, width].to(x.dtype)
