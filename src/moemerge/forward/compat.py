"""Every private or undocumented name of transformers that this package needs, with the reason.

`tests/forward/test_compat.py` has a test for each: a release that removes a name or changes its
signature fails there. Checked with transformers 5.22.2; 5.17 is the oldest supported release.
Private names of torch are in `runtime/torch_compat.py`, where lower packages can import them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# transformers 5 keeps experts fused in memory and per expert on disk. It converts between the two
# by a table without public access: `get_model_conversion_mapping` returns the table of a model,
# `rename_source_key` applies it to a stored name, and experts are stacked in the order of
# `dot_natural_key`. The converters list the operations that make a parameter.
from transformers.conversion_mapping import (
    get_model_conversion_mapping as get_model_conversion_mapping,
)
from transformers.core_model_loading import Concatenate as Concatenate
from transformers.core_model_loading import MergeModulelist as MergeModulelist
from transformers.core_model_loading import WeightConverter as WeightConverter
from transformers.core_model_loading import WeightRenaming as WeightRenaming
from transformers.core_model_loading import dot_natural_key as dot_natural_key
from transformers.core_model_loading import rename_source_key as rename_source_key

# A config names one of the expert implementations registered there; other code can register more.
from transformers.integrations import moe

# --- building a model -------------------------------------------------------------------------


def build_model(cls: type[PreTrainedModel], config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a new model of a class.

    `AutoModelForCausalLM.from_config` is public, but chooses the class by the config's type, not by
    the name in its `architectures`.
    """
    model: PreTrainedModel = cls._from_config(config, dtype=dtype)  # type: ignore[no-untyped-call,unused-ignore]
    return model


def mark_initialised(parameter: nn.Parameter) -> None:
    """Keep transformers from initialising a parameter, which takes milliseconds each on meta."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def supports_sdpa(cls: type[PreTrainedModel]) -> bool:
    """Return whether a family has fused attention; without it, memory holds every score."""
    return bool(cls._supports_sdpa)


def attention_implementation(config: Any) -> str | None:
    """Return the name of the attention that a model computes by; `config` is the text model's."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return the dtypes of parameters that a family keeps in another dtype, by name pattern."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """Return the parameters that share another one's tensor: {name: name of the other}."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def router_recorders(module: nn.Module) -> list[Any]:
    """Return what a module declares as the origin of router logits: classes, or recorders.

    A recorder has a `target_class`, and a `layer_name` that is part of the path, or None. Families
    differ in the names and the paths of their routers, and this declaration names them all.
    """
    declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
    return list(declared) if isinstance(declared, list | tuple) else [declared]


# --- experts ----------------------------------------------------------------------------------

GROUPED = "grouped_mm"  # the implementation that transformers chooses by default
ExpertsForward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def register_experts(name: str, forward: ExpertsForward) -> None:
    """Add an implementation of experts to transformers' registry, where a config can name it."""
    register: Any = moe.ALL_EXPERTS_FUNCTIONS.register
    register(name, forward)


def grouped_experts(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute experts by transformers' own grouped products."""
    forward: Any = moe.grouped_mm_experts_forward
    result: Tensor = forward(module, x, chosen, weights)
    return result


def set_experts_implementation(module: nn.Module, name: str) -> bool:
    """Name the experts implementation of a module's config, if it is transformers' default.

    The public method of a model also switches models whose experts have another implementation.
    """
    config: Any = getattr(module, "config", None)
    if getattr(config, "_experts_implementation", None) != GROUPED:
        return False
    config._experts_implementation_internal = name
    return True


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has transformers' interface of fused experts."""
    return (
        hasattr(module, "_apply_gate")
        and hasattr(module, "has_gate")
        and isinstance(getattr(module, "down_proj", None), nn.Parameter)
        and isinstance(
            getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None), nn.Parameter
        )
    )


def apply_gate(module: Any, gate_up: Tensor) -> Tensor:
    """Return what the down projection of fused experts reads: act(gate) * up, in most families."""
    gated: Tensor = module._apply_gate(gate_up)
    return gated


def has_default_gate(module: Any) -> bool:
    """Return whether the experts' gate is act(gate) * up and they are not split over processes."""
    own_gate = type(module)._apply_gate is not moe._default_apply_gate
    return not own_gate and not getattr(module, "_is_expert_parallel", False)


# --- training ---------------------------------------------------------------------------------


def use_one_gpu(arguments: Any) -> None:
    """Restrict a Trainer to one GPU; it has no public setting for that."""
    arguments._n_gpu = min(1, arguments._n_gpu)
