"""Run programs that models wrote, each in its own namespaces and with limits (`confined.py`).

A system that does not grant namespaces runs no programs.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from moemerge.errors import ResourceError, UsageError
from moemerge.lab.confined import HOME, PROCESSES, READY

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Processor time is the main limit, since it does not depend on the machine's load. The wall clock
    only ends programs that wait.
    """

    cpu_seconds: float = 10.0
    wall_seconds: float = 25.0
    memory: int = 4 * GIB  # address space; numpy reserves most of one GiB
    file_bytes: int = 64 * MIB  # of all files together

    def with_time(self, cpu_seconds: float) -> Limits:
        """Return these limits with another processor time; the wall clock is scaled with it."""
        factor = cpu_seconds / self.cpu_seconds
        return replace(self, cpu_seconds=cpu_seconds, wall_seconds=self.wall_seconds * factor)


SCRIPT: Final = str(Path(__file__).with_name("confined.py"))
# A fixed hash seed, and one thread for numpy's library.
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": HOME,
    "TMPDIR": HOME,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")
DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OPEN_FILES: Final = 64
LONGEST_ANSWER: Final = MIB
GRACE: Final = 2.0  # seconds for a process to start, and to end itself


@dataclass(frozen=True)
class ProcessResult:
    """The answer of a program and how it ended."""

    answer: bytes
    timed_out: bool
    exit_code: int
    seconds: float  # on the clock


class SandboxError(ResourceError):
    """A process ended before it was confined."""


@functools.cache
def require_sandbox() -> None:
    """Refuse to run programs on a system that does not grant namespaces."""
    try:
        if sys.platform != "linux":
            raise SandboxError("only Linux has namespaces")
        run_confined("", "", "", Limits())
    except (SandboxError, OSError) as error:
        raise UsageError(
            f"programs cannot be run, because this system grants no sandbox ({error})",
            hint="use Linux 5.12 or later with user namespaces: on Ubuntu `sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0`, in Docker `--security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
            "systempaths=unconfined`. Completions that exist can be judged there",
        ) from None


def run_confined(program: str, tests: str, secret: str, limits: Limits) -> ProcessResult:
    """Run a program with its tests (`confined.judge`)."""
    with (
        tempfile.TemporaryDirectory(prefix="moemerge-sandbox-") as folder,
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,  # a file, whose size is limited
        tempfile.TemporaryFile() as log,  # until the program starts
    ):
        orders = {
            "folder": folder,
            "readable": readable(),
            "packages": packages(),
            "seconds": limits.wall_seconds,
            "limits": {
                "CPU": math.ceil(limits.cpu_seconds),
                "AS": limits.memory,
                "FSIZE": limits.file_bytes,
                "NOFILE": OPEN_FILES,
                "NPROC": PROCESSES,
                "CORE": 0,
            },
            "program": program,
            "tests": tests,
            "secret": secret,
        }
        stdin.write(json.dumps(orders).encode())
        stdin.seek(0)
        began = time.monotonic()
        process = subprocess.Popen(
            # No site packages, no bytecode written, nothing imported from the working folder.
            [sys.executable, "-S", "-s", "-P", "-B", SCRIPT],
            stdin=stdin,
            stdout=stdout,
            stderr=log,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        try:
            process.wait(limits.wall_seconds + GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            code = process.wait()
        seconds = time.monotonic() - began
        stdout.seek(0)
        answer = stdout.read(LONGEST_ANSWER)
        log.seek(0)
        complaint = log.read(MIB).decode(errors="replace").strip()
    # The alarm, the kill above, or the limit on processor time.
    timed_out = code in (-signal.SIGALRM, -signal.SIGKILL, 128 + signal.SIGXCPU) or (
        code == 128 + signal.SIGKILL and seconds >= limits.cpu_seconds
    )
    if not answer.startswith(READY) and not timed_out:
        last = complaint.splitlines()[-1] if complaint else f"exit code {code}"
        raise SandboxError(f"the sandbox did not start: {last}")
    return ProcessResult(answer.removeprefix(READY), timed_out, code, seconds)


@functools.cache
def readable() -> list[str]:
    """Return what Python needs, without trees inside others."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    wanted += [sysconfig.get_paths()["stdlib"], *packages()]
    trees = {os.path.abspath(path) for path in wanted}
    trees |= {os.path.realpath(tree) for tree in trees} | {*SYSTEM, *DEVICES}
    return [
        tree
        for tree in sorted(trees)
        if os.path.exists(tree) and not any(str(up) in trees for up in Path(tree).parents)
    ]


@functools.cache
def packages() -> list[str]:
    """Return the folders of installed packages, such as numpy for tests."""
    paths = sysconfig.get_paths()
    known = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [path for path in dict.fromkeys(known) if os.path.isdir(path)]
