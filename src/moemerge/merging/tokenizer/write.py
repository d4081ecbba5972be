"""The output tokenizer's files, and what config.json and generation_config.json say of it.

Where the vocabulary is the donor's, so are the files, byte for byte. Otherwise tokens are appended
to (or taken out of) tokenizer.json's added tokens and the files that repeat them; the donor's own
tokens, merge rules and ids stay, so that everything that names an id stays true.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from moemerge.merging.tokenizer.plan import TokenizerPlan
from moemerge.merging.tokenizer.vocab import SPECIAL_KEYS, SPECIAL_LISTS, Vocabulary, read_json

PATTERNS: Final = (
    "tokenizer*.json",
    "tokenizer*.model",
    "tokenization*.py",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.tiktoken",
    "*.spm",
    "spiece.*",
    "sentencepiece*.model",
    "bpe.codes",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
)


def is_tokenizer_file(name: str) -> bool:
    """Whether a companion belongs to the tokenizer, and so comes from the tokenizer's donor."""
    return any(fnmatch(name.lower(), pattern) for pattern in PATTERNS)


def tokenizer_files(plan: TokenizerPlan) -> dict[str, bytes]:
    """All tokenizer files of the output, by name."""
    folder = plan.vocabulary.folder
    files = donor_files(folder)
    if not plan.appended and not plan.dropped:
        return files
    for name, edit in _EDITS.items():
        content = read_json(folder / name)
        if content is not None:
            files[name] = to_json(edit(content, plan))
    if not plan.vocabulary.has_tokenizer_json:
        config = read_json(folder / "tokenizer_config.json") or {}
        files["tokenizer_config.json"] = to_json(_listing_all(config, plan))
    return files


def donor_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a folder as they are."""
    candidates = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    named = {p.relative_to(folder).as_posix(): p for p in sorted(candidates) if p.is_file()}
    return {name: p.read_bytes() for name, p in named.items() if is_tokenizer_file(name)}


def to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _tokenizer_json(content: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    return {**content, "added_tokens": _entries(plan.vocabulary)}


def _entries(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """All added tokens in the order of their ids: loading numbers them anew, in this order."""
    ids = vocabulary.ids
    return [
        {"id": ids[token.content], "content": token.content, **token.flags()}
        for token in sorted(vocabulary.added.values(), key=lambda token: ids[token.content])
    ]


def _decoder(vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        str(entry["id"]): {k: v for k, v in entry.items() if k != "id"}
        for entry in _entries(vocabulary)
    }


def _tokenizer_config(content: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    kept = _without_dropped(content, plan)
    if "added_tokens_decoder" in kept:
        kept["added_tokens_decoder"] = _decoder(plan.vocabulary)
    return kept


def _listing_all(content: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    """Without a tokenizer.json it is tokenizer_config.json that lists the added tokens."""
    return {
        **_without_dropped(content, plan),
        "added_tokens_decoder": _decoder(plan.vocabulary),
    }


def _without_dropped(content: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    """No mention of dropped tokens: naming one would append it again when loading."""

    def is_dropped(value: object) -> bool:
        return (value.get("content") if isinstance(value, dict) else value) in plan.dropped

    kept = {k: v for k, v in content.items() if not (k in SPECIAL_KEYS and is_dropped(v))}
    for key in SPECIAL_LISTS:
        values = kept.get(key)
        if isinstance(values, dict):
            kept[key] = {k: v for k, v in values.items() if not is_dropped(v)}
        elif isinstance(values, list):
            kept[key] = [v for v in values if not is_dropped(v)]
    return kept


def _added_tokens(_: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    ids = plan.vocabulary.added_ids
    return dict(sorted(ids.items(), key=lambda item: item[1]))


_EDITS: Final = {
    "tokenizer.json": _tokenizer_json,
    "tokenizer_config.json": _tokenizer_config,
    "special_tokens_map.json": _without_dropped,
    "added_tokens.json": _added_tokens,
}


def config_for(
    config: Mapping[str, Any],
    plan: TokenizerPlan,
    *,
    own: Vocabulary | None,
    donor: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """`config` (config.json or generation_config.json) for the output's vocabulary, and warnings.

    `own` is the vocabulary that the ids in `config` belong to; None or the donor's: they stand.
    `donor` is the same file of the tokenizer's donor, whose ids go first.
    """
    warnings: list[str] = []
    out = dict(config)
    if own is not None and own.folder != plan.vocabulary.folder:
        out.update(_special_ids(config, donor or {}, own, plan, warnings))
    if "vocab_size" in out:
        out["vocab_size"] = plan.output_rows
    for part in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(out.get(part), dict):
            inner = (donor or {}).get(part)
            out[part], more = config_for(out[part], plan, own=own, donor=inner)
            warnings += more
    return out, warnings


def _special_ids(
    config: Mapping[str, Any],
    donor: Mapping[str, Any],
    own: Vocabulary,
    plan: TokenizerPlan,
    warnings: list[str],
) -> dict[str, Any]:
    tokens = {i: t for t, i in own.ids.items()}
    ids = plan.vocabulary.ids
    out: dict[str, Any] = {}
    for key in (k for k in {**config, **donor} if k.endswith("_token_id")):
        if donor.get(key) is not None:
            out[key] = donor[key]
            continue
        value = config.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        mapped = [ids[tokens[i]] for i in listed if i in tokens and tokens[i] in ids]
        if len(mapped) < len(listed):
            warnings.append(f"{key}: {value} has no counterpart in the output's tokenizer")
        if isinstance(value, list):
            out[key] = mapped
        else:
            out[key] = mapped[0] if mapped else None
    return out
