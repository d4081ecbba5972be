"""Training S models at once: losses, AdamW on the flat weights, and the loop.

Everything a step reads lies on the device (rows to take, learning rates, the step's own number),
so that a GPU can replay it without being told anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.runtime.gpu import RecordedStep
from moemerge.testbed.network.forward import (
    Routing,
    hidden_states,
    logits,
    prepare,
    rotation,
)
from moemerge.testbed.network.layout import IDS, PAD, Shape, router_mask
from moemerge.testbed.training.data import CLIP, FINAL_LR, LENGTH, WARMUP, Pool

_BETA1, _BETA2, _EPS = 0.9, 0.98, 1e-9  # short runs: the second moment forgets within 50 steps
_REPORT_EVERY = 20  # steps between two words about progress


@dataclass(frozen=True)
class Course:
    """What one model of a stack learns, and how."""

    rows: Tensor  # (steps, batch) of the pool
    lr: float
    router_lr: float
    balance: float  # weight of the load-balancing loss
    prompt_steps: int  # the first steps, which learn prompts as well as answers


@dataclass
class State:
    """All that changes while a stack trains."""

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
    """The learning rate of each step as a share of the full one, (steps,)."""
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
    """Do all steps that are left. `report` is told the number of steps done since its last call."""
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
    """TF32 where there is such a thing: noise well below that of a batch."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Step:
    """One step of all models of a stack."""

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
        self._predicted = torch.arange(1, LENGTH, device=device)  # places of what is predicted
        self._routers = router_mask(shape)
        # Activations are what a step spends its time on; half of their bytes are enough. On the
        # CPU bfloat16 is slow, so there it stays float32.
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
        """The sum over models, and each model's loss of prediction (S,)."""
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
        """The tokens that are no padding. A recorded step cannot change its shapes, and several
        models have unlike numbers of them: there padding is worked on and not counted."""
        return None if real.is_cuda or len(real) > 1 else real[0].nonzero()[:, 0]

    def _counted(self, rows: Tensor) -> Tensor:
        """One for each token that is learnt, (S, batch, LENGTH - 1)."""
        prompts = self._pool.prompts[rows][..., None]
        lengths = self._pool.lengths[rows][..., None]
        with_prompt = (self._state.step < self._prompt_steps)[..., None]  # (S, 1, 1)
        learnt = (self._predicted >= prompts) | with_prompt
        return (learnt & (self._predicted < lengths)).float()

    def _update(self, gradient: Tensor) -> None:
        """AdamW without decay; each model's gradient is bounded on its own."""
        state = self._state
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((CLIP / (norm + _EPS)).clamp_(max=1.0))
        state.first.lerp_(gradient, 1 - _BETA1)
        state.second.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        number = (state.step + 1).float()
        rate = self._rates.index_select(0, state.step)
        # The second moment's correction is put on the step and on eps, not on every weight.
        correction = (1 - _BETA2**number).sqrt()
        size = rate * correction / (1 - _BETA1**number)
        change = torch.sqrt(state.second).add_(_EPS * correction).reciprocal_().mul_(state.first)
        split = self._routers.start
        state.flat[:, :split].sub_(change[:, :split].mul_(size * self._lr))
        state.flat[:, split:].sub_(change[:, split:].mul_(size * self._router_lr))


def _mean_balance(routings: Sequence[Routing], real: Tensor) -> Tensor:
    return torch.stack([routing.balance(real) for routing in routings]).mean(0)  # (S,)
