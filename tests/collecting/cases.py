"""Names that the tests here share."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from moemerge.text.domains import load_domain
from moemerge.text.tokens import load_tokenizer


def token_rows(model: Path, text: Path) -> tuple[Tensor, ...]:
    return load_domain("text", text, load_tokenizer(model)).rows
