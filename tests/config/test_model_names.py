from __future__ import annotations

from collections.abc import Callable

import pytest

from moemerge.config.load import LoadedConfig
from moemerge.config.models import ModelRef
from moemerge.config.schema import TokenSource

Load = Callable[..., LoadedConfig]

HEAD = """merge_method: ties
base_model: org/base
parameters: {weight: 0.5}
models:
  - {model: org/math@v1, name: math}
  - {model: ./code}
"""


def test_tokenizer_source_and_names_are_resolved(load: Load) -> None:
    config = load(HEAD + "tokenizer_source: math\nrouter: {keep: code}\n").config
    assert config.tokenizer_source is None
    assert config.tokenizer is not None
    assert config.tokenizer.source == ModelRef("org/math", "v1")
    assert config.router is not None
    assert config.router.keep == ModelRef("./code")


@pytest.mark.parametrize("source", ["union", "base"])
def test_tokenizer_words(load: Load, source: str) -> None:
    config = load(HEAD + f"tokenizer_source: {source}\n").config
    assert config.tokenizer is not None
    assert config.tokenizer.source == source


def test_tokens(load: Load) -> None:
    text = """tokenizer:
  source: base
  tokens:
    <a>: {source: math, force: true}
    <b>: {source: {kind: zero}}
    <c>: {source: {kind: model_token, model: ./code, token_id: 3}}
    <d>: {source: {model: {path: ./code}}}
  pad_to_multiple_of: 64
"""
    settings = load(HEAD + text).config.tokenizer
    assert settings is not None
    tokens = settings.tokens
    assert tokens["<a>"].source == ModelRef("org/math", "v1")
    assert tokens["<a>"].force
    assert tokens["<b>"].source == TokenSource(kind="zero")
    third = tokens["<c>"].source
    assert isinstance(third, TokenSource)
    assert (third.model, third.token_id) == (ModelRef("./code"), 3)
    assert tokens["<d>"].source == ModelRef("./code")
    assert settings.pad_to_multiple_of == 64
