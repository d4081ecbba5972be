"""A checkpoint with some of its tensors replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from moemerge.checkpoint.reader import Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


class OverlaidCheckpoint(Checkpoint):
    """A checkpoint that takes some tensors from another one, or from memory.

    It shares the files of its base, so it has nothing to close.
    """

    def __init__(self, base: Checkpoint, overlay: Mapping[str, Callable[[], Tensor]]) -> None:
        self.path = base.path
        self.label = base.label
        self.config = base.config
        self.files, self._file_of = base.files, base._file_of
        self.tensors, self.quantisation = base.tensors, base.quantisation
        self._base = base
        self._overlay = overlay

    def read(
        self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        if name not in self._overlay:
            return self._base.read(name, rows, out)
        info = self.tensors[name]
        block = self._overlay[name]().to(info.dtype.torch).reshape(info.shape)
        if rows is not None:
            block = block[rows[0] : rows[1]]
        return block.clone() if out is None else out.copy_(block)

    def close(self) -> None: ...
