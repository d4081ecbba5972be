"""Run a model over batches with one decoder layer in memory, and stop at any module of it.

The model's own forward runs once per batch, each in its own thread, which pauses before every layer
and every module that a job stops at. When all batches wait at the same place, the next layer's
weights are loaded, or the module's inputs are handed out. Masks, rotary embeddings and state that
layers pass to each other are left to the model, so the features are those of the whole model, bit
for bit.

    with ModelStream(checkpoint, batches, StreamSettings(device, dtype)) as stream:
        for number in stream:                             # every layer, its weights in memory
            stop = stream.run_to(["model.layers.0.self_attn.o_proj"])
            for x in stop.inputs("math"):                 # (tokens, d) of each batch, no padding
                ...
            stream.put({stop.path + ".weight": new})      # rounded to the stored dtype

Memory holds: the resident part (norms, the head if requested, and the embeddings before the first
layer), one layer (and the next, while it is read), the waiting batches' activations (see `spill`),
one running batch's temporaries, and the inputs at a stop.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.forward.fused import fuse
from moemerge.forward.input_hooks import InputHooks, find_input_hooks
from moemerge.forward.loading import NameMap, build_skeleton
from moemerge.forward.routers import Anatomy, anatomy, names_outside_layers, require_logits
from moemerge.forward.settings import StreamSettings, estimate_memory, raise_forward_error
from moemerge.forward.spill import SpillFactory, held_by
from moemerge.forward.stops import (
    Arrival,
    CallLog,
    ModuleStop,
    OnCalls,
    Pause,
    Worker,
    current_worker,
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
    """One model, run layer by layer. Use it as a context manager, which frees everything.

    `on_output` is called with every batch's final hidden states (after the last norm) or logits.
    `last_layer` is the last layer that is needed; without it, the model runs to its end. With
    `layer_inputs`, `entered` has each batch's hidden states before the layer.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        settings: StreamSettings | None = None,
        *,
        output: Output = "hidden",
        on_output: Callable[[Batch, Tensor], None] | None = None,
        last_layer: int | None = None,
        layer_inputs: bool = False,
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
        self._last = len(self.anatomy.layers) - 1 if last_layer is None else last_layer
        self._to_the_end = last_layer is None
        self._layer_inputs = layer_inputs
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
        self._log = CallLog()
        self._brought: dict[int, weakref.ref[Tensor]] = {}  # by batch, at the previous stop
        self._hooks: list[RemovableHandle] = []
        self.layer: int | None = None  # whose weights are in memory
        self.entered: Sequence[Arrival] = ()  # hidden states before the layer
        self._stop: ModuleStop | None = None  # whose inputs are freed when the stream runs on
        self._at: Pause | None = None  # where all batches wait; None before the first step
        self._closed = False

    @property
    def names(self) -> NameMap:
        """Where each parameter is stored."""
        return self.weights.names

    @property
    def stored_bytes(self) -> int:
        """Return the size on disk of what is read."""
        names = [
            *self._root,
            *(n for p in self.anatomy.layers for n in self.weights.names_under(p)),
        ]
        recipes = [recipe for name in names if (recipe := self.names.recipes.get(name))]
        stored = {name for recipe in recipes for _, name in recipe.sources}
        return sum(self.checkpoint.tensors[name].stored_bytes for name in stored)

    @cached_property
    def input_hooks(self) -> InputHooks:
        """The modules of every layer whose inputs can be read."""
        return find_input_hooks(self.model, self.anatomy)

    def module(self, path: str) -> Any:
        return self.model.get_submodule(path)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter by its name in memory."""
        return self.model.get_parameter(name).detach()

    def listen(self, paths: Iterable[str], on_calls: OnCalls, *, outputs: bool = False) -> None:
        """Record the calls of these modules, with their outputs if `outputs` is set.

        `on_calls` is called with a batch's calls whenever the batch waits. Their tensors may change
        after it returns.
        """
        self._hooks += self._log.listen(self.model, paths, on_calls, outputs=outputs)

    # --- running ---

    def __iter__(self) -> Iterator[int]:
        while (number := self.begin_layer()) is not None:
            yield number

    def begin_layer(self) -> int | None:
        """Run all batches to the next layer and load its weights; return its number.

        The previous layer runs to its end first. Return None after the last layer.
        """
        try:
            if self._at is None:
                self._start()
            last = self.layer == self._last and not self._to_the_end
            if self.layer is not None and not last:
                self.finish_layer()
            assert self._at is not None
            if last or self._at.kind == "end":
                self.drop_layer()
                self._progress.finish()
                return None
            self._bring(self.anatomy.layers.index(self._at.key))
        except RuntimeError as error:
            self._raise(error)
        return self.layer

    def run_to(self, paths: Collection[str]) -> ModuleStop | None:
        """Run the layer until all batches wait before one of these modules.

        Return None if the layer has run to its end, with its weights still in memory.
        """
        if self._has_left_layer():
            return None
        hooks = [self._pause_before(Pause("module", path)) for path in paths]
        try:
            arrivals, same = self._advance()
        except RuntimeError as error:
            self._raise(error)
        finally:
            for hook in hooks:
                hook.remove()
        if self._has_left_layer():
            return None
        assert self._at is not None
        assert self.layer is not None
        router = next((r for r in self.anatomy.routers if r.path == self._at.key), None)
        self._stop = ModuleStop(self._at.key, self.layer, arrivals, same, router, self.weights)
        return self._stop

    def routers(self) -> Iterator[ModuleStop]:
        """Run the layer to each of its routers in turn."""
        paths = [router.path for router in self.anatomy.routers if router.layer == self.layer]
        while (stop := self.run_to(paths)) is not None:
            yield stop

    def finish_layer(self) -> None:
        """Run the layer to its end."""
        while not self._has_left_layer():
            self.run_to(())

    def _has_left_layer(self) -> bool:
        """Whether all batches have passed the layer in memory."""
        here = None if self.layer is None else self.anatomy.layers[self.layer]
        return self._at is not None and self._at.kind != "module" and self._at.key != here

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors from now on, by name on disk, rounded to their stored dtype.

        Each must be stored as one tensor, and be finite after rounding.
        """
        for name, value in tensors.items():
            self.weights.put(self.names.in_memory(name), value)

    def _start(self) -> None:
        self._progress.start("streaming", len(self.anatomy.layers), unit="layers")
        with self.stopwatch.span("wait for weights"):
            self.weights.place(self.weights.fetch(self._root))
        self.weights.check(self._root, "the resident part")
        self.weights.require_finite(self._root)
        self.give_back()
        self._read_ahead(0)
        layers = self.anatomy.layers
        self._hooks.append(take_over_inputs(self.model.get_submodule(layers[0])))
        self._hooks += [self._pause_before(Pause("layer", path)) for path in layers]
        self._advance()

    def _advance(self) -> tuple[list[Arrival], bool]:
        """Run every batch to its next pause, which must be the same for all.

        Return the batches with their inputs there, and whether these are the same tensors as at the
        previous pause.
        """
        if self._stop is not None:
            self._stop.arrivals = ()
        self._stop, self.entered = None, ()
        arrivals: list[Arrival] = []
        flags: list[Tensor] = []
        same = True
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
            if worker.at.kind == "module" or self._layer_inputs:
                same &= self._has_same_input(worker)
                arrivals.append(self._arrival(worker))
            if self._spills.active:
                worker.put_away(self._shared_storages(), self.settings.spill_smallest)
        pauses = {worker.at for worker in self._workers}
        if len(pauses) != 1:
            raise ArchitectureError(
                f"batches wait at different places of the model: {sorted(map(str, pauses))}",
                hint="the model's control flow depends on its input; it cannot be streamed",
            )
        self._at = pauses.pop()
        self._check_finite(self._at, flags)
        self.stopwatch.add("embeddings" if self.layer is None else "layers", begin)
        if self._at.kind == "layer":
            self.entered = arrivals
        return arrivals, same

    def _bring(self, layer: int) -> None:
        """Replace the layer in memory by this one, and start to read the next."""
        first = self.layer is None
        path = self.anatomy.layers[layer]
        names = self.weights.names_under(path)
        with self.stopwatch.span("wait for weights"):
            self._drop_embeddings() if first else self.drop_layer()
            self.weights.place(self.weights.fetched(path, names))
            self.weights.check(names, path)
            # Hidden states do not show NaN in an expert that receives no token.
            self.weights.require_finite(names)
            self.layer = layer
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
        later = layer + 1 if self.settings.prefetches else layer
        if self.settings.prefetches and layer <= self._last:
            self.weights.prefetch(layers[layer], self.weights.names_under(layers[layer]))
        if later <= self._last:
            self.weights.advise(self.weights.names_under(layers[later]))

    # --- closing ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every thread, drop every weight and spilled file. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.cancel()
        if self._stop is not None:
            self._stop.arrivals = ()
        self._workers, self.entered = [], ()
        for hook in self._hooks:
            hook.remove()
        self.weights.close()
        self.weights.free(self._root)
        self.drop_layer()
        self._spills.close()
        self.give_back()

    def drop_layer(self) -> None:
        """Free the layer in memory, after all batches have passed it."""
        if self.layer is not None:
            self.weights.free(self.weights.names_under(self.anatomy.layers[self.layer]))
            self.layer = None
            self.give_back()

    def _drop_embeddings(self) -> None:
        """Free the embeddings, once every batch has passed them."""
        if self._runs is self.model:
            return  # logits are computed, and the head may share its matrix with the embeddings
        with suppress(NotImplementedError):  # the model does not declare its embeddings
            table = self.model.get_input_embeddings()
            paths = [path for path, module in self.model.named_modules() if module is table]
            self.weights.free(name for path in paths for name in self.weights.names_under(path))
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

    def _pause_before(self, at: Pause) -> RemovableHandle:
        def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            worker = current_worker()
            if worker is None:
                return
            given = (*args, *kwargs.values())
            if not given or not isinstance(given[0], Tensor):
                raise ArchitectureError(f"{at.key} is called without a tensor of hidden states")
            others = given[1:] if at.kind == "module" else ()
            worker.pause(at, given[0], tuple(v for v in others if isinstance(v, Tensor)))

        return self.model.get_submodule(at.key).register_forward_pre_hook(pause, with_kwargs=True)

    # --- inputs at a stop ---

    def _has_same_input(self, worker: Worker) -> bool:
        before, value = self._brought.get(id(worker)), worker.value
        assert value is not None
        self._brought[id(worker)] = weakref.ref(value)
        return before is not None and before() is value

    def _arrival(self, worker: Worker) -> Arrival:
        """Return the module's tensor arguments whose rows are tokens, without padding."""
        value = worker.value
        assert value is not None
        given = []
        for number, tensor in enumerate((value, *worker.others)):
            tokens = flat_tokens(tensor, worker.batch)
            if tokens is not None:
                given.append(worker.real(tokens, copy=self._spills.active))
            elif number == 0:
                return Arrival(worker.batch, ())
        return Arrival(worker.batch, tuple(given))

    def _shared_storages(self) -> set[int]:
        inside = () if self.layer is None else (self.anatomy.layers[self.layer],)
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
        where = (
            f"in layer {self.layer}, before {pause.key}"
            if pause.kind == "module"
            else "in the embeddings"
            if self.layer is None
            else f"in the output of layer {self.layer}"
        )
        raise NumericalError(
            f"{self.checkpoint.label}: non-finite hidden states {where}, domain "
            f"{', '.join(sorted(bad))}",
            hint="the weights of that layer hold NaN or infinity, or overflow in this dtype; "
            'try `dtype="float32"`',
        )

    def _raise(self, error: RuntimeError) -> None:
        """Raise an error of this thread; out of memory is explained."""
        if not is_out_of_memory(error):
            raise error
        raise_forward_error(error, f"{self.checkpoint.label}: no room", self.memory)

    def _raise_error_of(self, worker: Worker) -> None:
        if worker.error is not None:
            layer = "before the first layer" if self.layer is None else f"in layer {self.layer}"
            where = f"{self.checkpoint.label}: {layer}, domain {worker.batch.domain}"
            raise_forward_error(worker.error, where, self.memory)
