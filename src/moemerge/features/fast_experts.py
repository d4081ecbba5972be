"""The fused experts of `kernels` in a transformers model, where they compute what it would.

transformers chooses how experts are computed by a name in the config. Ours takes what it knows
(SwiGLU, bf16, stacked as [gate; up]) and hands anything else to transformers' own grouped products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from moemerge.kernels.availability import triton_works
from moemerge.runtime.devices import multiplies_bfloat16

NAME = "moemerge"
GROUPED = "grouped_mm"  # what transformers takes by itself


def use_fused_experts(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Switch a model to the fused experts; tells whether it was."""
    # Older GPUs have no grouped products; transformers then goes from expert to expert.
    if dtype != torch.bfloat16 or not multiplies_bfloat16(device) or not triton_works(device):
        return False
    register: Any = moe.ALL_EXPERTS_FUNCTIONS.register
    register(NAME, experts_forward)
    switched = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == GROUPED:
            config._experts_implementation_internal = NAME
            switched = True
    return switched


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What transformers calls in place of an experts module's own forward."""
    if not _suited(module, hidden_states, top_k_index, top_k_weights):
        plain: Any = moe.grouped_mm_experts_forward
        found: Tensor = plain(module, hidden_states, top_k_index, top_k_weights)
        return found
    from moemerge.kernels.experts import experts

    return experts(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)


def _suited(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> bool:
    flags = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    learns = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (x, weights, *module.parameters())
    )
    return (
        not learns  # the kernels have no way back
        and bool(module.has_gate)
        and getattr(module, "is_concatenated", True)
        and not any(getattr(module, flag, False) for flag in flags)
        and type(module)._apply_gate is moe._default_apply_gate
        and _is_silu(module.act_fn)
        and x.dim() == chosen.dim() == 2
        and chosen.shape == weights.shape
        and x.is_contiguous()
        and x.dtype == module.gate_up_proj.dtype == module.down_proj.dtype == torch.bfloat16
    )


def _is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU | SiLUActivation) or function is nn.functional.silu
