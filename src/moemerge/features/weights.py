"""Weights come and go: a part of the model is read, placed on the device, and freed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import CheckpointError
from moemerge.features.loading import NameMap, Recipe, keeps_float32, map_names, tied_names

READERS = 4  # parallel reads within one layer; more only make them wait for each other


class Weights:
    """A meta model's parameters and persistent buffers, read from a checkpoint on demand.

    `fetch` only reads and may run in any thread; `place` and `free` change the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.device = device
        self.names: NameMap = map_names(model, checkpoint)
        self._state: Mapping[str, Tensor] = dict(model.state_dict())
        self._meta = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
        self._float32 = keeps_float32(model, dtype)
        self._tied = tied_names(model)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="moemerge-read")
        self._ahead: tuple[str, Future[dict[str, Tensor]]] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="moemerge-prefetch")
        self._buffers_to_device()

    def close(self) -> None:
        """Stop reading ahead; what was placed stays."""
        self._ahead = None
        self._background.shutdown(wait=True, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)

    def names_under(self, prefix: str) -> tuple[str, ...]:
        """Names in memory of everything below a module path."""
        return tuple(name for name in self._state if name.startswith(prefix + "."))

    def nbytes(self, prefix: str) -> int:
        """Bytes that the parameters below a module path take when they are there."""
        return self.nbytes_of(self.names_under(prefix))

    def nbytes_of(self, names: Iterable[str]) -> int:
        return sum(self._state[name].numel() * self._dtype_of(name).itemsize for name in names)

    # --- reading ---

    def fetch(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors (names in memory) into CPU memory, converted and in their final dtype."""
        made: dict[str, Tensor] = {}
        for name in names:
            if name in made:
                continue
            recipe = self._recipe(name)
            if recipe is None:
                continue  # `check` tells, unless a splitting conversion still makes it
            if recipe.target != name and recipe.target in made:
                made[name] = made[recipe.target]  # tied: one tensor, two names
                continue
            tensors = self._make(recipe)
            made.update(tensors)
            if recipe.target != name:
                made[name] = tensors[recipe.target]
        return made

    def prefetch(self, key: str, names: Iterable[str]) -> None:
        """Begin to read in the background; at most one such part is kept."""
        if self._ahead is None:
            self._ahead = (key, self._background.submit(self.fetch, tuple(names)))

    def fetched(self, key: str, names: Iterable[str]) -> dict[str, Tensor]:
        """What was read ahead under this key, or a read now."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self.fetch(names)
        tensors = ahead[1].result()
        return tensors if ahead[0] == key else self.fetch(names)

    def _recipe(self, name: str) -> Recipe | None:
        recipe = self.names.recipes.get(name)
        if recipe is None and name in self._tied:
            recipe = self.names.recipes.get(self._tied[name])
        return recipe

    def _make(self, recipe: Recipe) -> dict[str, Tensor]:
        stack = recipe.stack
        if stack is not None:
            return {recipe.target: self._stacked(recipe.target, stack)}
        dtype = self._dtype_of(recipe.target)
        made = recipe.convert(self.model, lambda name: self.checkpoint.read(name).to(dtype))
        if self._pinned:
            return {name: value.contiguous().pin_memory() for name, value in made.items()}
        return made

    def _stacked(self, target: str, stack: tuple[tuple[str, ...], ...]) -> Tensor:
        """Experts go straight to their place in the stack: no second copy of a layer."""
        infos = [self.checkpoint.tensors[names[0]] for names in stack]
        experts = len(stack[0])
        rows = sum(info.shape[0] for info in infos)
        shape = (experts, rows, *infos[0].shape[1:])
        if shape != tuple(self._state[target].shape):
            raise self._mismatch(target, shape, f"{stack[0][0]} and its kin")
        dtype = self._dtype_of(target)
        out = torch.empty(shape, dtype=dtype, pin_memory=self._pinned)

        def job(name: str, slot: Tensor) -> None:
            info = self.checkpoint.tensors[name]
            if info.shape != tuple(slot.shape):
                raise self._mismatch(name, info.shape, name, tuple(slot.shape))
            if info.dtype == dtype:
                self.checkpoint.read(name, out=slot)
            else:
                slot.copy_(self.checkpoint.read(name))

        jobs: list[Future[None]] = []
        start = 0
        for info, names in zip(infos, stack, strict=True):
            stop = start + info.shape[0]
            jobs += [
                self._pool.submit(job, name, out[expert, start:stop])
                for expert, name in enumerate(names)
            ]
            start = stop
        for done in jobs:
            done.result()
        return out

    @property
    def _pinned(self) -> bool:
        return self.device.type == "cuda"

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if self._float32(name) else self._state[name].dtype

    # --- placing ---

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Put fetched tensors into the model, on its device."""
        moved: dict[int, nn.Parameter] = {}  # tied names get one parameter, as in the whole model
        for name, tensor in tensors.items():
            wanted = self._state.get(name)
            if wanted is None:
                raise CheckpointError(f"{self.checkpoint.label}: no place for {name} in the model")
            if wanted.shape != tensor.shape:
                raise self._mismatch(name, tuple(tensor.shape), self._stored(name))
            if id(tensor) not in moved:
                there = tensor.to(self.device, non_blocking=True)
                moved[id(tensor)] = nn.Parameter(there, requires_grad=False)
            _set(self.model, name, moved[id(tensor)])

    def free(self, names: Iterable[str]) -> None:
        """Parameters go back to meta; buffers (small, and partly not on disk) stay."""
        for name in names:
            if name in self._meta:
                parent, leaf = _parent(self.model, name)
                parent._parameters[leaf] = self._meta[name]

    def check(self, names: Iterable[str], where: str) -> None:
        """Everything named must be real now."""
        left = [name for name in names if _current(self.model, name).device.type == "meta"]
        if left:
            shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise CheckpointError(
                f"{self.checkpoint.label}: no stored tensor for {shown} (in {where})",
                hint="the folder lacks weights its config.json asks for, or names them otherwise",
            )

    def _stored(self, name: str) -> str:
        recipe = self._recipe(name)
        return name if recipe is None else recipe.sources[0][1]

    def _mismatch(
        self,
        name: str,
        got: tuple[int, ...],
        stored: str,
        wanted: tuple[int, ...] | None = None,
    ) -> CheckpointError:
        wanted = tuple(self._state[name].shape) if wanted is None else wanted
        return CheckpointError(
            f"{self.checkpoint.label}: {name} has shape {list(got)} (stored as {stored}), but its "
            f"config.json asks for {list(wanted)}",
            hint="weights and config.json do not belong together, or an expert is missing",
        )

    def _buffers_to_device(self) -> None:
        for module in self.model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[leaf] = buffer.to(self.device)


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _current(model: nn.Module, name: str) -> Tensor:
    parent, leaf = _parent(model, name)
    value: Any = getattr(parent, leaf)
    assert isinstance(value, Tensor)
    return value


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, leaf = _parent(model, name)
    if leaf in parent._buffers:
        parent._buffers[leaf] = value.data
    else:
        parent._parameters[leaf] = value
