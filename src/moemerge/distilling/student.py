"""The model that learns: its weights in the forward dtype, and float32 copies that are optimised.

An update of 1e-4 of a weight is lost if it is added in bfloat16, so the optimiser works on float32
copies and the model gets them rounded after every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from moemerge.architectures.opened import OpenModel
from moemerge.errors import NumericalError
from moemerge.features.trainable import TrainedLayout, load_trainable

OptimiserName = Literal["adamw", "adafactor"]
BETAS: Final = (0.9, 0.95)
# Bytes per trained parameter next to the weights themselves: the gradient in the forward dtype, the
# float32 copy, its gradient, and the optimiser's state (two moments, or next to nothing).
STATE_BYTES: Final = {"adamw": 4 + 4 + 8, "adafactor": 4 + 4}


class Student:
    """A model in memory with some trainable parameters."""

    def __init__(
        self,
        opened: OpenModel,
        layout: TrainedLayout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        recompute: bool,
    ) -> None:
        self.device = device
        self.model: Any = load_trainable(opened, layout, dtype, lora=False, device=device)
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        # Named as in the model. Of a float32 model they are its own parameters.
        self.masters: dict[str, Tensor] = {
            name: value if value.dtype == torch.float32 else value.detach().float().requires_grad_()
            for name, value in self.trained.items()
        }

    def logits(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Return the next-token logits (rows, length, vocabulary) of rows padded on the right."""
        out: Tensor = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        return out

    def gradients(self) -> list[Tensor]:
        """Return the gradient of every trained parameter, zeros if no token reached it."""
        for value in self.trained.values():
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        return [value.grad for value in self.trained.values() if value.grad is not None]

    def update(self, optimiser: torch.optim.Optimizer, clip: float) -> float:
        """Take one optimiser step; return the norm of the gradient before it was clipped."""
        for name, value in self.trained.items():
            master = self.masters[name]
            if master is not value:
                assert value.grad is not None
                master.grad, value.grad = value.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), clip))
        if not torch.isfinite(torch.tensor(norm)):
            raise NumericalError(f"the gradient's norm is {norm}", hint="lower `learning_rate`")
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        self._round_masters()
        return norm

    def load(self, values: dict[str, Tensor]) -> None:
        """Set the trained parameters to float32 `values`."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(values[name])
        self._round_masters()

    def snapshot(self) -> dict[str, Tensor]:
        """Return the trained parameters in float32 on the host."""
        return {name: value.detach().cpu().clone() for name, value in self.masters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return every tensor of the model, the trained ones in float32."""
        return {**self.model.state_dict(), **{n: v.detach() for n, v in self.masters.items()}}

    def _round_masters(self) -> None:
        with torch.no_grad():
            for name, value in self.trained.items():
                if self.masters[name] is not value:
                    value.copy_(self.masters[name])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the model without gradients and in evaluation mode."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()


def make_optimiser(
    name: OptimiserName, parameters: Sequence[Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return torch's optimiser of this name."""
    if name == "adafactor":
        return torch.optim.Adafactor(list(parameters), lr=rate, weight_decay=0.0)
    fused = parameters[0].is_cuda
    return torch.optim.AdamW(list(parameters), lr=rate, betas=BETAS, weight_decay=0.0, fused=fused)
