"""An output folder that appears complete or not at all.

Everything is written into a hidden folder next to it (`.OUT.partial-PID-RANDOM`), which is renamed
at the end. A killed run leaves that folder behind. The next run with the same OUT removes it if its
process is gone and its lock is free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from moemerge.checkpoint.folder import CARRIED_FOLDERS, is_companion, is_weights, place_in
from moemerge.checkpoint.tensors import format_size
from moemerge.errors import CheckpointError, MoeMergeError, ResourceError
from moemerge.runtime.checksums import PartSums, add_checksums
from moemerge.runtime.devices import free_disk
from moemerge.runtime.files import (
    abandoned,
    hidden_pattern,
    hidden_sibling,
    lock_folder,
    sync_folder,
    write_file,
)
from moemerge.runtime.outputs import check_name

KEPT_FOLDER: Final = "moemerge_tasks"  # parts of the merged models, see `merging.kept`
# Folders that tools create in a model folder; they contain no data of the user.
_KNOWN_FOLDERS: Final = frozenset({*CARRIED_FOLDERS, ".cache", KEPT_FOLDER})
_OF_A_MODEL: Final = frozenset(
    {"config.json", "readme.md", ".gitattributes", "moemerge_report.json", "moemerge_config.yml"}
    | {"adapter_config.json", "trainer_state.json", "all_results.json", "routing.html"}
)
_BLOCK: Final = 64 * 2**20  # copied by the kernel between two calls of `check`
_SMALL_BLOCK: Final = 2**20  # the same for copies through this process
_OF_A_DISK: Final = frozenset({"lost+found"})  # entries of an empty disk
_ADVICE: Final = {
    errno.ENOSPC: "free some space, or choose an output folder on another disk",
    errno.EDQUOT: "your disk quota is used up; free some space or choose another folder",
    errno.EACCES: "you may not write there; choose another output folder or change permissions",
    errno.EPERM: "you may not write there; choose another output folder or change permissions",
    errno.EROFS: "that disk is read-only; choose an output folder on another one",
    errno.ENOTDIR: "a part of the path is a file; choose another output folder",
}


def require_space(out: Path, nbytes: int) -> None:
    """Refuse a job whose output cannot fit on the disk."""
    free = free_disk(out)
    if free < nbytes:
        raise ResourceError(
            f"{out} needs {format_size(nbytes)}, but only {format_size(free)} are free there",
            hint=_ADVICE[errno.ENOSPC],
        )


def check_output(out: Path, *, overwrite: bool | None, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output folder that must not be written, before any work is done.

    `overwrite` is None if the caller has no such option.
    """
    check_name(out)
    target = _real(out)
    for folder in map(_real, inputs):
        if _of_this_run(folder, target):
            continue
        if target == folder or target.is_relative_to(folder) or folder.is_relative_to(target):
            where = "is" if target == folder else "overlaps"
            raise CheckpointError(
                f"the output {out} {where} the input folder {folder}",
                hint="choose an output folder outside every input",
            )
    if os.path.lexists(target):
        _check_replaceable(out, target, overwrite)
    _check_writable(out, target)


def _of_this_run(folder: Path, target: Path) -> bool:
    """Return whether an input is in a hidden folder of OUT.

    A merge that is then repaired is there if OUT is a mount point.
    """
    return folder.is_relative_to(target) and any(
        path.parent == target and _is_unfinished(path, target) for path in (folder, *folder.parents)
    )


def _check_writable(out: Path, target: Path) -> None:
    parent = target if os.path.ismount(target) else target.parent
    while not os.path.exists(parent):
        parent = parent.parent
    if not os.path.isdir(parent):
        raise CheckpointError(
            f"the output {out} cannot be made: {parent} is a file", hint=_ADVICE[errno.ENOTDIR]
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        read_only = os.statvfs(parent).f_flag & os.ST_RDONLY
        raise CheckpointError(
            f"the output {out} cannot be made: {parent} is not writable",
            hint=_ADVICE[errno.EROFS if read_only else errno.EACCES],
        )


def _check_replaceable(out: Path, target: Path, overwrite: bool | None) -> None:
    try:
        entries = [p for p in target.iterdir() if not _is_unfinished(p, target)]
    except NotADirectoryError:
        raise CheckpointError(
            f"the output {out} exists and is a file", hint="choose another output folder"
        ) from None
    except FileNotFoundError:  # another run has just moved it
        return
    except OSError as error:  # a loop of symbolic links, a folder that cannot be read
        raise CheckpointError(
            f"the output {out} cannot be used: {error.strerror}",
            hint="choose another output folder",
        ) from error
    if os.path.ismount(target) and {p.name for p in entries} - _OF_A_DISK:
        raise CheckpointError(
            f"the output {out} is a mount point and not empty, so it cannot be replaced as a whole",
            hint=f"name a folder in it, such as {out / 'merged'}, or empty it yourself",
        )
    if os.path.ismount(target) or not entries:
        return
    if not overwrite:
        raise CheckpointError(
            f"the output {out} exists",
            hint="choose another folder"
            + ("" if overwrite is None else ", or allow it: `overwrite=True`"),
        )
    foreign = sorted(p.name for p in entries if not _may_be_replaced(p))
    is_model = any(p.name == "config.json" or is_weights(p.name) for p in entries)
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


def hidden_folder(out: Path, kind: str) -> Path:
    """Return a path next to OUT that later runs recognise.

    If OUT is a mount point, it is inside OUT: a mount point is another disk and cannot be renamed.
    """
    target = _real(out)
    path = hidden_sibling(target, kind)
    return target / path.name if os.path.ismount(target) else path


def _is_unfinished(path: Path, target: Path) -> bool:
    """Return whether this is the hidden folder of a run that writes `target`, alive or killed."""
    return re.fullmatch(hidden_pattern(target, "partial"), path.name) is not None


def temporary_folder(prefix: str, folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory, and remove those of killed runs."""
    parent = Path(tempfile.gettempdir()) if folder is None else folder
    _remove(abandoned(parent, rf"{re.escape(prefix)}(\d+)-\w+"))
    return tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=folder)


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
            f"{path} cannot be written: torch wrote a part of a file",
            hint=_ADVICE[errno.ENOSPC],
        )
    return CheckpointError(
        f"{path} cannot be written: {error.strerror or error}",
        hint=_ADVICE.get(error.errno or 0, "check the disk, or choose another output folder"),
    )


def _restore(target: Path) -> None:
    """Repair what a killed run with --overwrite left.

    Move the old model back, or finish its removal if the new one is in place.
    """
    if not os.path.isdir(target.parent):
        return
    for path in abandoned(target.parent, hidden_pattern(target, "replaced")):
        if os.path.lexists(target):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, target)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _missing_parents(target: Path) -> list[Path]:
    """Return the folders above `target` that do not exist, the innermost first."""
    return [path for path in target.parents if not os.path.exists(path)]


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it contains another output
            folder.rmdir()


class OutputFolder:
    """A hidden folder that becomes OUT on `commit`, and is removed on `abort`."""

    def __init__(self, out: Path, *, overwrite: bool | None, inputs: Sequence[Path] = ()) -> None:
        with writing(out):
            _restore(_real(out))
        check_output(out, overwrite=overwrite, inputs=inputs)
        self.out = out
        self._target = _real(out)
        self._overwrite = overwrite
        self._made = _missing_parents(self._target)
        self._lock: int | None = None
        self.committed = False
        self.path = hidden_folder(out, "partial")
        with writing(out):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._remove_stale()
                self.path.mkdir()
                self._lock = _lock(self.path)
            except BaseException:  # a signal too
                self.abort()
                raise

    def _remove_stale(self) -> None:
        for path in abandoned(self.path.parent, hidden_pattern(self._target, "partial")):
            lock = _lock(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)

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

        With `overwrite`, delete the old folder after the rename.
        """
        aside: list[Path] = []
        with writing(self.out):
            add_checksums(self.path, known)
            sync_folder(self.path)
            try:
                self._put_into_place(aside)
            except (OSError, CheckpointError):
                if aside and not os.path.lexists(self._target):
                    os.rename(aside.pop(), self._target)
                _remove(aside)
                raise
            self.committed = True
            with contextlib.suppress(OSError):  # OUT is already in place and complete
                sync_folder(self._target.parent)
        self._unlock()
        _remove(aside)

    def _put_into_place(self, aside: list[Path]) -> None:
        """Rename to OUT, and append a replaced folder to `aside`.

        Another run may create OUT at any moment; then check again whether it may be replaced.
        """
        while True:
            old = self._move_aside()
            if old is not None:
                aside.append(old)
            try:
                if self.path.parent == self._target:
                    self._move_up()
                else:
                    os.rename(self.path, self._target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def _move_aside(self) -> Path | None:
        try:
            if not os.path.lexists(self._target):
                return None
            # It may have been created or filled in the meantime.
            _check_replaceable(self.out, self._target, self._overwrite)
            if self.path.parent == self._target:
                return None
            old = hidden_folder(self.out, "replaced")
            os.rename(self._target, old)
        except FileNotFoundError:  # another run has moved it
            return None
        return old

    def _move_up(self) -> None:
        """Move the files from the hidden folder up into a mount point.

        config.json comes last: without it the folder does not count as a model.
        """
        for path in sorted(self.path.iterdir(), key=lambda path: path.name == "config.json"):
            os.rename(path, self._target / path.name)
        self.path.rmdir()

    def abort(self) -> None:
        """Remove everything that was created. Does nothing after a commit."""
        if self.committed:
            return
        self._unlock()
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self._made)
        self._made.clear()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path) -> int | None:
    """Lock a folder exclusively. Return None if it is locked or locks do not work."""
    try:
        return lock_folder(folder)
    except OSError:
        return None


def copy_file(source: Path, target: Path, check: Callable[[], None] | None = None) -> None:
    """Copy contents, sharing blocks if the file system can. Follows symlinks.

    `check` is called between blocks and may raise to stop the copy.
    """
    look = check if check is not None else lambda: None
    with _open_source(source) as reader, open(target, "xb") as writer:
        size = os.fstat(reader.fileno()).st_size
        try:
            _copy_by_system(reader, writer, size, look)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
                raise
            reader.seek(0)
            writer.seek(0)
            while block := reader.read(_SMALL_BLOCK):
                look()
                writer.write(block)
        writer.flush()
        if (copied := os.fstat(writer.fileno()).st_size) != size:
            raise CheckpointError(
                f"{source} had {size} bytes when its copy began and {copied} at its end",
                hint="another process writes to it; repeat this when it is finished",
            )
        os.fsync(writer.fileno())


def _copy_by_system(
    reader: BinaryIO, writer: BinaryIO, size: int, look: Callable[[], None]
) -> None:
    if not hasattr(os, "copy_file_range"):  # macOS
        raise OSError(errno.ENOSYS, "no copy_file_range")
    while size > 0:
        look()
        count = os.copy_file_range(reader.fileno(), writer.fileno(), min(size, _BLOCK))
        if count == 0:  # some file systems return 0 instead of failing
            raise OSError(errno.EINVAL, "nothing was copied")
        size -= count


def _open_source(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}",
            hint="the file must be copied into the output; restore it or its permissions",
        ) from error


@contextlib.contextmanager
def temporary_sibling(out: Path) -> Iterator[Path]:
    """Create a hidden folder next to OUT, removed at the end.

    It is named like an unfinished output, so that the next run that writes OUT removes what a
    killed run left.
    """
    folder = hidden_folder(out, "partial")
    made = _missing_parents(_real(out))
    try:
        with writing(out):
            folder.mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(made)
