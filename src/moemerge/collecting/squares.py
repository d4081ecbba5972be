"""Squared gradients of single sequences: the mathematics of the diagonal Fisher information.

For y = x Wᵀ the gradient of one sequence's loss is dW = Σ_t δ_t x_tᵀ over the tokens of that
sequence, with δ = d loss / d y. Squares are summed over sequences, never squared after the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moemerge.collecting.moments import transposed_product
from moemerge.features.tokens import sort_by_expert

# Bytes of single sequences' gradients that are held at a time.
BUDGET = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
# Sums of squares are float64, but for matrices so large that they would fill the memory.
LARGE = 2**26  # elements
PAD = 8  # tokens of a sequence are padded to a multiple of this: the matrix unit wants it


def new_total(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Zeros to sum squares in."""
    dtype = torch.float32 if shape[0] * shape[1] > LARGE else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device)


def add_squares(total: Tensor, delta: Tensor, x: Tensor) -> None:
    """total (out, in) += Σ_s (Σ_t δ_st x_stᵀ)² of (sequences, tokens, out) and (…, in)."""
    out, width = total.shape
    budget = BUDGET.get(x.device.type, BUDGET["cpu"])
    together = max(1, budget // (4 * out * width))  # sequences
    rows = max(1, min(out, budget // (4 * width)))  # of W, where a single sequence is too much
    for first in range(0, x.shape[0], together):
        some = slice(first, first + together)
        for row in range(0, out, rows):
            part = total[row : row + rows]
            _add(part, transposed_product(delta[some, :, row : row + rows], x[some]))


def _add(total: Tensor, gradients: Tensor) -> None:
    """total += Σ_s g² of gradients (sequences, out, in), which are used up."""
    if gradients.shape[0] == 1:
        one = gradients[0].to(total.dtype)
        total.addcmul_(one, one)
    elif gradients.device.type == "cpu":
        total += gradients.square_().sum(dim=0)
    else:
        # One read of the gradients, which are far larger than anything else here.
        total += torch.linalg.vector_norm(gradients, dim=0).to(total.dtype).square_()


def groups(counts: Sequence[int], nbytes: int, device: torch.device) -> Iterator[list[int]]:
    """Sequences with tokens, those of like length together, as many as the budget allows.

    `counts` are tokens of each sequence, `nbytes` what one sequence's gradient takes.
    """
    together = max(1, BUDGET.get(device.type, BUDGET["cpu"]) // nbytes)
    order = sorted((s for s, count in enumerate(counts) if count), key=lambda s: -counts[s])
    for first in range(0, len(order), together):
        yield order[first : first + together]


def add_ragged_squares(total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
    """The same for rows (tokens, out) and (tokens, in) that lie sequence by sequence."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    device = x.device
    delta = torch.cat([delta, delta.new_zeros(1, delta.shape[1])])
    x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    empty = x.shape[0] - 1
    lengths = torch.tensor(counts, device=device)
    begins = torch.tensor(starts[:-1], device=device)
    for some in groups(counts, 4 * total.numel(), device):
        longest = -(-counts[some[0]] // PAD) * PAD
        chosen = torch.tensor(some, device=device)
        steps = torch.arange(longest, device=device)
        places = begins[chosen, None] + steps  # (sequences, tokens)
        places = torch.where(steps < lengths[chosen, None], places, empty)
        add_squares(total, delta[places], x[places])


class RoutedGradients:
    """Inputs, choices, routing weights and gradients of all batches, handed out by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._lengths: list[int] = []  # real tokens of each sequence

    def add(
        self, x: Tensor, chosen: Tensor, weights: Tensor, gradient: Tensor, *, lengths: list[int]
    ) -> None:
        """x and d loss / d output (tokens, d); choices and their weights (tokens, k)."""
        self._parts.append((x, chosen, weights.detach(), gradient))
        self._lengths += lengths

    def by_expert(self) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
        """Each expert: its inputs (n, d), gradients of its own output (n, d), both sequence by
        sequence, and how many tokens of each sequence it got."""
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
        # All counts at once: the device is waited for once a layer.
        slots = chosen.reshape(-1).to(torch.int64).clamp(max=self._experts)
        pairs = slots * len(lengths) + sequence.repeat_interleave(width)
        counts = torch.bincount(pairs, minlength=(self._experts + 1) * len(lengths))
        table = counts.reshape(self._experts + 1, -1).tolist()
        for expert in range(self._experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            tokens = places // width
            own = gradient.index_select(0, tokens) * scale.index_select(0, places)[:, None]
            yield expert, x.index_select(0, tokens), own, table[expert]
