"""Where a calibration's routers go: into a journal as they are found, at the end into OUT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from moemerge.calibration.journal import Entry, Journal
from moemerge.calibration.prepare import Prepared
from moemerge.calibration.provenance import output_files
from moemerge.calibration.report import CalibrationReport
from moemerge.checkpoint import CheckpointPatch
from moemerge.errors import ArchitectureError, DataError, NumericalError, UsageError
from moemerge.runtime.threads import thread_pool
from moemerge.version import __version__


class StrictError(NumericalError):
    """A solve that --strict refuses."""


# After these a second attempt would end the same: what is finished is of no use.
HOPELESS = (ArchitectureError, DataError, NumericalError, UsageError)


class Output:
    """Finished routers, kept in memory alone."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.where = "memory"

    @property
    def copied(self) -> tuple[float, int]:
        """Seconds and bytes of the copy of what stays as merged."""
        return 0.0, 0

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def check(self) -> None:
        """Raise what has gone wrong in the background, if anything has."""

    def finish(self, report: CalibrationReport) -> None:
        """All routers are there."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class OutputFolder(Output):
    """OUT in the making, whole or not at all; what stays as merged is copied from the start.

    A run that is killed or interrupted leaves a journal of its finished routers beside OUT.
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__()
        request = prepared.request
        self._prepared = prepared
        self._journal = Journal.open(request.out, prepared.key, resume=request.resume)
        self.entries = self._journal.entries
        self.where = str(self._journal.folder)
        # A GPU solves for the next router in the time that a disk takes to make one durable.
        self._later: ThreadPoolExecutor | None = None
        if prepared.device.type != "cpu":
            self._later = thread_pool(1, "moemerge-journal")
        self._adding: Future[None] | None = None
        try:
            self._patch = CheckpointPatch(
                prepared.merged.checkpoint,
                request.out,
                overwrite=request.overwrite,
                link=request.passing,
                inputs=_inputs(prepared),
            )
        except BaseException:
            self._journal.close()
            raise

    @property
    def copied(self) -> tuple[float, int]:
        return self._patch.copied

    def __enter__(self) -> Self:
        try:
            self._patch.begin([pair.place.weight for pair in self._prepared.routers])
        except BaseException:
            self._patch.abort()
            self._journal.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._later is not None:
            self._later.shutdown(wait=True)
        # The journal first: OUT's parents can be removed only once nothing is in them. Without
        # --strict, what it refused is as good as any.
        if isinstance(error, HOPELESS) and not isinstance(error, StrictError):
            self._journal.remove()
        self._journal.close()
        self._patch.abort()

    def add(self, entry: Entry) -> None:
        self._settle()
        if self._later is None:
            self._journal.add(entry)
        else:
            self._adding = self._later.submit(self._journal.add, entry)

    def check(self) -> None:
        self._settle()
        self._patch.poll()

    def _settle(self) -> None:
        """Wait until what was added is durable."""
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()

    def finish(self, report: CalibrationReport) -> None:
        biases = {pair.place.weight: pair.place.bias for pair in self._prepared.routers}
        for entry in self.entries:
            self._patch.write(entry.router, entry.weight)
            bias = biases[entry.router]
            if bias is not None and entry.bias is not None:
                shape = self._prepared.merged.checkpoint.tensors[bias].shape
                self._patch.write(bias, entry.bias.reshape(shape))
        for name, data in output_files(self._prepared, report, __version__).items():
            self._patch.add_bytes(name, data)
        self._patch.commit()
        self._journal.remove()


def open_output(prepared: Prepared) -> Output:
    make: Callable[[], Output] = (
        (lambda: OutputFolder(prepared)) if prepared.request.write else Output
    )
    return make()


def _inputs(prepared: Prepared) -> Sequence[Path]:
    return [f for source in prepared.sources.values() for f in source.checkpoint.folders]
