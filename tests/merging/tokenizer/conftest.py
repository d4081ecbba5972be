"""Tiny tokenizers on disk: three that differ in order, ordinary tokens and added tokens."""

import pytest

from merging.tokenizer.samples import bpe, entry, tokenizer_json, write_json
from moemerge.config.models import ModelRef


@pytest.fixture
def make(tmp_path):
    """make(name, vocab, merges, special, plain, **tokenizer_config) -> ModelRef of the folder."""

    def build(
        name,
        vocab,
        merges=(),
        special=(),
        plain=(),
        **config,
    ):
        folder = tmp_path / name
        names = [(t, True) for t in special] + [(t, False) for t in plain]
        added = [
            entry(t, len(vocab) + i, special=s, lstrip=not s) for i, (t, s) in enumerate(names)
        ]
        write_json(folder / "tokenizer.json", tokenizer_json(bpe(vocab, merges), added))
        write_json(
            folder / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", **config},
        )
        return ModelRef(str(folder))

    return build


@pytest.fixture
def trio(make):
    """base: a b ab | <s> </s>; chat: the same and two chat marks; other: another order, `ba`."""
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    ab = [("a", "b")]
    base = make("base", ["a", "b", "ab"], ab, ["<s>", "</s>"], **ends)
    chat = make("chat", ["a", "b", "ab"], ab, ["<s>", "</s>", "<im>", "<end>"], **ends)
    other = make("other", ["b", "a", "ba"], [("b", "a")], ["</s>", "<s>", "<end>"], ["<t>"], **ends)
    return base, chat, other
