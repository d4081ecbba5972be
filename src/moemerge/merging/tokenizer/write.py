"""Write the output tokenizer's files, and its ids in config.json and generation_config.json.

If the vocabulary is the donor's, the files are copied byte for byte. Otherwise tokens are added to
or removed from the added tokens of tokenizer.json and of the files that repeat them. The donor's
own tokens, merge rules and ids stay, so that references to ids remain valid.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.folder import TOKENIZER_FILES
from moemerge.config.fields import CHAT_TEMPLATES
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.plan import TokenizerPlan
from moemerge.merging.tokenizer.vocab import SPECIAL_KEYS, SPECIAL_LISTS, Vocabulary, read_json
from moemerge.runtime.files import read_utf8


def is_tokenizer_file(name: str) -> bool:
    """Return whether a companion file belongs to the tokenizer and comes from its donor."""
    return any(fnmatch(name.lower(), pattern) for pattern in TOKENIZER_FILES)


def tokenizer_files(plan: TokenizerPlan) -> dict[str, bytes]:
    """Return all tokenizer files of the output, by name."""
    folder = plan.vocabulary.folder
    files = donor_files(folder)
    if not plan.appended and not plan.dropped:
        return files
    for name, edit in _EDITS.items():
        content = read_json(folder / name)
        if content is not None:
            files[name] = to_json(edit(content, plan))
    if not plan.vocabulary.has_tokenizer_json:
        config = _without_dropped(read_json(folder / "tokenizer_config.json") or {}, plan)
        config["added_tokens_decoder"] = _decoder(plan.vocabulary)
        files["tokenizer_config.json"] = to_json(config)
    return files


def donor_files(folder: Path) -> dict[str, bytes]:
    """Return the unchanged tokenizer files of a folder."""
    candidates = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
    named = {p.relative_to(folder).as_posix(): p for p in sorted(candidates) if os.path.isfile(p)}
    return {name: p.read_bytes() for name, p in named.items() if is_tokenizer_file(name)}


def to_json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _entries(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return all added tokens by id, the order in which loading renumbers them."""
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


def _without_dropped(content: dict[str, Any], plan: TokenizerPlan) -> dict[str, Any]:
    """Remove dropped tokens, which loading would append again."""

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


_EDITS: Final[Mapping[str, Callable[[dict[str, Any], TokenizerPlan], dict[str, Any]]]] = {
    "tokenizer.json": lambda content, plan: {**content, "added_tokens": _entries(plan.vocabulary)},
    "tokenizer_config.json": _tokenizer_config,
    "special_tokens_map.json": _without_dropped,
    "added_tokens.json": _added_tokens,
}


def config_for(
    config: Mapping[str, Any],
    plan: TokenizerPlan,
    *,
    own: Vocabulary,
    donor: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Adapt `config` (config.json or generation_config.json) to the vocabulary; return warnings.

    `own` is the vocabulary of the ids in `config`; if it is the donor's, the ids are unchanged.
    `donor` is the same file of the tokenizer's donor, whose ids take precedence.
    """
    warnings: list[str] = []
    out = dict(config)
    if own.folder != plan.vocabulary.folder:
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


# --- chat templates -------------------------------------------------------------------------------

# The template is written to a separate file, which transformers reads first. The key in
# tokenizer_config.json is removed, so that the two cannot disagree. The formats follow their public
# descriptions. Line breaks of a format are strings inside expressions; the templates' own line
# breaks are trimmed, so that the layout here does not leak into a prompt.
FILE: Final = "chat_template.jinja"

TEMPLATES: Final = Path(__file__).parent / "chat_templates"


def read_chat_template(folder: Path) -> str | None:
    """Return a folder's default chat template: the file's, else tokenizer_config.json's."""
    path = folder / FILE
    if os.path.isfile(path):
        return read_utf8(path, "download the tokenizer files again", TokenizerError)
    return _default((read_json(folder / "tokenizer_config.json") or {}).get("chat_template"))


def _default(value: Any) -> str | None:
    if isinstance(value, list):  # several named ones: [{"name": ..., "template": ...}]
        named = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in named if e.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def resolve_chat_template(setting: str, folders: Iterable[Path]) -> str | None:
    """Return the template that `chat_template:` selects; None for `auto` if no input has one.

    `auto` is the most frequent template of the inputs' tokenizers; ties go to the first.
    """
    if setting == "auto":
        texts = map(read_chat_template, folders)
        counts = Counter(text for text in texts if text is not None)
        return counts.most_common(1)[0][0] if counts else None
    if setting in CHAT_TEMPLATES:
        return (TEMPLATES / f"{setting}.jinja").read_text(encoding="utf-8")
    return setting


def with_chat_template(files: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Return the tokenizer files with this template instead of their own."""
    out = {
        name: content
        for name, content in files.items()
        if not name.startswith("additional_chat_templates/")
    }
    out[FILE] = template.encode()
    config = json.loads(out.get("tokenizer_config.json", b"{}"))
    if "chat_template" in config:
        del config["chat_template"]
        out["tokenizer_config.json"] = to_json(config)
    return out
