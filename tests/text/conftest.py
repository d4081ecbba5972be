"""Tokenizers of the tiny models, which a test may change."""

import pytest

import zoo
from moemerge.text.tokens import load_tokenizer


@pytest.fixture
def chat(tmp_path_factory):
    return load_tokenizer(zoo.tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=True))


@pytest.fixture
def plain(tmp_path_factory):
    return load_tokenizer(zoo.tiny_tokenizer(tmp_path_factory.mktemp("plain")))
