"""Prompts as tokens: where a model is to go on."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from moemerge.text.rows import Turn
from moemerge.text.templates import has_template, render


def prompt_text(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, prefill: str, where: str
) -> str:
    """Turns through the chat template, ready for the assistant, and the beginning of its answer.

    Without a template: what was said, line by line, and nothing after it.
    """
    if not has_template(tokenizer):
        return "\n".join(str(turn["content"]) for turn in turns) + prefill
    return render(turns, tokenizer, where, go_on=True) + prefill


def prompt_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of prompts; a template has written its special tokens itself."""
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=not has_template(tokenizer))["input_ids"]
    end = tokenizer.eos_token_id
    # Some tokenizers end every text by themselves, and this one is to go on.
    return [list(ids[:-1]) if len(ids) > 1 and ids[-1] == end else list(ids) for ids in rows]
