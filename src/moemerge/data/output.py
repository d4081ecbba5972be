"""Rows as they are written."""

from __future__ import annotations

from typing import Any

from moemerge.generation.prompts import PromptRow
from moemerge.text.templates import has_template
from moemerge.text.tokens import Tokenizer

Row = dict[str, Any]


def answered_row(prompt: PromptRow, response: str, tokenizer: Tokenizer, *, ended: bool) -> Row:
    """A prompt and the model's answer, such that reading the row gives what the model wrote.

    Without a chat template the answer goes on where the prompt ends, and the end token, which the
    model wrote as well, stands behind it.
    """
    if has_template(tokenizer):
        return _conversation(prompt, response)
    end = str(tokenizer.eos_token) if ended and tokenizer.eos_token else ""
    return {"text": _joined(prompt) + response + end}


def reference_row(prompt: PromptRow, tokenizer: Tokenizer) -> Row:
    """A prompt and the row's own solution."""
    assert prompt.reference is not None
    if has_template(tokenizer):
        return _conversation(prompt, prompt.reference)
    return {"prompt": _joined(prompt), "response": prompt.reference}


def prompt_row(prompt: PromptRow, tokenizer: Tokenizer) -> Row:
    """A prompt alone."""
    if not has_template(tokenizer):
        return {"text": _joined(prompt)}
    if len(prompt.turns) == 1:
        return {"prompt": prompt.turns[0]["content"]}
    return {"messages": list(prompt.turns)}


def _conversation(prompt: PromptRow, response: str) -> Row:
    if len(prompt.turns) == 1:
        return {"prompt": prompt.turns[0]["content"], "response": response}
    return {"messages": [*prompt.turns, {"role": "assistant", "content": response}]}


def _joined(prompt: PromptRow) -> str:
    return "\n".join(str(turn["content"]) for turn in prompt.turns)
