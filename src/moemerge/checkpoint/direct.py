"""Writing past the page cache.

What is written here is made durable anyway, so a copy in the page cache is only work: for the
processor that makes it, for the kernel that writes it back page by page, and for the inputs that it
drives out. Whole pages therefore go to the disk straight from aligned buffers, by threads of their
own; the edges of a block, which share a page with its neighbours, go through the page cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moemerge.checkpoint.tensors import as_bytes
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor
from moemerge.runtime.process import thread_pool

# No disk or file system asks for a coarser alignment than 4096; a page of the cache may be larger
# (64 KiB on some ARM machines), and must not be written both ways.
PAGE: Final = max(4096, mmap.PAGESIZE)
BUFFER_BYTES: Final = 8 * 2**20
BUFFERS: Final = 6  # one being filled and one being written for each core, and some to spare
THREADS: Final = 2
# Smaller blocks are cheaper through the page cache than a write of their own that is waited for.
LEAST_BYTES: Final = 256 * 2**10
_DIRECT: Final = getattr(os, "O_DIRECT", 0)  # macOS has none


class OutputFile:
    """A file that is written in many places at once, by any thread: a new one, or one that another
    process has made."""

    def __init__(self, path: Path, *, direct: bool, new: bool = True) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        self.path = path
        self.fd = os.open(path, flags, 0o666)
        self._direct: int | None = None
        if direct and _DIRECT:
            with contextlib.suppress(OSError):  # a file system without it
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)

    @property
    def direct(self) -> bool:
        """Whether whole pages can go straight to the disk."""
        return self._direct is not None

    def write(self, data: memoryview, offset: int) -> None:
        """Through the page cache."""
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

    def write_aligned(self, data: memoryview, offset: int) -> None:
        """Memory that lies to pages as `offset` does: whole pages straight to the disk."""
        first = min(-offset % PAGE, len(data))
        last = max(first, len(data) - (offset + len(data)) % PAGE)
        done = first + self._write_pages(data[first:last], offset + first)
        self.write(data[:first], offset)
        self.write(data[done:], offset + done)

    def _write_pages(self, data: memoryview, offset: int) -> int:
        """How many bytes went straight to the disk; the rest is left to the page cache."""
        done = 0
        while done < len(data) and self._direct is not None:
            try:
                count = os.pwrite(self._direct, data[done:], offset + done)
            except OSError:  # refused after all, or an error that the page cache's write repeats
                break
            done += count - count % PAGE
            if count % PAGE:
                break
        return done

    def close(self) -> None:
        os.close(self.fd)
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


@dataclass(frozen=True)
class Buffer:
    """A piece of memory that waits for its turn at the disk."""

    memory: Tensor  # (BUFFER_BYTES + PAGE,), page-aligned
    view: memoryview


class Buffers:
    """Aligned buffers, and threads that write what is in them."""

    def __init__(self) -> None:
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._made = 0
        self.pool = thread_pool(THREADS, "moemerge-write")

    def filled(self, data: Tensor, offset: int) -> Iterator[tuple[Buffer, memoryview, int]]:
        """Copies of the bytes `data` (n,), with their offsets, each aligned as its offset is.

        Waits while all buffers are with the writers. The caller gives each buffer back.
        """
        start = 0
        while start < len(data):
            at = offset + start
            count = min(len(data) - start, BUFFER_BYTES - at % PAGE)
            buffer = self._take()
            begin = at % PAGE
            buffer.memory[begin : begin + count].copy_(data[start : start + count])
            yield buffer, buffer.view[begin : begin + count], at
            start += count

    def _take(self) -> Buffer:
        if self._made < BUFFERS:  # a race makes one or two more, no harm
            with contextlib.suppress(queue.Empty):
                return self._free.get_nowait()
            self._made += 1
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, BUFFER_BYTES + PAGE, flags=flags)
            with torch.inference_mode(False):  # to be filled by threads in either mode
                memory = torch.frombuffer(pages, dtype=torch.uint8)
            return Buffer(memory, as_bytes(memory))
        return self._free.get()

    def give_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def close(self) -> None:
        self.pool.shutdown(wait=True)
