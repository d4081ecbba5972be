"""Render chat templates, as transformers does: in Jinja's sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, library_errors

MOST_CHARACTERS: Final = 2**25  # of one rendered row


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_turns(
    turns: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render turns with the tokenizer's chat template."""
    what = f"{where}: the tokenizer's chat template refuses this row"
    hint = "if the row is correct, fix the template: chat_template.jinja of the model"
    try:
        with library_errors(DataError, what, hint=hint):
            text = str(
                tokenizer.apply_chat_template(
                    list(turns), tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
    except DataError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise TokenizerError(
                f"the tokenizer's chat template cannot be used ({error.__cause__})"
            ) from error
        raise
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"{what} (it makes {len(text)} characters)", hint=hint)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the tokenizer's chat template makes half a character (a lone surrogate)",
            hint="remove it from chat_template.jinja or tokenizer_config.json of the model",
        ) from error
    return text
