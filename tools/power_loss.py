"""Replay a job's writes with a power loss at any moment: OUT must be absent or complete.

    python -m tools.power_loss [--states 2000] [--again 20] [--seed 1] [--job calibrate]

`strace` records every call that changes files. In a small model of a file system, data is durable
after a sync of its file, and names after a sync of their folder. At a random call the power fails.
Of the changes that were not yet synced, any may be on disk: a random subset of the writes, some cut
short, and the first names, or any names that do not depend on a lost one. Some of the states
without OUT are given to the same command again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.fuzz import cases, corpus, harness

JOBS = {"merge": cases.LINEAR, "calibrate": cases.CALIBRATE}
OUT = "out"
CALLS = (
    "openat,write,pwrite64,pwritev,pwritev2,writev,lseek,ftruncate,fallocate,copy_file_range,sendfile,"
    "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,link,linkat,"
    "symlink,symlinkat"
)
_LINE = re.compile(r"(?P<time>[\d.]+) (?P<call>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)")
_HEX = re.compile(r"\\x([0-9a-f]{2})")


# --- the file system ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """Bytes of a file; `data` is None for a new size."""

    file: int
    offset: int
    data: bytes | None


@dataclass(frozen=True)
class Name:
    """A name that appears (`inode`) or disappears; a renaming is both at once."""

    folder: int
    name: str
    inode: int | None
    old: tuple[int, str] | None = None


@dataclass(frozen=True)
class Sync:
    """Everything written to this file, or every name in this folder, is on disk."""

    inode: int


Change = Write | Name | Sync


@dataclass
class Disk:
    """Folders (names to inodes) and contents of files; inode 0 is the job's folder."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        if isinstance(change, Write):
            content = self.files.setdefault(change.file, bytearray())
            if change.data is None:
                del content[change.offset :]
            missing = change.offset - len(content)
            content.extend(bytes(max(0, missing)))
            if change.data is not None:
                content[change.offset : change.offset + len(change.data)] = change.data
        elif isinstance(change, Name):
            if change.old is not None:
                self.folders[change.old[0]].pop(change.old[1], None)
            names = self.folders.setdefault(change.folder, {})
            if change.inode is None:
                names.pop(change.name, None)
            else:
                names[change.name] = change.inode

    def find(self, path: str) -> int | None:
        inode: int | None = 0
        for part in Path(path).parts:
            inode = self.folders.get(inode, {}).get(part) if inode is not None else None
        return inode

    def tree(self, inode: int = 0, before: str = "") -> Iterator[tuple[str, bytes | None]]:
        """Yield every path with its content; None for a folder."""
        for name, child in sorted(self.folders.get(inode, {}).items()):
            path = f"{before}{name}"
            if child in self.folders:
                yield path, None
                yield from self.tree(child, f"{path}/")
            else:
                yield path, bytes(self.files.get(child, b""))


def after_power_loss(changes: Sequence[Change], folders: set[int], rng: random.Random) -> Disk:
    """Return a disk that may be found after these changes and a power loss."""
    disk = Disk({inode: {} for inode in folders})
    share, ordered = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)), rng.random() < 0.5
    durable = durable_changes(changes)
    names = [n for n, c in enumerate(changes) if isinstance(c, Name) and n not in durable]
    last = rng.choice([-1, *names])  # of the names that are on disk, if they are in order
    lost: set[tuple[int, str] | None] = set()
    for number, change in enumerate(changes):
        here = rng.random() < share
        if number in durable:
            disk.apply(change)
        elif isinstance(change, Write) and here:
            disk.apply(_cut(change, rng))
        elif isinstance(change, Name):
            place = (change.folder, change.name)
            if lost & {place, change.old} or not (number <= last if ordered else here):
                lost.add(place)
            else:
                disk.apply(change)
    return disk


def durable_changes(changes: Sequence[Change]) -> set[int]:
    """Return the numbers of the changes that a later sync put on disk."""
    durable: set[int] = set()
    synced: set[int] = set()
    for number in range(len(changes) - 1, -1, -1):
        change = changes[number]
        if isinstance(change, Sync):
            synced.add(change.inode)
        elif (change.file if isinstance(change, Write) else change.folder) in synced:
            durable.add(number)
    return durable


def _cut(write: Write, rng: random.Random) -> Write:
    """Return the write, or its first part."""
    if not write.data or rng.random() < 0.8:
        return write
    return Write(write.file, write.offset, write.data[: rng.randrange(len(write.data))])


# --- recording ------------------------------------------------------------------------------------


class Recording:
    """The changes that a job made inside a folder."""

    def __init__(self, folder: Path) -> None:
        self.changes: list[Change] = []
        self.folders = {0}
        self.now = Disk()
        self._root = folder
        self._inputs = {
            str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
        }
        self._positions: dict[int, int] = {}
        self._open: dict[int, str] = {}
        self._count = 0

    def add(self, change: Change) -> None:
        self.now.apply(change)
        self.changes.append(change)

    def run(self, arguments: Sequence[str]) -> None:
        """Run `moemerge ARGUMENTS` in the folder and record what it does."""
        with tempfile.TemporaryDirectory(prefix="strace-") as logs:
            log = f"{logs}/log"
            strace = [
                "strace",
                "--seccomp-bpf",
                "-f",
                "-ff",
                "-qq",
                "-ttt",
                "-y",
                "-xx",
                "-s",
                "99999999",
            ]
            job = [sys.executable, "-m", "moemerge", *arguments]
            subprocess.run(
                [*strace, "-o", log, "-e", f"trace={CALLS}", *job], cwd=self._root, check=True
            )
            lines = (line for file in Path(logs).iterdir() for line in file.open())
            matches = [m for m in map(_LINE.match, lines) if m and not m["result"].startswith("-")]
        for match in sorted(matches, key=lambda m: float(m["time"])):
            self._record(match["call"], _arguments(match["arguments"]), int(match["result"]))

    def _record(self, call: str, parts: list[str], result: int) -> None:
        handler = getattr(self, f"_{_SAME.get(call, call)}", None)
        assert handler is not None, f"{call} is not modelled"
        handler(parts, result)

    def _inside(self, path: str, at: str = "") -> str | None:
        """Return a path relative to the job's folder, or None if it is elsewhere."""
        joined = os.path.normpath(os.path.join(_descriptor(at)[1] if at else str(self._root), path))
        inside = joined.startswith(f"{self._root}{os.sep}") or joined == str(self._root)
        name = os.path.relpath(joined, self._root)
        return name if inside and not name.startswith("tmp") else None

    def _new(self, path: str, *, folder: bool) -> None:
        parent = self.now.find(os.path.dirname(path))
        if parent is None:
            return  # in a folder that the job did not make
        self._count += 1
        if folder:
            self.folders.add(self._count)
            self.now.folders[self._count] = {}
        self.add(Name(parent, os.path.basename(path), self._count))

    def _openat(self, parts: list[str], result: int) -> None:
        path = self._inside(_text(parts[1]), parts[0])
        self._open.pop(result, None)
        if path is None:
            return
        self._open[result], self._positions[result] = path, 0
        if "O_CREAT" in parts[2] and self.now.find(path) is None and path not in self._inputs:
            self._new(path, folder=False)
        inode = self.now.find(path)
        if inode is None or inode in self.folders:
            return
        if "O_TRUNC" in parts[2]:
            self.add(Write(inode, 0, None))
        if "O_APPEND" in parts[2]:
            self._positions[result] = len(self.now.files.get(inode, b""))

    def _file(self, part: str) -> tuple[int, int | None]:
        """Return the descriptor and the inode of a file that the job made."""
        number, path = _descriptor(part)
        if number not in self._open:
            return number, None
        inside = self._inside(path)
        return number, None if inside is None else self.now.find(inside)

    def _put(self, part: str, data: bytes, offset: int | None = None) -> None:
        number, inode = self._file(part)
        if inode is None:
            return
        at = self._positions[number] if offset is None else offset
        self.add(Write(inode, at, data))
        if offset is None:
            self._positions[number] = at + len(data)

    def _write(self, parts: list[str], result: int) -> None:
        self._put(parts[0], _bytes(parts[1])[:result])

    def _writev(self, parts: list[str], result: int) -> None:
        self._put(parts[0], _vector(parts[1])[:result])

    def _pwrite64(self, parts: list[str], result: int) -> None:
        self._put(parts[0], _bytes(parts[1])[:result], int(parts[3]))

    def _pwritev(self, parts: list[str], result: int) -> None:
        self._put(parts[0], _vector(parts[1])[:result], int(parts[3]))

    def _lseek(self, parts: list[str], result: int) -> None:
        self._positions[_descriptor(parts[0])[0]] = result

    def _copy_file_range(self, parts: list[str], result: int) -> None:
        self._copied(parts[0], parts[1], parts[2], parts[3], result)

    def _sendfile(self, parts: list[str], result: int) -> None:
        self._copied(parts[1], parts[2], parts[0], "NULL", result)

    def _copied(self, source: str, start: str, target: str, place: str, count: int) -> None:
        number, path = _descriptor(source)
        inside = self._inside(path)
        if inside is None or self._file(target)[1] is None:
            return
        made = self.now.find(inside)
        data = self._inputs[inside] if made is None else bytes(self.now.files[made])
        at = self._positions[number] if start == "NULL" else int(start.strip("[]").split("=>")[0])
        if start == "NULL":
            self._positions[number] = at + count
        offset = None if place == "NULL" else int(place.strip("[]").split("=>")[0])
        self._put(target, data[at : at + count], offset)

    def _ftruncate(self, parts: list[str], result: int) -> None:
        _, inode = self._file(parts[0])
        if inode is not None:
            self.add(Write(inode, int(parts[1]), None))

    def _fallocate(self, parts: list[str], result: int) -> None:
        _, inode = self._file(parts[0])
        size = int(parts[2]) + int(parts[3])
        if inode is not None and len(self.now.files.get(inode, b"")) < size:
            self.add(Write(inode, size, None))

    def _fsync(self, parts: list[str], result: int) -> None:
        inside = self._inside(_descriptor(parts[0])[1])
        inode = None if inside is None else self.now.find(inside)
        if inode is not None:
            self.add(Sync(inode))

    def _rename(self, parts: list[str], result: int) -> None:
        self._renamed(self._inside(_text(parts[0])), self._inside(_text(parts[1])))

    def _renameat(self, parts: list[str], result: int) -> None:
        old, new = self._inside(_text(parts[1]), parts[0]), self._inside(_text(parts[3]), parts[2])
        self._renamed(old, new)

    def _renamed(self, old: str | None, new: str | None) -> None:
        if old is None or new is None or (inode := self.now.find(old)) is None:
            return
        places = [self.now.find(os.path.dirname(path)) for path in (old, new)]
        assert places[0] is not None
        assert places[1] is not None
        self.add(Name(places[1], os.path.basename(new), inode, (places[0], os.path.basename(old))))

    def _mkdir(self, parts: list[str], result: int) -> None:
        if (path := self._inside(_text(parts[0]))) is not None:
            self._new(path, folder=True)

    def _mkdirat(self, parts: list[str], result: int) -> None:
        if (path := self._inside(_text(parts[1]), parts[0])) is not None:
            self._new(path, folder=True)

    def _unlink(self, parts: list[str], result: int) -> None:
        self._removed(self._inside(_text(parts[0])))

    def _unlinkat(self, parts: list[str], result: int) -> None:
        self._removed(self._inside(_text(parts[1]), parts[0]))

    def _removed(self, path: str | None) -> None:
        if path is not None and self.now.find(path) is not None:
            parent = self.now.find(os.path.dirname(path))
            assert parent is not None
            self.add(Name(parent, os.path.basename(path), None))


_SAME = {"fdatasync": "fsync", "renameat2": "renameat", "rmdir": "unlink", "pwritev2": "pwritev"}


def _arguments(text: str) -> list[str]:
    """Split a call's arguments; commas inside brackets belong to an argument."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [*parts, text[start:].strip()]


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.strip('"').replace("\\x", ""))


def _vector(text: str) -> bytes:
    return b"".join(_bytes(part) for part in re.findall(r'iov_base="([^"]*)"', text))


def _text(part: str) -> str:
    return os.fsdecode(_bytes(part))


def _descriptor(part: str) -> tuple[int, str]:
    """Return the number and the path of `3<...>` or `AT_FDCWD<...>`."""
    number, _, path = part.partition("<")
    text = _HEX.sub(lambda m: chr(int(m[1], 16)), path.rstrip(">"))
    return (int(number) if number.isdigit() else -1), text.encode("latin-1").decode(
        "utf-8", "replace"
    )


# --- the campaign ---------------------------------------------------------------------------------


class Campaign:
    """Checks states after a power loss during one job."""

    def __init__(self, job: str, corpus_folder: Path, scratch: Path) -> None:
        self.job, self._corpus, self._scratch = job, corpus_folder, scratch
        folder = self.fresh()
        self._recording = Recording(folder)
        self._recording.run(JOBS[job])
        self.changes = self._recording.changes
        self.whole = _out(self._recording.now)
        self.found = {p: (folder / OUT / p).read_bytes() for p in _files(folder / OUT)}
        self.outcomes: Counter[str] = Counter()
        self.bad: list[str] = []

    def fresh(self) -> Path:
        folder = self._scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._corpus, folder, ignore=shutil.ignore_patterns("tmp", ".out.journal"))
        (folder / "tmp").mkdir()
        return folder

    def state(self, rng: random.Random) -> tuple[int, Disk]:
        """Return a moment and a disk after a power loss at that moment."""
        moment = rng.randrange(len(self.changes) + 1)
        return moment, after_power_loss(self.changes[:moment], self._recording.folders, rng)

    def check(self, rng: random.Random, *, again: bool) -> None:
        moment, disk = self.state(rng)
        out = _out(disk)
        if disk.find(OUT) is None:
            outcome = self._again(disk) if again else "no OUT"
        else:
            outcome = (
                "OUT complete" if out == self.whole else f"BAD: {_difference(out, self.whole)}"
            )
        self.outcomes[outcome if not outcome.startswith("BAD") else "bad"] += 1
        if outcome.startswith("BAD"):
            self.bad.append(f"{self.job}, after {moment} of {len(self.changes)} changes: {outcome}")
            print(self.bad[-1], flush=True)

    def _again(self, disk: Disk) -> str:
        """Run the job again on this disk."""
        folder = self.fresh()
        for path, content in disk.tree():
            if content is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(content)
        before = {path.split("/")[0] for path, _ in disk.tree()}
        ended = harness.command(JOBS[self.job], folder, self._scratch / "log", limit=300)
        if ended.code != 0:
            return f"BAD: the second run ended with {ended.code}: {ended.output.strip()[-200:]}"
        weights = {p: d for p, d in self.found.items() if p.endswith(".safetensors")}
        if {p: (folder / OUT / p).read_bytes() for p in weights} != weights:
            return "BAD: the second run wrote other weights"
        left = [name for name in before if (folder / name).exists()]
        return f"BAD: left {left}" if left else "no OUT; the same command wrote it"


def _out(disk: Disk) -> dict[str, bytes | None]:
    return {path: data for path, data in disk.tree() if path.split("/")[0] == OUT}


def _difference(found: dict[str, bytes | None], whole: dict[str, bytes | None]) -> str:
    missing = sorted(set(whole) - set(found))
    if missing:
        return f"OUT lacks {missing[0]}"
    return f"{next(p for p in found if found[p] != whole.get(p))} differs"


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--states", type=int, default=2000)
    parser.add_argument("--again", type=int, default=20, help="second runs of each job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", choices=list(JOBS), action="append")
    parser.add_argument("--corpus", type=Path, help="folder of the corpus, built if missing")
    arguments = parser.parse_args()
    harness.warm_up()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="power-") as scratch:
        where = arguments.corpus or Path(scratch) / "corpus"
        if not where.exists():
            corpus.build(where)
        for job in arguments.job or JOBS:
            campaign = Campaign(job, where, Path(os.path.realpath(scratch)))
            rng = random.Random(f"{job}/{arguments.seed}")
            for number in range(arguments.states):
                campaign.check(rng, again=number < 2 * arguments.again and number % 2 == 0)
            bad += len(campaign.bad)
            print(f"{job}: {len(campaign.changes)} changes, {dict(campaign.outcomes)}", flush=True)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
