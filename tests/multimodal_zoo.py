"""Tiny random checkpoints of the families that have their head only beside a model of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import zoo

_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
_SAM = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "mlp_dim": 16,
    "output_channels": 8,
    "downsample_channels": [8, 16],
    "global_attn_indexes": [0],
}
_OCR = {**_DENSE_FIRST, "num_key_value_heads": 4, "topk_method": "group_limited_greedy"}

# By the text model's row: the whole model's type, what the text needs beyond the common values, and
# the rest of the whole config.
_WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_ocr2_text": (
        "deepseek_ocr2",
        _OCR,
        {"vision_config": {"sam_config": _SAM, "encoder_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2}}},
    ),
    "unlimited_ocr_text": (
        "unlimited_ocr",
        _OCR,
        {"vision_config": {"sam_config": _SAM, "encoder_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2}}},
    ),
    "mistral_large4_text": (
        "mistral_large4",
        {**_DENSE_FIRST, "num_key_value_heads": 4, "head_dim": None},
        {"vision_config": {"model_type": "pixtral", "hidden_act": "silu", **_TOWER}},
    ),
    "glm5_next_text": (
        "glm5_next",
        {**_DENSE_FIRST, "num_key_value_heads": 4, "head_dim": None, "qk_rope_head_dim": 0,
         "index_kpool": 2,
         # What the checkpoint says; each release has a name of its own for the second.
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {"vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32,
                           "intermediate_size": 16, "projection_intermediate_size": 16,
                           "image_size": 28}},
    ),
    "step3p5": (
        "step3p7",
        {**_DENSE_FIRST, "share_expert_dim": 24,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"vision_config": {**_TOWER, "mlp_ratio": 1.0}},
    ),
    "muse_spark_text": (
        "muse_spark",
        {**_DENSE_FIRST, "moe_hidden_size": 16},
        {"vision_config": {**_TOWER, "pos_emb_height": 2, "pos_emb_width": 2},
         "audio_config": {"patch_sizes": [2], "hidden_sizes": [8], "depths": [1],
                          "num_hidden_layers": 1, "out_hidden_size": zoo.HIDDEN},
         "out_hidden_size": 128, "projector_hidden_size": 16},
    ),
}  # fmt: skip

FAMILIES: tuple[str, ...] = tuple(_WHOLE)


def config(model_type: str) -> Any:
    """The tiny config of a whole model."""
    outer, text, rest = _WHOLE[model_type]
    known = set(transformers.CONFIG_MAPPING[model_type].__dataclass_fields__)
    values = {k: v for k, v in {**zoo._COMMON, **text}.items() if k in known and v is not None}
    return transformers.CONFIG_MAPPING[outer](text_config=values, **rest)


def model(model_type: str, *, seed: int = 0) -> Any:
    """The tiny random model itself."""
    with zoo._quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = transformers.AutoModelForImageTextToText.from_config(config(model_type))
    zoo._randomise(built, seed)
    return built.eval()


def build(model_type: str, folder: Path, *, seed: int = 0, fused: bool = False) -> Path:
    """Save it in the original layout, or as transformers holds it in memory (`fused`)."""
    built = model(model_type, seed=seed)
    with zoo._quiet():
        built.save_pretrained(folder, save_original_format=not fused)
    return Path(folder)
