"""Rows of plain text: which column holds it."""

from __future__ import annotations

from collections.abc import Sequence

from moemerge.config.data import DataSettings
from moemerge.errors import DataError
from moemerge.generation.prompts import USUAL, file_of
from moemerge.registry import did_you_mean
from moemerge.text.rows import TextRow, row_fields


def read_texts(rows: Sequence[TextRow], settings: DataSettings) -> list[tuple[str, str]]:
    """(group, text) of rows of plain text."""
    texts = []
    for row in rows:
        fields = row_fields(row)
        column = settings.map.get("text") or next((c for c in USUAL["text"] if c in fields), "text")
        if not isinstance(fields.get(column), str):
            raise DataError(
                f"{row.where}: no text in column {column!r}{did_you_mean(column, fields)}",
                hint=f'columns: {", ".join(fields)}; `map={{"text": COLUMN}}`',
            )
        group = str(fields.get(settings.balance)) if settings.balance else file_of(row.where)
        texts.append((group, fields[column]))
    return texts
