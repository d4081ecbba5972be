"""Gram matrices (second moments of inputs) and squared gradients.

For y = x Wᵀ the gradient of one sequence's loss is dW = Σ_t δ_t x_tᵀ over the tokens of that
sequence, with δ = d loss / d y. Squares are summed over sequences, never squared after the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from moemerge.forward.tokens import sort_by_expert
from moemerge.kernels.long_sums import add_up
from moemerge.runtime.ranks import SINGLE, Ranks

# Tokens whose products are summed in float32; sums over chunks are float64. A GPU's tensor cores
# truncate at every step: the relative error is 5e-5 for 25 000 tokens at once, 3e-6 for 1024.
TOKENS_PER_SUM = 1024
# Bytes of chunk sums in memory at once.
CHUNK_SUM_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
HALF = (torch.bfloat16, torch.float16)


def gram_sum(x: Tensor) -> Tensor:
    """Return Σ x xᵀ over the rows of x (tokens, d): (d, d), float64.

    Products of half-precision features are exact in float32. They are summed in float32 within a
    chunk of tokens and in float64 over chunks.
    """
    tokens, width = x.shape
    total = torch.zeros((width, width), dtype=torch.float64, device=x.device)
    together = max(
        1, CHUNK_SUM_BYTES.get(x.device.type, CHUNK_SUM_BYTES["cpu"]) // (4 * width * width)
    )
    whole = tokens - tokens % TOKENS_PER_SUM
    for part in torch.split(x[:whole].reshape(-1, TOKENS_PER_SUM, width), together):
        add_up(total, transposed_product(part, part))
    if whole < tokens:
        total += transposed_product(x[whole:], x[whole:])
    return total


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ b of (tokens, m) and (tokens, n), possibly batched, in at least float32."""
    left = a.transpose(-1, -2)
    if a.dtype in HALF and a.device.type == "cuda":
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        product: Tensor = multiply(left, b, out_dtype=torch.float32)
        return product
    if a.dtype in HALF:
        left, b = left.float(), b.float()
    return left @ b


class TokenSum:
    """A running sum over tokens and their number; call `add_up` before `mean`.

    `of` returns the sum over the rows of x (tokens, d) in float64.
    """

    def __init__(self, of: Callable[[Tensor], Tensor], ranks: Ranks = SINGLE) -> None:
        self._of = of
        self._ranks = ranks
        self.tokens = 0
        self._sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Add the rows of x (tokens, d)."""
        if x.shape[0] == 0 and self._ranks.count == 1:  # other ranks may have tokens
            return
        part = self._of(x)
        self._sum = part if self._sum is None else self._sum.add_(part)
        self.tokens += x.shape[0]

    def add_up(self) -> None:
        """Reduce over all ranks: rank 0 gets the sum, all get the number of tokens."""
        if self._sum is not None:
            self.tokens = self._ranks.total(self.tokens, self._sum.device)
            self._ranks.reduce_to(0, self._sum)

    def mean(self) -> Tensor | None:
        """Return the mean in float32; None before the first token."""
        if self._sum is None or not self.tokens:
            return None
        return (self._sum / self.tokens).float()


def magnitude_sum(x: Tensor) -> Tensor:
    """Return Σ |x| over the rows of x (tokens, d): (d,), float64."""
    return x.abs().sum(dim=0, dtype=torch.float64)


def power_sum(x: Tensor) -> Tensor:
    """Return Σ x² over the rows of x (tokens, d): (d,), float64."""
    return x.double().square_().sum(dim=0)


class Routed:
    """Inputs and choices of all batches, grouped by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._inputs: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def add(self, x: Tensor, chosen: Tensor) -> None:
        """Add x (tokens, d) and its experts (tokens, k); neither is copied."""
        self._inputs.append(x.detach())
        self._chosen.append(chosen.detach())

    def by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each expert with its tokens (n, d), in the text's order."""
        inputs = torch.cat(self._inputs)
        self._inputs.clear()
        chosen = torch.cat(self._chosen)  # (tokens, k)
        order, bounds = sort_by_expert(chosen, self._experts)
        for expert in range(self._experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            yield expert, inputs.index_select(0, places // chosen.shape[1])


# Bytes of per-sequence gradients in memory at once.
BUDGET = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# Sums of squares are float64, except for matrices that would fill the memory.
LARGE = 2**26  # elements
PAD = 8  # tokens of a sequence are padded to a multiple of this: the matrix unit wants it


def new_total(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return zeros to sum squares in."""
    dtype = torch.float32 if shape[0] * shape[1] > LARGE else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device)


def add_squares(total: Tensor, delta: Tensor, x: Tensor) -> None:
    """Add Σ_s (Σ_t δ_st x_stᵀ)² of (sequences, tokens, out) and (…, in) to total (out, in)."""
    out, width = total.shape
    budget = BUDGET.get(x.device.type, BUDGET["cpu"])
    together = max(1, budget // (4 * out * width))  # sequences
    rows = max(1, min(out, budget // (4 * width)))  # rows of W, if a single sequence is too large
    for first in range(0, x.shape[0], together):
        some = slice(first, first + together)
        for row in range(0, out, rows):
            part = total[row : row + rows]
            _add(part, transposed_product(delta[some, :, row : row + rows], x[some]))


def _add(total: Tensor, gradients: Tensor) -> None:
    """Add Σ_s g² of gradients (sequences, out, in) to total; overwrites the gradients."""
    if gradients.shape[0] == 1:
        one = gradients[0].to(total.dtype)
        total.addcmul_(one, one)
    elif gradients.device.type == "cpu":
        total += gradients.square_().sum(dim=0)
    else:
        # A single pass over the gradients, by far the largest tensors here.
        total += torch.linalg.vector_norm(gradients, dim=0).to(total.dtype).square_()


def add_ragged_squares(total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """Add squares for rows (tokens, out) and (tokens, in), ordered by sequence.

    Sequences of similar length are computed together, within the memory budget.
    """
    device = x.device
    together = max(1, BUDGET.get(device.type, BUDGET["cpu"]) // (4 * total.numel()))
    order = sorted((s for s, count in enumerate(counts) if count), key=lambda s: -counts[s])
    delta = torch.cat([delta, delta.new_zeros(1, delta.shape[1])])
    x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    empty = x.shape[0] - 1
    lengths = torch.tensor(counts, device=device)
    begins = torch.tensor([0, *itertools.accumulate(counts)], device=device)
    for first in range(0, len(order), together):
        some = order[first : first + together]
        longest = -(-counts[some[0]] // PAD) * PAD
        chosen = torch.tensor(some, device=device)
        steps = torch.arange(longest, device=device)
        places = begins[chosen, None] + steps  # (sequences, tokens)
        places = torch.where(steps < lengths[chosen, None], places, empty)
        add_squares(total, delta[places], x[places])


class RoutedGradients:
    """Inputs, choices, routing weights and gradients of all batches, grouped by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._lengths: list[int] = []  # real tokens of each sequence

    def add(
        self, x: Tensor, chosen: Tensor, weights: Tensor, gradient: Tensor, *, lengths: list[int]
    ) -> None:
        """Add x and d loss / d output (tokens, d); choices and their weights (tokens, k)."""
        self._parts.append((x, chosen, weights.detach(), gradient))
        self._lengths += lengths

    def by_expert(self) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
        """Yield each expert's inputs (n, d) and output gradients (n, d), ordered by sequence.

        Also yield its number of tokens in each sequence.
        """
        x, chosen, weights, gradient = (
            torch.cat(values) for values in zip(*self._parts, strict=True)
        )
        self._parts.clear()
        order, bounds = sort_by_expert(chosen, self._experts)
        device = x.device
        lengths = torch.tensor(self._lengths, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        scale = weights.reshape(-1)
        width = chosen.shape[1]
        # All counts at once: one synchronisation per layer.
        slots = chosen.reshape(-1).to(torch.int64).clamp(max=self._experts)
        pairs = slots * len(lengths) + sequence.repeat_interleave(width)
        counts = torch.bincount(pairs, minlength=(self._experts + 1) * len(lengths))
        table = counts.reshape(self._experts + 1, -1).tolist()
        for expert in range(self._experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            tokens = places // width
            own = gradient.index_select(0, tokens) * scale.index_select(0, places)[:, None]
            yield expert, x.index_select(0, tokens), own, table[expert]
