"""A diagnosis document as the page needs it: rows by model and domain, names that fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moemerge.errors import DataError
from moemerge.report.words import FigureWords, display_names, number

KIND = "diagnosis"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """A document, with its rows sorted out. The diagnosed model comes first in `models`."""

    document: Mapping[str, Any]

    def __post_init__(self) -> None:
        kind = self.document.get("kind")
        if kind != KIND:
            raise DataError(
                f"a page shows a document of kind {KIND!r}, this one is of kind {kind!r}",
                hint="moemerge diagnose MODEL ... --json FILE writes one",
            )

    @cached_property
    def figures(self) -> dict[str, FigureWords]:
        """The words of every figure, by its name."""
        try:
            words = [FigureWords.from_json(figure) for figure in self._list("figures")]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the document describes its figures in a way that is not known here: {error}",
                hint="write it again with this version: moemerge diagnose MODEL ... --json FILE",
            ) from error
        return {figure.name: figure for figure in words}

    @cached_property
    def labels(self) -> dict[str, str]:
        """The models' labels in full (paths, hub ids), by their names in the rows."""
        return {str(m["name"]): str(m.get("label") or m["name"]) for m in self._list("models")}

    @cached_property
    def names(self) -> dict[str, str]:
        """What the models are called on the page: as much of their labels as tells them apart."""
        return dict(zip(self.labels, display_names([*self.labels.values()]), strict=True))

    @property
    def models(self) -> list[str]:
        return list(self.labels)

    @cached_property
    def tags(self) -> dict[str, str]:
        """Why a model stands out among several: it is recommended, or one of two that may be."""
        verdict = self.document.get("verdict") or {}
        best = [name for name in verdict.get("recommended") or () if name in self.labels]
        if len(self.labels) < 2 or not best:
            return {}
        if len(best) == 1:
            return {best[0]: "recommended"}
        return {best[0]: "routes best", best[1]: "predicts best"}

    @cached_property
    def domains(self) -> list[str]:
        """The domains that have rows, in the document's order."""
        seen = {str(row["domain"]) for row in self.layers}
        known = [str(name) for name in self.document.get("domains") or {}]
        return [name for name in known if name in seen] + sorted(seen.difference(known))

    @property
    def layers(self) -> list[Row]:
        return self._list("layers")

    @property
    def totals(self) -> list[Row]:
        return self._list("totals")

    @property
    def swaps(self) -> list[Row]:
        return self._list("swaps")

    @property
    def calibration(self) -> Row:
        return self.document.get("calibration") or {}

    @property
    def calibrated(self) -> str:
        """The model that the calibration report belongs to."""
        return str(self.document.get("calibration_of") or self.models[0])

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], list[Row]]:
        pairs: dict[tuple[str, str], list[Row]] = {}
        for row in self.layers:
            pairs.setdefault((str(row["model"]), str(row["domain"])), []).append(row)
        for rows in pairs.values():
            rows.sort(key=lambda row: int(row["layer"]))
        return pairs

    def rows(self, model: str, domain: str) -> list[Row]:
        """One model's rows on one domain, by layer."""
        return self._by_pair.get((model, domain), [])

    def total(self, model: str, domain: str) -> Row:
        for row in self.totals:
            if row["model"] == model and row["domain"] == domain:
                return row
        return {}

    def source_label(self, domain: str) -> str:
        source = (self.document.get("sources") or {}).get(domain) or {}
        return str(source.get("label") or domain)

    def reference(self, domain: str) -> str:
        """What a domain is measured against: its source, or the base."""
        text = (self.document.get("domains") or {}).get(domain) or {}
        return "Base" if text.get("reference") == "base" else "Source"

    @cached_property
    def worst(self) -> Row:
        """The row of the diagnosed model with the highest mismatch."""
        own = [row for row in self.layers if row["model"] == self.models[0]]
        return max(own or self.layers, key=lambda row: number(row.get("mismatch")) or 0.0)

    def _list(self, key: str) -> list[Any]:
        return list(self.document.get(key) or [])


def series(rows: Iterable[Row], key: str) -> list[float | None]:
    """One figure of several rows, with as many digits as a chart can show."""
    return [rounded(number(row.get(key))) for row in rows]


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
