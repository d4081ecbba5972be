"""`moemerge_report.json`: one document per output folder, a part for each job that was done."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

REPORT_NAME = "moemerge_report.json"
CONFIG_NAME = "moemerge_config.yml"
CARD_NAME = "README.md"


def report_document(version: str, **parts: dict[str, Any] | None) -> dict[str, Any]:
    """The parts that exist, under a header that says which program and when."""
    return {
        "moemerge": version,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: part for name, part in parts.items() if part is not None},
    }


def report_bytes(document: dict[str, Any]) -> bytes:
    # allow_nan=False: a report with NaN is not JSON, and no reader should meet one.
    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
