"""Whether the base model is among the sources: what no source speaks for may be lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moemerge.architectures.opened import OpenModel
from moemerge.config.models import ModelRef
from moemerge.config.yaml_lines import read_yaml
from moemerge.errors import ConfigError
from moemerge.report.files import CONFIG_NAME

BASE = "base"


def base_notices(
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    given: Mapping[str, str | Path | ModelRef],
) -> list[str]:
    """One sentence where no source is the base: what that may cost, and what to do."""
    base = _base_of(merged.checkpoint.path)
    if BASE in sources or (base is not None and base in map(str, given.values())):
        return []
    name = base or "BASE"
    return [
        "no source is the base model, so what it can do beyond these domains may be lost: a few "
        f"rows of general text keep it (--source base={name} --data base=general.jsonl)"
    ]


def _base_of(folder: Path) -> str | None:
    """The base that a merge of ours was made with, as its config names it."""
    path = folder / CONFIG_NAME
    try:
        data = read_yaml(path.read_text(encoding="utf-8"), str(path)).data
    except (OSError, ConfigError, UnicodeDecodeError):
        return None  # another tool merged it
    base = data.get("base_model") if isinstance(data, dict) else None
    return str(base) if isinstance(base, str) else None
