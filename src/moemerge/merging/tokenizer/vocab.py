"""Read one model folder's vocabulary, with the ids that transformers assigns.

tokenizer.json lists the model's own tokens and the added tokens. The stored ids of added tokens are
not used: on loading, an added token that the model does not have gets the next free id. Tokens that
only tokenizer_config.json (or the older special_tokens_map.json and added_tokens.json) names are
appended in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moemerge.config.documents import (
    TokenizerConfigDocument,
    TokenizerDocument,
    parse_document,
)
from moemerge.errors import TokenizerError
from moemerge.runtime.files import read_object

SPECIAL_KEYS: Final = (  # in the order in which transformers appends the tokens
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
SPECIAL_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
MOST_IDS: Final = 2**31
_AGAIN: Final = "download the tokenizer files again"
_KINDS: Final[Mapping[str, type[TokenizerDocument | TokenizerConfigDocument]]] = {
    "tokenizer.json": TokenizerDocument,
    "tokenizer_config.json": TokenizerConfigDocument,
    "special_tokens_map.json": TokenizerConfigDocument,
}
FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class AddedToken:
    """A token outside the model's own vocabulary, with its matching flags."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False

    @classmethod
    def parse(cls, raw: str | Mapping[str, Any], *, special: bool) -> AddedToken:
        """Parse a JSON entry, or a bare string in a list of special tokens."""
        if isinstance(raw, str):
            return cls(raw, special=special, normalized=not special)
        flags = {k: bool(raw[k]) for k in FLAGS if k in raw}
        return cls(str(raw["content"]), **({"special": special} | flags))

    def flags(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in FLAGS}


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and ids of one tokenizer. `added` has all added tokens, in the model or not."""

    label: str
    folder: Path
    model_ids: Mapping[str, int]
    added_ids: Mapping[str, int]  # tokens that the model does not have
    added: Mapping[str, AddedToken]
    has_tokenizer_json: bool = True

    @property
    def ids(self) -> dict[str, int]:
        return {**self.model_ids, **self.added_ids}


def next_id(model_ids: Mapping[str, int], added_ids: Mapping[str, int]) -> int:
    """Return the id that the `tokenizers` library assigns to the next added token."""
    return max(len(model_ids), 1 + max(added_ids.values(), default=-1))


def read_vocabulary(folder: Path, label: str) -> Vocabulary:
    """Read tokenizer.json, or vocab.json if a byte-pair tokenizer has only that."""
    tokenizer = read_json(folder / "tokenizer.json")
    config = read_json(folder / "tokenizer_config.json") or {}
    if tokenizer is not None:
        model_ids = _model_ids(tokenizer, folder / "tokenizer.json")
        listed = [AddedToken.parse(a, special=False) for a in tokenizer.get("added_tokens") or []]
    else:
        model_ids = _vocab_json(folder, label)
        listed = []
    added_ids: dict[str, int] = {}
    added: dict[str, AddedToken] = {}
    for token in [*listed, *_named_in_config(folder, config)]:
        if token.content not in model_ids and token.content not in added_ids:
            added_ids[token.content] = next_id(model_ids, added_ids)
        added.setdefault(token.content, token)
    return Vocabulary(label, folder, model_ids, added_ids, added, tokenizer is not None)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or None if there is no such file."""
    if not os.path.isfile(path):
        return None
    value = read_object(path, _AGAIN, TokenizerError)
    kind = _KINDS.get(path.name)
    if kind is not None:
        parse_document(kind, value, str(path), _AGAIN, TokenizerError)
    return value


def _model_ids(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if vocab and isinstance(vocab, dict) and all(map(_is_id, vocab.values())):
        return vocab  # BPE, WordPiece, WordLevel
    if vocab and isinstance(vocab, list) and all(_is_piece(v) for v in vocab):
        return {piece: index for index, (piece, _) in enumerate(vocab)}  # Unigram
    raise TokenizerError(
        f"{path}: expected `model.vocab` as token -> id (BPE, WordPiece, WordLevel) or a list of "
        f"[piece, score] (Unigram), got {type(vocab).__name__}" + ("" if vocab else ", empty"),
        hint="save the tokenizer again with transformers' save_pretrained",
    )


def _is_piece(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_IDS


def _vocab_json(folder: Path, label: str) -> dict[str, int]:
    vocab = read_json(folder / "vocab.json")
    if vocab is not None and os.path.isfile(folder / "merges.txt"):
        if all(map(_is_id, vocab.values())):
            return vocab
        raise TokenizerError(f"{folder / 'vocab.json'}: expected token -> id", hint=_AGAIN)
    raise TokenizerError(
        f"{label}: no tokenizer.json (nor vocab.json with merges.txt) in {folder}; other tokenizer "
        "files, such as sentencepiece's tokenizer.model, cannot be merged",
        hint=f"make one: AutoTokenizer.from_pretrained({str(folder)!r})"
        f".save_pretrained({str(folder)!r})",
    )


def _named_in_config(folder: Path, config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that loading appends, in order: with ids, special ones, special lists."""
    decoder = config.get("added_tokens_decoder")
    if decoder is not None:
        for index in sorted(decoder, key=int):
            yield AddedToken.parse(decoder[index], special=False)
    else:
        older = read_json(folder / "added_tokens.json") or {}
        if not all(map(_is_id, older.values())):
            raise TokenizerError(
                f"{folder / 'added_tokens.json'}: expected token -> id", hint=_AGAIN
            )
        for content in sorted(older, key=lambda token: int(older[token])):
            yield AddedToken.parse(content, special=False)
        config = {**(read_json(folder / "special_tokens_map.json") or {}), **config}
    for key in SPECIAL_KEYS:
        if config.get(key):
            yield AddedToken.parse(config[key], special=True)
    for key in SPECIAL_LISTS:
        values = config.get(key) or []
        for value in values.values() if isinstance(values, dict) else values:
            yield AddedToken.parse(value, special=True)
