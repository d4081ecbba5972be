"""Refit all maps of a layer together, by gradient steps towards the sources' hidden states.

    min  Σ_i (ω_i / N_i) Σ_t ‖h_m − h_s‖²

h_m and h_s are the hidden states of the merged model and of the source after the layer. As in the
closed form, everything below is already refitted, and one layer is in memory. The head is trained
on the KL divergence from the source's distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from moemerge.errors import ArchitectureError, NumericalError
from moemerge.forward.stops import Rerun
from moemerge.forward.tokens import real_tokens
from moemerge.repairs.refitting.least_squares import Affine, Fit
from moemerge.repairs.refitting.records import LayerCalls, Record
from moemerge.routing.search import lowest
from moemerge.runtime.devices import deterministic
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

BATCH_TOKENS: Final = 4096  # at most, in a batch; a step takes one batch of every domain
BETAS: Final = (0.9, 0.98)
WARMUP: Final = 0.1  # share of the steps in which the rate rises; it falls to zero as a cosine
RATES: Final = tuple(10.0 ** (exponent / 2) for exponent in range(-12, -3))
FIRST_RATE: Final = 10.0**-3.5
EVALUATIONS: Final = 5  # of a training, evenly spread
TRIAL: Final = 0.2  # of the steps: how long a rate is tried
HEAD_VALUES: Final = 2**27  # logits that a step computes of every domain


@dataclass
class Training:
    """The settings of all layers, and the rate at which the search begins."""

    steps: int
    seed: int
    weights: Mapping[str, float]  # ω of every domain
    ranks: Ranks
    rate: float = FIRST_RATE  # the last layer's

    def layer(
        self,
        layer: nn.Module,
        trained: Mapping[nn.Parameter, torch.dtype],
        calls: LayerCalls,
        batches: Sequence[Batch],
        source: Callable[[Batch], Record],
        number: int,
    ) -> tuple[Fit, float]:
        """Train some weights of a layer, given with their stored dtypes. Return errors and rate."""

        def squares(batch: Batch) -> Tensor:
            again, hidden, rows = calls.of(batch)
            wanted = source(batch).left
            found = _output(again, layer, hidden, batch, rows)
            if wanted is None or found.shape != wanted.shape:
                raise ArchitectureError(
                    f"layer {number} does not return the hidden states of its tokens",
                    hint='use `solver="closed-form"`',
                )
            return (found.float() - wanted.float()).square().sum()

        return Descent(self, trained, squares, batches, f"layer {number}").run()

    def head(
        self,
        weight: Tensor,
        stored: torch.dtype,
        heads: Mapping[str, Affine],
        batches: Sequence[Batch],
        ours: Mapping[int, Tensor],
        theirs: Mapping[int, Tensor],
    ) -> tuple[Tensor, Fit, float]:
        """Return the trained matrix of the head, its errors and the rate."""
        trained = nn.Parameter(weight.clone())
        most = max(1, HEAD_VALUES // weight.shape[0])

        def divergence(batch: Batch) -> Tensor:
            total = weight.new_zeros((), dtype=torch.float32)
            for start in range(0, batch.tokens, most):
                rows = slice(start, start + most)
                wanted = heads[batch.domain](theirs[id(batch)][rows]).float().log_softmax(-1)
                found = (ours[id(batch)][rows] @ trained.T).float().log_softmax(-1)
                total = total + kl_div(found, wanted, reduction="sum", log_target=True)
            return total

        fit, rate = Descent(self, {trained: stored}, divergence, batches, "the head").run()
        return trained.detach(), fit, rate


@dataclass
class Descent:
    """Adam on float32 copies of some weights.

    Held-out rows choose the rate, and the weights among all that were evaluated, the first
    included. Without held-out rows, calibration rows do.
    """

    training: Training
    trained: Mapping[nn.Parameter, torch.dtype]  # with the dtype in which each is stored
    loss: Callable[[Batch], Tensor]  # summed over the tokens of a batch
    batches: Sequence[Batch]
    where: str
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
        rate = self.training.rate
        if decisive > 0.0:  # below it there is rounding only
            rate = self.training.rate = self._choose_rate(start)
            self._train(rate, self.training.steps, evaluations=EVALUATIONS)
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
        keys = [(name, held) for name in self.training.weights for held in (False, True)]
        own = dict.fromkeys(keys, 0)
        for batch in self.batches:
            own[batch.domain, batch.holdout] += batch.tokens
        totals = self.training.ranks.totals(list(own.values()), self._device)
        return dict(zip(keys, totals, strict=True))

    @torch.no_grad()
    def _error(self, *, held: bool) -> float | None:
        """Return Σ_i (ω_i / N_i) Σ_t of the loss; None without such rows."""
        if held and not self._holds_out:
            return None
        sums = dict.fromkeys(self.training.weights, 0.0)
        for batch in self.batches:
            if batch.holdout == held:
                sums[batch.domain] += float(self.loss(batch))
        return math.fsum(
            weight * self.training.ranks.sum_of(sums[name], self._device) / count
            for name, weight in self.training.weights.items()
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
                    scale = self.training.weights[batch.domain] / batch.tokens
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
        self.training.ranks.all_reduce(*gradients)
        return gradients

    def _order(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step: every domain's in random order, epoch after epoch."""
        domains: dict[str, list[Batch]] = {}
        for batch in self.batches:
            if not batch.holdout:
                domains.setdefault(batch.domain, []).append(batch)
        drawn = random.Random(f"{self.training.seed} {self.where}")
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
        steps = max(1, round(TRIAL * self.training.steps))

        def error(rate: float) -> float:
            found = self._train(rate, steps)
            self._set(start)
            return found if math.isfinite(found) else math.inf

        chosen, tried = lowest(RATES, self.training.rate, error)
        if not math.isfinite(tried[chosen]):
            raise NumericalError(
                f"{self.where}: the error is not finite after {steps} steps at any rate tried",
                hint='use `solver="closed-form"`',
            )
        return chosen


def _output(
    again: Rerun, layer: nn.Module, hidden: Tensor, batch: Batch, rows: Tensor | None
) -> Tensor:
    """Return the layer's hidden states of real tokens, (tokens, d)."""
    out = again(layer, hidden)
    out = out[0] if isinstance(out, tuple) else out
    tokens = real_tokens(out, batch, rows) if isinstance(out, Tensor) else None
    return hidden.new_empty(0) if tokens is None else tokens
