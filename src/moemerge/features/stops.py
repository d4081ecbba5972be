"""What a stream hands out at a router."""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.errors import NumericalError, UsageError
from moemerge.features.routers import RouterModule
from moemerge.text.batches import Batch


class RouterStop:
    """All batches wait before this router: read its inputs, replace its weight, go on.

    Valid until the iteration continues; inputs that are not held elsewhere are freed then.
    """

    def __init__(
        self,
        router: RouterModule,
        names: tuple[str, str | None],
        parameters: tuple[Tensor, Tensor | None],
        stored: tuple[torch.dtype, torch.dtype | None],
        features: list[tuple[Batch, Tensor]],
    ) -> None:
        self.layer = router.layer
        self.router = router.path
        self.weight_name, self.bias_name = names  # on disk
        self._weight, self._bias = parameters
        self._stored, self._stored_bias = stored
        self._features = features

    @property
    def weight(self) -> Tensor:
        """(experts, d), as the model computes with it."""
        return self._weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """(experts,), where one is added to the logits."""
        return None if self._bias is None else self._bias.detach()

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(batch.domain for batch, _ in self._features))

    def inputs(self, domain: str, *, holdout: bool = False) -> list[Tensor]:
        """The router's inputs, a (tokens, d) tensor per batch, padding left out."""
        return [x for _, x in self.by_batch(domain, holdout=holdout)]

    def by_batch(self, domain: str, *, holdout: bool = False) -> list[tuple[Batch, Tensor]]:
        """The same with the batch each comes from, to pair tokens of several models."""
        if domain not in self.domains:
            raise UsageError(f"no domain {domain!r}; there are {', '.join(self.domains)}")
        return [
            (batch, x)
            for batch, x in self._features
            if batch.domain == domain and batch.holdout == holdout
        ]

    def replace(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Go on with this router. It is rounded to the dtype it will be stored in first."""
        self._put(self._weight, weight, self.weight_name, self._stored)
        if bias is not None:
            if self._bias is None or self.bias_name is None or self._stored_bias is None:
                raise UsageError(f"{self.router} has no bias to replace")
            self._put(self._bias, bias, self.bias_name, self._stored_bias)

    def _put(self, parameter: Tensor, value: Tensor, name: str, stored: torch.dtype) -> None:
        if value.shape != parameter.shape:
            raise UsageError(
                f"{name}: got shape {list(value.shape)}, expected {list(parameter.shape)}"
            )
        rounded = value.detach().to(stored)
        if not bool(torch.isfinite(rounded).all()):
            raise NumericalError(f"{name}: the new router holds non-finite values")
        with torch.no_grad():
            parameter.copy_(rounded)

    def release(self) -> None:
        self._features = []
