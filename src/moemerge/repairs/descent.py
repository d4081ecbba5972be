"""Gradient steps on some weights: Adam on float32 copies, with trials of the rate.

    min  Σ_i (ω_i / N_i) Σ_t loss_t

Held-out rows choose the rate, and the weights among all that were evaluated, the first included.
Without held-out rows, calibration rows do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from moemerge.errors import NumericalError
from moemerge.repairs.least_squares import Fit
from moemerge.routing.search import lowest
from moemerge.runtime.devices import deterministic
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

BETAS: Final = (0.9, 0.98)
WARMUP: Final = 0.1  # share of the steps in which the rate rises; it falls to zero as a cosine
RATES: Final = tuple(10.0 ** (exponent / 2) for exponent in range(-12, -3))
FIRST_RATE: Final = 10.0**-3.5
EVALUATIONS: Final = 5  # of a training, evenly spread
TRIAL: Final = 0.2  # of the steps: how long a rate is tried


@dataclass
class Descent:
    """Adam on float32 copies of some weights.

    Held-out rows choose the rate, and the weights among all that were evaluated, the first
    included. Without held-out rows, calibration rows do.
    """

    trained: Mapping[nn.Parameter, torch.dtype]  # with the dtype in which each is stored
    loss: Callable[[Batch], Tensor]  # summed over the tokens of a batch
    batches: Sequence[Batch]
    where: str  # what is trained: seeds the order of batches
    weights: Mapping[str, float]  # ω of every domain
    ranks: Ranks
    steps: int
    seed: int
    rate: float = FIRST_RATE  # at which the search begins
    _tokens: dict[tuple[str, bool], int] = field(default_factory=dict)  # of all ranks
    _best: tuple[float, list[Tensor]] = (math.inf, [])  # the lowest error, and its weights

    def run(self) -> tuple[Fit, float]:
        """Train the weights, and return their errors and the rate."""
        with deterministic(self._device):
            return self._run()

    def _run(self) -> tuple[Fit, float]:
        self._tokens = self._count()
        start = self._weights()
        before = self._error(held=False), self._error(held=True)
        decisive = before[self._holds_out]
        assert decisive is not None
        self._best = decisive, start
        rate = self.rate
        if decisive > 0.0:  # below it there is rounding only
            rate = self._choose_rate(start)
            self._train(rate, self.steps, evaluations=EVALUATIONS)
        kept = self._best[1] is start
        self._set(self._best[1])
        after = before if kept else (self._error(held=False), self._error(held=True))
        held = sum(count for (_, holdout), count in self._tokens.items() if holdout)
        fit = Fit(
            ridge=math.nan,
            inputs=0,
            tokens=sum(self._tokens.values()) - held,
            before=before[0] or 0.0,
            after=after[0] or 0.0,
            held_tokens=held,
            held_before=before[1],
            held_after=after[1],
            kept=kept,
        )
        return fit, rate

    # --- errors ---

    @property
    def _holds_out(self) -> bool:
        return any(held and count for (_, held), count in self._tokens.items())

    def _count(self) -> dict[tuple[str, bool], int]:
        """Return the tokens of every domain's calibration and held-out rows, over all ranks."""
        keys = [(name, held) for name in self.weights for held in (False, True)]
        own = dict.fromkeys(keys, 0)
        for batch in self.batches:
            own[batch.domain, batch.holdout] += batch.tokens
        totals = self.ranks.totals(list(own.values()), self._device)
        return dict(zip(keys, totals, strict=True))

    @torch.no_grad()
    def _error(self, *, held: bool) -> float | None:
        """Return Σ_i (ω_i / N_i) Σ_t of the loss; None without such rows."""
        if held and not self._holds_out:
            return None
        sums = dict.fromkeys(self.weights, 0.0)
        for batch in self.batches:
            if batch.holdout == held:
                sums[batch.domain] += float(self.loss(batch))
        return math.fsum(
            weight * self.ranks.sum_of(sums[name], self._device) / count
            for name, weight in self.weights.items()
            if (count := self._tokens[name, held])
        )

    def _evaluate(self) -> float:
        """Return the error that decides, of the weights as they are stored; keep the best."""
        exact = self._weights()
        for weight, stored in self.trained.items():
            weight.data.copy_(weight.data.to(stored))
        error = self._error(held=self._holds_out)
        assert error is not None
        if error < self._best[0]:
            self._best = error, self._weights()
        self._set(exact)
        return error

    # --- weights ---

    @property
    def _device(self) -> torch.device:
        return next(iter(self.trained)).device

    def _weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.trained]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for weight, value in zip(self.trained, values, strict=True):
            weight.copy_(value)

    # --- steps ---

    def _train(self, highest: float, steps: int, *, evaluations: int = 1) -> float:
        """Take steps from the current weights, and return the error after the last.

        Each step reads one batch of every domain.
        """
        weights = list(self.trained)
        masters = [weight.detach().float().clone().requires_grad_() for weight in weights]
        optimiser = torch.optim.AdamW(
            masters, lr=highest, betas=BETAS, weight_decay=0.0, fused=masters[0].is_cuda
        )
        due = {round(steps * (n + 1) / evaluations) for n in range(evaluations)} | {steps}
        order, error = self._order(), math.inf
        for step in range(steps):
            rising = min(1.0, (step + 1) / max(1.0, WARMUP * steps))
            falling = 0.5 * (1.0 + math.cos(math.pi * step / steps))
            for group in optimiser.param_groups:
                group["lr"] = highest * rising * falling
            for master, gradient in zip(masters, self._gradients(next(order)), strict=True):
                master.grad = gradient
            optimiser.step()
            self._set(masters)
            if step + 1 in due:
                error = self._evaluate()
        return error

    def _gradients(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the float32 gradients of one step, summed over all ranks."""
        for weight in self.trained:
            weight.requires_grad_(True)
        try:
            with torch.enable_grad():
                for batch in batches:
                    scale = self.weights[batch.domain] / batch.tokens
                    (scale * self.loss(batch)).backward()  # type: ignore[no-untyped-call]
            gradients = [
                torch.zeros_like(weight, dtype=torch.float32)
                if weight.grad is None
                else weight.grad.float()
                for weight in self.trained
            ]
        finally:
            for weight in self.trained:
                weight.grad = None
                weight.requires_grad_(False)
        self.ranks.all_reduce(*gradients)
        return gradients

    def _order(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step: every domain's in random order, epoch after epoch."""
        domains: dict[str, list[Batch]] = {}
        for batch in self.batches:
            if not batch.holdout:
                domains.setdefault(batch.domain, []).append(batch)
        drawn = random.Random(f"{self.seed} {self.where}")
        left: dict[str, list[Batch]] = {name: [] for name in domains}
        while True:
            step = []
            for name, own in domains.items():
                if not left[name]:
                    left[name] = drawn.sample(own, len(own))
                step.append(left[name].pop())
            yield step

    # --- the rate ---

    def _choose_rate(self, start: Sequence[Tensor]) -> float:
        """Return the best of the rates tried, walking downhill from the last layer's."""
        steps = max(1, round(TRIAL * self.steps))

        def error(rate: float) -> float:
            found = self._train(rate, steps)
            self._set(start)
            return found if math.isfinite(found) else math.inf

        chosen, tried = lowest(RATES, self.rate, error)
        if not math.isfinite(tried[chosen]):
            raise NumericalError(
                f"{self.where}: the error is not finite after {steps} steps at any rate tried",
                hint='use `solver="closed-form"`',
            )
        return chosen
