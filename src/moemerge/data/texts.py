"""Rows of plain text: which column holds it."""

from __future__ import annotations

from moemerge.config.data import DataSettings
from moemerge.errors import DataError
from moemerge.generation.prompts import USUAL, file_of
from moemerge.registry import did_you_mean
from moemerge.text.rows import TextRow, row_fields


def read_text(row: TextRow, settings: DataSettings) -> tuple[str, str]:
    """(group, text) of a row of plain text."""
    fields = row_fields(row)
    column = settings.map.get("text") or next((c for c in USUAL["text"] if c in fields), "text")
    if not isinstance(fields.get(column), str):
        raise DataError(
            f"{row.where}: no text in column {column!r}{did_you_mean(column, fields)}",
            hint=f'columns: {", ".join(fields)}; `map={{"text": COLUMN}}`',
        )
    group = str(fields.get(settings.balance)) if settings.balance else file_of(row.where)
    return group, fields[column]
