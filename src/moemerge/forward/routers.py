"""Find the routers and decoder layers of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from moemerge.errors import ArchitectureError
from moemerge.forward.loading import recorded_routers

# Routers that transform their input first; the linear map inside is solved for.
_INNER = {"Gemma4TextRouter": "proj"}
_ROUTER_CLASS = re.compile(r"(Router|TopKGating|MoEV1Gate)$")
_BLOCK_CHILDREN = ("gate", "router")
# Biases that are added to the logits. In other families such a bias only changes the selection.
_LOGIT_BIAS = {"GptOssTopKRouter": "bias"}
# Routers that transformers does not record, and why streams do not stop at them.
_PASSED_OVER = {
    "DeepseekV4HashRouter": "chooses experts by token id from a table, not by its weight"
}


@dataclass(frozen=True)
class RouterModule:
    """A router z = W x (+ b): the module whose input is x, and its parameters' names in memory."""

    layer: int
    path: str
    weight: str
    bias: str | None


@dataclass(frozen=True)
class Anatomy:
    """Layers and routers of a model by module path."""

    layers: tuple[str, ...]
    owner: str  # the module that holds the layer list and runs it
    routers: tuple[RouterModule, ...]
    passed_over: tuple[tuple[str, str], ...]  # (path, reason)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the decoder layers, and in them every router."""
    paths = _router_paths(model)
    passed = tuple(
        (path, _PASSED_OVER[type(module).__name__])
        for path, module in model.named_modules()
        if type(module).__name__ in _PASSED_OVER
    )
    layer_list = _layer_list(model, [*paths, *(path for path, _ in passed)])
    count = len(model.get_submodule(layer_list))  # type: ignore[arg-type]
    routers = tuple(_router(model, layer_list, path) for path in paths)
    return Anatomy(
        layers=tuple(f"{layer_list}.{index}" for index in range(count)),
        owner=layer_list.rpartition(".")[0],
        routers=routers,
        passed_over=passed,
    )


def require_logits(model: PreTrainedModel, label: str) -> None:
    """Refuse a decoder without an output head."""
    head: Any = model.get_output_embeddings  # untyped in transformers
    if not anatomy(model).owner and head() is None:
        raise ArchitectureError(
            f"{label}: config.json's `architectures` names {type(model).__name__}, which computes "
            "no logits",
            hint="name the class of the causal language model there",
        )


def _router_paths(model: PreTrainedModel) -> list[str]:
    paths = recorded_routers(model) or _by_name(model)
    # jetmoe also declares its attention blocks, which contain the router itself.
    return [path for path in paths if not any(other.startswith(path + ".") for other in paths)]


def _by_name(model: PreTrainedModel) -> list[str]:
    """Find routers by class name or path, for families that declare none."""
    modules = [
        (path, module)
        for path, module in model.named_modules()
        if type(module).__name__ not in _PASSED_OVER
    ]
    named = [path for path, module in modules if _ROUTER_CLASS.search(type(module).__name__)]
    return named or [
        path
        for path, module in modules
        if isinstance(module, nn.Linear) and path.endswith(".router")
    ]


def _layer_list(model: PreTrainedModel, routers: list[str]) -> str:
    """Return the outermost module list with the routers; without routers, the longest list."""
    lists = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ArchitectureError(f"{type(model).__name__} has no list of layers to stream")

    def rank(path: str) -> tuple[int, int, int]:
        inside = sum(router.startswith(path + ".") for router in routers)
        length = len(model.get_submodule(path))  # type: ignore[arg-type]
        return (inside, -path.count("."), length)

    best: str = max(lists, key=rank)
    return best


def _router(model: PreTrainedModel, layer_list: str, path: str) -> RouterModule:
    declared = model.get_submodule(path)
    inner = _INNER.get(type(declared).__name__)
    # Some releases declare the whole block; its router is then a child with one of these names.
    candidates = [path] if inner is None else []
    candidates += [f"{path}.{child}" for child in ((inner,) if inner else _BLOCK_CHILDREN)]
    for candidate in candidates:
        matrices = _matrices(model, candidate)
        if len(matrices) == 1 and candidate.startswith(layer_list + "."):
            bias = _LOGIT_BIAS.get(type(model.get_submodule(candidate)).__name__)
            return RouterModule(
                layer=int(candidate.removeprefix(layer_list + ".").split(".")[0]),
                path=candidate,
                weight=f"{candidate}.{matrices[0]}",
                bias=None if bias is None else f"{candidate}.{bias}",
            )
    raise ArchitectureError(
        f"{path} ({type(declared).__name__}) is not a single linear map of its input, so it cannot "
        "be calibrated",
        hint=f"its matrices: {', '.join(_matrices(model, path)) or 'none'}",
    )


def _matrices(model: PreTrainedModel, path: str) -> list[str]:
    parent, _, leaf = path.rpartition(".")
    module = getattr(model.get_submodule(parent), leaf, None)
    if not isinstance(module, nn.Module):
        return []
    return [
        name
        for name, value in module.named_parameters()
        if value.dim() == 2 and not name.endswith("correction_bias")
    ]


def names_outside_layers(
    model: PreTrainedModel, anatomy: Anatomy, *, whole: bool
) -> tuple[str, ...]:
    """Return the parameters outside the layers, which stay in memory.

    Without `whole`, return only those of the module that owns the layers, not the head's.
    """
    inside = tuple(path + "." for path in anatomy.layers)
    prefix = anatomy.owner + "." if anatomy.owner and not whole else ""
    return tuple(
        name
        for name in model.state_dict()
        if name.startswith(prefix) and not name.startswith(inside)
    )
