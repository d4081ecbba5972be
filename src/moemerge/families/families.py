"""The table of MoE families: names of tensors, layout of experts, gates.

Names are relative to the decoder layer, in the spelling of the family's original checkpoints.
`renames` map other spellings to it, above all the one that transformers 5 uses in memory and writes
with `save_original_format=False`. They are plain replacements on `.name.`, applied in order.
"""

from __future__ import annotations

from moemerge.errors import UsageError
from moemerge.families.families_sigmoid import SIGMOID_FAMILIES
from moemerge.families.families_softmax import SOFTMAX_FAMILIES
from moemerge.families.rules import (
    Experts,
    Family,
    GateRule,
    Router,
    Score,
    W,
    key,
)

OTHER_FAMILIES: tuple[Family, ...] = (
    # sqrt(softplus) scores
    Family(
        ("deepseek_v4",),
        "DeepSeek-V4",
        GateRule(
            score={
                "sqrtsoftplus": Score.SQRT_SOFTPLUS,
                "sigmoid": Score.SIGMOID,
                "softmax": Score.SOFTMAX,
            },
            score_key=key("scoring_func", default="sqrtsoftplus"),
            top_k=key("num_experts_per_tok", default=6),
        ),
        routers=(
            Router(
                "ffn.gate.weight",
                selection_bias="ffn.gate.bias",  # a logit bias only by name
                extra=("ffn.gate.tid2eid",),
            ),
        ),
        experts=(Experts("ffn.experts", W),),
        shared=("ffn.shared_experts.",),
        renames=(
            (".self_attn.sinks", ".attn.attn_sink"),
            (".self_attn.compressor.indexer.scorer.weights_proj.", ".attn.indexer.weights_proj."),
            (".self_attn.compressor.indexer.q_b_proj.", ".attn.indexer.wq_b."),
            (".self_attn.compressor.indexer.", ".attn.indexer.compressor."),
            (".self_attn.", ".attn."),
            (".compressor.position_bias", ".compressor.ape"),
            (".compressor.kv_norm.", ".compressor.norm."),
            (".compressor.gate_proj.", ".compressor.wgate."),
            (".kv_proj.", ".wkv."),
            (".attn.kv_norm.", ".attn.norm."),
            (".attn.q_a_norm.", ".attn.q_norm."),
            (".q_a_proj.", ".wq_a."),
            (".q_b_proj.", ".wq_b."),
            (".o_a_proj.", ".wo_a."),
            (".o_b_proj.", ".wo_b."),
            (".input_layernorm.", ".attn_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".attn_hc.", ".hc_attn_"),
            (".ffn_hc.", ".hc_ffn_"),
            (".mlp.", ".ffn."),
            (".ffn.gate.e_score_correction_bias", ".ffn.gate.bias"),
            (".shared_experts.gate_proj.", ".shared_experts.w1."),
            (".shared_experts.down_proj.", ".shared_experts.w2."),
            (".shared_experts.up_proj.", ".shared_experts.w3."),
        ),
        root_renames=(
            (".lm_head.", ".head."),
            (".embed.", ".embed_tokens."),
            (".hc_head_", ".hc_head.hc_"),
        ),
        passed_over=(
            "ffn.gate.tid2eid",
            "hash-routed layer: a table of token ids chooses the experts, not the router",
        ),
    ),
    # not served
    Family(
        ("zaya",),
        "Zaya",
        GateRule(top_k=key("num_experts_per_tok", default=1)),
        routers=(
            Router(
                "mlp.gate.router_mlp.out_proj.weight",
                selection_bias="mlp.gate.balancing_biases",
                extra=("mlp.gate.",),
            ),
        ),
        served=False,
        reason="its router is a small network with a state carried from layer to layer, "
        "not a matrix on the hidden state",
    ),
    Family(
        ("doge",),
        "Doge",
        GateRule(top_k=key("num_experts_per_tok", default=64)),
        routers=(Router("mlp.router_gate.weight"),),
        experts=(Experts(whole=("mlp.down_embed.weight", "mlp.up_embed.weight")),),
        dense="is_moe",
        served=False,
        reason="its router chooses experts by product keys, not by one row for each expert",
    ),
)

FAMILIES: tuple[Family, ...] = (*SOFTMAX_FAMILIES, *SIGMOID_FAMILIES, *OTHER_FAMILIES)

BY_MODEL_TYPE: dict[str, Family] = {name: row for row in FAMILIES for name in row.model_types}
_BY_CLASS: dict[str, Family] = {name.replace("_", ""): row for name, row in BY_MODEL_TYPE.items()}


def families() -> tuple[Family, ...]:
    """Return every row of the table, including those that plugins added."""
    return tuple({row.model_type: row for row in BY_MODEL_TYPE.values()}.values())


def add_family(family: Family) -> None:
    """Add a row for models that the table does not know."""
    for name in family.model_types:
        if name in BY_MODEL_TYPE:
            raise UsageError(
                f"the model_type {name!r} is in the table of families already",
                hint="an existing family cannot be replaced",
            )
    for name in family.model_types:
        BY_MODEL_TYPE[name] = _BY_CLASS[name.replace("_", "")] = family


def family_of(model_type: str | None) -> Family | None:
    """Return the row of a `model_type`, or None."""
    return BY_MODEL_TYPE.get(model_type or "")


def family_of_class(name: str) -> Family | None:
    """Return the row of a class name (`OlmoeForCausalLM` is olmoe), or None."""
    return _BY_CLASS.get(name.split("For")[0].removesuffix("Model").lower())
