"""Rows written as JSON lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moemerge.runtime.files import write_whole


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines (gzipped where the name says so), written beside the file and renamed."""
    # Halves of characters, which a cut text may end with, have no bytes in UTF-8.
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = "".join(lines).encode("utf-8", "replace")
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)
