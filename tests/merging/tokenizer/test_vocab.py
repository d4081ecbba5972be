"""Ids must be those transformers gives, for every way a tokenizer may be stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from merging.tokenizer.samples import Maker, bpe, entry, tokenizer_json, write_json
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.vocab import read_vocabulary

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
MODELS: dict[str, dict[str, Any]] = {
    "BPE": bpe(["a", "b", "ab"], [("a", "b")]),
    "WordLevel": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    "WordPiece": {
        "type": "WordPiece",
        "vocab": {"[UNK]": 0, "a": 1, "##b": 2},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    "Unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]},
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    added = [entry("<x>", len(MODELS[kind]["vocab"]), special=True)]
    write_json(tmp_path / "tokenizer.json", tokenizer_json(MODELS[kind], added))
    write_json(tmp_path / "tokenizer_config.json", FAST)
    loaded = AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert read_vocabulary(tmp_path, "x").ids == loaded
    assert "<x>" in loaded


@pytest.mark.parametrize(
    ("vocab", "added"),
    [
        ({"a": 0, "b": 1, "z": 5}, [("z", 5), ("x", 6), ("y", 7)]),  # gaps: x gets 3
        ({"a": 0, "b": 1, "z": 2}, [("x", 10), ("y", 7)]),  # written ids do not count
        ({"a": 0, "b": 1, "z": 2}, [("a", 0), ("x", 3)]),
    ],
)
def test_added_tokens_get_the_next_free_id(
    vocab: dict[str, int], added: list[tuple[str, int]], tmp_path: Path
) -> None:
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    entries = [entry(t, i, special=True) for t, i in added]
    write_json(tmp_path / "tokenizer.json", tokenizer_json(model, entries))
    write_json(tmp_path / "tokenizer_config.json", FAST)
    assert read_vocabulary(tmp_path, "x").ids == AutoTokenizer.from_pretrained(tmp_path).get_vocab()


def test_tokens_named_only_in_the_config(make: Maker) -> None:
    decoder = {"3": entry("<d>"), "9": entry("<late>", special=True)}
    for value in decoder.values():
        del value["id"]
    ref = make(
        "m",
        ["a", "b"],
        special=["<s>"],
        bos_token="<s>",
        pad_token="<pad>",
        sep_token="<sep>",
        additional_special_tokens=["<m2>", "<m1>"],
        added_tokens_decoder=decoder,
    )
    expected = {"a": 0, "b": 1, "<s>": 2, "<d>": 3, "<late>": 4, "<sep>": 5, "<pad>": 6}
    expected |= {"<m2>": 7, "<m1>": 8}
    assert read_vocabulary(Path(ref.path), "m").ids == expected
    assert AutoTokenizer.from_pretrained(ref.path).get_vocab() == expected


def test_older_files(make: Maker) -> None:
    ref = make("m", ["a", "b"], special=["<s>"])
    folder = Path(ref.path)
    write_json(folder / "special_tokens_map.json", {"pad_token": "<pad>", "bos_token": "<s>"})
    write_json(folder / "added_tokens.json", {"<y>": 4, "<x>": 3})
    expected = {"a": 0, "b": 1, "<s>": 2, "<x>": 3, "<y>": 4, "<pad>": 5}
    assert read_vocabulary(folder, "m").ids == expected
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == expected


def test_vocab_json_with_merges(tmp_path: Path) -> None:
    write_json(tmp_path / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    end = entry("<|endoftext|>", special=True)
    del end["id"]
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"3": end}}
    write_json(tmp_path / "tokenizer_config.json", {**config, "eos_token": "<|endoftext|>"})
    found = read_vocabulary(tmp_path, "q")
    assert found.ids == AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert not found.has_tokenizer_json


def test_sentencepiece_alone_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x00")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json(.|\n)*save_pretrained"):
        read_vocabulary(tmp_path, "llama")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_damaged_tokenizer_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, "m")
