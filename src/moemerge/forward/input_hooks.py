"""Find the modules whose inputs can be hooked: linear maps, routers and stacks of experts.

`UnitMap` maps a matrix in memory to the units that it is stored as.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.families.architecture import Architecture
from moemerge.families.roles import Role, Unit
from moemerge.forward.compat import apply_gate, is_experts, tied_weights
from moemerge.forward.loading import NameMap, Recipe
from moemerge.forward.routers import Anatomy

_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class LinearHook:
    """y = x Wᵀ: a linear module, or a router."""

    path: str  # the module whose first argument is x
    weight: str  # its matrix by its name in memory
    shape: tuple[int, int]  # (out, in)
    router: bool = False


@dataclass(frozen=True)
class ExpertsHook:
    """A module with all experts of a layer, which gets the chosen experts of each token."""

    path: str
    up: str  # the stack that reads x (gate and up, or up alone), by name in memory
    down: str
    count: int


InputHook = LinearHook | ExpertsHook


@dataclass(frozen=True)
class InputHooks:
    """Input hooks per layer, and the matrices that cannot be hooked."""

    layers: tuple[tuple[InputHook, ...], ...]
    head: LinearHook | None  # None: no head, or one tied to the embeddings
    unhooked: tuple[str, ...]  # matrices without a hook, by name in memory

    @property
    def notice(self) -> str | None:
        """A message about matrices without statistics, or None."""
        kinds = sorted({_NUMBER.sub(".N.", n) for n in self.unhooked if not n.endswith("bias")})
        if not kinds:
            return None
        return f"no linear maps of tokens, so without statistics: {', '.join(kinds)}"


def linear_weights(hooks: Iterable[InputHook]) -> list[str]:
    """Return the matrices of the linear maps among the hooks, by name in memory.

    Fused attention may ignore NaN at a masked position, so hidden states do not always show it. An
    expert's output does, and an expert without tokens does not affect statistics.
    """
    return [hook.weight for hook in hooks if isinstance(hook, LinearHook)]


def find_input_hooks(model: PreTrainedModel, anatomy: Anatomy) -> InputHooks:
    """Find the input hooks of all layers and of the head."""
    routers = {router.path: router.weight for router in anatomy.routers}
    layers: list[tuple[InputHook, ...]] = []
    unhooked: list[str] = []
    for path in anatomy.layers:
        hooks = _layer_hooks(model, path, routers)
        layers.append(hooks)
        seen = {name for hook in hooks for name in _weights_of(hook)}
        matrices = (n for n, p in model.get_submodule(path).named_parameters(path) if p.dim() > 1)
        unhooked += [name for name in matrices if name not in seen]
    return InputHooks(tuple(layers), _head(model), tuple(unhooked))


def _weights_of(hook: InputHook) -> tuple[str, ...]:
    return (hook.weight,) if isinstance(hook, LinearHook) else (hook.up, hook.down)


def _layer_hooks(
    model: PreTrainedModel, layer: str, routers: Mapping[str, str]
) -> tuple[InputHook, ...]:
    hooks: list[InputHook] = []
    for path, module in model.get_submodule(layer).named_modules(prefix=layer):
        if path in routers and (
            isinstance(module, nn.Linear) or not _inner_linear(model, routers[path], path)
        ):
            out, width = model.get_parameter(routers[path]).shape
            hooks.append(LinearHook(path, routers[path], (out, width), router=True))
        elif isinstance(module, nn.Linear):
            hooks.append(
                LinearHook(path, f"{path}.weight", (module.out_features, module.in_features))
            )
        elif is_experts(module):
            up = "gate_up_proj" if module.has_gate else "up_proj"
            count = int(model.get_parameter(f"{path}.down_proj").shape[0])
            hooks.append(ExpertsHook(path, f"{path}.{up}", f"{path}.down_proj", count))
    return tuple(hooks)


def _inner_linear(model: PreTrainedModel, weight: str, router: str) -> bool:
    """Return whether a router's matrix belongs to a linear module inside it."""
    owner = weight.rpartition(".")[0]
    return owner != router and isinstance(model.get_submodule(owner), nn.Linear)


def _head(model: PreTrainedModel) -> LinearHook | None:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):
        return None
    path = next((path for path, module in model.named_modules() if module is head), None)
    tied = tied_weights(model)
    if path is None or f"{path}.weight" in {*tied, *tied.values()}:
        return None
    return LinearHook(path, f"{path}.weight", (head.out_features, head.in_features))


class ExpertView:
    """One expert of a fused module, computed by the family's own gate and activation.

    pre = W_up x, mid = gate(pre), out = W_down mid; the routing weight is applied afterwards.
    """

    def __init__(self, module: Any, expert: int) -> None:
        self._module = module
        self._expert = expert

    def pre(self, x: Tensor) -> Tensor:
        """(tokens, d) -> (tokens, gate and up)."""
        return self._linear(x, "gate_up_proj" if self._module.has_gate else "up_proj")

    def mid(self, pre: Tensor) -> Tensor:
        """Return the input of the down projection, (tokens, inner)."""
        module = self._module
        if module.has_gate:
            return apply_gate(module, pre)
        mid: Tensor = module.act_fn(pre)
        return mid

    def down(self, mid: Tensor) -> Tensor:
        """(tokens, inner) -> (tokens, d)."""
        return self._linear(mid, "down_proj")

    def finish(self, down: Tensor) -> Tensor:
        """Apply the norm between the down projection and the routing weight, if there is one."""
        if getattr(self._module, "has_post_expert_norm", False):
            normed: Tensor = self._module.post_expert_norm(down)
            return normed
        return down

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = getattr(self._module, name)[self._expert]
        bias = (
            getattr(self._module, f"{name}_bias")[self._expert] if self._module.has_bias else None
        )
        return nn.functional.linear(x, weight.T if self._module.is_transposed else weight, bias)


def projections(module: Any, values: Tensor) -> dict[str, Tensor]:
    """Split the rows of W_up by projection: (gate and up, d) -> each (inner, d)."""
    if not module.has_gate:
        return {"up": values}
    if getattr(module, "is_concatenated", True):
        gate, up = values.chunk(2, dim=0)
        return {"gate": gate, "up": up}
    return {"gate": values[0::2], "up": values[1::2]}


# --- the head without the body ----------------------------------------------------------------

OTHER_STATES = "_hidden_states"  # how a body's output names the states of images and sounds


class _BodyOutput(MoeModelOutputWithPast):
    """The output of a body, for a head that runs alone.

    States of images or sounds, which a head may pass on, are None. A head that reads any other
    attribute cannot run without the body.
    """

    def __getattr__(self, name: str) -> None:
        if not name.endswith(OTHER_STATES):
            raise AttributeError(name)


@contextlib.contextmanager
def body_gives(model: PreTrainedModel, owner: str, hidden: Tensor) -> Iterator[None]:
    """Skip the body (which contains `owner`) inside the block: the head gets `hidden`."""
    given: Any = _BodyOutput(last_hidden_state=hidden)  # type: ignore[arg-type]
    with _forward_of(model, owner.split(".")[0], lambda *args, **kwargs: given):
        yield


class _Reached(BaseException):
    """Ends a forward pass at the head. Not an Exception, so that model code cannot catch it."""


def head_input(model: PreTrainedModel, owner: str, head: LinearHook, hidden: Tensor) -> Tensor:
    """Return the input of the head's matrix, which some families scale; needs no weights."""
    seen: list[Tensor] = []

    def reached(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x)
        raise _Reached

    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    with (
        torch.no_grad(),
        contextlib.suppress(_Reached),
        body_gives(model, owner, hidden),
        _forward_of(model, head.path, reached),
    ):
        try:
            model(input_ids=ids, use_cache=False)
        except (RuntimeError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise ArchitectureError(
                f"the head of {type(model).__name__} does not run by itself: "
                f"{type(error).__name__}: {error}"
            ) from error
    if len(seen) != 1 or seen[0].shape != hidden.shape:
        raise ArchitectureError(f"{head.path} does not read the final hidden states")
    return seen[0]


@contextlib.contextmanager
def _forward_of(model: PreTrainedModel, path: str, forward: Any) -> Iterator[None]:
    module: Any = model.get_submodule(path)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and its first row in the matrix in memory."""

    unit: Unit
    start: int

    def take(self, values: Tensor) -> Tensor:
        """Return the unit's part of a tensor of the matrix's shape, as (out, in)."""
        slot = self.unit.slot
        first, stop = slot.rows or (0, self.unit.shape[0])
        return slot.take(values[self.start + first : self.start + stop])


ExpertKey = tuple[int, str | None]  # (expert, projection); None: gate and up in one unit


class UnitMap:
    """Maps the parameters of a model to the units of its checkpoint."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture, names: NameMap) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._names = names

    def linear(self, hook: LinearHook) -> tuple[PlacedUnit, ...]:
        """Return the units of a linear map; none if it is not stored as rows of units."""
        recipe = self._names.recipes.get(hook.weight)
        if recipe is None or not _joins_rows(recipe):
            return ()
        placed: list[PlacedUnit] = []
        start = 0
        for _, name in recipe.sources:
            shape = self._checkpoint.tensors[name].shape
            if len(shape) != 2 or shape[1] != hook.shape[1]:
                return ()
            units = self._architecture.units(name)
            placed += [PlacedUnit(u, start) for u in units if u.shape[1:] == (hook.shape[1],)]
            start += shape[0]
        return tuple(placed) if start == hook.shape[0] else ()

    def stored_as(self, parameter: str) -> str | None:
        """Return the stored tensor of a parameter, if it is exactly one, unchanged."""
        return self._names.on_disk(parameter)

    def experts(self, hook: ExpertsHook) -> Mapping[ExpertKey, Unit]:
        """Return the units of all experts by (expert, projection)."""
        experts: dict[ExpertKey, Unit] = {}
        for parameter in (hook.up, hook.down):
            recipe = self._names.recipes.get(parameter)
            for _, name in () if recipe is None else recipe.sources:
                for unit in self._architecture.units(name):
                    if unit.expert is not None and len(unit.shape) == 2:
                        experts[unit.expert, unit.projection] = unit
        return experts

    def require_experts(self, hooks: InputHooks) -> None:
        """Refuse a model whose experts cannot be hooked: most statistics would be missing."""
        for parameter in hooks.unhooked:
            recipe = self._names.recipes.get(parameter)
            for _, name in () if recipe is None else recipe.sources:
                for unit in self._architecture.units(name):
                    if unit.role is Role.EXPERT and len(unit.shape) == 2:
                        raise ArchitectureError(
                            f"{self._checkpoint.label}: {parameter} holds experts of "
                            f"{self._architecture.model_type} in a form whose inputs cannot be "
                            "separated by expert",
                            hint="merge this family with a method that needs no statistics",
                        )


def _joins_rows(recipe: Recipe) -> bool:
    """Return whether the parameter is one stored tensor, or several stacked row-wise."""
    if recipe.converter is None:
        return True
    plan = [(type(op).__name__, getattr(op, "dim", None)) for op in recipe.converter.operations]
    return plan == [("Concatenate", 0)] and len(recipe.converter.target_patterns) == 1
