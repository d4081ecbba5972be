"""Train S models at once: the losses, AdamW on the flat weights, and the loop.

Everything a step reads is on the device (rows, learning rates, the step number), so that a CUDA
graph can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from evidence.data import CLIP, FINAL_LR, LENGTH, WARMUP, Pool
from evidence.forward import (
    Routing,
    hidden_states,
    logits,
    prepare,
    rotation,
)
from evidence.layout import IDS, PAD, Shape, router_slice
from moemerge.runtime.gpu import RecordedStep

_BETA1, _BETA2, _EPS = 0.9, 0.98, 1e-9  # a short memory for short runs
_REPORT_EVERY = 20  # steps between progress reports


@dataclass(frozen=True)
class Course:
    """The training of one model: its rows and hyperparameters."""

    rows: Tensor  # (steps, batch), indices into the pool
    lr: float
    router_lr: float
    balance: float  # weight of the load-balancing loss
    prompt_steps: int  # first steps, whose loss includes the prompts


@dataclass
class State:
    """The state of a stack of models in training."""

    flat: Tensor  # (S, parameters)
    first: Tensor  # Adam's moments
    second: Tensor
    step: Tensor  # (1,), steps done
    losses: Tensor  # (steps, S)

    @classmethod
    def start(cls, flat: Tensor, steps: int) -> State:
        flat = flat.clone()
        return cls(
            flat,
            torch.zeros_like(flat),
            torch.zeros_like(flat),
            torch.zeros(1, dtype=torch.long, device=flat.device),
            torch.zeros(steps, len(flat), device=flat.device),
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


def schedule(steps: int) -> Tensor:
    """Return the learning rate of each step as a share of the full rate, (steps,)."""
    warmup = max(1, min(WARMUP, steps // 10))
    number = torch.arange(1, steps + 1, dtype=torch.float64)
    falling = 1 - (1 - FINAL_LR) * (number - warmup) / max(1, steps - warmup)
    return torch.minimum(number / warmup, falling).float()


def train_stack(
    state: State,
    courses: Sequence[Course],
    pool: Pool,
    shape: Shape,
    report: Callable[[int], None],
) -> None:
    """Run the remaining steps; `report` gets the number of steps since its last call."""
    device = state.flat.device
    steps = len(courses[0].rows)
    step = RecordedStep(_Step(state, courses, pool.to(device), shape), device)
    done = reported = int(state.step)
    with _fast_products():
        while done < steps:
            step()
            done += 1
            if done - reported == _REPORT_EVERY or done == steps:
                step.wait()
                report(done - reported)
                reported = done


@contextmanager
def _fast_products() -> Iterator[None]:
    """Allow TF32 products, whose error is far below the noise of a batch."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Step:
    """One training step of all models of a stack."""

    def __init__(self, state: State, courses: Sequence[Course], pool: Pool, shape: Shape) -> None:
        device = state.flat.device
        self._state, self._pool, self._shape = state, pool, shape
        self._rows = torch.stack([c.rows for c in courses], 1).to(device)  # (steps, S, batch)
        steps = len(self._rows)
        self._rates = schedule(steps).to(device)
        self._lr, self._router_lr, self._balance = (
            torch.tensor([[getattr(c, name)] for c in courses], device=device)  # (S, 1)
            for name in ("lr", "router_lr", "balance")
        )
        self._prompt_steps = torch.tensor([[c.prompt_steps] for c in courses], device=device)
        self._rotation = rotation(torch.arange(LENGTH - 1, device=device), shape)
        self._predicted = torch.arange(1, LENGTH, device=device)  # positions of the targets
        self._routers = router_slice(shape)
        # bfloat16 activations on a GPU, float32 on a CPU, which is slow in bfloat16.
        self._inner = torch.bfloat16 if device.type == "cuda" else torch.float32

    def __call__(self) -> None:
        state = self._state
        weights = state.flat.detach().requires_grad_()
        loss, losses = self._loss(weights)
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            state.losses.index_copy_(0, state.step, losses[None])
            self._update(gradient)
            state.step.add_(1)

    def _loss(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the total loss, and each model's prediction loss (S,)."""
        rows = self._rows.index_select(0, self._state.step)[0]  # (S, batch)
        tokens = self._pool.tokens[rows].long()  # (S, batch, LENGTH)
        before, after = tokens[..., :-1], tokens[..., 1:].flatten(1)
        counted = self._counted(rows).flatten(1)
        real = (before != IDS[PAD]).flatten(1).float()
        places = self._places_of(real)
        if places is not None:
            after, counted, real = after[:, places], counted[:, places], real[:, places]
        weights = prepare(flat, self._shape, self._inner)
        hidden, routings = hidden_states(
            weights,
            before,
            self._shape,
            self._rotation,
            places=places,
        )
        scores = logits(weights, hidden).log_softmax(-1)  # (S, N, V)
        losses = -scores.gather(-1, after[..., None])[..., 0]
        prediction = (losses * counted).sum(1) / counted.sum(1)  # (S,)
        balance = _mean_balance(routings, real[..., None])
        return (prediction + self._balance[:, 0] * balance).sum(), prediction.detach()

    def _places_of(self, real: Tensor) -> Tensor | None:
        """Return the positions that are not padding, or None.

        A CUDA graph and a stack of several models need fixed shapes: there padding is computed and
        does not count.
        """
        return None if real.is_cuda or len(real) > 1 else real[0].nonzero()[:, 0]

    def _counted(self, rows: Tensor) -> Tensor:
        """Return one for each token in the loss, (S, batch, LENGTH - 1)."""
        prompts = self._pool.prompts[rows][..., None]
        lengths = self._pool.lengths[rows][..., None]
        with_prompt = (self._state.step < self._prompt_steps)[..., None]  # (S, 1, 1)
        learnt = (self._predicted >= prompts) | with_prompt
        return (learnt & (self._predicted < lengths)).float()

    def _update(self, gradient: Tensor) -> None:
        """Apply AdamW without weight decay; gradients are clipped per model."""
        state = self._state
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((CLIP / (norm + _EPS)).clamp_(max=1.0))
        state.first.lerp_(gradient, 1 - _BETA1)
        state.second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        number = (state.step + 1).float()
        rate = self._rates.index_select(0, state.step)
        # The bias correction of the second moment is applied to the step size and eps.
        correction = (1 - _BETA2**number).sqrt()
        size = rate * correction / (1 - _BETA1**number)
        change = torch.sqrt(state.second).add_(_EPS * correction).reciprocal_().mul_(state.first)
        split = self._routers.start
        state.flat[:, :split].sub_(change[:, :split].mul_(size * self._lr))
        state.flat[:, split:].sub_(change[:, split:].mul_(size * self._router_lr))


def _mean_balance(routings: Sequence[Routing], real: Tensor) -> Tensor:
    return torch.stack([routing.balance(real) for routing in routings]).mean(0)  # (S,)
