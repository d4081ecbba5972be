"""Fused experts and RMS norms on a GPU; experts in their stored dtype on a CPU."""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from moemerge.forward.compat import (
    apply_gate,
    grouped_experts,
    has_default_gate,
    is_experts,
    register_experts,
    set_experts_implementation,
)
from moemerge.kernels.availability import triton_works
from moemerge.runtime.devices import multiplies_bfloat16


def fuse(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, *, narrow: bool = False
) -> frozenset[str]:
    """Switch the experts and the plain RMS norms of a model to their fused forms.

    Return the weights that keep their stored dtype: with `narrow`, those of experts on a CPU.
    """
    use_fused_experts(model, device, dtype)
    use_fused_norms(model, device, dtype)
    return use_narrow_experts(model) if narrow and device.type == "cpu" else frozenset()


# --- experts ------------------------------------------------------------------------------------
#
# A name in the config chooses transformers' implementation of experts. Ours computes SwiGLU experts
# in bf16, stacked as [gate; up], and passes all others to transformers' grouped products.

NAME = "moemerge"
EAGER = "eager"  # expert by expert


def use_fused_experts(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Switch a model to the fused experts; return whether it was switched."""
    if dtype == torch.float64:  # torch has no grouped products of it
        _compute_by(EAGER, model)
        return False
    # Older GPUs have no grouped products; transformers then computes expert by expert.
    if dtype != torch.bfloat16 or not multiplies_bfloat16(device) or not triton_works(device):
        return False
    register_experts(NAME, experts_forward)
    return _compute_by(NAME, model)


def _compute_by(name: str, model: PreTrainedModel) -> bool:
    return any([set_experts_implementation(module, name) for module in model.modules()])


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts; transformers calls this instead of the module's own forward."""
    if not _suited(module, hidden_states, top_k_index, top_k_weights):
        return grouped_experts(module, hidden_states, top_k_index, top_k_weights)
    from moemerge.kernels.experts import experts

    return experts(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)


def _suited(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> bool:
    learns = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, weights, *module.parameters())
    )
    return (
        not learns  # the kernels have no backward pass
        and _is_plain(module)
        and _is_silu(module.act_fn)
        and x.dim() == chosen.dim() == 2
        and chosen.shape == weights.shape
        and x.is_contiguous()
        and x.dtype == module.gate_up_proj.dtype == module.down_proj.dtype == torch.bfloat16
    )


def _is_plain(module: Any) -> bool:
    flags = ("has_bias", "is_transposed", "has_post_expert_norm")
    return (
        bool(module.has_gate)
        and getattr(module, "is_concatenated", True)
        and not any(getattr(module, flag, False) for flag in flags)
        and has_default_gate(module)
    )


def _is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU | SiLUActivation) or function is nn.functional.silu


# On a CPU, the hidden states are float32, and experts in bf16 take half of the memory.

NARROW = "moemerge-narrow"
CONVERTED_BYTES = 64 * 2**20  # of a weight, in the hidden states' dtype


def use_narrow_experts(model: PreTrainedModel) -> frozenset[str]:
    """Let plain experts convert their weights as they use them; return the weights' names."""
    register_experts(NARROW, narrow_experts_forward)
    _compute_by(NARROW, model)
    modules: Any = model.named_modules()
    return frozenset(
        f"{path}.{leaf}"
        for path, module in modules
        if is_experts(module)
        and _is_plain(module)
        and getattr(module.config, "_experts_implementation", None) == NARROW
        for leaf in ("gate_up_proj", "down_proj")
    )


def narrow_experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute expert by expert; transformers calls this instead of the module's own forward."""
    x = hidden_states
    if not _is_plain(module) or all(value.dtype == x.dtype for value in module.parameters()):
        return grouped_experts(module, x, top_k_index, top_k_weights)
    out = torch.zeros_like(x)
    for expert in range(module.down_proj.shape[0]):
        token, place = torch.where(top_k_index == expert)
        if not len(token):
            continue
        gated = apply_gate(module, _product(x[token], module.gate_up_proj[expert]))
        made = _product(gated, module.down_proj[expert])
        out.index_add_(0, token, made * top_k_weights[token, place, None].to(x.dtype))
    return out


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ; some rows of W at a time are converted to x's dtype."""
    rows = max(1, CONVERTED_BYTES // (weight.shape[1] * x.element_size()))
    parts = [functional.linear(x, part.to(x.dtype)) for part in torch.split(weight, rows)]
    return torch.cat(parts, dim=1)


# --- norms --------------------------------------------------------------------------------------
#
# transformers' norms convert, square, average, scale and convert back in separate kernels. That is
# ten times the memory traffic of a fused norm. Whether a class is such a plain norm is tested on
# random numbers.

SUFFIX = "RMSNorm"
# The plain formulation rounds to bf16 before and after the weight: twice half a unit.
TOLERANCE = 2 * 2.0**-8


def use_fused_norms(model: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Switch every plain RMS norm to torch's fused one; return how many were switched."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return 0
    plain: dict[tuple[type, int], bool] = {}
    switched = 0
    module: Any
    for module in model.modules():
        if not type(module).__name__.endswith(SUFFIX) or not _looks_plain(module):
            continue
        key = (type(module), module.weight.shape[0])
        if key not in plain:
            plain[key] = is_plain_norm(module, device, dtype)
        if plain[key]:
            module.forward = types.MethodType(_fused, module)
            switched += 1
    return switched


def is_plain_norm(module: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the module computes x / rms(x) * weight, tested on random numbers."""
    if not _looks_plain(module):
        return False
    probe = copy.deepcopy(module)
    probe.weight = nn.Parameter(torch.empty(module.weight.shape, device=device, dtype=dtype))
    generator = torch.Generator(device).manual_seed(0)
    epsilon = _epsilon(module) or 0.0
    with torch.no_grad():
        probe.weight.uniform_(0.5, 1.5, generator=generator)
        x = torch.randn(16, module.weight.shape[0], device=device, generator=generator)
        # The second is as small as epsilon, and so shows where a norm adds it.
        inputs = [(x * scale).to(dtype) for scale in (3.0, epsilon**0.5)]
        pairs = [(probe(some), _fused(probe, some)) for some in inputs]
    return all(
        fused.dtype == wanted.dtype
        and torch.allclose(fused.float(), wanted.float(), rtol=TOLERANCE, atol=TOLERANCE)
        for fused, wanted in pairs
    )


def _looks_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 1
        and [name for name, _ in module.named_parameters()] == ["weight"]
        and not list(module.named_buffers())
        and len(inspect.signature(module.forward).parameters) == 1
        and _epsilon(module) is not None
    )


def _epsilon(module: Any) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def _fused(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:
        result: Tensor = type(self).forward(self, hidden_states)
        return result
    return functional.rms_norm(hidden_states, self.weight.shape, self.weight, _epsilon(self))
