"""Merge and calibrate in one go: the merge lives in a hidden folder until the routers are done."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from moemerge.calibration.prepare import check_files
from moemerge.checkpoint.output import writing
from moemerge.config.pairing import CalibrationRun
from moemerge.lockstep.models import open_model, require_calibratable, require_same_family


@contextlib.contextmanager
def passing_folder(out: Path) -> Iterator[Path]:
    """A place for the merge beside OUT, gone at the end.

    It bears the name of an unfinished output, so that what a killed run leaves is removed by the
    next one that writes OUT.
    """
    target = Path(os.path.realpath(out))
    folder = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    made = [p for p in target.parents if not p.exists()]
    try:
        with writing(out):
            folder.mkdir(parents=True)
        yield folder / "merged"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # OUT is in it
                parent.rmdir()


def check_calibration(wanted: CalibrationRun) -> None:
    """What can be refused of a calibration before its merge is made."""
    check_files(wanted.data)
    opened = [open_model(name, ref) for name, ref in wanted.sources.items()]
    for model in opened:
        require_same_family(opened[0], model)
        require_calibratable(model)
