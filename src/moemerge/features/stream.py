"""Stream a model over batches, one decoder layer in memory at a time, stopping at each router.

The model's own forward runs, once per batch, each in a thread of its own that is parked before
every layer and every router. When all batches wait at the same place, the next layer's weights are
brought in, or the router's inputs are handed out; then one batch after the other goes on. Masks,
rotary embeddings, state that layers pass to each other: all of it is the model's own business, so
the features are those of the whole model, bit for bit.

What lives where: the resident part (embeddings, norms, head when asked for), one layer (and the
next, while it is read), the parked batches' activations (see `spill`), one running batch's
temporaries, and at a router its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ArchitectureError, NumericalError, UsageError
from moemerge.features.checks import (
    check_tokens,
    finite,
    no_router,
    raise_forward_error,
    real_rows,
)
from moemerge.features.fast_experts import use_fused_experts
from moemerge.features.fast_norms import use_fused_norms
from moemerge.features.gathering import Emptied, Gathered
from moemerge.features.loading import build_skeleton
from moemerge.features.memory import MemoryEstimate, choose_offload, estimate_memory
from moemerge.features.routers import Anatomy, RouterModule, anatomy, names_outside_layers
from moemerge.features.spill import SMALLEST, Offload, SpillRoom, held_by
from moemerge.features.stops import RouterStop
from moemerge.features.weights import Weights
from moemerge.features.workers import Pause, Worker, current_worker, part_of_a_layer
from moemerge.runtime.allocator import give_back_freed_memory, keep_few_kernels, share_one_heap
from moemerge.runtime.devices import attention_without_plans
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch

Output = Literal["hidden", "logits"]


class RouterStream:
    """Iterate to get a `RouterStop` at every router, in the order the model runs them.

    `layers` restricts the stops (all layers are run all the same, as far as they are needed).
    `on_output` gets every batch's final hidden states (after the last norm) or logits; without it
    the run ends at the last router asked for. `prefetch` reads the next layer while one computes
    (default: on accelerators); `gather` hands out a domain's inputs side by side in memory (same
    default). Use it as a context manager: leaving it ends all threads and frees
    the weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        offload: Offload | Literal["auto"] = "auto",
        layers: Collection[int] | None = None,
        output: Output = "hidden",
        on_output: Callable[[Batch, Tensor], None] | None = None,
        prefetch: bool | None = None,
        gather: bool | None = None,
        progress: Progress | None = None,
        spill_folder: Path | None = None,
        spill_smallest: int = SMALLEST,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        keep_few_kernels()
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        if self.device.type == "cpu":
            share_one_heap()
        self.model = build_skeleton(checkpoint, dtype)
        use_fused_experts(self.model, self.device, dtype)
        use_fused_norms(self.model, self.device, dtype)
        self.anatomy: Anatomy = anatomy(self.model)
        self._wanted = {
            router.path: router
            for router in self.anatomy.routers
            if layers is None or router.layer in layers
        }
        if not self._wanted and on_output is None:
            raise no_router(self.anatomy, checkpoint.label)
        check_tokens(self.model, batches, checkpoint.label)
        self._on_output = on_output
        # On a CPU, reading ahead takes memory and the very cores that compute.
        self._prefetch = self.device.type != "cpu" if prefetch is None else prefetch
        self._gather = self.device.type != "cpu" if gather is None else gather
        self._progress = progress or Silent()
        self._smallest = spill_smallest
        whole = on_output is not None and output == "logits"
        self._runs = self.model if whole else self.model.get_submodule(self.anatomy.owner)
        self.stopwatch = stopwatch or Stopwatch(self.device)
        self._weights = Weights(self.model, checkpoint, self.device, dtype, self.stopwatch)
        self._root = names_outside_layers(self.model, self.anatomy, whole=whole)
        self.memory: MemoryEstimate = estimate_memory(
            self._weights,
            self.anatomy,
            batches,
            self._root,
            offload="device" if offload == "auto" else offload,
            prefetch=self._prefetch,
            gather=self._gather,
        )
        if offload == "auto":
            self.memory = choose_offload(self.memory)
        self._room = SpillRoom(self.memory.offload, self.device, spill_folder)
        self._workers = [
            Worker(number, batch, self._forward, self._room.spill(number))
            for number, batch in enumerate(batches)
        ]
        for worker in self._workers:
            worker.rows = real_rows(worker.batch, self.device)
        self._hooks: list[RemovableHandle] = []
        self._layer: int | None = None  # the one whose weights are placed
        self._at = "start"  # the kind of place where the batches wait
        self._closed = False
        self._stops: Iterator[RouterStop] | None = None

    @property
    def passed_over(self) -> tuple[tuple[str, str], ...]:
        """Routers that are never stopped at: (module path, reason)."""
        return self.anatomy.passed_over

    @property
    def unused(self) -> tuple[str, ...]:
        """Stored tensors that the model has no place for (MTP layers, ...)."""
        return self._weights.names.unused

    # --- life ---

    def __enter__(self) -> RouterStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        self._weights.close()
        self._weights.free(self._root)
        self._drop_layer()
        self._room.close()
        if self.device.type == "cpu":
            give_back_freed_memory()

    def __iter__(self) -> Iterator[RouterStop]:
        if self._stops is not None:
            raise UsageError("a RouterStream runs once; open another for a second pass")
        self._stops = self._run()  # kept here: a dropped iterator must not end the stream
        return self._stops

    # --- the schedule ---

    def _run(self) -> Iterator[RouterStop]:
        try:
            yield from self._schedule()
        except torch.OutOfMemoryError as error:
            raise_forward_error(error, f"{self.checkpoint.label}: no room", self.memory)
        finally:
            self.close()

    def _schedule(self) -> Iterator[RouterStop]:
        self._progress.start("streaming", len(self.anatomy.layers), unit="layers")
        with self.stopwatch.span("wait for weights"):
            self._weights.place(self._weights.fetch(self._root))
        self._weights.check(self._root, "the resident part")
        if self._prefetch:
            self._read_ahead(0)
        self._add_hooks()
        left = set(self._wanted)
        while left or self._on_output is not None:
            place, features = self._advance()
            if place.kind == "end":
                break
            if place.kind == "layer":
                self._bring(self.anatomy.layers.index(place.key))
                continue
            left.discard(place.key)
            stop = self._stop(self._wanted[place.key], features)
            del features
            yield stop
            stop.release()
        self._progress.finish()

    def _advance(self) -> tuple[Pause, list[tuple[Batch, Tensor]]]:
        """Every batch goes on to its next pause; all must come to the same."""
        features: list[tuple[Batch, Tensor]] = []
        flags: list[Tensor] = []
        gathered = None
        if self._gather:
            gathered = Gathered(worker.batch for worker in self._workers)
        begin = self.stopwatch.mark()
        for worker in self._workers:
            with attention_without_plans():
                worker.step()
            self._raise_error_of(worker)
            self._stepped(worker)
            if worker.value is not None:
                flags.append(finite(worker.value, worker.rows))
            if worker.place.kind == "router":
                features.append((worker.batch, self._features(worker, gathered)))
            if worker.place.kind == "end":
                self._finish(worker)
            elif self._room.active:
                worker.put_away(self._shared_storages(), self._smallest)
        places = {worker.place for worker in self._workers}
        if len(places) != 1:
            raise ArchitectureError(
                f"batches wait at different places of the model: {sorted(map(str, places))}",
                hint="the model's course depends on its input; it cannot be streamed by layers",
            )
        place = places.pop()
        self._check_finite(place, flags)
        self.stopwatch.add(part_of_a_layer(self._at, place.kind), begin)
        self._at = place.kind
        return place, features

    def _stepped(self, worker: Worker) -> None:
        """A batch has come to its next pause: a place for streams that listen on the way."""

    def _finish(self, worker: Worker) -> None:
        if self._on_output is not None and worker.value is not None:
            self._on_output(worker.batch, worker.value)
        worker.value = None

    def _bring(self, layer: int) -> None:
        """Replace the resident layer by this one, and begin to read the one after it."""
        if layer == self._layer:
            return
        first = self._layer is None
        path = self.anatomy.layers[layer]
        names = self._weights.names_under(path)
        with self.stopwatch.span("wait for weights"):
            self._drop_layer()
            self._weights.place(self._weights.fetched(path, names))
            self._weights.check(names, path)
            self._layer = layer
            if self._prefetch:
                self._read_ahead(layer + 1)
        if not first:
            self._progress.advance(1)

    def _read_ahead(self, layer: int) -> None:
        """Begin to read a layer, and let the system look for the one after it."""
        last = len(self.anatomy.layers) - 1
        if self._on_output is None:
            last = max(router.layer for router in self._wanted.values())
        if layer <= last:
            path = self.anatomy.layers[layer]
            self._weights.prefetch(path, self._weights.names_under(path))
        if layer < last:
            after = self.anatomy.layers[layer + 1]
            self._weights.advise(self._weights.names_under(after))

    def _drop_layer(self) -> None:
        if self._layer is not None:
            path = self.anatomy.layers[self._layer]
            self._weights.free(self._weights.names_under(path))
            self._layer = None
            if self.device.type == "cpu":
                # What a layer's batches freed would else lie beside the next layer's weights.
                give_back_freed_memory()

    def _stop(self, router: RouterModule, features: list[tuple[Batch, Tensor]]) -> RouterStop:
        names = self._weights.names
        weight_name = names.on_disk(router.weight)
        bias_name = None if router.bias is None else names.on_disk(router.bias)
        if weight_name is None or (router.bias is not None and bias_name is None):
            raise ArchitectureError(
                f"{self.checkpoint.label}: {router.weight} is not stored as one tensor of its own"
            )
        bias = None if router.bias is None else self.model.get_parameter(router.bias)
        tensors = self.checkpoint.tensors
        stored = (
            tensors[weight_name].dtype,
            None if bias_name is None else tensors[bias_name].dtype,
        )
        parameters = (self.model.get_parameter(router.weight), bias)
        return RouterStop(router, (weight_name, bias_name), parameters, stored, features)

    # --- what runs inside the batches' threads ---

    def _forward(self, batch: Batch) -> Tensor:
        mask = batch.mask.to(self.device, torch.int64) if batch.padded else None
        result: Any = self._runs(
            input_ids=batch.input_ids.to(self.device), attention_mask=mask, use_cache=False
        )
        found: Tensor = (
            result.logits if self._runs is self.model and "logits" in result else result[0]
        )
        return found

    def _add_hooks(self) -> None:
        for path in self.anatomy.layers:
            self._hook(path, Pause("layer", path))
        for path in self._wanted:
            self._hook(path, Pause("router", path))

    def _hook(self, path: str, place: Pause) -> None:
        def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            worker = current_worker()
            if worker is None:
                return
            value = args[0] if args else next(iter(kwargs.values()))
            if not isinstance(value, Tensor):
                raise ArchitectureError(f"{path} is called without a tensor of hidden states")
            worker.pause(place, value)

        module = self.model.get_submodule(path)
        self._hooks.append(module.register_forward_pre_hook(pause, with_kwargs=True))

    # --- checks and parts ---

    def _features(self, worker: Worker, gathered: Gathered | None) -> Tensor:
        value = worker.value
        assert value is not None
        tokens = value.reshape(-1, value.shape[-1])  # (rows * length, d)
        if tokens.shape[0] != worker.batch.mask.numel():
            raise ArchitectureError(
                f"{worker.place.key} sees {tokens.shape[0]} tokens of a batch of "
                f"{worker.batch.mask.numel()}"
            )
        if gathered is not None:
            found = gathered.take(worker.batch, tokens, worker.rows)
            if not self._room.active:
                worker.emptied, worker.value = Emptied.of(value, found, worker.rows), None
            return found
        if worker.rows is not None:
            return tokens.index_select(0, worker.rows)
        return tokens.clone() if self._room.active else tokens

    def _shared_storages(self) -> set[int]:
        inside = () if self._layer is None else (self.anatomy.layers[self._layer],)
        modules = [
            module
            for path, module in self.model.named_modules()
            if path.startswith(inside) or not path.startswith(self.anatomy.layers)
        ]
        return held_by(modules)

    def _check_finite(self, place: Pause, flags: list[Tensor]) -> None:
        if not flags or bool(torch.stack(flags).all()):
            return
        bad = {
            worker.batch.domain
            for worker, flag in zip(self._workers, flags, strict=True)
            if not bool(flag)
        }
        raise NumericalError(
            f"{self.checkpoint.label}: non-finite hidden states {self._where(place)}, domain "
            f"{', '.join(sorted(bad))}",
            hint="the weights of that layer hold NaN or infinity, or overflow in this dtype; "
            "try --dtype float32",
        )

    def _where(self, place: Pause) -> str:
        if place.kind == "router":
            return f"in layer {self._layer}, before its router"
        if self._layer is None:
            return "in the embeddings"
        return f"in the output of layer {self._layer}"

    def _raise_error_of(self, worker: Worker) -> None:
        if worker.error is not None:
            layer = "before the first layer" if self._layer is None else f"in layer {self._layer}"
            where = f"{self.checkpoint.label}: {layer}, domain {worker.batch.domain}"
            raise_forward_error(worker.error, where, self.memory)
