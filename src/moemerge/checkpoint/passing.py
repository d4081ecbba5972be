"""A place beside an output for what is needed only while the output is made."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moemerge.checkpoint.output import hidden_folder, writing


@contextlib.contextmanager
def passing_folder(out: Path) -> Iterator[Path]:
    """A hidden folder beside OUT, gone at the end.

    It bears the name of an unfinished output, so that what a killed run leaves is removed by the
    next one that writes OUT.
    """
    target = Path(os.path.realpath(out))
    folder = hidden_folder(out, "partial")
    made = [p for p in target.parents if not p.exists()]
    try:
        with writing(out):
            folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # OUT is in it
                parent.rmdir()
