"""The problem of one router: agree with the routing of every source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moemerge.architectures.rules import Gate
from moemerge.routing.gates import divergence
from moemerge.routing.products import DomainFeatures, features_of


@dataclass(frozen=True)
class RouterProblem:
    """A merged router on the tokens of every domain, and the sources' routing to match."""

    gate: Gate
    merged: Tensor  # (K, d), or (K, d + 1) with the bias as last column; float64
    domains: Sequence[DomainFeatures]
    holdout: Sequence[DomainFeatures]  # measured, never solved on
    dtypes: tuple[torch.dtype, torch.dtype | None]  # of the stored weight and bias
    selection_bias: Tensor | None = None
    # Selection biases of the sources by domain.
    source_biases: Mapping[str, Tensor | None] = field(default_factory=dict)

    def divergences(self, domains: Sequence[DomainFeatures], weight: Tensor) -> dict[str, float]:
        """Return the mean KL(source ‖ router) of each domain."""
        divergences = {}
        for domain in domains:
            total = torch.zeros((), dtype=torch.float64, device=weight.device)
            for at, x in enumerate(domain.features):
                features = features_of(x, weight.shape[1])
                target = (
                    features.working_logits(domain.router.to(x.device))
                    if domain.targets is None
                    else domain.targets[at]
                )
                mine = features.working_logits(weight.to(x.device))
                total += divergence(self.gate, target.double(), mine.double()).sum()
            tokens = domain.ranks.total(domain.tokens, weight.device)
            summed = domain.ranks.sum_of(float(total), weight.device)
            divergences[domain.name] = summed / max(1, tokens)
        return divergences
