"""Rewrite settings in messages as flags.

Errors and notices name a setting as Python spells it, in backticks: `offload="disk"`. The command
line replaces it by the flag of the running command, or by the key of its config.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

_SETTING = re.compile(r"`([a-z][a-z_]*)(?:=([^`]+))?`")

_flags: Mapping[str, str] = {}
_has_config = False


def speak_of(parameters: Iterable[Any]) -> None:
    """Set the flags that replace settings: those of the running command."""
    global _flags, _has_config
    options = {p.name: p.opts[0] for p in parameters if p.param_type_name == "option"}
    # Python takes `sources={...}`; the command line repeats `--source`.
    _flags = {**{f"{name}s": flag for name, flag in options.items()}, **options}
    _has_config = any(p.name == "config" for p in parameters)


def in_flags(text: str) -> str:
    """Replace `offload="disk"` by `--offload disk`; other words in backticks stay."""
    return _SETTING.sub(_replacement, text)


def _replacement(match: re.Match[str]) -> str:
    name, value = match.groups()
    if name not in _flags and (value is None or _has_config):
        return match[0] if value is None else f"`{name}: {_in_yaml(value)}`"
    flag = _flags.get(name, f"--{name.replace('_', '-')}")
    if value in (None, "True"):
        return flag
    if value == "False":
        return flag.replace("--", "--no-", 1)
    return " ".join(f"{flag} {word}" for word in _words(value))


def _in_yaml(value: str) -> str:
    """Return a Python value in YAML."""
    pairs = _words(value)
    if not value.startswith("{"):
        return pairs[0]
    return "{" + ", ".join(pair.replace("=", ": ", 1) for pair in pairs) + "}"


def _words(value: str) -> list[str]:
    """Return a Python value as arguments: one, or NAME=VALUE for each pair of a dict."""
    try:
        parsed = ast.parse(value, mode="eval").body
    except SyntaxError:
        return [value]
    if isinstance(parsed, ast.Dict):
        pairs = zip(parsed.keys, parsed.values, strict=True)
        # `**data` stands for the pairs that were given: flags are added to them.
        return [f"{_word(key)}={_word(value)}" for key, value in pairs if key is not None]
    return [_word(parsed)]


def _word(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "" if node is None else ast.unparse(node)
