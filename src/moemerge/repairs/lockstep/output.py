"""The output of a repair: a journal of finished entries, and OUT at the end."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from moemerge.checkpoint import Checkpoint, CheckpointPatch, require_space
from moemerge.checkpoint.patch import Quantised
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    DataError,
    NumericalError,
    UsageError,
)
from moemerge.repairs.lockstep.journal import Entry, Journal, SavedStates
from moemerge.runtime.ranks import SINGLE, Ranks

# Space for report, card and config next to the weights.
COMPANION_BYTES = 16 * 2**20


class RefusedResultError(NumericalError):
    """A result that only the settings refuse: finished entries stay useful with others."""


# After these errors a second attempt would fail again, so the journal is removed.
PERMANENT = (ArchitectureError, DataError, NumericalError, UsageError)


class Output:
    """Finished entries in memory. It writes nothing, so it drops their tensors."""

    def __init__(self) -> None:
        self.entries: Sequence[Entry] = []
        self.resumed = 0  # entries of a killed run
        self.states: SavedStates | None = None  # of a training: not needed once OUT is complete
        self._number = 0

    @property
    def copied(self) -> tuple[float, int]:
        """Seconds and bytes of copying the unchanged tensors."""
        return 0.0, 0

    def begin(
        self, key: Mapping[str, Any], names: Collection[str], *, replace: bool = False
    ) -> None:
        """Begin the work.

        `key` is everything that the result depends on, as plain data. `names` are the stored
        tensors that will change. Unfinished work of this run is continued. That of another one is
        refused, or replaced if `replace`.
        """

    def finished(self, name: str) -> Entry | None:
        """Return the next entry if a killed run had finished it; it must be named `name`."""
        number = self._number
        self._number += 1
        if number >= self.resumed:
            return None
        entry = self.entries[number]
        if entry.name != name:
            raise CheckpointError(
                f"{self.where}: entry {number} is of {entry.name}, but the model runs {name} there",
                hint="the journal is damaged; remove it",
            )
        return entry

    @property
    def where(self) -> str:
        return "memory"

    def add(self, entry: Entry) -> None:
        self.entries = [*self.entries, replace(entry, tensors={})]

    def hold(self, entry: Entry, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add an entry that is not stored before `write`, which takes its tensors one by one.

        It is for a result as large as OUT: storing it first would take as long as writing it.
        """
        self.add(entry)

    def check(self) -> None:
        """Raise an error of the background work, if there was one."""

    def write(self) -> dict[str, Any]:
        """Write the tensors of all entries to OUT.

        Return their quantisation errors (`RoundingErrors.sums`).
        """
        return {}

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add `files` next to the weights, after all tensors were written."""
        self._close_states(keep=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._close_states(keep=not _is_hopeless(error))

    def _close_states(self, *, keep: bool) -> None:
        states, self.states = self.states, None
        if states is not None:
            states.close(keep=keep)


def _is_hopeless(error: BaseException | None) -> bool:
    """Return whether the same run would fail again, so that unfinished work is of no use."""
    return isinstance(error, PERMANENT) and not isinstance(error, RefusedResultError)


class FollowingOutput(Output):
    """The output in ranks other than 0, which writes: it has the finished entries of rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def begin(
        self, key: Mapping[str, Any], names: Collection[str], *, replace: bool = False
    ) -> None:
        nothing: tuple[list[Entry], str | None] = [], None
        self.entries, folder = self._ranks.broadcast_object(nothing)
        self.resumed = len(self.entries)
        if not self._ranks.all_agree(folder is None or os.path.isdir(folder)):
            self.entries = self._ranks.broadcast_object([])  # with their tensors


class PatchedOutput(Output):
    """OUT as a copy of a model with some tensors replaced. It appears complete or not at all.

    Unchanged tensors are copied in the background from `begin` on. A run that is killed or
    interrupted leaves a journal of its entries next to OUT.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        *,
        others: Sequence[Checkpoint] = (),
        overwrite: bool = False,
        link: bool = False,
        in_background: bool = False,
        quantised: Quantised = "keep",
        ranks: Ranks = SINGLE,
    ) -> None:
        """Refuse an output that must not be written, or does not fit on the disk.

        `others` are further models that the result depends on: OUT must not overwrite them, and
        they must not change. `link` makes hard links for unchanged shards.
        """
        super().__init__()
        self._ranks = ranks
        self._out = out
        self._journal: Journal | None = None
        # A GPU computes the next entry while the disk makes one durable.
        self._later: ThreadPoolExecutor | None = None
        if in_background:
            self._later = ThreadPoolExecutor(1, "moemerge-journal")
        self._adding: Future[None] | None = None
        self._held: Iterable[tuple[str, Tensor]] = ()
        self._others = others
        inputs = [folder for other in others for folder in other.folders]
        self._patch = CheckpointPatch(
            source, out, overwrite=overwrite, link=link, inputs=inputs, quantised=quantised
        )
        self._written = False
        try:
            require_space(out, self._patch.nbytes + COMPANION_BYTES)
        except BaseException:
            self._patch.abort()
            raise

    @property
    def copied(self) -> tuple[float, int]:
        return self._patch.copied

    @property
    def where(self) -> str:
        return "memory" if self._journal is None else str(self._journal.folder)

    def begin(
        self, key: Mapping[str, Any], names: Collection[str], *, replace: bool = False
    ) -> None:
        self._journal = Journal(self._out, key, replace=replace)
        self.entries = self._journal.entries
        self.resumed = len(self.entries)
        if self._ranks.count > 1:
            self._send_to_others(self._journal)
        self._patch.begin(names)

    def _send_to_others(self, journal: Journal) -> None:
        """Send the finished entries; other ranks read the tensors if they can read the journal."""
        entries = list(self.entries)
        self._ranks.broadcast_object((entries, str(journal.folder) if entries else None))
        if not self._ranks.all_agree(True):
            self._ranks.broadcast_object([replace(e, tensors=dict(e.tensors)) for e in entries])

    def add(self, entry: Entry) -> None:
        assert self._journal is not None
        self._wait()
        if self._later is None:
            self._journal.add(entry)
        else:
            self._adding = self._later.submit(self._journal.add, entry)

    def hold(self, entry: Entry, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().add(entry)
        self._held = tensors

    def check(self) -> None:
        self._wait()
        self._patch.poll()

    def _wait(self) -> None:
        """Wait until the last entry is durable."""
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()

    def write(self) -> dict[str, Any]:
        self._wait()
        for entry in self.entries:
            for name, tensor in entry.tensors.items():
                self._patch.write(name, tensor)
        for name, tensor in self._held:
            self._patch.write(name, tensor)
        self._written = True
        return self._patch.rounding.sums

    def finish(self, files: Mapping[str, bytes]) -> None:
        assert self._journal is not None
        if not self._written:
            self.write()
        for name, data in files.items():
            self._patch.add_bytes(name, data)
        for other in self._others:
            other.require_unchanged()
        self._patch.commit()
        self._journal.remove()
        super().finish(files)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._later is not None:
            self._later.shutdown(wait=True)
        # The journal first: OUT's parents can be removed only once nothing is in them.
        super().__exit__(kind, error, trace)
        if self._journal is not None:
            if _is_hopeless(error):
                self._journal.remove()
            self._journal.close()
        self._patch.abort()
