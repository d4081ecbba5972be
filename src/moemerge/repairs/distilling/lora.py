"""Low-rank adapters: while a layer runs, each of its matrices W is replaced by W + 2 B A.

The sum is computed for a whole layer and rounded to the forward dtype. So no module needs to know
of adapters, stacks of experts get one pair per expert, and the merged weights are exactly those
that were evaluated. Only the small factors A and B have gradients and optimiser states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

SCALE: Final = 2.0  # of B A, as in `tune`


def factor_shapes(shape: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of B and A for a matrix, or for a stack of them."""
    *stack, rows, columns = shape
    rank = min(rank, rows, columns)
    return (*stack, rows, rank), (*stack, rank, columns)


def adapter_numel(shapes: Mapping[str, Sequence[int]], rank: int) -> int:
    """Return the number of parameters of adapters on matrices of these shapes."""
    return sum(math.prod(one) for shape in shapes.values() for one in factor_shapes(shape, rank))


class Adapters:
    """The adapters of a model's layers."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[str],
        shapes: Mapping[str, Sequence[int]],
        rank: int,
        generator: torch.Generator,
    ) -> None:
        self._model = model
        # While the model is evaluated: the dtypes of the written weights, by name.
        self.rounded: Mapping[str, torch.dtype] = {}
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        device = generator.device
        for name, shape in sorted(shapes.items()):
            up, down = factor_shapes(shape, rank)
            spread = torch.randn(down, generator=generator, device=device) * shape[-1] ** -0.5
            self.factors[name] = torch.zeros(up, device=device).requires_grad_(), spread
            spread.requires_grad_()
        for path in layers:
            self._wrap(path)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the factors by name."""
        return {
            f"{name}.lora_{part}": factor
            for name, pair in self.factors.items()
            for part, factor in zip("BA", pair, strict=True)
        }

    def adapted(self, name: str, weight: Tensor | None = None) -> Tensor:
        """Return W + 2 B A, rounded to the dtype of W; W is the model's own by default."""
        weight = self._model.get_parameter(name) if weight is None else weight
        up, down = (factor.to(weight.dtype) for factor in self.factors[name])
        add = torch.addmm if weight.dim() == 2 else torch.baddbmm
        whole = add(weight, up, down, alpha=SCALE)
        return whole.to(self.rounded.get(name, whole.dtype)).to(whole.dtype)

    def merge(self) -> None:
        """Write the adapted matrices into the model."""
        with torch.no_grad():
            for name in self.factors:
                self._model.get_parameter(name).copy_(self.adapted(name))

    def _wrap(self, path: str) -> None:
        """Run a layer with its adapted matrices."""
        layer: Any = self._model.get_submodule(path)
        names = [name for name in self.factors if name.startswith(f"{path}.")]
        run = _Forward(layer)

        def forward(*args: Any, **keywords: Any) -> Any:
            matrices = {f"layer.{n[len(path) + 1 :]}": self.adapted(n) for n in names}
            return functional_call(run, matrices, args, keywords)

        layer.forward = forward


class _Forward(nn.Module):
    """A module's own forward pass under another name, so that it can be replaced by one that
    calls it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._run = layer.forward

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._run(*args, **keywords)
