"""Rows of the family table with softmax gates."""

from __future__ import annotations

from moemerge.families.rules import (
    GRANITE,
    GRANITE_ROUTER,
    GRANITE_STACKS,
    MIXTRAL,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SPARSE_BLOCK,
    TO_SPARSE_BLOCK,
    TOP_GROUPS_OR_ZERO,
    Experts,
    Family,
    GateRule,
    Groups,
    Router,
    Score,
    W,
    key,
)

_SOFTMAX = GateRule()


def _softmax(top_k: str, default: int) -> GateRule:
    return GateRule(top_k=key(top_k, default=default))


def _deepseek_v2(top_k: int | None = None) -> GateRule:
    """Return the gate with groups scored by their best expert, if the config has groups."""
    return GateRule(
        top_k=key("num_experts_per_tok", default=top_k),
        groups=Groups(
            key("n_group"),
            key("topk_group"),
            score="max",
            only_if=("topk_method", "group_limited_greedy"),
            masked=0.0,
        ),
    )


SOFTMAX_FAMILIES: tuple[Family, ...] = (
    # softmax over all experts, a plain W x: the paper's case
    Family(("olmoe",), "OLMoE", _softmax("num_experts_per_tok", 8)),
    Family(("flex_olmo",), "FlexOlmo", _softmax("num_experts_per_tok", 5)),
    Family(
        ("qwen2_moe",),
        "Qwen2-MoE",
        _softmax("num_experts_per_tok", 4),
        shared=SHARED_EXPERT,
        dense="mlp_only_layers",
    ),
    Family(
        ("qwen3_moe", "qwen3_omni_moe_text"),
        "Qwen3-MoE",
        _softmax("num_experts_per_tok", 8),
        dense="mlp_only_layers",
    ),
    Family(
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "Qwen3-VL-MoE",
        _softmax("num_experts_per_tok", 4),
        experts=(Experts(transposed=None),),
        dense="mlp_only_layers",
    ),
    Family(
        ("qwen3_next",),
        "Qwen3-Next",
        _softmax("num_experts_per_tok", 10),
        shared=SHARED_EXPERT,
        dense="mlp_only_layers",
    ),
    Family(
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        "Qwen3.5-MoE",
        _softmax("num_experts_per_tok", 8),
        shared=SHARED_EXPERT,
    ),
    Family(
        ("qwen4_exp_text", "qwen4_exp"),
        "Qwen4-Exp",
        _softmax("num_experts_per_tok", 10),
        shared=SHARED_EXPERT,
    ),
    Family(("mellum",), "Mellum", _softmax("num_experts_per_tok", 8), dense="mlp_layer_types"),
    Family(
        ("mixtral",),
        "Mixtral",
        _softmax("num_experts_per_tok", 2),
        routers=SPARSE_BLOCK,
        experts=MIXTRAL,
        renames=TO_SPARSE_BLOCK,
    ),
    Family(
        ("minimax",),
        "MiniMax",
        _softmax("num_experts_per_tok", 2),
        routers=SPARSE_BLOCK,
        experts=MIXTRAL,
        renames=TO_SPARSE_BLOCK,
    ),
    Family(
        ("hunyuan_v1_moe",),
        "HunYuan v1",
        GateRule(top_k=key("moe_topk", "num_experts_per_tok", default=1)),
        routers=(Router("mlp.gate.wg.weight"),),
        shared=("mlp.shared_mlp.",),
    ),
    Family(
        ("jamba",),
        "Jamba",
        _softmax("num_experts_per_tok", 2),
        routers=(Router("feed_forward.router.weight"),),
        experts=(Experts("feed_forward.experts"),),
        dense="expert_layer_period",
    ),
    Family(
        ("dbrx",),
        "DBRX",
        _softmax("ffn_config.moe_top_k", 1),
        routers=(Router("ffn.router.layer.weight"),),
        experts=(
            Experts(
                "ffn.experts",
                ("w1", "v1", "w2"),
                flat=(
                    ("ffn.experts.mlp.w1", "gate", False),
                    ("ffn.experts.mlp.v1", "up", False),
                    ("ffn.experts.mlp.w2", "down", True),
                ),
            ),
        ),
        container="transformer.blocks",
    ),
    Family(
        ("deepseek_v2",),
        "DeepSeek-V2",
        _deepseek_v2(2),
        shared=SHARED_EXPERTS,
        dense="first_k_dense_replace",
    ),
    Family(
        ("deepseek_ocr2_text", "deepseek_ocr2"),
        "DeepSeek-OCR-2",
        _deepseek_v2(),
        shared=SHARED_EXPERTS,
        dense="mlp_layer_types",
    ),
    Family(
        ("unlimited_ocr_text", "unlimited_ocr"),
        "Unlimited-OCR",
        _deepseek_v2(6),
        shared=SHARED_EXPERTS,
        dense="mlp_layer_types",
    ),
    Family(
        ("mistral4",),
        "Mistral 4",
        GateRule(top_k=key("num_experts_per_tok", default=4), groups=TOP_GROUPS_OR_ZERO),
        shared=SHARED_EXPERTS,
        dense="first_k_dense_replace",
    ),
    Family(
        ("mistral_large4_text", "mistral_large4"),
        "Mistral Large 4",
        GateRule(top_k=key("num_experts_per_tok", default=4), groups=TOP_GROUPS_OR_ZERO),
        routers=(Router("gate.weight"),),
        experts=(Experts("experts", W),),
        shared=("shared_experts.",),
        container="layers",
        renames=(
            (".mlp.gate.", ".gate."),
            (".mlp.experts.", ".experts."),
            (".mlp.shared_experts.", ".shared_experts."),
            (".mlp.", ".feed_forward."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
            (".self_attn.", ".attention."),
            (".attention.q_proj.", ".attention.wq."),
            (".attention.o_proj.", ".attention.wo."),
            (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa."),
            (".kv_b_proj.", ".wkv_b."),
            (".kv_a_layernorm.", ".kv_a_norm."),
            (".input_layernorm.", ".attention_norm."),
            (".post_attention_layernorm.", ".ffn_norm."),
            (".softmax_scaling.scale", ".ssmax_scaling.s"),
            (".softmax_scaling.bias", ".ssmax_scaling.b"),
        ),
        root_renames=(
            (".embed_tokens.", ".tok_embeddings."),
            (".rotary_emb.alpha", ".lerope.alpha"),
            (".lm_head.", ".output."),
        ),
        dense="mlp_layer_types",
    ),
    Family(
        ("gpt_oss",),
        "gpt-oss",
        _softmax("num_experts_per_tok", 4),
        routers=(Router("mlp.router.weight", bias="mlp.router.bias"),),
        experts=(Experts(transposed=True, interleaved=True),),
    ),
    Family(
        ("granitemoe",),
        "Granite-MoE",
        _SOFTMAX,
        routers=GRANITE,
        experts=GRANITE_STACKS,
        renames=GRANITE_ROUTER,
    ),
    Family(
        ("granitemoeshared",),
        "Granite-MoE shared",
        _SOFTMAX,
        routers=GRANITE,
        experts=GRANITE_STACKS,
        shared=("shared_mlp.",),
        renames=GRANITE_ROUTER,
    ),
    Family(
        ("granitemoehybrid",),
        "Granite-MoE hybrid",
        _SOFTMAX,
        routers=GRANITE,
        experts=GRANITE_STACKS,
        shared=("shared_mlp.",),
        renames=GRANITE_ROUTER,
    ),
    Family(
        ("granitemoe_swa",),
        "Granite-MoE sliding-window",
        _SOFTMAX,
        routers=(Router("block_sparse_moe.router.weight"),),
        experts=(Experts("block_sparse_moe.experts"),),
        shared=("shared_mlp.",),
    ),
    Family(
        ("aria_text", "aria"),
        "Aria",
        _softmax("moe_topk", 2),
        routers=(Router("mlp.router.weight"),),
        experts=(
            Experts(
                transposed=True,
                stacks=(("mlp.experts.fc1.weight", "gate+up"), ("mlp.experts.fc2.weight", "down")),
            ),
        ),
        shared=SHARED_EXPERTS,
    ),
    Family(
        ("cohere2_moe",),
        "Cohere2-MoE",
        GateRule(
            score={"softmax": Score.SOFTMAX, "sigmoid": Score.SIGMOID},
            score_key=key("expert_selection_fn", default="softmax"),
            normalised=key("norm_topk_prob", default=True),
        ),
        shared=SHARED_EXPERTS,
        dense="mlp_layer_types",
    ),
    Family(
        ("jetmoe",),
        "JetMoE",
        _SOFTMAX,
        # attention runs first, and its heads are experts too
        routers=(
            Router("self_attention.experts.router.layer.weight"),
            Router("mlp.router.layer.weight"),
        ),
        experts=(
            Experts(
                "self_attention.experts",
                ("", "input_linear", "output_linear"),
                stacks=(
                    ("self_attention.experts.input_linear.weight", "up"),
                    ("self_attention.experts.output_linear.weight", "down"),
                ),
            ),
            Experts(
                stacks=(
                    ("mlp.input_linear.weight", "gate+up"),
                    ("mlp.output_linear.weight", "down"),
                ),
            ),
        ),
    ),
    # softmax, with a bias that moves the choice only
    Family(
        ("ernie4_5_moe",),
        "ERNIE 4.5",
        GateRule(top_k=key("moe_k", "num_experts_per_tok", default=6)),
        routers=(Router(selection_bias="mlp.moe_statics.e_score_correction_bias"),),
        shared=SHARED_EXPERTS,
        renames=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
        dense="moe_layer_interval",
    ),
    Family(
        ("longcat_flash",),
        "LongCat-Flash",
        GateRule(top_k=key("moe_topk", "num_experts_per_tok", default=12)),
        routers=(
            Router(
                "mlp.router.classifier.weight",
                selection_bias="mlp.router.e_score_correction_bias",
                extra=("mlp.router.classifier.bias",),  # the forward never reads it
            ),
        ),
        depth=(("num_layers", 1), ("num_hidden_layers", 2)),  # two attentions in a layer
    ),
    Family(
        ("gemma4_text", "gemma4"),
        "Gemma 4",
        GateRule(top_k=key("top_k_experts", default=8)),
        routers=(Router("router.proj.weight", extra=("router.",)),),
        experts=(Experts("experts"),),
        dense="enable_moe_block",
    ),
    Family(
        ("phimoe",),
        "Phi-MoE",
        GateRule(approximate="sparsemixer: a softmax inside a window around each of two maxima"),
        routers=SPARSE_BLOCK,
        experts=MIXTRAL,
        renames=((".mlp.router.", ".block_sparse_moe.gate."), (".mlp.", ".block_sparse_moe.")),
    ),
)
