"""How much of everything a confined process may use."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Bounds of one process.

    Processor time does not depend on what else the machine does, so that is what counts; the clock
    only ends what waits.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 25.0
    memory: int = 4 * GIB  # address space; numpy alone reserves most of one
    file_bytes: int = 64 * MIB  # of all files together where it has a file system of its own
    open_files: int = 64
    processes: int = 100  # threads; other processes are refused anyway where calls are filtered
    answer: int = 8 * MIB  # bytes that may come back

    def with_time(self, cpu_seconds: float) -> Limits:
        """More or less time, by the clock as well."""
        factor = cpu_seconds / self.cpu_seconds
        return replace(self, cpu_seconds=cpu_seconds, wall_seconds=self.wall_seconds * factor)
