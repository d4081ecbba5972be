"""Where unfinished work waits to be resumed: hidden, next to the folder or file that it is for.

Apart from the work itself, so that somebody who interrupts it can be told without importing it.
"""

from __future__ import annotations

import os
from pathlib import Path


def journal_path(out: Path) -> Path:
    """Of a calibration's finished routers."""
    return _sibling(out, "journal")


def saved_path(out: Path) -> Path:
    """Of a training's finished steps."""
    return _sibling(out, "training")


def completions_path(out: Path) -> Path:
    """Of completions that calibration text is made of."""
    return _sibling(out, "completions")


def judgements_path(out: Path) -> Path:
    """Of what was decided about these completions."""
    return _sibling(out, "judgements")


def _sibling(out: Path, what: str) -> Path:
    out = Path(os.path.realpath(out))
    return out.with_name(f".{out.name}.{what}")
