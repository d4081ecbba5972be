"""Programs that nobody should run, run: each is stopped, and nothing outside notices."""

import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.verification.hostile import HOSTILE
from moemerge.lab.verification.code_checks import CodeVerifier
from moemerge.lab.verification.judgement import Grade, Judgement
from moemerge.lab.verification.sandbox.process import MIB, Limits, Sandbox
from moemerge.lab.verification.sandbox.protections import WAYS, present, protections, strongest
from moemerge.lab.verification.sandbox.system import has_filters

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
    assert not _left_behind()
    assert CodeVerifier(allow_code=True).check(ROW, HONEST).right


def _left_behind():
    """Confined processes of ours, or that lost their parent: their command line names them."""
    running = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if b"verification.sandbox.inside" in command and parent in (1, os.getpid()):
            running.append(command.decode())
    return running


@pytest.mark.parametrize("how", WAYS)
def test_what_is_said_to_hold_was_tried(how):
    if not present(how):
        pytest.skip(f"no {how} on this system")
    held = protections(Sandbox(how))
    assert held.network
    assert held.signals
    if how != "limits":
        assert len(held.sentences()) == 1


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


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("program", [DEEP, UNREADABLE, MODE, NESTED])
def test_odd_files_and_answers_leave_nothing(how, program, tmp_path, monkeypatch):
    if not present(how):
        pytest.skip(f"no {how} on this system")
    verifier = CodeVerifier(allow_code=True, limits=Limits(cpu_seconds=5))
    verifier._sandbox = Sandbox(how)
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o640)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    judgement = verifier.check(ROW, program.replace("OUTSIDE", str(tmp_path)) + HONEST)
    assert judgement.right == (program != NESTED), judgement
    assert not list((tmp_path / "tmp").iterdir())
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o640 or not has_filters()


def test_the_strongest_is_taken():
    sandbox, held = strongest()
    assert sandbox.how == held.how == next(how for how in WAYS if present(how))
