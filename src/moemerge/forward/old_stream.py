"""Run a model over batches with one decoder layer in memory, and stop at requested modules.

The model's own forward runs once per batch, each in its own thread, which pauses before every layer
and every requested module. When all batches wait at the same place, the next layer's weights are
loaded, or the module's inputs are handed out. Then one batch after the other continues. Masks,
rotary embeddings and state that layers pass to each other are left to the model, so the features
are those of the whole model, bit for bit.

    with ModelStream(checkpoint, batches, StreamSettings(device, dtype)) as stream:
        stream.stop_at_layers()                           # before each layer, and at the end
        stream.stop_before(["model.layers.0.self_attn.o_proj"])
        stream.listen([router.path for router in stream.anatomy.routers], on_calls)
        for stop in stream:                               # in the order the model runs them
            if stop.kind == "module":
                for x in stop.inputs("math"):             # (tokens, d) of each batch, no padding
                    ...
                stop.replace({f"{stop.path}.weight": new})   # rounded to the stored dtype

Memory holds: the resident part (norms, the head if requested, and the embeddings before the first
layer), one layer (and the next, while it is read), the waiting batches' activations (see `spill`),
one running batch's temporaries, and the inputs at a stop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ArchitectureError, NumericalError, UsageError
from moemerge.forward.fused import fuse
from moemerge.forward.input_hooks import InputHooks, find_input_hooks
from moemerge.forward.loading import NameMap, build_skeleton
from moemerge.forward.routers import Anatomy, anatomy, names_outside_layers, require_logits
from moemerge.forward.settings import StreamSettings, estimate_memory, raise_forward_error
from moemerge.forward.spill import Emptied, Gathered, SpillFactory, held_by
from moemerge.forward.stops import (
    Arrival,
    CallLog,
    OnCalls,
    Pause,
    PauseKind,
    Stop,
    Worker,
    current_worker,
    part_of_a_layer,
    take_over_inputs,
)
from moemerge.forward.tokens import check_tokens, finite, flat_tokens, real_rows
from moemerge.forward.weights import Weights
from moemerge.runtime.devices import attention_without_plans, is_out_of_memory
from moemerge.runtime.process import give_back_freed_memory
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch

Output = Literal["hidden", "logits"]


class ModelStream:
    """Iterate to get the requested `Stop`s, in the order of the model's forward.

    `on_output` is called with every batch's final hidden states (after the last norm) or logits.
    Without it, and without stops at layers, the run ends at the last stop. Use it as a context
    manager: leaving it ends all threads and frees the weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        settings: StreamSettings | None = None,
        *,
        output: Output = "hidden",
        on_output: Callable[[Batch, Tensor], None] | None = None,
        progress: Progress | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.settings = settings = settings or StreamSettings()
        self.device = settings.device
        self.model = build_skeleton(checkpoint, settings.dtype)
        kept = fuse(self.model, self.device, settings.dtype, narrow=settings.narrow_experts)
        self.anatomy: Anatomy = anatomy(self.model)
        check_tokens(self.model, batches, checkpoint.label)
        self._on_output = on_output
        self._progress = progress or Silent()
        whole = on_output is not None and output == "logits"
        if whole:
            require_logits(self.model, checkpoint.label)
        self._runs = self.model if whole else self.model.get_submodule(self.anatomy.owner)
        self.stopwatch = stopwatch or Stopwatch(self.device)
        self.weights = Weights(
            self.model, checkpoint, self.device, settings.dtype, self.stopwatch, kept
        )
        self._root = names_outside_layers(self.model, self.anatomy, whole=whole)
        self.memory = estimate_memory(self.weights, self.anatomy, batches, self._root, settings)
        self._spills = SpillFactory(self.memory.offload, self.device, settings.spill_folder)
        self._workers = [
            Worker(number, batch, self._forward, self._spills.spill(number))
            for number, batch in enumerate(batches)
        ]
        for worker in self._workers:
            worker.rows = real_rows(worker.batch, self.device)
        self._points: dict[str, Pause] = {}  # modules to stop before, by path
        self._at_layers = self._layer_inputs = False
        self._log = CallLog()
        self._brought: dict[int, weakref.ref[Tensor]] = {}  # by batch, at the previous stop
        self._hooks: list[RemovableHandle] = []
        self._layer: int | None = None  # whose weights are in memory
        self._at = "start"  # the kind of pause where the batches wait
        self._closed = False
        self._stops: Iterator[Stop] | None = None

    @property
    def names(self) -> NameMap:
        """Where each parameter is stored."""
        return self.weights.names

    @cached_property
    def input_hooks(self) -> InputHooks:
        """The modules of every layer whose inputs can be read."""
        return find_input_hooks(self.model, self.anatomy)

    # --- stops and listeners: to be set before the iteration begins ---

    def stop_before(self, paths: Iterable[str], kind: PauseKind = "module") -> None:
        """Stop before these modules of the layers."""
        self._points.update({path: Pause(kind, path) for path in paths})

    def stop_at_layers(self, *, inputs: bool = False) -> None:
        """Stop before every layer, with the previous one still in memory, and at the end.

        With `inputs`, hand out the layer's input hidden states.
        """
        self._at_layers, self._layer_inputs = True, inputs

    def listen(self, paths: Iterable[str], on_calls: OnCalls, *, outputs: bool = False) -> None:
        """Record the calls of these modules, with their outputs if `outputs` is set.

        `on_calls` is called with a batch's calls whenever the batch waits. Their tensors may change
        after it returns.
        """
        self._hooks += self._log.listen(self.model, paths, on_calls, outputs=outputs)

    # --- opening and closing ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every thread, drop every weight and spilled file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._stops = iter(())
        for worker in self._workers:
            worker.cancel()
        self._workers = []
        for hook in self._hooks:
            hook.remove()
        self.weights.close()
        self.weights.free(self._root)
        self.drop_layer()
        self._spills.close()
        self.give_back()

    def __iter__(self) -> Iterator[Any]:
        if self._stops is not None:
            raise UsageError("a stream runs once; open another for a second pass")
        self._stops = self._run()  # a reference: a dropped iterator must not end the stream
        return self._stops

    # --- the schedule ---

    def _run(self) -> Iterator[Stop]:
        try:
            yield from self._schedule()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise_forward_error(error, f"{self.checkpoint.label}: no room", self.memory)
        finally:
            self.close()

    def _schedule(self) -> Iterator[Stop]:
        self._progress.start("streaming", len(self.anatomy.layers), unit="layers")
        with self.stopwatch.span("wait for weights"):
            self.weights.place(self.weights.fetch(self._root))
        self.weights.check(self._root, "the resident part")
        self.weights.require_finite(self._root)
        layers = tuple(f"{path}." for path in self.anatomy.layers)
        outside = (name for name in self.names.recipes if not name.startswith(layers))
        self.weights.require_finite_on_disk(name for name in outside if name not in self._root)
        self.give_back()
        self._read_ahead(0)
        self._hooks.append(take_over_inputs(self.model.get_submodule(self.anatomy.layers[0])))
        for path in self.anatomy.layers:
            self._pause_before(Pause("layer", path))
        for pause in self._points.values():
            self._pause_before(pause)
        left = set(self._points)
        while left or self._to_the_end:
            pause, arrivals, shared = self._advance()
            if pause.kind not in ("layer", "end") or self._at_layers:
                left.discard(pause.key)
                stop = self._stop(pause, arrivals, shared)
                del arrivals
                yield stop
                stop.release()
            if pause.kind == "layer":
                self._bring(self.anatomy.layers.index(pause.key))
            elif pause.kind == "end":
                break
        if not self._to_the_end and self._layer is not None:
            # Modules after the last stop do not run, so hidden states cannot show their NaN.
            self.weights.require_finite(self.weights.names_under(self.anatomy.layers[self._layer]))
        self._progress.finish()

    @property
    def _to_the_end(self) -> bool:
        return self._at_layers or self._on_output is not None

    def _stop(self, pause: Pause, arrivals: Sequence[Arrival], shared: bool) -> Stop:
        layers = self.anatomy.layers
        layer = layers.index(pause.key) if pause.kind == "layer" else self._layer
        if pause.kind == "end" or layer is None:
            layer = len(layers)
        return Stop(pause, layer, self.weights, arrivals, shared)

    def _advance(self) -> tuple[Pause, list[Arrival], bool]:
        """Run every batch to its next pause, which must be the same for all."""
        arrivals: list[Arrival] = []
        flags: list[Tensor] = []
        shared = True
        gathered = None
        if self.settings.gathers:
            gathered = Gathered(worker.batch for worker in self._workers)
        begin = self.stopwatch.mark()
        for worker in self._workers:
            with attention_without_plans():
                worker.step()
            self._raise_error_of(worker)
            self._log.hand_out(worker)
            if worker.value is not None:
                flags.append(finite(worker.value, worker.batch, worker.rows))
            if worker.at.kind == "end":
                if self._on_output is not None and worker.value is not None:
                    self._on_output(worker.batch, worker.value)
                worker.value = None
                continue
            if worker.at.kind != "layer" or self._layer_inputs:
                shared &= self._has_same_input(worker)
                arrivals.append(self._arrival(worker, gathered))
            if self._spills.active:
                worker.put_away(self._shared_storages(), self.settings.spill_smallest)
        pauses = {worker.at for worker in self._workers}
        if len(pauses) != 1:
            raise ArchitectureError(
                f"batches wait at different places of the model: {sorted(map(str, pauses))}",
                hint="the model's control flow depends on its input; it cannot be streamed",
            )
        pause = pauses.pop()
        self._check_finite(pause, flags)
        self.stopwatch.add(part_of_a_layer(self._at, pause.kind), begin)
        self._at = pause.kind
        return pause, arrivals, shared

    def _bring(self, layer: int) -> None:
        """Replace the layer in memory by this one, and start to read the next."""
        if layer == self._layer:
            return
        first = self._layer is None
        path = self.anatomy.layers[layer]
        names = self.weights.names_under(path)
        with self.stopwatch.span("wait for weights"):
            self._drop_embeddings() if first else self.drop_layer()
            self.weights.place(self.weights.fetched(path, names))
            self.weights.check(names, path)
            # Hidden states do not show NaN in an expert that receives no token.
            self.weights.require_finite(names)
            self._layer = layer
            self._read_ahead(layer + 1)
        if not first:
            self._progress.advance(1)

    def _read_ahead(self, layer: int) -> None:
        """Start to read a layer, and let the system prefetch the one after it.

        Without memory for a second layer on a GPU, let the system prefetch the layer itself.
        """
        if self.device.type == "cpu" and not self.settings.prefetches:
            return
        layers = self.anatomy.layers
        last = len(layers) - 1
        if not self._to_the_end:
            last = max(
                number
                for number, path in enumerate(layers)
                if any(point.startswith(path + ".") for point in self._points)
            )
        later = layer + 1 if self.settings.prefetches else layer
        if self.settings.prefetches and layer <= last:
            self.weights.prefetch(layers[layer], self.weights.names_under(layers[layer]))
        if later <= last:
            self.weights.advise(self.weights.names_under(layers[later]))

    def drop_layer(self) -> None:
        """Free the layer in memory, after all batches have passed it."""
        if self._layer is not None:
            path = self.anatomy.layers[self._layer]
            self.weights.free(self.weights.names_under(path))
            self._layer = None
            self.give_back()

    def _drop_embeddings(self) -> None:
        """Free the embeddings, once every batch has passed them."""
        with suppress(NotImplementedError):  # the model does not declare its embeddings
            table = self.model.get_input_embeddings()
            paths = [path for path, module in self.model.named_modules() if module is table]
            own = {name for path in paths for name in self.weights.names_under(path)}
            # If logits are computed, the head may share its matrix with the embeddings.
            self.weights.free(own if self._runs is not self.model else ())
            self.give_back()

    def give_back(self) -> None:
        """On a CPU, return freed memory to the system before more is allocated."""
        if self.device.type == "cpu":
            give_back_freed_memory()

    # --- in the batches' threads ---

    def _forward(self, batch: Batch) -> Tensor:
        mask = batch.mask.to(self.device, torch.int64) if batch.padded else None
        result: Any = self._runs(
            input_ids=batch.input_ids.to(self.device), attention_mask=mask, use_cache=False
        )
        final: Tensor = result.logits if "logits" in result else result[0]
        return final

    def _pause_before(self, at: Pause) -> None:
        def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            worker = current_worker()
            if worker is None:
                return
            given = (*args, *kwargs.values())
            if not given or not isinstance(given[0], Tensor):
                raise ArchitectureError(f"{at.key} is called without a tensor of hidden states")
            others = given[1:] if at.kind == "module" else ()
            worker.pause(at, given[0], tuple(v for v in others if isinstance(v, Tensor)))

        module = self.model.get_submodule(at.key)
        self._hooks.append(module.register_forward_pre_hook(pause, with_kwargs=True))

    # --- inputs at a stop ---

    def _has_same_input(self, worker: Worker) -> bool:
        before, value = self._brought.get(id(worker)), worker.value
        assert value is not None
        self._brought[id(worker)] = weakref.ref(value)
        return before is not None and before() is value

    def _arrival(self, worker: Worker, gathered: Gathered | None) -> Arrival:
        value = worker.value
        assert value is not None
        tokens = flat_tokens(value, worker.batch)
        if tokens is None:
            if worker.at.kind == "router":
                raise ArchitectureError(
                    f"{worker.at.key} sees {value.numel() // value.shape[-1]} tokens of a batch of "
                    f"{worker.batch.mask.numel()}"
                )
            return Arrival(worker.batch, ())
        if gathered is None or worker.at.kind == "layer":
            others = self._others(worker, copy=self._spills.active)
            return Arrival(worker.batch, (worker.real(tokens, copy=self._spills.active), *others))
        others = self._others(worker, copy=True)
        block = gathered.take(worker.batch, tokens, worker.rows)
        if not self._spills.active:
            worker.emptied, worker.value = Emptied.of(value, block, worker.rows), None
        return Arrival(worker.batch, (block, *others))

    def _others(self, worker: Worker, *, copy: bool) -> list[Tensor]:
        """Return further tensor arguments of the module whose rows are tokens, too."""
        others = (flat_tokens(other, worker.batch) for other in worker.others)
        return [worker.real(other, copy=copy) for other in others if other is not None]

    def _shared_storages(self) -> set[int]:
        inside = () if self._layer is None else (self.anatomy.layers[self._layer],)
        return held_by(
            module
            for path, module in self.model.named_modules()
            if path.startswith(inside) or not path.startswith(self.anatomy.layers)
        )

    # --- checks ---

    def _check_finite(self, pause: Pause, flags: list[Tensor]) -> None:
        if not flags or bool(torch.stack(flags).all()):
            return
        bad = {
            worker.batch.domain
            for worker, flag in zip(self._workers, flags, strict=True)
            if not bool(flag)
        }
        raise NumericalError(
            f"{self.checkpoint.label}: non-finite hidden states {self._where(pause)}, domain "
            f"{', '.join(sorted(bad))}",
            hint="the weights of that layer hold NaN or infinity, or overflow in this dtype; "
            'try `dtype="float32"`',
        )

    def _where(self, pause: Pause) -> str:
        if pause.kind in ("router", "module"):
            what = "its router" if pause.kind == "router" else pause.key
            return f"in layer {self._layer}, before {what}"
        layer = self._layer
        return "in the embeddings" if layer is None else f"in the output of layer {layer}"

    def _raise_error_of(self, worker: Worker) -> None:
        if worker.error is not None:
            layer = "before the first layer" if self._layer is None else f"in layer {self._layer}"
            where = f"{self.checkpoint.label}: {layer}, domain {worker.batch.domain}"
            raise_forward_error(worker.error, where, self.memory)
