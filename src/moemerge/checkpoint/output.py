"""An output folder that appears complete or not at all.

Everything is written into a hidden folder next to it (`.OUT.partial-PID-RANDOM`), which is renamed
at the end. A killed run leaves that folder behind, and the next run with the same OUT removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from moemerge.checkpoint.folder import CARRIED_FOLDERS, is_companion, is_weights, place_in
from moemerge.checkpoint.tensors import format_size
from moemerge.errors import CheckpointError, MoeMergeError, ResourceError
from moemerge.runtime.checksums import PartSums, add_checksums
from moemerge.runtime.devices import free_disk
from moemerge.runtime.files import abandoned, hidden_pattern, hidden_sibling, write_file
from moemerge.runtime.outputs import check_name

KEPT_FOLDER: Final = "moemerge_tasks"  # parts of the merged models, see `merging.kept`
# Folders that tools create in a model folder; they contain no data of the user.
_KNOWN_FOLDERS: Final = frozenset({*CARRIED_FOLDERS, ".cache", KEPT_FOLDER})
_OF_A_MODEL: Final = frozenset(
    {"config.json", "readme.md", ".gitattributes", "moemerge_report.json", "moemerge_config.yml"}
    | {"adapter_config.json", "trainer_state.json", "all_results.json", "routing.html"}
)
_BLOCK: Final = 16 * 2**20  # copied at once
_CANNOT_SHARE: Final = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL: Final = "free some space, or choose an output folder on another disk"
_ADVICE: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EACCES: "you may not write there; choose another output folder or change permissions",
    errno.EPERM: "you may not write there; choose another output folder or change permissions",
    errno.EROFS: "that disk is read-only; choose an output folder on another one",
}


def require_space(out: Path, nbytes: int) -> None:
    """Refuse a job whose output cannot fit on the disk."""
    free = free_disk(out)
    if free < nbytes:
        raise ResourceError(
            f"{out} needs {format_size(nbytes)}, but only {format_size(free)} are free there",
            hint=_FULL,
        )


def check_output(out: Path, *, overwrite: bool | None, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output folder that must not be written, before any work is done.

    It is not an input, inside one, or around one. It replaces an existing folder only with
    `overwrite` (None if the caller has no such option), and only if that is a model folder.
    """
    check_name(out)
    target = _real(out)
    for folder in map(_real, inputs):
        if target.is_relative_to(folder) or folder.is_relative_to(target):
            where = "is" if target == folder else "overlaps"
            raise CheckpointError(
                f"the output {out} {where} the input folder {folder}",
                hint="choose an output folder outside every input",
            )
    parent = target.parent
    while not os.path.exists(parent):
        parent = parent.parent
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        fault = "is not writable" if os.path.isdir(parent) else "is a file"
        raise CheckpointError(
            f"the output {out} cannot be made: {parent} {fault}",
            hint="choose another output folder, or change permissions",
        )
    if not os.path.lexists(target):
        return
    try:
        entries = list(target.iterdir())
    except OSError as error:
        fault = "is a file" if os.path.isfile(target) else f"cannot be used: {error.strerror}"
        raise CheckpointError(
            f"the output {out} {fault}", hint="choose another output folder"
        ) from error
    if os.path.ismount(target):
        raise CheckpointError(
            f"the output {out} is a mount point, so it cannot be replaced as a whole",
            hint=f"name a folder in it, such as {out / 'merged'}",
        )
    if not entries:
        return
    if not overwrite:
        raise CheckpointError(
            f"the output {out} exists",
            hint="choose another folder"
            + ("" if overwrite is None else ", or allow it: `overwrite=True`"),
        )
    foreign = sorted(path.name for path in entries if not _may_be_replaced(path))
    is_model = any(path.name == "config.json" or is_weights(path.name) for path in entries)
    if foreign or not is_model:
        reason = f"it holds {foreign[0]}" if foreign else "it holds no model"
        raise CheckpointError(
            f"the output {out} exists and is not overwritten: {reason}, so other data would be "
            "lost with it",
            hint="choose another output folder, or empty this one yourself",
        )


def _may_be_replaced(path: Path) -> bool:
    """Return whether an entry belongs to a model folder and may be deleted with it."""
    if os.path.isdir(path) and not os.path.islink(path):
        return path.name in _KNOWN_FOLDERS
    name = path.name.lower()
    return is_weights(name) or is_companion(name) or name in _OF_A_MODEL


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


class OutputFolder:
    """A hidden folder that becomes OUT on `commit`, and is removed on `abort`."""

    def __init__(self, out: Path, *, overwrite: bool | None, inputs: Sequence[Path] = ()) -> None:
        check_output(out, overwrite=overwrite, inputs=inputs)
        self.out = out
        self.committed = False
        self._target = _real(out)
        self._overwrite = overwrite
        self._made = [path for path in self._target.parents if not os.path.exists(path)]
        self.path = hidden_sibling(self._target, "partial")
        with writing(out):
            try:
                self.path.mkdir(parents=True)
                kinds = "(?:partial|replaced)" if os.path.lexists(self._target) else "partial"
                for path in abandoned(self.path.parent, hidden_pattern(self._target, kinds)):
                    shutil.rmtree(path, ignore_errors=True)
            except BaseException:  # a signal too
                self.abort()
                raise

    def add_bytes(self, name: str, data: bytes) -> None:
        """Write a small file, replacing one of that name."""
        with writing(self.out):
            write_file(place_in(self.path, name, self.out), data)

    def add_file(self, source: Path, name: str | None = None) -> None:
        """Copy a file under its own name or another, replacing one of that name."""
        with writing(self.out):
            path = place_in(self.path, name if name is not None else source.name, self.out)
            path.unlink(missing_ok=True)
            copy_file(source, path)

    def commit(self, known: PartSums | None = None) -> None:
        """Add checksums to the report, also those that are `known`, and rename into place.

        With `overwrite`, the old folder is moved aside before the rename and deleted after it.
        """
        with writing(self.out):
            add_checksums(self.path, known)
            # OUT may have been made or filled since the job began.
            check_output(self.out, overwrite=self._overwrite)
            old = None
            if self._overwrite and os.path.lexists(self._target):
                old = hidden_sibling(self._target, "replaced")
                os.rename(self._target, old)
            try:  # fails if another run has put files there meanwhile
                os.rename(self.path, self._target)
            except BaseException:
                if old is not None:
                    os.rename(old, self._target)
                raise
            self.committed = True
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)

    def abort(self) -> None:
        """Remove everything that was created. Does nothing after a commit."""
        if self.committed:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self._made)
        self._made.clear()


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it contains another output
            folder.rmdir()


@contextlib.contextmanager
def temporary_sibling(out: Path) -> Iterator[Path]:
    """Create a hidden folder next to OUT, removed at the end.

    It is named like an unfinished output, so that the next run that writes OUT removes what a
    killed run left.
    """
    folder = hidden_sibling(_real(out), "partial")
    made = [path for path in folder.parents if not os.path.exists(path)]
    try:
        with writing(out):
            folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(made)


def temporary_folder(prefix: str, folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory, and remove those of killed runs."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder
    for path in abandoned(parent, rf"{re.escape(prefix)}(\d+)-\w+"):
        shutil.rmtree(path, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=folder)


def copy_file(source: Path, target: Path, check: Callable[[], None] = lambda: None) -> None:
    """Copy contents, sharing blocks if the file system can. Follows symlinks.

    `check` is called between blocks and may raise to stop the copy.
    """
    if not os.access(source, os.R_OK):
        raise CheckpointError(
            f"{source} cannot be read",
            hint="the file must be copied into the output; restore it or its permissions",
        )
    with open(source, "rb") as reader, open(target, "xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        ends = reader.fileno(), writer.fileno()
        shared = hasattr(os, "copy_file_range")  # not on macOS
        done = 0
        while done < size:
            check()
            count = 0
            try:
                if shared:
                    count = os.copy_file_range(*ends, min(size - done, _BLOCK), done, done)
            except OSError as error:
                if error.errno not in _CANNOT_SHARE:
                    raise
            if not count:
                shared = False
                block = os.pread(ends[0], min(size - done, _BLOCK), done)
                count = os.pwrite(ends[1], block, done)
            if not count:
                break
            done += count
        if done != size:
            raise CheckpointError(
                f"{source} had {size} bytes when its copy began and {done} at its end",
                hint="another process writes to it; repeat this when it is finished",
            )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError, or that of torch.save, into an error with a hint."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_failed_save(error):
            raise
        raise output_error(error, path) from error


def is_failed_save(error: Exception) -> bool:
    """Return whether torch.save could not write a file. It does not say why."""
    text = str(error)
    return "inline_container" in text and "Reader" not in text


def output_error(error: OSError | RuntimeError, path: Path) -> MoeMergeError:
    if not isinstance(error, OSError):
        return CheckpointError(
            f"{path} cannot be written: torch wrote a part of a file", hint=_FULL
        )
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}",
        hint=_ADVICE.get(error.errno or 0, "check the disk, or choose another output folder"),
    )
