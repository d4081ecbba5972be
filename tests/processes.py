"""Processes of their own without the seconds that imports take, for tests of what a process does.

One process imports everything once and never computes, so that it has no threads. Every command or
program is a fork of it with streams, environment and folder of its own. Where importing is the
subject (which modules, what Ctrl-C does meanwhile), `fresh` starts an interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

# Nothing of the command line: what it makes of streams and environment is looked at by tests.
WARM = (
    "moemerge.api",
    "moemerge.repairs.harc",
    "moemerge.statistics.collecting.run",
    "moemerge.lab.data.run",
    "moemerge.diagnosis.run",
    "moemerge.lab.engines",
    "moemerge.merging.run",
    "moemerge.repairs.refit",
    "moemerge.report.page.assemble",
    "rich.console",
    "rich.table",
    "safetensors.torch",
    "tokenizers",
    "torch._dynamo",
    "torch.distributed",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.olmoe.modeling_olmoe",
    "transformers.utils.chat_template_utils",
    "typer",
)
COMMAND = "from moemerge.cli import main; main()"
LIMIT = 120.0  # seconds


def environment(**more: str) -> dict[str, str]:
    """This process's, with one thread, no colours and wide lines."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1", **more}


def moemerge(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`moemerge WORDS`, with these variables besides the usual ones."""
    return python(COMMAND, *words, env=environment(**more))


def fresh(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -m moemerge WORDS` by an interpreter that has imported nothing."""
    return interpreter("-m", "moemerge", *words, env=environment(**more))


def interpreter(
    *words: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` by an interpreter that has imported nothing."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )


@contextlib.contextmanager
def limited(kind: int, most: int) -> Iterator[None]:
    """Less of a resource for this process, such as `resource.RLIMIT_FSIZE`, for a while."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def python(
    code: str, *words: str | Path, env: Mapping[str, str] | None = None, timeout: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE WORDS`, to its end."""
    process = start(code, *words, env=env)
    out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(["python", *words], process.returncode or 0, out, err)


def start(code: str, *words: str | Path, env: Mapping[str, str] | None = None) -> Process:
    """`python -c CODE WORDS`, begun."""
    variables = dict(os.environ if env is None else env)
    # On a machine with a GPU, importing torch starts threads.
    if sys.platform != "linux" or torch.cuda.is_available():
        command = [sys.executable, "-c", code, *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables)
    request = {"code": code, "words": [*map(str, words)], "env": variables, "folder": os.getcwd()}
    return Fork(_server()[0], request, variables.get("PYTHONIOENCODING", "utf-8"))


class Fork:
    """A fork at work, with what tests use of `subprocess.Popen`."""

    def __init__(self, server: socket.socket, request: dict[str, Any], encoding: str) -> None:
        self._encoding = encoding
        self._streams: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in "oe"]  # noqa: SIM115
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as file, theirs:
            file.write(json.dumps(request).encode())
            file.seek(0)
            given = [file, *self._streams, theirs]
            socket.send_fds(server, [b"."], [one.fileno() for one in given])
        self.pid = int(self._reply.recv(64))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """What it wrote, once it has ended."""
        if self._wait(timeout) is None:
            self.kill()
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        said = []
        for stream, errors in zip(self._streams, ("strict", "backslashreplace"), strict=True):
            stream.seek(0)
            said.append(stream.read().decode(self._encoding, errors))
            stream.close()
        return said[0], said[1]

    def _wait(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._reply], [], [], seconds)[0]:
            self.returncode = int(self._reply.recv(64))
            self._reply.close()
        return self.returncode


Process = subprocess.Popen[str] | Fork


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that is forked; it ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is not for it
        )
    assert ours.recv(64) == b"ready"
    return ours, process


# --- the other process --------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    for name in WARM:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()  # or the first search for garbage would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(b"ready")
    while True:
        message, numbers, *_ = socket.recv_fds(control, 64, 4)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _keep(*numbers)
        for number in numbers:
            os.close(number)


def _keep(file: int, out: int, err: int, reply: int) -> NoReturn:
    """Fork once more, and tell how that one ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(reply)
        with open(file, encoding="utf-8") as asked:
            request = json.load(asked)
        _become(request, out, err)
    with contextlib.suppress(OSError), socket.socket(fileno=reply) as channel:  # nobody waits
        channel.send(str(child).encode())
        _, status = os.waitpid(child, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int) -> NoReturn:
    code: object = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.dup2(out, 1)
        os.dup2(err, 2)
        encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
        sys.stdout = sys.__stdout__ = _stream(1, encoding, "strict")
        sys.stderr = sys.__stderr__ = _stream(2, encoding, "backslashreplace")
        sys.argv = ["-c", *request["words"]]
        sys.path[0] = ""
        tempfile.tempdir = None
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(request["code"], "<string>", "exec", dont_inherit=True), vars(main))
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _stream(number: int, encoding: str, errors: str) -> io.TextIOWrapper:
    file = open(number, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, encoding, errors, line_buffering=number == 2)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as given:
        _serve(given)
