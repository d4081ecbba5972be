"""Spellings that several rows of the family table share."""

from __future__ import annotations

from moemerge.architectures.rules import Experts, Groups, Router, W, key

# groups scored by their two best experts, added up
TOP_GROUPS = Groups(key("n_group", "num_expert_group"), key("topk_group"), score="top2_sum")

CORRECTED = (Router(selection_bias="mlp.gate.e_score_correction_bias"),)
SPARSE_BLOCK = (Router("block_sparse_moe.gate.weight"),)
GRANITE = (Router("block_sparse_moe.router.layer.weight"),)

MIXTRAL = (Experts("block_sparse_moe.experts", W),)
GRANITE_STACKS = (
    Experts(
        "block_sparse_moe.experts",
        stacks=(
            ("block_sparse_moe.input_linear.weight", "gate+up"),
            ("block_sparse_moe.output_linear.weight", "down"),
        ),
    ),
)

TO_SPARSE_BLOCK = ((".mlp.", ".block_sparse_moe."),)
GRANITE_ROUTER = ((".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),)

SHARED_EXPERT = ("mlp.shared_expert.", "mlp.shared_expert_gate.")
SHARED_EXPERTS = ("mlp.shared_experts.",)
