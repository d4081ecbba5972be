"""Collect gradient statistics of one model: forward layer by layer, then backward.

The forward pass stores the input of every layer (`store`). The backward pass recomputes one layer
at a time with only its weights in memory. Statistics of its gradients (squares per sequence, or
sensitivities) are summed and written before the next layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError, DataError, NumericalError, ResourceError
from moemerge.families.roles import Unit
from moemerge.forward.gradients import ModuleCall, expert_deltas, head_back, run_back
from moemerge.forward.input_hooks import (
    ExpertsHook,
    ExpertView,
    LinearHook,
    linear_weights,
    projections,
)
from moemerge.forward.tokens import as_sequences, real_tokens, routing_of
from moemerge.forward.weights import Weights
from moemerge.runtime.devices import attention_without_plans, deterministic, is_out_of_memory
from moemerge.runtime.process import give_back_freed_memory
from moemerge.runtime.progress import Progress
from moemerge.statistics import StatisticsWriter
from moemerge.statistics.collecting.forward import Forward, run_forward
from moemerge.statistics.collecting.job import CollectingJob
from moemerge.statistics.collecting.maths import (
    RoutedGradients,
    add_ragged_squares,
    add_squares,
    new_total,
    transposed_product,
)
from moemerge.statistics.file import stored_shape
from moemerge.text.batches import Batch, rows_of

# What the model's own code may raise.
MODEL_ERRORS = (MemoryError, RuntimeError, AttributeError, TypeError, ValueError, KeyError)

# A measure sums a statistic of d loss / d W = Σ_t δ_t x_tᵀ into `total` (out, in): `add` takes
# gradients (sequences, tokens, out) and inputs (sequences, tokens, in), `add_ragged` rows
# (tokens, out) and (tokens, in), ordered by sequence. `finish` returns the statistic of the sum,
# and `of_unit` a unit's value as it is stored, in float32.


class Squares:
    """Fisher values: the mean over sequences of each sequence's squared gradient."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences

    def add(self, total: Tensor, delta: Tensor, x: Tensor) -> None:
        add_squares(total, delta, x)

    def add_ragged(self, total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        add_ragged_squares(total, delta, x, counts)

    def finish(self, total: Tensor) -> Tensor:
        return (total / self._sequences).float()

    def of_unit(self, unit: Unit, values: Tensor) -> Tensor:
        return values.contiguous()


class Sensitivity:
    """Σ |W · d loss / d W| of a unit, with the summed loss of all sequences."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def add(self, total: Tensor, delta: Tensor, x: Tensor) -> None:
        total += transposed_product(delta.flatten(0, 1), x.flatten(0, 1))

    def add_ragged(self, total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        total += transposed_product(delta, x)

    def finish(self, total: Tensor) -> Tensor:
        return total

    def of_unit(self, unit: Unit, values: Tensor) -> Tensor:
        stored = unit.slot.take(self._checkpoint.read(unit.tensor, unit.slot.rows))
        weight = stored.to(values.device, torch.float64)
        return (weight * values).abs().sum().float().reshape(1)


# Tokens whose logits are in memory at once.
HEAD_TOKENS = {"cpu": 512, "cuda": 8192}
# How far a recomputed layer may deviate, relative to the mean size. Another kernel rounds
# differently and may route a token to other experts, but never most tokens.
RERUN_TOLERANCE = 0.05


def collect_gradients(
    job: CollectingJob, writer: StatisticsWriter | None, progress: Progress
) -> tuple[list[str], list[str]]:
    """Write Fisher values or sensitivities of every matrix.

    Return notices and the units of unvisited experts. `writer` is rank 0's: other ranks only add to
    the sums.
    """
    if not predicting(job):
        raise DataError(
            "every row of the text is a single token, so there is nothing to predict",
            hint="give rows of at least two tokens",
        )
    with run_forward(job, progress) as forward:
        back = _Backward(job, forward, writer)
        try:
            with deterministic(job.stream.device), attention_without_plans():
                back.run(progress)
        finally:
            back.close()
    return back.notices, back.unvisited


def predicting(job: CollectingJob) -> int:
    """Return the number of sequences that predict at least one token, over which the mean is."""
    return sum(len(row) > 1 for row in job.domain.rows)


class _Backward:
    def __init__(
        self, job: CollectingJob, forward: Forward, writer: StatisticsWriter | None
    ) -> None:
        self._job = job
        self._ranks = job.ranks
        self._forward = forward
        self._writer = writer
        self._model = forward.model
        self._device = job.stream.device
        checkpoint = job.model.checkpoint
        self._measure: Squares | Sensitivity = (
            Squares(predicting(job))
            if job.request.settings.kind == "fisher"
            else Sensitivity(checkpoint)
        )
        self._weights = Weights(self._model, checkpoint, job.stream.device, job.stream.dtype)
        self._gradients: list[Tensor] = []  # d loss / d output of the layer at hand, by batch
        self._expected: Tensor | None = None  # the first batch's input of the layer above
        self.notices: list[str] = [forward.input_hooks.notice] if forward.input_hooks.notice else []
        self.unvisited: list[str] = []

    def close(self) -> None:
        self._weights.close()

    def run(self, progress: Progress) -> None:
        layers = self._forward.anatomy.layers
        progress.start("gradients", len(layers), unit="layers")
        with self._placed("head", self._forward.head_names):
            self._head()
        for number in reversed(range(len(layers))):
            with self._placed(layers[number], self._weights.names_under(layers[number])):
                if number and self._device.type != "cpu":
                    below = layers[number - 1]
                    self._weights.prefetch(below, self._weights.names_under(below))
                self._layer(number)
            if self._device.type == "cpu":
                give_back_freed_memory()
            progress.advance(1)
        progress.finish()

    @contextlib.contextmanager
    def _placed(self, key: str, names: Sequence[str]) -> Iterator[None]:
        self._weights.place(self._weights.fetched(key, names))
        self._weights.check(names, key)
        try:
            yield
        finally:
            self._weights.free(names)

    # --- the head ---

    def _head(self) -> None:
        head = self._forward.input_hooks.head
        total = None if head is None else new_total(head.shape, self._device)
        for number, batch in enumerate(self._job.batches):
            hidden = self._forward.store.take((len(self._forward.anatomy.layers), number))
            gradients: list[Tensor] = []
            count, length = batch.input_ids.shape
            step = max(1, HEAD_TOKENS.get(self._device.type, 512) // length)  # rows
            for rows in (slice(first, first + step) for first in range(0, count, step)):
                part = rows_of(batch, rows)
                with self._errors_named("the head"):
                    back, heard = head_back(
                        self._model,
                        self._forward.anatomy.owner,
                        self._forward.tail,
                        part,
                        hidden[rows],
                        head,
                    )
                gradients.append(back)
                if total is not None:
                    self._add(total, heard, part)
            self._gradients.append(torch.cat(gradients))
        if head is not None and total is not None:
            self._write_linear(head, total, self._job.domain.tokens)

    # --- a layer ---

    def _layer(self, number: int) -> None:
        forward = self._forward
        hooks = forward.input_hooks.layers[number]
        totals = {
            t.path: new_total(t.shape, self._device) for t in hooks if isinstance(t, LinearHook)
        }
        routed = {t.path: RoutedGradients(t.count) for t in hooks if isinstance(t, ExpertsHook)}
        passed: dict[str, int] = {}
        path = forward.anatomy.layers[number]
        self._weights.require_finite(linear_weights(hooks))
        finite = torch.ones((), dtype=torch.bool, device=self._device)
        for at, batch in enumerate(self._job.batches):
            hidden = forward.store.take((number, at))
            call = forward.calls.pop((number, at))
            with self._errors_named(path):
                out, back, heard = run_back(
                    self._model, path, hidden, call, self._gradients[at], hooks
                )
            if at == 0:
                self._check_same(path, out)
                self._expected = hidden
            del out
            self._gradients[at] = back
            finite &= torch.isfinite(back).all()
            self._sum(heard, batch, totals, routed, passed)
        if not bool(finite):
            raise NumericalError(
                f"{self._job.model.label}: non-finite gradients below {path}",
                hint='try `dtype="float32"`',
            )
        for hook in hooks:
            if isinstance(hook, ExpertsHook):
                if hook.path in passed:
                    self._write_experts(hook, routed.pop(hook.path))
            elif hook.path in passed:
                tokens = self._ranks.total(passed[hook.path], self._device)
                self._write_linear(hook, totals.pop(hook.path), tokens)

    def _sum(
        self,
        heard: Sequence[ModuleCall],
        batch: Batch,
        totals: dict[str, Tensor],
        routed: dict[str, RoutedGradients],
        passed: dict[str, int],
    ) -> None:
        calls: dict[str, list[ModuleCall]] = {}
        for one in heard:
            calls.setdefault(one.hook.path, []).append(one)
        for path, some in calls.items():
            if path in routed:
                for one in some:
                    self._keep(one, batch, routed[path])
            else:
                self._add(totals[path], some, batch)
            passed[path] = passed.get(path, 0) + batch.tokens

    def _add(self, total: Tensor, heard: Sequence[ModuleCall], batch: Batch) -> None:
        """Add all calls of one module in one pass: a sequence's gradient is their sum."""
        pairs = [(one.args[0], one.delta) for one in heard if one.delta is not None]
        if not pairs:
            return
        inputs = [as_sequences(x, batch) for x, _ in pairs]
        deltas = [as_sequences(delta, batch) for _, delta in pairs]
        if any(value is None for value in (*inputs, *deltas)):
            raise ArchitectureError(
                f"{heard[0].hook.path} reads its input in a shape that cannot be separated by "
                "sequence, so there are no squared gradients of single sequences"
            )
        x = torch.cat([value for value in inputs if value is not None], dim=1)
        delta = torch.cat([value for value in deltas if value is not None], dim=1)
        if x.dtype != delta.dtype:
            x, delta = x.float(), delta.float()
        self._measure.add(total, delta, x)

    def _keep(self, heard: ModuleCall, batch: Batch, routed: RoutedGradients) -> None:
        if heard.delta is None:
            raise ArchitectureError(f"no gradient came back to {heard.hook.path}")
        rows = batch.mask.reshape(-1).nonzero().squeeze(1).to(self._device)
        x, chosen, weights = routing_of(heard.hook.path, heard.args)
        tokens = [real_tokens(value, batch, rows) for value in (x, chosen, weights, heard.delta)]
        if any(value is None for value in tokens):
            raise ArchitectureError(f"{heard.hook.path} is not given all tokens of a batch")
        lengths = batch.mask.sum(dim=1).tolist()
        routed.add(*(value for value in tokens if value is not None), lengths=lengths)

    def _check_same(self, path: str, out: Tensor) -> None:
        if self._expected is None:
            return
        real = self._job.batches[0].mask.to(self._device)
        wanted, got = self._expected[real].float(), out[real].float()  # (tokens, d)
        if float((got - wanted).abs().mean()) > RERUN_TOLERANCE * float(wanted.abs().mean()):
            raise ArchitectureError(
                f"{path} run again does not give what the layer above it read: this model hands "
                "more than hidden states from layer to layer",
                hint='gram statistics need the forward pass alone: `kind="gram"`',
            )

    # --- writing ---

    def _write_linear(self, hook: LinearHook, total: Tensor, tokens: int) -> None:
        placed = self._forward.units.linear(hook)
        if not placed:
            self.notices.append(
                f"{hook.weight} is stored in parts: nothing is known of its gradient"
            )
        self._ranks.reduce_to(0, total)
        values = self._measure.finish(total)
        for one in placed:
            self._write(one.unit, one.take(values), tokens)

    def _write_experts(self, hook: ExpertsHook, routed: RoutedGradients) -> None:
        units = self._forward.units.experts(hook)
        module: Any = self._model.get_submodule(hook.path)
        for expert, x, gradient, counts in routed.by_expert():
            view = ExpertView(module, expert)
            tokens = self._ranks.total(x.shape[0], self._device)
            sums = None
            if tokens:  # on this rank or another
                sums = self._expert_sums(view, module, x, gradient, counts)
            for (number, projection), unit in units.items():
                if number != expert:
                    continue
                values = None if sums is None else sums.get(projection)
                if values is None:
                    self.unvisited.append(unit.key)
                self._write(unit, values, tokens)

    def _expert_sums(
        self, view: ExpertView, module: Any, x: Tensor, gradient: Tensor, counts: list[int]
    ) -> dict[str | None, Tensor]:
        of_pre, mid, of_down = expert_deltas(view, x, gradient)
        up = new_total((of_pre.shape[1], x.shape[1]), self._device)
        down = new_total((of_down.shape[1], mid.shape[1]), self._device)
        self._measure.add_ragged(up, of_pre, x, counts)
        self._measure.add_ragged(down, of_down, mid, counts)
        self._ranks.reduce_to(0, up, down)
        up = self._measure.finish(up)
        sums: dict[str | None, Tensor] = {None: up, "down": self._measure.finish(down)}
        sums.update(projections(module, up))
        return sums

    def _write(self, unit: Unit, values: Tensor | None, tokens: int) -> None:
        if self._writer is None:
            return
        shape = stored_shape(self._job.request.settings.kind, unit.shape)
        kept = None if values is None else self._measure.of_unit(unit, values)
        self._writer.add(unit.key, shape, kept, units={unit.key: unit.shape}, tokens=tokens)

    @contextlib.contextmanager
    def _errors_named(self, where: str) -> Iterator[None]:
        """Name the location of an error inside the model's own code."""
        label = self._job.model.label
        try:
            yield
        except MODEL_ERRORS as error:
            if is_out_of_memory(error):
                raise ResourceError(
                    f"{label}: out of memory on {self._device} in {where}, on the way back",
                    hint='use `offload="disk"`, or lower `max_tokens` or `max_length`',
                ) from error
            raise ArchitectureError(
                f"{label}: gradients cannot be sent back through {where}: "
                f"{type(error).__name__}: {error}"
            ) from error
