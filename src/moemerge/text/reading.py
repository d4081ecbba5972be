"""Rows of files of any size: large files are read again instead of kept in memory."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from moemerge.errors import DataError
from moemerge.text.rows import (
    TextRow,
    TextSource,
    is_pipe,
    read_rows,
    source_names,
    stream_rows,
)

HELD_BYTES: Final = 2**26  # of text in memory


class Rows:
    """All rows of some sources, in the order given.

    Up to `HELD_BYTES` of them are in memory. Of more, only the number is, and every use reads the
    files once. A pipe can be read only once, so its rows are always in memory.
    """

    def __init__(
        self, sources: Sequence[TextSource], wanted: Collection[str] | None = None
    ) -> None:
        """Read them once; `wanted` as in `read_rows`."""
        self._sources, self._wanted = tuple(sources), wanted
        self._held: list[TextRow] | None = []
        self._count = self.size = 0
        if any(isinstance(one, str | Path) and is_pipe(Path(one)) for one in sources):
            self._held = read_rows(sources, wanted=wanted)
            self._count, self.size = len(self._held), sum(row.size for row in self._held)
            return
        for row in stream_rows(sources, wanted=wanted):
            self._count += 1
            self.size += row.size
            if self.size > HELD_BYTES:
                self._held = None
            if self._held is not None:
                self._held.append(row)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TextRow]:
        if self._held is not None:
            yield from self._held
            return
        count = 0
        for row in stream_rows(self._sources, wanted=self._wanted):
            count += 1
            yield row
        if count != self._count:
            raise DataError(
                f"{', '.join(source_names(self._sources))}: {self._count} rows when read first, "
                f"now {count}",
                hint="do not write to files of text while they are read",
            )

    def take(self, places: Sequence[int]) -> Iterator[TextRow]:
        """Return the rows at these distinct indices, in the order of the indices."""
        if self._held is not None:
            for place in places:
                yield self._held[place]
            return
        mean = max(1, self.size // max(1, self._count))
        at_once = max(1, HELD_BYTES // mean)
        for start in range(0, len(places), at_once):
            wanted = places[start : start + at_once]
            found = frozenset(wanted)
            rows = {place: row for place, row in enumerate(self) if place in found}
            for place in wanted:
                yield rows.pop(place)

    def drawn(self, rng: random.Random | None) -> tuple[Sequence[int], Iterator[TextRow]]:
        """Return all indices and their rows, in a random order, or without `rng` in file order."""
        if rng is None:
            return range(self._count), iter(self)
        order = array("q", range(self._count))
        rng.shuffle(order)
        return order, self.take(order)
