"""Rows of the family table with sigmoid gates."""

from __future__ import annotations

from typing import Any

from moemerge.families.rules import (
    CORRECTED,
    MIXTRAL,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    TO_SPARSE_BLOCK,
    TOP_GROUPS,
    TOP_GROUPS_OR_ZERO,
    BiasPlace,
    Concat,
    Experts,
    Family,
    GateRule,
    Groups,
    Router,
    Score,
    W,
    key,
)


def _sigmoid(
    *names: str, top_k: int, norm: bool = True, groups: Groups | None = TOP_GROUPS
) -> GateRule:
    """Return the rule of a sigmoid gate; `norm` is the default of the renormalisation flag."""
    return GateRule(
        score=Score.SIGMOID,
        top_k=key(*(names or ("num_experts_per_tok",)), default=top_k),
        normalised=key("norm_topk_prob", "moe_renormalize", default=norm),
        groups=groups,
    )


def _sigmoid_always(top_k: int) -> GateRule:
    return GateRule(Score.SIGMOID, top_k=key("num_experts_per_tok", default=top_k))


def _one_convolution(attention: str) -> tuple[Concat, ...]:
    """Return the concatenation of the convolutions of queries, keys and values in memory."""
    parts = tuple(f"{attention}.{part}_conv1d.weight" for part in "qkv")
    return (Concat(f"{attention}.conv1d.weight", parts),)


_EIGHT_OF_GROUPS = _sigmoid(top_k=8)


def _like_deepseek(
    names: tuple[str, ...], title: str, gate: GateRule = _EIGHT_OF_GROUPS, **others: Any
) -> Family:
    """Return a family with DeepSeek-V3's names of the router, its bias and the shared experts."""
    return Family(names, title, gate, routers=CORRECTED, shared=SHARED_EXPERTS, **others)


SIGMOID_FAMILIES: tuple[Family, ...] = (
    # sigmoid scores
    _like_deepseek(("deepseek_v3", "kimi_k2"), "DeepSeek-V3", dense="first_k_dense_replace"),
    _like_deepseek(("deepseek_v32",), "DeepSeek-V3.2", dense="mlp_layer_types"),
    _like_deepseek(
        ("glm4_moe", "glm4v_moe", "glm4v_moe_text"), "GLM-4.5", dense="first_k_dense_replace"
    ),
    _like_deepseek(("glm4_moe_lite",), "GLM-4.7 Flash", _sigmoid(top_k=4), dense="mlp_layer_types"),
    _like_deepseek(("glm_moe_dsa",), "GLM-5", dense="mlp_layer_types"),
    _like_deepseek(("solar_open",), "Solar Open"),
    _like_deepseek(
        ("dots1",),
        "dots.llm1",
        _sigmoid(top_k=2, norm=False),
        dense="first_k_dense_replace",
    ),
    _like_deepseek(
        ("axk1",),
        "A.X-K1",
        renames=((".mlp.post_mlp_layernorm.", ".post_mlp_layernorm."),),
        dense="mlp_layer_types",
    ),
    _like_deepseek(
        ("axk2",),
        "A.X-K2",
        _sigmoid(top_k=8, groups=TOP_GROUPS_OR_ZERO),
        renames=(
            ("norm.mlp.fc1.", "norm.W_down."),
            ("norm.mlp.fc2.", "norm.W_up."),
            (".self_attn.q_gate_proj.", ".self_attn.q_b_proj."),
        ),
        root_renames=(("norm.mlp.fc1.", "norm.W_down."), ("norm.mlp.fc2.", "norm.W_up.")),
        dense="mlp_layer_types",
    ),
    Family(
        ("exaone_moe",),
        "EXAONE-MoE",
        _sigmoid(top_k=8),
        routers=(Router(selection_bias="mlp.e_score_correction_bias"),),
        shared=SHARED_EXPERTS,
        renames=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
        dense="mlp_layer_types",
    ),
    Family(
        ("kimi_linear",),
        "Kimi Linear",
        _sigmoid("num_experts_per_token", "num_experts_per_tok", top_k=8),
        routers=(
            Router(
                "block_sparse_moe.gate.weight",
                selection_bias="block_sparse_moe.gate.e_score_correction_bias",
            ),
        ),
        experts=MIXTRAL,
        shared=("block_sparse_moe.shared_experts.",),
        renames=((".self_attn.forget_gate.", ".self_attn."), *TO_SPARSE_BLOCK),
        concats=_one_convolution("self_attn"),
        dense="mlp_layer_types",
    ),
    Family(
        ("bailing_hybrid",),
        "Ling / Ring hybrid",
        _sigmoid("num_experts_per_token", "num_experts_per_tok", top_k=8),
        routers=(Router(selection_bias="mlp.gate.expert_bias"),),
        shared=SHARED_EXPERTS,
        renames=(
            (".self_attn.forget_gate.", ".self_attn."),
            (".self_attn.o_proj.", ".self_attn.dense."),
            (".self_attn.", ".attention."),
            (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
        ),
        root_renames=((".embed_tokens.", ".word_embeddings."),),
        concats=_one_convolution("attention"),
        dense="first_k_dense_replace",
    ),
    Family(("beam",), "Beam", _sigmoid(top_k=8), routers=CORRECTED, dense="mlp_layer_types"),
    Family(
        ("mimo_v2_flash",),
        "MiMo-V2-Flash",
        _sigmoid(top_k=8),
        routers=CORRECTED,
        renames=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        dense="mlp_layer_types",
    ),
    Family(
        ("nemotron_h",),
        "Nemotron-H",
        _sigmoid(top_k=2),
        routers=(Router("mixer.gate.weight", selection_bias="mixer.gate.e_score_correction_bias"),),
        experts=(Experts("mixer.experts"),),
        shared=("mixer.shared_experts.",),
        container="backbone.layers",
        dense="layers_block_type",
    ),
    _like_deepseek(
        ("hy_v4",),
        "HunYuan v4",
        renames=(
            (".attn_hc.", ".hc_pre.hc_attn_layer.hc_"),
            (".ffn_hc.", ".hc_pre.hc_mlp_layer.hc_"),
            (".gate_proj.", ".linear_gate."),
            (".self_attn.sinks", ".self_attn.learnable_sink_param"),
        ),
        root_renames=(
            (".hc_head.hc_pre.hc_head_", ".hc_pre.hc_head.hc_head_"),
            (".hc_head.hc_", ".hc_pre.hc_head.hc_head_"),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("hy_v3",),
        "HunYuan v3",
        _sigmoid_always(8),
        routers=(Router("mlp.router.gate.weight", selection_bias="mlp.expert_bias"),),
        shared=("mlp.shared_mlp.",),
        renames=(
            (".mlp.gate.weight", ".mlp.router.gate.weight"),
            (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("afmoe",),
        "AFMoE",
        _sigmoid_always(6),
        routers=(Router("mlp.router.gate.weight", selection_bias="mlp.expert_bias"),),
        shared=SHARED_EXPERTS,
        dense="num_dense_layers",
    ),
    Family(
        ("lfm2_moe",),
        "LFM2-MoE",
        _sigmoid(top_k=4, groups=None),
        routers=(Router("feed_forward.gate.weight", selection_bias="feed_forward.expert_bias"),),
        experts=(Experts("feed_forward.experts", W),),
        dense="num_dense_layers",
    ),
    Family(
        ("minimax_m2",),
        "MiniMax-M2",
        _sigmoid_always(8),
        routers=(
            Router(
                "block_sparse_moe.gate.weight",
                selection_bias="block_sparse_moe.e_score_correction_bias",
            ),
        ),
        experts=MIXTRAL,
        renames=TO_SPARSE_BLOCK,
    ),
    Family(
        ("minimax_m3_vl_text", "minimax_m3_vl"),
        "MiniMax-M3",
        _sigmoid_always(4),
        routers=CORRECTED,
        experts=(Experts(spelling=W),),
        shared=SHARED_EXPERTS,
        renames=(
            (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            (".block_sparse_moe.", ".mlp."),
            (".self_attn.index_", ".self_attn.indexer."),
        ),
        concats=(
            Concat("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
            Concat(
                "mlp.shared_experts.gate_up_proj.weight",
                ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
            ),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("flint",),
        "Flint",
        _sigmoid(top_k=6, groups=None),
        shared=SHARED_EXPERT,
        renames=((".self_attn.sinks", ".self_attn.softmax_offset"),),
        dense="mlp_only_layers",
    ),
    Family(
        ("laguna",),
        "Laguna",
        GateRule(
            Score.SIGMOID,
            top_k=key("num_experts_per_tok", default=8),
            soft_cap=key("moe_router_logit_softcapping", default=0.0),
        ),
        routers=(Router(selection_bias="mlp.experts.e_score_correction_bias"),),
        shared=("mlp.shared_expert.",),
        renames=(
            (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),
            (".mlp.shared_experts.", ".mlp.shared_expert."),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("kolibri1",),
        "Kolibri 1",
        GateRule(
            Score.SIGMOID,
            top_k=key("num_experts_per_tok", default=6),
            normalised=key("norm_topk_prob", default=False),
            bias=BiasPlace.LOGITS,
        ),
        routers=(Router(selection_bias="moe.router.expert_bias"),),
        shared=SHARED_EXPERTS,
        renames=(
            (".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
            (".post_self_attn_layernorm.", ".post_attn_norm."),
            (".post_mlp_layernorm.", ".post_ffn_norm."),
        ),
    ),
    Family(
        ("llama4_text", "llama4"),
        "Llama 4",
        GateRule(Score.SIGMOID, top_k=key("num_experts_per_tok", default=1), normalised=False),
        routers=(Router("feed_forward.router.weight"),),
        experts=(Experts("feed_forward.experts", transposed=True),),
        shared=("feed_forward.shared_expert.",),
        dense="moe_layers",
    ),
    _like_deepseek(
        ("glm5_next_text", "glm5_next"),
        "GLM-5.3 Flash",
        container="model.language_model.layers",
        renames=(
            (".self_attn.forget_gate.", ".self_attn."),
            (".attn_hc.", ".hc_attn_"),
            (".ffn_hc.", ".hc_ffn_"),
        ),
        concats=_one_convolution("self_attn"),
        dense="mlp_layer_types",
    ),
    Family(
        ("step3p5", "step3p7"),
        "Step-3.7",
        GateRule(Score.SIGMOID, top_k=key("moe_top_k", "num_experts_per_tok", default=8)),
        routers=(Router("moe.gate.weight", selection_bias="moe.router_bias"),),
        experts=(
            Experts(
                stacks=(
                    ("moe.gate_proj.weight", "gate"),
                    ("moe.up_proj.weight", "up"),
                    ("moe.down_proj.weight", "down"),
                ),
            ),
        ),
        shared=("share_expert.",),
        renames=(
            (".mlp.gate.e_score_correction_bias", ".moe.router_bias"),
            (".mlp.gate.weight", ".moe.gate.weight"),
            (".mlp.shared_experts.", ".share_expert."),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("muse_spark_text", "muse_spark"),
        "Muse Spark",
        GateRule(
            Score.SIGMOID,
            top_k=key("num_experts_per_tok", default=8),
            scale=key("output_multiplier", default=0.1767766952966369),
        ),
        routers=CORRECTED,
        container="model.language_model.layers",
        dense="mlp_layer_types",
    ),
    Family(
        ("inkling_text",),
        "Inkling",
        _sigmoid_always(6),
        routers=(
            Router(
                selection_bias="mlp.gate.e_score_correction_bias",
                extra=("mlp.gate.global_scale",),
                real_rows=True,
            ),
        ),
        shared=SHARED_EXPERTS,
        dense="mlp_layer_types",
    ),
)
