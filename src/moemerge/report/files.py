"""Write pages."""

from __future__ import annotations

import base64
import gzip
from pathlib import Path

from moemerge.runtime.files import write_whole


def compressed(text: str) -> str:
    """Compress to base64: a third of the size, and no text in it can end a script element."""
    # mtime=0: the same document produces the same page.
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def save_page(text: str, path: Path) -> Path:
    """Write the page to `path`, whole or not at all."""
    # A label may contain bytes of a file name that are not UTF-8.
    write_whole(path, text.encode("utf-8", "replace"))
    return path
