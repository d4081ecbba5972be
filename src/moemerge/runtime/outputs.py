"""One rule for every file that a command writes.

It is neither an input nor inside one, and it replaces a file only with `overwrite` and only if
moemerge wrote that file. Folders are checked by `checkpoint.output`.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.files import open_plain

_BEGINNING: Final = 4096  # bytes that are read to recognise a file


class FileKind(Enum):
    """The files that moemerge writes, each with a pattern that it begins with."""

    REPORT = rb'\{\s*"moemerge": '
    PAGE = rb'(?s)<!doctype html>.{0,300}<meta name="generator" content="moemerge '
    STATISTICS = rb'(?s).{8}\{"__metadata__":\{"format":"pt","moemerge'
    COEFFICIENTS = rb"made_by:\n  version: "
    # Rows have no place for a mark: these are the columns that we write first.
    ROWS = rb'\{"(text|prompt|messages|where)": '

    def matches(self, path: Path) -> bool:
        """Return whether the file begins like one that moemerge wrote. An empty file does."""
        with open(open_plain(path), "rb") as file:
            begin = file.read(_BEGINNING)
        if begin.startswith(b"\x1f\x8b"):
            with gzip.open(path, "rb") as packed:
                begin = packed.read(_BEGINNING)
        return not begin or re.match(self.value, begin) is not None


def check_output_file(
    out: Path,
    kind: FileKind,
    *,
    overwrite: bool,
    inputs: Iterable[object] = (),
    what: str = "the output",
) -> None:
    """Refuse an output file that must not or cannot be written, before any work is done.

    `inputs` are files and folders as a caller names them; anything else, such as hub ids, is
    skipped. `what` names the output in messages.
    """
    check_name(out)
    parent = out.absolute().parent
    fault = (
        "it is a folder"
        if os.path.isdir(out)
        else f"there is no folder {parent}"
        if not os.path.isdir(parent)
        else f"{parent} is not writable"
        if not os.access(parent, os.W_OK | os.X_OK)
        else None
    )
    if fault is not None:
        raises = UsageError if kind in (FileKind.REPORT, FileKind.PAGE) else CheckpointError
        raise raises(f"{what} {out} cannot be made: {fault}", hint="name a file in another folder")
    check_apart(out, inputs, what)
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise CheckpointError(
            f"{what} {out} exists", hint="choose another name, or allow it: `overwrite=True`"
        )
    try:
        ours = kind.matches(out)
    except (OSError, EOFError):
        ours = False
    if not ours:
        raise CheckpointError(
            f"{what} {out} exists and is not overwritten: moemerge has not written it, or it is "
            "another kind of file",
            hint="choose another name, or remove the file yourself",
        )


def check_name(out: Path) -> None:
    """Refuse a name that cannot be written into a report, and a path that cannot be looked at."""
    for name in (str(out), os.path.realpath(out)):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise CheckpointError(
                f"the output {os.fsencode(name)!r} has a name that is not UTF-8",
                hint="reports cannot contain it; choose another name",
            ) from None
    try:
        os.lstat(out)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:  # a path that is too long, a loop of links
        raise CheckpointError(
            f"the output {str(out)[:200]} cannot be used: {error.strerror}",
            hint="choose another output",
        ) from error


def check_apart(out: Path, inputs: Iterable[object], what: str = "the output") -> None:
    """Refuse an output that is an input, also by a link, or inside an input folder."""
    target = Path(os.path.realpath(out))
    identity = _identity(target)
    # Rows in memory are no files. A model may have a LoRA adapter: `path+lora`.
    names = [str(one) for one in inputs if not isinstance(one, Mapping)]
    for name in (part for one in names for part in {one, *one.split("+")}):
        given = _identity(Path(name)) if name else None
        if given is None:
            continue
        if identity == given:
            raise CheckpointError(
                f"{what} {out} is also an input: {name}", hint="choose another output"
            )
        if target.is_relative_to(os.path.realpath(name)) or _holds(Path(name), identity):
            raise CheckpointError(
                f"{what} {out} is inside the input {name}",
                hint="choose an output outside every input",
            )


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what all names of a file have in common, or None if there is no such file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _holds(folder: Path, identity: tuple[int, int] | None) -> bool:
    """Return whether a file in this folder has that identity: a hard link."""
    if identity is None or not os.path.isdir(folder):
        return False
    try:
        return any(_identity(path) == identity for path in folder.iterdir())
    except OSError:  # the job cannot read it either
        return False
