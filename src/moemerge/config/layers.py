"""A choice of layers: `all`, `last:4`, `8-15`, `3`, `0,2,5-7`, or a list of such."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from moemerge.errors import UsageError

FORMS: Final = "all, last:4, 8-15, 3 or 0,2,5-7"
_LAST: Final = re.compile(r"last:([0-9]+)")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class LayerSelection:
    """Layers as a user names them; both ends of a range are meant."""

    text: str = "all"

    @classmethod
    def parse(cls, value: object) -> LayerSelection:
        """Check the form; whether the layers exist is known only to `resolve`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, (list, tuple)):
            text = ",".join(str(item) for item in value)
        elif isinstance(value, (int, str)) and not isinstance(value, bool):
            text = str(value)
        else:
            raise UsageError(f"layers must be {FORMS}, not {value!r}")
        selection = cls(re.sub(r"\s+", "", text))
        selection._ranges()
        return selection

    def resolve(self, count: int) -> tuple[int, ...]:
        """The layer numbers, ascending, in a model (or list of MoE layers) of `count` layers."""
        chosen: set[int] = set()
        for low, high in self._ranges():
            start = count + low if low < 0 else low
            stop = count if high is None else high + 1
            if start < 0 or stop > count:
                raise UsageError(
                    f"layers {self.text!r}: the model has {count} layers, 0 to {count - 1}",
                    hint=f"choose among them: {FORMS}",
                )
            chosen.update(range(start, stop))
        return tuple(sorted(chosen))

    def _ranges(self) -> list[tuple[int, int | None]]:
        """Inclusive (first, last); `last:4` is (-4, None), `all` is (0, None)."""
        if self.text == "all":
            return [(0, None)]
        if match := _LAST.fullmatch(self.text):
            if int(match[1]) == 0:
                raise UsageError("layers 'last:0' selects none", hint=f"use {FORMS}")
            return [(-int(match[1]), None)]
        return [self._range(part) for part in self.text.split(",")]

    def _range(self, part: str) -> tuple[int, int | None]:
        match = _RANGE.fullmatch(part)
        if not match:
            raise UsageError(f"layers {self.text!r}: cannot read {part!r}", hint=f"use {FORMS}")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise UsageError(
                f"layers {self.text!r}: {part!r} runs backwards", hint=f"write {high}-{low}"
            )
        return low, high

    def __str__(self) -> str:
        return self.text
