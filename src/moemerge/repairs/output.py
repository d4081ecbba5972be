"""The output of a repair: finished layers next to OUT while it runs, and OUT at the end.

A finished layer is `NNNN.safetensors`, its new tensors, and one line of `layers.jsonl`, its rows of
the report. `key.json` states what they depend on. A run that was killed or interrupted continues
after the last layer with both. The folder disappears when OUT appears, or when the same run would
fail again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor

from moemerge.checkpoint import Checkpoint, CheckpointPatch, require_space
from moemerge.checkpoint.output import writing
from moemerge.checkpoint.patch import Quantised
from moemerge.checkpoint.safetensors_file import SafetensorsFile, build_header
from moemerge.checkpoint.tensors import TensorInfo, as_bytes
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    DataError,
    MoeMergeError,
    NumericalError,
    UsageError,
)
from moemerge.repairs.states import SavedStates, WorkFolder
from moemerge.runtime.journals import journal_path
from moemerge.runtime.ranks import SINGLE, Ranks

COMPANION_BYTES: Final = 16 * 2**20  # for report, card and config next to the weights
LINES: Final = "layers.jsonl"
FORMAT: Final = 4  # raised when older journals can no longer be read


class RefusedResultError(NumericalError):
    """A result that only the settings refuse: finished layers stay useful with others."""


# After these errors a second attempt would fail again, so the journal is removed.
PERMANENT = (ArchitectureError, DataError, NumericalError, UsageError)


@dataclass(frozen=True)
class Finished:
    """A finished layer: its tensors as they are stored, and its rows of the report."""

    name: str
    tensors: Mapping[str, Tensor]  # by their names in the checkpoint; read when they are used
    rows: list[dict[str, Any]]


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a file, read one by one."""

    def __init__(self, path: Path) -> None:
        self._file = SafetensorsFile(path)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._file.tensors:
            raise KeyError(name)
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.tensors)

    def __len__(self) -> int:
        return len(self._file.tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, which appears whole."""
    infos = [TensorInfo.of(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    header, offsets = build_header(infos)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(header)
        for name in sorted(offsets, key=offsets.__getitem__):
            file.write(as_bytes(tensors[name].contiguous()))
    part.replace(path)


class Journal(WorkFolder):
    """The finished layers of one run."""

    def __init__(self, out: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        super().__init__(out, journal_path(out), {"format": FORMAT, **key}, replace=replace)
        self.finished: list[Finished] = list(self._read()) if self.continues else []

    def _read(self) -> Iterator[Finished]:
        """Yield layers up to the first one that is incomplete."""
        path = self.folder / LINES
        lines = path.read_text("utf-8", "replace").split("\n")[:-1] if os.path.isfile(path) else []
        for number, line in enumerate(lines):
            try:
                content = json.loads(line)
                tensors = StoredTensors(self.folder / f"{number:04d}.safetensors")
                yield Finished(content["layer"], tensors, content["rows"])
            except (MoeMergeError, ValueError, KeyError, TypeError):
                return

    def add(self, name: str, tensors: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Write a layer to disk."""
        path = self.folder / f"{len(self.finished):04d}.safetensors"
        with writing(self.folder):
            if not self.continues:
                self.create()
            write_tensors(path, tensors)
            self.finished.append(Finished(name, StoredTensors(path), rows))
            lines = [json.dumps({"layer": one.name, "rows": one.rows}) for one in self.finished]
            part = self.folder / f"{LINES}.part"
            part.write_text("".join(f"{line}\n" for line in lines), "utf-8")
            part.replace(self.folder / LINES)


class Output:
    """OUT as a copy of the merged model with new tensors; it appears complete or not at all.

    Only rank 0 writes; other ranks know the finished layers of the journal. If not `write`, nothing
    is written, and only the rows of the report are kept.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        *,
        others: Sequence[Checkpoint] = (),
        overwrite: bool = False,
        link: bool = False,
        quantised: Quantised = "keep",
        write: bool = True,
        in_background: bool = False,
        ranks: Ranks = SINGLE,
    ) -> None:
        """Refuse an output that must not be written, or does not fit on the disk.

        `others` are further models that the result depends on: OUT must not overwrite them, and
        they must not change. `link` makes hard links for unchanged shards.
        """
        self.finished: list[Finished] = []
        self.resumed = 0  # layers of a killed run
        self.states: SavedStates | None = None  # of a training: not needed once OUT is complete
        self._out, self._others, self._ranks = out, others, ranks
        self._held: Iterable[tuple[str, Tensor]] = ()
        self._journal: Journal | None = None
        self._patch: CheckpointPatch | None = None
        # A GPU computes the next layer while the disk takes one.
        self._pool = ThreadPoolExecutor(1, "moemerge-journal") if in_background else None
        self._adding: Future[None] | None = None
        if not (write and ranks.leads):
            return
        inputs = [folder for other in others for folder in other.folders]
        self._patch = CheckpointPatch(
            source, out, overwrite=overwrite, link=link, inputs=inputs, quantised=quantised
        )
        try:
            require_space(out, self._patch.nbytes + COMPANION_BYTES)
        except BaseException:
            self._patch.abort()
            raise

    def begin(self, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Read the finished layers of a killed run, and copy unchanged tensors from now on.

        `key` is everything that the result depends on, as plain data. Work of another run is
        refused, or replaced if `replace`.
        """
        if self._patch is not None:
            self._journal = Journal(self._out, key, replace=replace)
            self.finished = list(self._journal.finished)
            self._patch.begin(())
        if self._ranks.count > 1:
            # Other ranks read the tensors from rank 0's folder.
            lead = self._ranks.broadcast_object([(one.name, one.rows) for one in self.finished])
            folder = self._ranks.broadcast_object(journal_path(self._out).absolute())
            if not self._ranks.all_agree(not lead or os.path.isdir(folder)):
                raise CheckpointError(
                    f"{folder}: not every process can read the finished layers",
                    hint="resume with the processes on one machine or file system, or start anew "
                    "with `overwrite=True`",
                )
            if not self._ranks.leads:
                files = [folder / f"{number:04d}.safetensors" for number in range(len(lead))]
                self.finished = [
                    Finished(name, StoredTensors(file), rows)
                    for (name, rows), file in zip(lead, files, strict=True)
                ]
        self.resumed = len(self.finished)

    def add(self, name: str, tensors: Mapping[str, Tensor], rows: list[dict[str, Any]]) -> None:
        """Store a finished layer."""
        self.finished.append(Finished(name, {}, rows))
        if self._journal is None or self._patch is None:
            return
        for tensor in tensors:
            self._patch.require_writable(tensor)
        self.check()
        if self._pool is None:
            self._journal.add(name, tensors, rows)
        else:
            self._adding = self._pool.submit(self._journal.add, name, tensors, rows)

    def hold(self, tensors: Iterable[tuple[str, Tensor]], row: dict[str, Any]) -> None:
        """Add tensors that are not stored before `write`, which takes them one by one.

        They are for a result as large as OUT: storing it first would take as long as writing it.
        """
        self.finished.append(Finished("", {}, [row]))
        self._held = tensors

    def check(self) -> None:
        """Raise an error of the background work, if there was one."""
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()
        if self._patch is not None:
            self._patch.poll()

    @property
    def copied(self) -> tuple[float, int]:
        """Seconds and bytes of copying the unchanged tensors."""
        return (0.0, 0) if self._patch is None else self._patch.copied

    def write(self) -> dict[str, Any]:
        """Write the new tensors to OUT; return their quantisation errors by format."""
        self.check()
        if self._patch is None or self._journal is None:
            return {}
        for one in self._journal.finished:
            for name, tensor in one.tensors.items():
                self._patch.write(name, tensor)
        for name, tensor in self._held:
            self._patch.write(name, tensor)
        return self._patch.rounding.sums

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add files next to the weights, and put OUT into place."""
        if self._patch is not None and self._journal is not None:
            for name, data in files.items():
                self._patch.add_bytes(name, data)
            for other in self._others:
                other.require_unchanged()
            self._patch.commit()
            self._journal.remove()
        self._close_states(keep=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        hopeless = isinstance(error, PERMANENT) and not isinstance(error, RefusedResultError)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        # The journal first: OUT's parents can be removed only once nothing is in them.
        self._close_states(keep=not hopeless)
        if self._journal is not None:
            if hopeless:
                self._journal.remove()
            self._journal.close()
        if self._patch is not None:
            self._patch.abort()

    def _close_states(self, *, keep: bool) -> None:
        states, self.states = self.states, None
        if states is not None:
            states.close(keep=keep)
