"""Spellings that several rows of the family table share."""

from __future__ import annotations

from dataclasses import replace

from moemerge.architectures.rules import Experts, Groups, Router, W, key

# groups scored by their two best experts, added up
TOP_GROUPS = Groups(key("n_group", "num_expert_group"), key("topk_group"), score="top2_sum")
# the same, but experts of other groups are set to 0: one with a negative bias may lose to them
TOP_GROUPS_OR_ZERO = replace(TOP_GROUPS, masked=0.0)

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
