"""Compare the sizes that a config states with the tensors that they determine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.families.architecture import Architecture
from moemerge.families.config_values import class_types
from moemerge.families.rules import look_up

# Each line has the end of a tensor's name in the original spelling (a pattern), an axis, and its
# size as a formula of config keys. Several lines with one tensor and axis are alternatives.
# Formulas with keys that the config does not state are ignored.
# A layer's attention; twice the queries: with an output gate.
_HEADS: Final = """
q_proj                 0  num_attention_heads*head_dim
q_proj                 0  2*num_attention_heads*head_dim
[kv]_proj              0  num_key_value_heads*head_dim
o_proj                 1  num_attention_heads*head_dim
kv_proj                0  2*num_key_value_heads*head_dim
qkv_proj\\.k_proj       0  num_key_value_heads*head_dim
Wqkv                   0  hidden_size+2*num_key_value_heads*head_dim
wq_a                   0  q_lora_rank
wq_b                   0  num_attention_heads*head_dim
wkv                    0  head_dim
wo_b                   1  o_groups*o_lora_rank
"""
_LATENT_HEADS: Final = """
q_proj|wq              0  num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim
q_a_proj               0  q_lora_rank
q_b_proj               0  num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim
q_b_proj               0  num_attention_heads*qk_head_dim
q_b_proj               0  \
num_attention_heads*qk_nope_head_dim+num_attention_heads*qk_rope_head_dim\
+num_attention_heads*v_head_dim
kv_b_proj|wkv_b        0  num_attention_heads*qk_nope_head_dim+num_attention_heads*v_head_dim
w?kv_a(_proj)?_with_mqa  0  kv_lora_rank+qk_rope_head_dim
o_proj|wo              1  num_attention_heads*v_head_dim
"""
_OTHERS: Final = """
linear_attn.conv1d.weight  0  \
2*linear_num_key_heads*linear_key_head_dim+linear_num_value_heads*linear_value_head_dim
linear_attn.conv1d.weight  2  linear_conv_kernel_dim
linear_attn.norm.weight    0  linear_value_head_dim
linear_attn.A_log          0  linear_num_value_heads
q_conv1d.weight            0  linear_num_heads*linear_head_dim
q_conv1d.weight            2  linear_conv_kernel_dim
q_conv1d.weight            2  short_conv_kernel_size
query_decay                1  block_size
mamba.A_log                1  mamba_d_state
mamba.A_log                0  mamba_n_heads
mamba.A_log                0  mamba_expand*hidden_size
mamba.conv1d.weight        0  mamba_expand*hidden_size+2*mamba_n_groups*mamba_d_state
mamba.conv1d.weight        2  mamba_d_conv
mamba.dt_proj.weight       1  mamba_dt_rank
mamba.out_proj.weight      1  mamba_n_heads*mamba_d_head
mixer.conv1d.weight        0  mamba_num_heads*mamba_head_dim+2*n_groups*ssm_state_size
mixer.conv1d.weight        2  conv_kernel
mixer.A_log                0  mamba_num_heads
conv.conv.weight           2  conv_L_cache
sconv.conv1d.weight        2  conv_kernel_size
conv_qk_depthwise.weight   2  cca_time0
conv_qk_grouped.weight     2  cca_time1
indexer.k_norm.weight      0  index_head_dim
indexer.compressor.norm.weight  0  index_head_dim
indexer.weights_proj.weight     0  index_n_heads
indexer.k_layernorm.weight      0  indexer_head_dim
indexer.index_qk_proj.weight    0  \
indexer_n_heads*indexer_head_dim+indexer_kv_heads*indexer_head_dim
index_kpool_compress_ape   0  index_kpool
hc_fn                      1  hc_mult*hidden_size
hc_(attn|ffn)_fn           1  hc_mult*hidden_size
hyper_connection.hc_norm.weight 0  hc_count*hidden_size
input_mix_weight_down.weight    0  hc_lowrank
mlp.router.classifier.weight    0  n_routed_experts+zero_expert_num
router_mlp.norm.weight     0  router_hidden_size
gate.balancing_biases      0  1+num_experts
gate.e_score_correction_bias    0  n_routed_experts
gate.tid2eid               1  num_experts_per_tok
mlp.down_embed.weight      0  num_experts
mlp.shared_experts.down_proj    0  n_shared_experts
mixer.shared_experts.down_proj.weight  1  moe_shared_expert_intermediate_size
fc1_latent_proj.weight     0  moe_latent_size
pre_expert_norm.weight     0  moe_hidden_size
norm.W_down.weight         0  gated_norm_rank
per_layer_input_gate.weight     0  hidden_size_per_layer_input
embed_tokens_per_layer.weight   0  vocab_size_per_layer_input
rel_logits_proj.proj       0  d_rel
rel_logits_proj.proj       1  sliding_window_size
rel_logits_proj.proj       1  rel_extent
"""
_PROJECTION = r"\.(?:self_attn|self_attention|attention|attn|mixer)(?:\.\d)?\.(?:{})\.weight$"
ATTENTION = re.compile(_PROJECTION.format(r"\w+_proj"))
# A layer with these tensors is a recurrent one and has its own head sizes.
_RECURRENT = re.compile(r"\.(A_log|dt_bias|\w*conv1d\.weight)$")
# Models with these keys, or of these families, have layers with other head sizes.
_OTHER_HEAD_SIZES = re.compile(r"^(swa_|global_head_dim|attention_other|\w+_per_layer$)")
_OTHER_HEAD_FAMILIES: Final = ("gemma4_text", "mimo_v2_flash")
QUERY_HEADS = ("num_attention_heads", "n_heads")
_KEY_VALUE_HEADS = ("attn_config.kv_n_heads", "num_key_value_heads")
_HEAD_DIM = ("head_dim", "kv_channels")

# A pattern of names, and the possible formulas of each axis.
Rule = tuple[re.Pattern[str], dict[int, list[str]]]


def size_faults(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield a sentence for each tensor whose sizes are not those that the config makes."""
    text = architecture.text_config
    sizes = _sizes(architecture)
    latent = text.get("kv_lora_rank") is not None
    heads = _rules(_LATENT_HEADS if latent else _HEADS, _PROJECTION)
    family = architecture.family and architecture.family.model_type
    if family in _OTHER_HEAD_FAMILIES or any(map(_OTHER_HEAD_SIZES.search, text)):
        heads = []
    others = _rules(_OTHERS, r"(?:{})$")
    recurrent = {architecture.layer_of(name) for name in tensors if _RECURRENT.search(name)}
    known: dict[tuple[str, bool], list[Rule]] = {}  # layers repeat the names
    for name, header in tensors.items():
        if architecture.expert_of(name) is not None:
            continue
        layer, key = architecture.layer_of(name), architecture.key(name)
        rest = key.rpartition(f".{layer}.")[2]
        has_heads = layer is not None and layer not in recurrent and len(header.shape) == 2
        if (rest, has_heads) not in known:
            rules = [*others, *heads] if has_heads else others
            known[rest, has_heads] = [rule for rule in rules if rule[0].search(key)]
        if has_heads:
            yield from _query_rank_fault(text, name)
        for _, axes in known[rest, has_heads]:
            for axis, formulas in axes.items():
                if axis < len(header.shape):
                    yield from _size_fault(sizes, formulas, name, axis, header.shape[axis])


def _rules(table: str, pattern: str) -> list[Rule]:
    """Return the rules of a table, one for each name."""
    axes: dict[str, dict[int, list[str]]] = {}
    for line in table.strip().splitlines():
        name, axis, formula = line.split()
        axes.setdefault(name, {}).setdefault(int(axis), []).append(formula)
    return [(re.compile(pattern.format(name)), rows) for name, rows in axes.items()]


def _sizes(architecture: Architecture) -> dict[str, int]:
    """Return the whole numbers of the text config, and those that follow from others."""
    text = architecture.text_config
    sizes = {key: value for key, value in text.items() if type(value) is int}
    hidden, heads = architecture.hidden_size, first_integer(text, QUERY_HEADS)
    if hidden:
        sizes["hidden_size"] = hidden
    if hidden and heads:
        key_value, dim = first_integer(text, _KEY_VALUE_HEADS), first_integer(text, _HEAD_DIM)
        sizes["num_attention_heads"] = heads
        if key_value is not None or "num_key_value_heads" in text:
            sizes["num_key_value_heads"] = key_value or heads
        types = class_types(architecture.model_type)  # a number alone has a default of its class
        if dim is not None or all("null" in types.get(key, "null") for key in _HEAD_DIM):
            sizes["head_dim"] = hidden // heads if dim is None else dim
    return sizes


def _size_fault(
    sizes: Mapping[str, int], formulas: list[str], name: str, axis: int, found: int
) -> Iterator[str]:
    """Yield a fault if one of the formulas can be computed, and none of them makes the size."""
    made = {formula: size for formula in formulas if (size := _total(formula, sizes)) is not None}
    if made and found not in made.values():
        formula, size = next(iter(made.items()))
        keys = dict.fromkeys(key for key in re.split(r"[*+]", formula) if key in sizes)
        stated = ", ".join(f"{key} is {sizes[key]}" for key in keys)
        what = ("rows", "columns")[axis] if axis < 2 else f"entries on axis {axis}"
        yield f"{stated}, which makes {size} {what}, but {name} has {found}"


def _total(formula: str, sizes: Mapping[str, int]) -> int | None:
    """Compute a sum of products of keys and numbers; None if a key is not stated."""
    terms = [
        [int(key) if key.isdecimal() else sizes.get(key) for key in term.split("*")]
        for term in formula.split("+")
    ]
    products = [math.prod(f for f in term if f is not None) for term in terms]
    return None if any(None in term for term in terms) else sum(products)


def _query_rank_fault(text: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield a fault if `q_lora_rank` is null and queries are projected in two steps, or not."""
    two_steps = name.endswith(".q_a_proj.weight")
    if (two_steps or name.endswith(".q_proj.weight")) and {
        "kv_lora_rank",
        "q_lora_rank",
    } <= text.keys():
        rank = text["q_lora_rank"]
        if two_steps == (rank is None):
            yield f"q_lora_rank is {rank!r:.80}, but there is {name}"


def first_integer(text: Mapping[str, Any], paths: tuple[str, ...]) -> int | None:
    """Return the value of the first of these keys that has a whole number."""
    values = (look_up(text, path) for path in paths)
    return next((value for value in values if isinstance(value, int)), None)
