"""Programs that nobody should run, run: each is stopped, and nothing outside notices."""

import os
import resource
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.hostile import HOSTILE
from moemerge.errors import UsageError
from moemerge.lab import sandbox
from moemerge.lab.judgement import Grade, Judgement
from moemerge.lab.programs import CodeVerifier
from moemerge.lab.sandbox import MIB, Limits

LIMITS = Limits(cpu_seconds=1, wall_seconds=1.5, memory=512 * MIB)
ROW = {"tests": "assert double(2) == 4"}
HONEST = "def double(x):\n    return 2 * x\n"


@dataclass(frozen=True)
class Deed:
    judgement: Judgement
    connected: bool
    outside: Path


@pytest.fixture(scope="module")
def deeds(tmp_path_factory):
    """All of them at once: most only wait for their end."""
    verifier = CodeVerifier(allow_code=True, limits=LIMITS)

    def commit(program):
        outside = tmp_path_factory.mktemp("outside")
        (outside / "kept").write_text("kept")
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = str(listener.getsockname()[1])
            program = program.replace("OUTSIDE", str(outside)).replace("PID", str(os.getpid()))
            # The right function stands first: only the deed may be what fails.
            judgement = verifier.check(ROW, HONEST + program.replace("PORT", port))
            listener.setblocking(False)
            try:
                listener.accept()
                connected = True
            except BlockingIOError:
                connected = False
        return Deed(judgement, connected, outside)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(HOSTILE, pool.map(commit, HOSTILE.values()), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_stopped_and_touches_nothing(name, deeds):
    deed = deeds[name]
    stopped = (Grade.ERROR, Grade.TIMEOUT, Grade.NO_ANSWER)
    assert deed.judgement.grade in stopped, deed.judgement
    assert not deed.connected
    assert [path.name for path in deed.outside.iterdir()] == ["kept"]
    assert (deed.outside / "kept").read_text() == "kept"


def test_after_all_of_them_nobody_is_left_and_an_honest_program_passes(deeds):
    assert subprocess.run(["pgrep", "-f", "lab/confined.py"], capture_output=True).returncode == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE) != (77, 77)
    assert CodeVerifier(allow_code=True).check(ROW, HONEST).right


def test_programs_are_refused_without_namespaces(tmp_path, monkeypatch):
    (tmp_path / "confined.py").write_text("raise PermissionError(1, 'unshare: not permitted')")
    monkeypatch.setattr(sandbox, "SCRIPT", str(tmp_path / "confined.py"))
    monkeypatch.setattr(sandbox, "require_sandbox", sandbox.require_sandbox.__wrapped__)
    with pytest.raises(UsageError, match=r"(?s)grants no sandbox .*unshare: not permitted.*Docker"):
        sandbox.require_sandbox()


DEEP = """
import os
try:
    for _ in range(3000):
        os.mkdir("d"), os.chdir("d")
except OSError:
    pass
"""
UNREADABLE = """
import os
os.makedirs("a/b"), os.symlink("OUTSIDE", "a/link")
for path in ("a/b", "a", "."):
    try:
        os.chmod(path, 0)
    except OSError:
        pass
"""
MODE = """
import os
os.symlink("OUTSIDE/kept", "link")
try:
    os.chmod("link", 0)
except OSError:
    pass
"""
NESTED = """
import os
for number in range(3, 64):
    try:
        os.write(number, b"[" * 100_000)
    except OSError:
        pass
os._exit(0)
"""


@pytest.mark.parametrize("program", [DEEP, UNREADABLE, MODE, NESTED])
def test_odd_files_and_answers_leave_nothing(program, tmp_path, monkeypatch):
    verifier = CodeVerifier(allow_code=True, limits=Limits(cpu_seconds=5))
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o640)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    judgement = verifier.check(ROW, program.replace("OUTSIDE", str(tmp_path)) + HONEST)
    assert judgement.right == (program != NESTED), judgement
    assert not list((tmp_path / "tmp").iterdir())
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o640
