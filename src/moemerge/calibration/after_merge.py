"""Merge and calibrate in one go: what is checked of the calibration before the merge is made."""

from __future__ import annotations

from moemerge.architectures.opened import open_model
from moemerge.config.requests import SourceData
from moemerge.lockstep.models import require_calibratable, require_same_family
from moemerge.text.rows import check_files


def check_calibration(wanted: SourceData) -> None:
    """What can be refused of a calibration before its merge is made."""
    check_files(wanted.data)
    opened = [open_model(name, ref) for name, ref in wanted.sources.items()]
    for model in opened:
        require_same_family(opened[0], model)
        require_calibratable(model)
