"""Coefficients by gradient descent: AdaMerging and Expert Merging (Yang et al. 2024, Zhang et al.
2025).

The merged model is W = W_0 + Σ_i λ_i^l τ_i, a function of the coefficients. Adam minimises the
entropy of its next tokens on the models' own text, or its distance from each model there. Base,
task vectors and gradients are all in memory, so the model must fit on the device several times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from moemerge.checkpoint import format_size
from moemerge.config.coefficients import EVERYWHERE
from moemerge.errors import NumericalError, ResourceError
from moemerge.families.opened import OpenModel
from moemerge.forward.loading import build_skeleton
from moemerge.forward.weights import Weights
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress, counted
from moemerge.statistics.coefficients.job import CoefficientsJob, FoundCoefficients
from moemerge.statistics.coefficients.maths import (
    next_token_divergence,
    next_token_entropy,
    relative_distance,
)
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain

LOSSES_RECORDED = 10  # losses recorded in the file


def adamerging(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return coefficients by model and place, and the course of the entropy."""
    merged = BlendedModel(job)

    def entropy(lambdas: Tensor, name: str, batch: Batch) -> Tensor:
        return next_token_entropy(merged.run(lambdas, batch).logits, merged.mask(batch))

    return descend(job, merged, entropy, progress, what="entropy", most=1.0)


def descend(
    job: CoefficientsJob,
    merged: BlendedModel,
    loss_on: Callable[[Tensor, str, Batch], Tensor],
    progress: Progress,
    *,
    what: str,
    most: float | None = None,
) -> FoundCoefficients:
    """Minimise a loss over all texts by Adam; `loss_on` takes λ, a model's name and its text.

    With `most`, coefficients stay between 0 and `most`.
    """
    settings = job.request.settings
    lambdas = merged.lambdas(settings.start).requires_grad_(True)
    optimiser = torch.optim.Adam([lambdas], lr=settings.lr)
    draws = {name: _draws(job, domain) for name, domain in job.domains.items()}
    losses: list[float] = []
    progress.start(f"lowering {what}", settings.steps, unit="steps")
    for _ in range(settings.steps):
        optimiser.zero_grad()
        total = 0.0
        for name, batches in draws.items():
            with torch.enable_grad():
                loss = loss_on(lambdas, name, next(batches))
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if lambdas.grad is None or not bool(lambdas.grad.isfinite().all()):
            raise NumericalError(
                f"after {counted(len(losses), 'step')} the {what} of the merged model has no "
                "finite gradient",
                hint='try `dtype="float32"`, or a smaller `lr`',
            )
        losses.append(total / len(draws))
        optimiser.step()
        if most is not None:
            with torch.no_grad():
                lambdas.clamp_(0, most)
        progress.advance(1)
    progress.finish()
    by_model = {
        name: dict(zip(merged.groups, row, strict=True))
        for name, row in zip(job.models, lambdas.detach().double().tolist(), strict=True)
    }
    shown = losses[:: max(1, len(losses) // LOSSES_RECORDED)]
    return FoundCoefficients(by_model, {what: [round(loss, 6) for loss in (*shown, losses[-1])]})


class BlendedModel:
    """A model with the base's parameters plus λ times the other models' changes."""

    def __init__(self, job: CoefficientsJob) -> None:
        self._device, self._dtype = job.stream.device, job.stream.dtype
        self._model: Any = build_skeleton(job.base.checkpoint, self._dtype)
        self._names = tuple(dict(self._model.named_parameters()))
        _require_memory(job)
        self._base = self._read(job.base)
        self._changes = []
        for model in job.models.values():
            own = self._read(model)
            self._changes.append({name: own[name] - self._base[name] for name in self._base})
        self.groups = (EVERYWHERE, *job.places)
        self._group = {name: self._group_of(name) for name in self._base}

    def _read(self, model: OpenModel) -> dict[str, Tensor]:
        with closing(Weights(self._model, model.checkpoint, self._device, self._dtype)) as weights:
            return weights.fetch(self._names)

    def _group_of(self, name: str) -> int:
        fits = (i for i, place in enumerate(self.groups) if f".{name}".find(f".{place}.") >= 0)
        return next(fits, 0)

    def lambdas(self, value: float) -> Tensor:
        """Return the same coefficient everywhere, (models, groups)."""
        shape = (len(self._changes), len(self.groups))
        return torch.full(shape, value, device=self._device)

    def mask(self, batch: Batch) -> Tensor:
        return batch.mask.to(self._device)

    def run(self, lambdas: Tensor, batch: Batch, *, hidden: bool = False) -> Any:
        """Return the merged model's output, differentiable in λ (models, groups)."""
        parameters = {
            name: self._merged(name, value, lambdas[:, self._group[name]])
            for name, value in self._base.items()
        }
        inputs = {
            "input_ids": batch.input_ids.to(self._device),
            "attention_mask": self.mask(batch).to(torch.int64),
            "use_cache": False,
            "output_hidden_states": hidden,
        }
        return functional_call(self._model, parameters, kwargs=inputs)

    def _merged(self, name: str, base: Tensor, shares: Tensor) -> Tensor:
        for share, changes in zip(shares, self._changes, strict=True):
            base = base + share.to(base.dtype) * changes[name]
        return base


def _require_memory(job: CoefficientsJob) -> None:
    """Refuse models that need more memory than is free.

    They need base, changes, the merged model and its gradient, and as much again for activations.
    """
    size = job.base.checkpoint.total_bytes
    needed = size * (len(job.models) + 4)
    free = available_memory(job.stream.device)
    if needed > free:
        raise ResourceError(
            f"{job.request.method} keeps all models in memory: about {format_size(needed)} on "
            f"{job.stream.device}, where {format_size(free)} are free",
            hint="use `acm` or `sens`, which stream, or a larger device",
        )


def _draws(job: CoefficientsJob, domain: Domain) -> Iterator[Batch]:
    """Yield random rows of a domain forever, some at a time, depending only on the seed."""
    rng = random.Random(f"{job.request.settings.seed}:{domain.name}")
    count = min(job.request.settings.rows, len(domain.rows))
    while True:
        yield one_batch(domain, rng.sample(range(len(domain.rows)), count))


def one_batch(domain: Domain, places: Sequence[int]) -> Batch:
    """Return some rows of a domain, padded to one batch."""
    rows = tuple(domain.rows[place] for place in places)
    longest = max(map(len, rows))
    return make_batches([Domain(domain.name, rows)], batch_tokens=longest * len(rows))[0]


def expertmerging(job: CoefficientsJob, progress: Progress) -> FoundCoefficients:
    """Return coefficients by model and place, and the course of the loss."""
    merged = BlendedModel(job)
    settings = job.request.settings
    places = {name: at for at, name in enumerate(job.models)}

    def loss(lambdas: Tensor, name: str, batch: Batch) -> Tensor:
        mask = merged.mask(batch)
        with torch.no_grad():
            whole = merged.lambdas(0.0)
            whole[places[name]] = 1.0
            expert = merged.run(whole, batch, hidden=True)
        ours = merged.run(lambdas, batch, hidden=True)
        pairs = list(zip(ours.hidden_states[1:], expert.hidden_states[1:], strict=True))
        distances = [relative_distance(a[mask], b[mask]) for a, b in pairs]
        return (
            torch.stack(distances).mean()
            + next_token_divergence(ours.logits[mask], expert.logits[mask])
            + settings.anchor * (lambdas - settings.start).abs().mean()
        )

    return descend(job, merged, loss, progress, what="loss")
