"""What rounding alone puts between two hidden states: it is nothing that a map should learn.

A source that gives what the merged model gives lacks nothing, and yet h_source − h_merged is not
zero: the forward rounds every product and every sum to its dtype, and what a map writes is computed
anew in float32. Rounding follows the inputs, so a fit finds something in it, on held-out rows too.
So before a map is fitted to the hidden state, every value that a domain lacks is held against the
most that rounding could have made of it. With u half a unit in the last place of the forward's
dtype, and h_j the state after the j-th write a_j o_j of the layer:

* a state as the model itself left it was rounded at every sum, by u |h_j|, and at every product a_j
  o_j (and o_j itself), by u |a_j o_j| each; one that is summed here from what was recorded has
  float32's roundings only;
* a map's own output was rounded once, and its factor's product once more;
* k experts' outputs are weighed and added in the forward's dtype, and both sides round them, in
  another order where batches are padded: 2 · 3k roundings, of which no more than six standard
  deviations (each u / √3) are to be met;
* a product of n terms is off by √n roundings of its running sum, taken as large as the token's
  outputs are in the mean, on both sides.

A domain of which no value of no token lacks more is the merged model's own to rounding: nothing of
it is missing. As soon as one does, all that is missing counts as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moemerge.runtime import ranks
from moemerge.text.batches import Batch

# Tokens that are looked at together: of a domain that differs, these are all as a rule.
LOOKED_AT = 1024
DEVIATIONS = 6.0
OWN_ROUNDINGS = 2.0  # a map's output, and its product with a factor
# Of a shared expert weighed by a gate: the gate's own output, its sigmoid, and the product.
GATED_ROUNDINGS = 8.0


def unit(dtype: torch.dtype) -> float:
    """u of a dtype: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def of_output(says: Tensor, dtype: torch.dtype, terms: int, roundings: float) -> Tensor:
    """How far a map's output (tokens, d) may be off, by this many roundings to `dtype`."""
    typical = says.square().mean(dim=1, keepdim=True).sqrt()
    share = roundings * unit(dtype) + 4.0 * math.sqrt(terms) * unit(says.dtype)
    return (says.abs() + typical) * share


def of_experts(chosen: int) -> float:
    """Roundings of what `chosen` experts of a token say together."""
    return DEVIATIONS * math.sqrt(2.0 * chosen)


# rows -> what these lack, and the most that rounding makes of it, (tokens, d)
Compared = Callable[[slice], tuple[Tensor, Tensor]]


class RoundingCheck:
    """Finds the domains of which no value lacks more than rounding."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._domains = tuple(domains)
        self._differing: set[str] = set()

    def look(self, batch: Batch, compared: Compared) -> None:
        """At some rows after the other, until one shows that the domain differs."""
        for begin in range(0, batch.tokens, LOOKED_AT):
            if batch.domain in self._differing:
                return
            lacking, bound = compared(slice(begin, min(begin + LOOKED_AT, batch.tokens)))
            if not bool((lacking.abs() <= bound).all()):
                self._differing.add(batch.domain)

    def alike(self) -> frozenset[str]:
        """Once all batches were looked at; over all ranks."""
        return frozenset(d for d in self._domains if ranks.all_say(d not in self._differing))
