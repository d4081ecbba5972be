"""A diagnosis document as the page needs it: rows by model and domain, labels that fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moemerge.errors import DataError
from moemerge.report.words import display_names

KIND = "diagnosis"
Row = Mapping[str, Any]
# More runs of layers than this are counted, not listed.
RUNS = 4


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
        """What the model is called that the calibration report belongs to."""
        name = str(self.document.get("calibration_of") or self.models[0])
        return self.names.get(name, name)

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], list[Row]]:
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.layers:
            found.setdefault((str(row["model"]), str(row["domain"])), []).append(row)
        for rows in found.values():
            rows.sort(key=lambda row: int(row["layer"]))
        return found

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

    @cached_property
    def worst(self) -> Row | None:
        """The row of the diagnosed model with the highest mismatch."""
        mine = [row for row in self.layers if row["model"] == self.models[0]]
        told = [row for row in mine if number(row.get("mismatch")) is not None]
        return max(told, key=lambda row: float(row["mismatch"]), default=None)

    def _list(self, key: str) -> list[Row]:
        return list(self.document.get(key) or [])


def number(value: Any) -> float | None:
    """A finite number, or None: what a chart leaves a gap for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def series(rows: Iterable[Row], key: str) -> list[float | None]:
    """One figure of several rows, with as many digits as a chart can show."""
    return [rounded(number(row.get(key))) for row in rows]


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def told(values: Iterable[float | None]) -> list[float]:
    """Those that are numbers."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    found = told(values)
    return math.fsum(found) / len(found) if found else None


def percent(value: float | None) -> str:
    """0.1234 as 12.3%, with a digit more where it is small."""
    if value is None:
        return "–"
    share = 100 * value
    digits = 1 if abs(share) >= 1 or share == 0 else 2
    return f"{share:.{digits}f}%"


def plain(value: float | None, digits: int = 3) -> str:
    """A number for people: significant digits, no exponent unless it is tiny."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def span(layers: Sequence[int]) -> str:
    """Layer numbers in words: layer 3; layers 0–4, 7; 23 layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if len(runs) > RUNS:
        return f"{len(layers)} layers"
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(shown)}"
