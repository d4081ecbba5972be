"""Read stored tensors, count their bytes, and share the reads with the ranks of one machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from moemerge.checkpoint.quantised.tensor import FetchStored, QuantisedInfo
from moemerge.checkpoint.reader import Checkpoint
from moemerge.runtime.gpu import Uploads
from moemerge.runtime.ranks import Ranks, SharedReads
from moemerge.runtime.timing import Stopwatch


class StoredReads:
    """Reads tensors of a checkpoint. Thread-safe.

    The stopwatch counts the bytes on disk that this process reads. After `share`, the ranks of this
    machine read the same parts, and each tensor is read by one of them.
    """

    def __init__(self, checkpoint: Checkpoint, stopwatch: Stopwatch) -> None:
        self.checkpoint = checkpoint
        self._stopwatch = stopwatch
        self._shared: SharedReads | None = None

    def share(self, ranks: Ranks) -> None:
        self._shared = ranks.shared_reads()

    @property
    def in_order(self) -> bool:
        """Whether the tensors of a part are obtained in the order of their numbers."""
        return self._shared is not None

    def own(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names whose tensors this rank processes for its machine."""
        shared = self._shared
        return (name for n, name in enumerate(names) if shared is None or shared.reads(n))

    def obtain(
        self,
        number: int,
        name: str,
        rows: tuple[int, int] | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Read a tensor or rows of it, or receive them from the rank that reads this number."""
        shared = self._shared
        if shared is None:
            return self.read(name, rows, out)
        info = self.checkpoint.tensors[name]
        if out is None:
            out = torch.empty(info.block_shape(rows), dtype=info.dtype.torch)
        shared.obtain(number, out, lambda: self.read(name, rows, out))
        return out

    def finish(self) -> None:
        """End a part, whose tensors were numbered from 0. Raise if a rank could not read."""
        if self._shared is not None:
            self._shared.finish(self.checkpoint.label)

    def read(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        """Read a tensor or rows of it in this process; see `Checkpoint.read`."""
        info = self.checkpoint.tensors[name]
        count = info.rows if rows is None else rows[1] - rows[0]
        self._stopwatch.aside("read", 0.0, info.stored_bytes * count // max(1, info.rows))
        return self.checkpoint.read(name, rows, out, codes)

    def decodes_on_device(self, name: str, slot: Tensor) -> bool:
        """Return whether `decode` can fill `slot`. Ranks that share reads send decoded tensors."""
        info = self.checkpoint.tensors[name]
        fits = isinstance(info, QuantisedInfo) and info.dtype.torch == slot.dtype
        return fits and self._shared is None

    def decode(
        self, name: str, rows: tuple[int, int] | None, slot: Tensor, uploads: Uploads
    ) -> None:
        """Read a quantised tensor, or rows of it, and decode it on the device of `slot`."""

        def codes(part: str, some: tuple[int, int] | None) -> Tensor:
            info = self.checkpoint.stored_info(part)
            assert info is not None
            there = torch.empty(info.block_shape(some), dtype=info.dtype.torch, device=slot.device)
            with uploads.buffer() as pinned:
                host = pinned.like(there)
                self.checkpoint.stored(part, some, host)
                pinned.send(host, there)
            return there

        with uploads.queued():
            self.read(name, rows, slot, codes)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None
