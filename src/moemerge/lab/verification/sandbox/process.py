"""Start and end confined processes, with their limits and readable folders."""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import os
import secrets
import select
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from moemerge.errors import ResourceError
from moemerge.lab.verification.sandbox.inside import READY
from moemerge.lab.verification.sandbox.system import HOME

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one process.

    Processor time is the main limit, since it does not depend on the machine's load. The wall clock
    only ends processes that wait.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 25.0
    memory: int = 4 * GIB  # address space; numpy reserves most of one GiB
    file_bytes: int = 64 * MIB  # of all files together, if it has its own file system
    open_files: int = 64
    processes: int = 100  # threads; where calls are filtered, other processes are refused anyway
    answer: int = 8 * MIB  # size of an answer

    def with_time(self, cpu_seconds: float) -> Limits:
        """Return these limits with another processor time; the wall clock is scaled with it."""
        factor = cpu_seconds / self.cpu_seconds
        return replace(self, cpu_seconds=cpu_seconds, wall_seconds=self.wall_seconds * factor)


PACKAGE: Final = Path(__file__).parents[2]
# moemerge's __init__ looks up the installed version, which takes longer than everything else.
START: Final = f"""
import sys, types
package = types.ModuleType("moemerge")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["moemerge"] = package
from moemerge.errors import ResourceError
from moemerge.lab.verification.sandbox.inside import main
main()
"""
# A fixed hash seed, and one thread for numpy's library.
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
GRACE: Final = 2.0  # seconds for a process to start, and for its supervisor to act first


class Ended(enum.Enum):
    """How a process ended."""

    ITSELF = "ended"
    TIME = "time limit"
    OUTPUT = "output limit"
    KILLED = "killed"


@dataclass(frozen=True)
class ProcessResult:
    """The answer of a process and how it ended."""

    answer: bytes
    ended: Ended
    exit_code: int
    seconds: float


class Sandbox:
    """Runs our functions, each in its own confined process. Thread-safe."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._readable = readable()

    def run(self, function: str, request: bytes, limits: Limits | None = None) -> ProcessResult:
        """Call `module:function` with (request, answer) and return its answer."""
        limits = limits or Limits()
        with (
            _folder() as folder,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as log,
        ):
            stdin.write(request)
            stdin.seek(0)
            began = time.monotonic()
            process = subprocess.Popen(
                self._command(function, folder, limits),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=log,  # until the program starts
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
            answer, ended = _read(process, began + limits.wall_seconds + GRACE, limits.answer)
            seconds = time.monotonic() - began
            log.seek(0)
            complaint = log.read().decode(errors="replace").strip()
        if not answer.startswith(READY) and ended is not Ended.TIME:
            raise SandboxError(self.how, process.returncode, complaint)
        if ended is Ended.ITSELF and process.returncode:
            ended = _by_limit(process.returncode, seconds, limits)
        return ProcessResult(answer[len(READY) :], ended, process.returncode, seconds)

    def _command(self, function: str, folder: str, limits: Limits) -> list[str]:
        orders = {
            "how": self.how,
            "function": function,
            "folder": folder,
            "readable": self._readable,
            "packages": packages(),
            "limits": asdict(limits),
        }
        # No site packages, no bytecode written; -P: nothing is imported from the folder.
        return [sys.executable, "-S", "-s", "-P", "-B", "-c", START, json.dumps(orders)]


class SandboxError(ResourceError):
    """The confined process ended before it called the function."""

    def __init__(self, how: str, exit_code: int, complaint: str) -> None:
        last = complaint.splitlines()[-1] if complaint else f"exit code {exit_code}"
        super().__init__(f"the sandbox ({how}) did not start: {last}")


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder that is deleted at the end, whatever a program did to it."""
    folder = tempfile.mkdtemp(prefix="moemerge-sandbox-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            _remove(folder)


def _remove(folder: str) -> None:
    """Delete a folder that a program filled: without rights, or deeper than functions recurse.

    What is inside a folder is moved to the top, so that no path becomes too long.
    """
    moved = (f"{secrets.token_hex(16)}-{number}" for number in itertools.count())
    os.chmod(folder, 0o700)
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if not _is_folder(path):
                os.unlink(path)
                continue
            for inner in os.listdir(path):
                place = os.path.join(path, inner)
                _is_folder(place)
                os.rename(place, os.path.join(folder, next(moved)))
            os.rmdir(path)
    os.rmdir(folder)


def _is_folder(path: str) -> bool:
    """Return whether this is a folder, and make it accessible."""
    found = os.path.isdir(path) and not os.path.islink(path)
    if found:
        os.chmod(path, 0o700)
    return found


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> tuple[bytes, Ended]:
    """Read the answer until the process ends or has to be killed. Leaves no process behind."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    pieces: list[bytes] = []
    size, ended = 0, Ended.ITSELF
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                ended = Ended.TIME
                break
            piece = os.read(pipe, MIB)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if size > most:
                ended = Ended.OUTPUT
                break
        if ended is Ended.ITSELF:  # it may have closed its stdout and still run
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            ended = Ended.ITSELF if process.poll() is not None else Ended.TIME
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return b"".join(pieces), ended


def _by_limit(exit_code: int, seconds: float, limits: Limits) -> Ended:
    """Return whether a killed process had used up its processor time."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    out_of_time = number == signal.SIGXCPU or (
        number == signal.SIGKILL and seconds >= limits.cpu_seconds
    )
    return Ended.TIME if out_of_time else Ended.KILLED


# --- what it sees ---------------------------------------------------------------------------------

SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")


def readable() -> list[str]:
    """Return the trees that Python needs, without those inside others."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    wanted += [sysconfig.get_paths()["stdlib"], *packages()]
    trees = list(dict.fromkeys(os.path.abspath(path) for path in wanted))
    trees += [os.path.realpath(tree) for tree in trees if os.path.realpath(tree) != tree]
    trees = [*SYSTEM, *dict.fromkeys(trees)]
    return [
        tree
        for tree in trees
        if os.path.exists(tree)
        and not any(tree != other and Path(tree).is_relative_to(other) for other in trees)
    ]


def packages() -> list[str]:
    """Return the folders of installed packages, such as numpy for tests."""
    paths = sysconfig.get_paths()
    known = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [path for path in dict.fromkeys(known) if os.path.isdir(path)]
