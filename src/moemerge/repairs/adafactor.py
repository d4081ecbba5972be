"""Optimisers: torch's AdamW, and an Adafactor for weights without float32 copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

OptimiserName = Literal["adamw", "adafactor"]
BETAS: Final = (0.9, 0.95)
DECAY: Final = -0.8  # the second moment averages over the steps t with weight 1 - t ** DECAY
LEAST_SQUARE: Final = 1e-30  # added to squared gradients
LEAST_SIZE: Final = 1e-3  # of a weight, to which an update is relative
LARGEST_UPDATE: Final = 1.0  # root mean square, before it is multiplied by the rate
CHUNK: Final = 2**26  # elements of a stack that are updated at once


def make_optimiser(
    name: OptimiserName, parameters: Sequence[Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return an optimiser. AdamW updates float32 parameters; Adafactor also rounds to bfloat16."""
    if name == "adafactor":
        return Adafactor(parameters, rate)
    fused = parameters[0].is_cuda
    return torch.optim.AdamW(list(parameters), lr=rate, betas=BETAS, weight_decay=0.0, fused=fused)


class Adafactor(torch.optim.Optimizer):
    """Adafactor without a first moment. The second moment of a matrix is the product of its mean
    over rows and over columns; every matrix of a stack counts alone.

    torch's version computes in the parameters' dtype, in which small updates are lost. This one
    computes in float32 and rounds bfloat16 weights stochastically, so that updates are right in the
    mean. Seed torch's generator before each step to repeat it.
    """

    def __init__(self, parameters: Sequence[Tensor], rate: float) -> None:
        super().__init__(list(parameters), {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None and value.numel():  # a share may be empty
                    self._update(value, value.grad, group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. torch would round it to the parameters' dtype."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for number, value in enumerate(group["params"]):
                stored = state_dict["state"].get(number, {})
                self.state[value] = {
                    name: part.to(value.device) if isinstance(part, Tensor) else part
                    for name, part in stored.items()
                }

    def _update(self, value: Tensor, gradient: Tensor, rate: float) -> None:
        state = self.state[value]
        if not state:
            state["step"] = 0
            state.update(_moments(value))
        state["step"] += 1
        keep = 1.0 - state["step"] ** DECAY
        moments = {name: part for name, part in state.items() if name != "step"}
        if value.dim() < 3:
            own = value.view(-1) if value.dim() < 2 else value
            _update_matrices(own, gradient.view_as(own), moments, keep, rate)
            return
        at_once = max(1, CHUNK // value[0].numel())
        for first in range(0, len(value), at_once):
            part = slice(first, first + at_once)
            own_moments = {name: whole[part] for name, whole in moments.items()}
            _update_matrices(value[part], gradient[part], own_moments, keep, rate)


def _moments(value: Tensor) -> dict[str, Tensor]:
    if value.dim() < 2:
        return {"square": torch.zeros(value.numel(), device=value.device)}
    rows = torch.zeros(value.shape[:-1], device=value.device)
    columns = torch.zeros((*value.shape[:-2], value.shape[-1]), device=value.device)
    return {"rows": rows, "columns": columns}


def _update_matrices(
    value: Tensor, gradient: Tensor, moments: dict[str, Tensor], keep: float, rate: float
) -> None:
    """Update a matrix, or each matrix of a stack; with few passes over memory."""
    axes = (-2, -1) if value.dim() > 1 else (-1,)
    if value.dim() > 1:
        rows, columns = moments["rows"], moments["columns"]
        rows.lerp_(_mean_square(gradient, (-1,)).squeeze(-1), 1.0 - keep)
        columns.lerp_(_mean_square(gradient, (-2,)).squeeze(-2), 1.0 - keep)
        update = gradient * (rows / rows.mean(-1, keepdim=True)).rsqrt()[..., None]
        update *= columns.rsqrt()[..., None, :]
    else:
        square = moments["square"].lerp_(gradient.float().square() + LEAST_SQUARE, 1.0 - keep)
        update = gradient * square.rsqrt()
    size = _mean_square(update, axes).sqrt() / LARGEST_UPDATE
    scale = _mean_square(value, axes).sqrt().clamp_min(LEAST_SIZE)
    updated = torch.addcmul(value, update, -rate * scale / size.clamp_min(1.0))  # in float32
    value.copy_(_rounded(updated, value.dtype))


def _mean_square(value: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the mean of squares over some axes, which stay with length 1, in float32."""
    norm = torch.linalg.vector_norm(value, dim=axes, keepdim=True, dtype=torch.float32)
    mean: Tensor = norm.square() * (norm.numel() / value.numel()) + LEAST_SQUARE
    return mean


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to bfloat16, up or down at random: in the mean it is exact.

    Overwrites `value`. A bfloat16 is the upper half of a float32, the second in memory.
    """
    if dtype != torch.bfloat16:
        return value
    bits = value.view(torch.int32)
    bits += torch.randint_like(bits, 2**16)
    return bits.view(torch.bfloat16).view(*value.shape, 2)[..., 1]
