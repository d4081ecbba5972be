"""What a merged folder tells of how it was made: its own report and config, where it has them.

A repair repeats them in its own report and card. It does not depend on them: where they are not
ours, damaged or edited by hand, they have nothing to tell.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.config.documents import MergeDocument, parse_document
from moemerge.config.schema import RunConfig
from moemerge.config.translate import parse_settings
from moemerge.config.yaml_lines import read_yaml
from moemerge.errors import MoeMergeError
from moemerge.report.files import REPORT_NAME
from moemerge.runtime.files import read_object, read_utf8

REPAIRS = ("calibration", "refit")


def earlier_report(folder: Path) -> dict[str, Any]:
    """The folder's own report, where moemerge merged it; else nothing."""
    try:
        report = read_object(folder / REPORT_NAME)
        parse_document(MergeDocument, report.get("merge"), str(folder / REPORT_NAME))
        json.dumps(report, allow_nan=False)  # what it says is repeated, and NaN is no JSON
    except (MoeMergeError, ValueError):
        return {}
    return report


def merge_config(path: Path, blocks: Mapping[str, Any]) -> RunConfig | None:
    """A merge's config with `blocks` added; None where it cannot be read, or has a repair."""
    try:
        data = read_yaml(read_utf8(path), str(path)).data
        if any(name in data for name in REPAIRS):
            return None
        return parse_settings(RunConfig, {**data, **blocks}, str(path))
    except MoeMergeError:
        return None
