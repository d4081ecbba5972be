"""Whether a model can go on from slots: asked of its config, then tried on a few tokens."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moemerge.generation.continuous import prefill
from moemerge.generation.slots import SlotCache, layers_of

# Relative error of the last logits. Rounding of float32 stays below 1e-4; in bfloat16 a token may
# choose other experts. A cache that is read wrongly errs by about 1.
TOLERANCE: Final = {torch.float32: 1e-2, torch.float64: 1e-2}
ROUGH: Final = 0.3
FULL: Final = "full_attention"
PROMPTS: Final = ((3, 5, 7, 4, 6), (5, 3), (4,))
CONTINUED: Final = (4, 7, 3)


def why_not(model: PreTrainedModel) -> str | None:
    """Why texts of unlike length cannot share a batch; None where they can."""
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {FULL}
    if kinds:
        return f"layers of {', '.join(sorted(kinds))}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "a sliding window"
    if config._attn_implementation != "sdpa":
        return f"{config._attn_implementation} attention"
    try:
        error = _error(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as problem:
        return f"a cache of its own kind ({type(problem).__name__})"
    bound = TOLERANCE.get(model.dtype, ROUGH)
    return None if error <= bound else f"a cache of its own kind (logits differ by {error:.2g})"


@torch.inference_mode()
def _error(model: PreTrainedModel) -> float:
    """How far logits after a few steps from slots are from those of the whole texts."""
    device = model.device
    cache = prefill(model, PROMPTS, {})
    if len(layers_of(cache)) != len(cache.layers):
        raise TypeError("layers that hold more than keys and values")
    texts = [(*prompt, *CONTINUED) for prompt in PROMPTS]
    slots = SlotCache(cache, len(texts), max(map(len, texts)), device)
    rows = torch.arange(len(texts), device=device)
    slots.adopt(cache, rows, rows)
    slots.positions.copy_(torch.tensor([len(p) - 1 for p in PROMPTS]))
    columns = torch.arange(slots.capacity, device=device)
    for at in range(-1, len(CONTINUED)):
        tokens = [text[len(p) + at] for text, p in zip(texts, PROMPTS, strict=True)]
        logits = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            attention_mask=(columns <= slots.positions[:, None])[:, None, None],
            position_ids=slots.positions[:, None],
            past_key_values=slots,
            use_cache=True,
        ).logits[:, -1]
        slots.positions += 1
    return max(_relative(logits[row], _whole(model, text)) for row, text in enumerate(texts))


def _whole(model: PreTrainedModel, tokens: tuple[int, ...]) -> Tensor:
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
    return logits


def _relative(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return float((one - other).norm() / other.norm().clamp(min=1e-30))
