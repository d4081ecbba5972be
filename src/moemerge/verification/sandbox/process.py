"""Confined processes from the outside: what they may use and see, how they start and end."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import select
import shutil
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
from moemerge.verification.sandbox.inside import READY
from moemerge.verification.sandbox.namespaces import DEVICES, HOME

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


PACKAGE: Final = Path(__file__).parents[2]
# The package's own __init__ asks for the installed version, which takes longer than all the rest.
START: Final = f"""
import sys, types
package = types.ModuleType("moemerge")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["moemerge"] = package
from moemerge.errors import ResourceError
from moemerge.verification.sandbox.inside import main
main()
"""
# Set orders that do not change from run to run, and one thread for numpy's own library.
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": HOME,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
GRACE: Final = 2.0  # seconds for a process to start and for its own supervisor to act first


class Ended(enum.Enum):
    """How a process came to its end."""

    ITSELF = "ended"
    TIME = "time limit"
    OUTPUT = "output limit"
    KILLED = "killed"


@dataclass(frozen=True)
class ProcessResult:
    """What came back from a process."""

    answer: bytes
    ended: Ended
    exit_code: int
    seconds: float


class Sandbox:
    """Runs functions of ours, each in a confined process of its own. Threads may share one."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._readable = readable()

    def run(self, function: str, request: bytes, limits: Limits | None = None) -> ProcessResult:
        """Call `module:function`, a function of (request, answer), and return what it answered."""
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
                stderr=log,  # until the program's turn comes
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
        # No site packages and no bytecode written; -P: nothing is imported from the folder.
        python = [sys.executable, "-S", "-s", "-P", "-B", "-c", START, json.dumps(orders)]
        if self.how != "bubblewrap":
            return python
        return [*bubblewrap([*self._readable, str(PACKAGE)], limits), "--", *python]


class SandboxError(ResourceError):
    """The confined process did not come as far as the function."""

    def __init__(self, how: str, exit_code: int, complaint: str) -> None:
        last = complaint.splitlines()[-1] if complaint else f"exit code {exit_code}"
        super().__init__(f"the sandbox ({how}) did not start: {last}")


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """An empty folder that is gone afterwards, whatever a program did to it."""
    folder = tempfile.mkdtemp(prefix="moemerge-sandbox-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        return
    for parent, _folders, _files in os.walk(folder):  # a program may have locked its own folders
        os.chmod(parent, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> tuple[bytes, Ended]:
    """Everything the process answers, until it ends or must be ended. Leaves no process behind."""
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
        if ended is Ended.ITSELF:  # it may have closed its stdout and live on
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
    """Whether a process that was killed had used up its time."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    out_of_time = number == signal.SIGXCPU or (
        number == signal.SIGKILL and seconds >= limits.cpu_seconds
    )
    return Ended.TIME if out_of_time else Ended.KILLED


# --- what it sees ---------------------------------------------------------------------------------

SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")


def readable() -> list[str]:
    """Trees that Python needs, without those that lie inside of others."""
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
    """Folders with installed packages, such as numpy for tests."""
    paths = sysconfig.get_paths()
    known = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [path for path in dict.fromkeys(known) if os.path.isdir(path)]


def bubblewrap(readable: list[str], limits: Limits) -> list[str]:
    program = shutil.which("bwrap")
    assert program is not None
    command = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    command += ["--size", str(limits.file_bytes), "--tmpfs", "/"]
    for path in readable:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in DEVICES:
        command += ["--dev-bind-try", path, path]
    return [*command, "--dir", HOME, "--chdir", HOME]
