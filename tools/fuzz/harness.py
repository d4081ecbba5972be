"""Run commands in forked copies of this process, within time and memory limits.

The parent only imports. It never computes or tokenizes, because threads that libraries start do not
survive a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TIME_LIMIT = 30.0  # seconds per case
MEMORY_LIMIT = 2 * 2**30  # bytes of resident memory per case
ADDRESS_ROOM = 8 * 2**30  # on top of what the imports map
OURS = (2, 3, 4)  # exit codes of moemerge errors
WARM = (
    "moemerge.cli.app",
    "moemerge.api",
    "moemerge.merging.run",
    "moemerge.repairs.harc",
    "moemerge.diagnosis.run",
    "moemerge.statistics.collecting.run",
    "moemerge.repairs.refit",
    "moemerge.lab.data.run",
    "moemerge.lab.engines",
    "moemerge.report.page.assemble",
    "safetensors.torch",
    "transformers",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "transformers.utils.chat_template_utils",
    "tokenizers",
    "torch._dynamo",
)


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    code: int  # exit code; negative for a signal
    output: str  # stdout and stderr
    seconds: float
    memory: int  # peak resident bytes
    hung: bool = False


def warm_up() -> None:
    """Import what every case needs, and keep libraries quiet and offline."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    for name in WARM:
        with contextlib.suppress(ImportError):  # a renamed module costs only speed
            importlib.import_module(name)


def start(work: Callable[[], None], folder: Path, log: Path) -> int:
    """Start `work` in a child process and return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become(work, folder, log)
    return child


def in_child(
    work: Callable[[], None],
    folder: Path,
    log: Path,
    limit: float = TIME_LIMIT,
    ends_by: signal.Signals = signal.SIGKILL,
) -> Ended:
    """Run `work` in a child process in `folder`, within limits; its output goes to `log`.

    After `limit` seconds the child gets the signal `ends_by`, and has `TIME_LIMIT` to end.
    """
    begun = time.monotonic()
    child = start(work, folder, log)
    handle = os.pidfd_open(child)
    try:
        over = not select.select([handle], [], [], limit)[0]
        if over and ends_by != signal.SIGKILL:
            os.kill(child, ends_by)
            select.select([handle], [], [], TIME_LIMIT)
    finally:
        os.close(handle)
    if over:
        with contextlib.suppress(ProcessLookupError):  # it may not lead its process group yet
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # processes that it started
    return Ended(
        os.waitstatus_to_exitcode(status),
        log.read_text(encoding="utf-8", errors="replace"),
        time.monotonic() - begun,
        used.ru_maxrss * 1024,
        hung=over,
    )


def _become(work: Callable[[], None], folder: Path, log: Path) -> None:
    """Run `work` as the child process. Never returns."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
        os.chdir(folder)
        sys.dont_write_bytecode = True  # next to plugins
        null, out = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC),
        )
        for target, stream in enumerate((null, out, out)):
            os.dup2(stream, target)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_ROOM,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def command(
    arguments: Sequence[str],
    folder: Path,
    log: Path,
    limit: float = TIME_LIMIT,
    first: Callable[[], None] = lambda: None,
    ends_by: signal.Signals = signal.SIGKILL,
) -> Ended:
    """Run `first` and then `moemerge ARGUMENTS` in `folder`, with temporary files in its `tmp`."""
    return in_child(work_of(arguments, folder, first), folder, log, limit, ends_by)


def work_of(
    arguments: Sequence[str], folder: Path, first: Callable[[], None]
) -> Callable[[], None]:
    """Return the function that the child process of `command` runs."""

    def work() -> None:
        import tempfile

        from moemerge.cli import console, main

        for stream, target in ((console.out, sys.stdout), (console.err, sys.stderr)):
            stream.file = target
        os.environ["TMPDIR"] = str(folder / "tmp")
        tempfile.tempdir = None
        sys.argv = ["moemerge", *arguments]
        first()
        main()

    (folder / "tmp").mkdir(exist_ok=True)
    return work


def tree(folder: Path) -> set[str]:
    """Return every path inside, including hidden and temporary files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
