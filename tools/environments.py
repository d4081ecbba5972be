"""Run commands in hostile environments: closed or full streams, missing folders, odd variables.

    python -m tools.environments [--command merge] [--environment "no home"]

A run must end with one of our exit codes, without a traceback and a temporary file left behind, and
change no input. Unlike `tools.fuzz`, every run is a new process: most of these things are read when
Python starts.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.fuzz import cases, corpus, harness
from tools.fuzz.situations import COMMANDS

SECONDS = 300
CODES = (0, *harness.OURS)


@dataclass(frozen=True)
class Environment:
    """What differs from an ordinary process."""

    variables: Mapping[str, str | None] = field(default_factory=dict)  # None: not set
    before: Callable[[], object] | None = None  # runs in the new process
    file: str = ""  # a module in the current folder that shadows a library


def closed(*numbers: int) -> Callable[[], None]:
    def close() -> None:
        for number in numbers:
            os.close(number)

    return close


def full(number: int) -> Callable[[], object]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def limited(which: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (value, value))


def leave_for_removed_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x", "LOCAL_RANK": "x"}
ENVIRONMENTS: Mapping[str, Environment] = {
    "ascii": Environment(ASCII),
    "latin-1": Environment({"PYTHONIOENCODING": "latin-1"}),
    "utf-16": Environment({"PYTHONIOENCODING": "utf-16"}),
    "full stdout": Environment(before=full(1)),
    "full stderr": Environment(before=full(2)),
    "closed stdin": Environment(before=closed(0)),
    "closed stdout": Environment(before=closed(1)),
    "closed stderr": Environment(before=closed(2)),
    "closed streams": Environment(before=closed(0, 1, 2)),
    "no temporary folder": Environment({"TMPDIR": "/nonexistent"}),
    "temporary file": Environment({"TMPDIR": "/etc/passwd"}),
    "no home": Environment({"HOME": None}),
    "home is a file": Environment({"HOME": "/etc/passwd"}),
    "removed folder": Environment(before=leave_for_removed_folder),
    "no columns": Environment({"COLUMNS": "0"}),
    "one column": Environment({"COLUMNS": "1"}),
    "odd columns": Environment({"COLUMNS": "x", "LINES": "-5"}),
    "dumb terminal": Environment({"TERM": "dumb", "FORCE_COLOR": "1"}),
    "odd threads": Environment({"OMP_NUM_THREADS": "x"}),
    "a rank alone": Environment({"RANK": "0"}),
    "a world alone": Environment({"WORLD_SIZE": "2"}),
    "odd ranks": Environment({"RANK": "5", "WORLD_SIZE": "2", **MEETING}),
    "strict umask": Environment(before=lambda: os.umask(0o777)),
    "small files": Environment(before=limited(resource.RLIMIT_FSIZE, 4096)),
    "few descriptors": Environment(before=limited(resource.RLIMIT_NOFILE, 24)),
    "no assertions": Environment({"PYTHONOPTIMIZE": "1"}),
    "warnings are errors": Environment({"PYTHONWARNINGS": "error"}),
    "no hub": Environment({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}),
    "cache is a file": Environment({"HF_HOME": "/etc/passwd"}),
    "another json": Environment(file="json.py"),
    "another torch": Environment(file="torch.py"),
    "no such GPU": Environment({"CUDA_VISIBLE_DEVICES": "99"}),
    "loud transformers": Environment({"TRANSFORMERS_VERBOSITY": "x"}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--command", choices=list(COMMANDS), action="append")
    parser.add_argument("--environment", choices=list(ENVIRONMENTS), action="append")
    arguments = parser.parse_args()
    harness.warm_up()
    bad = runs = 0
    with tempfile.TemporaryDirectory(prefix="environments-") as scratch:
        valid = corpus.build(Path(scratch) / "corpus")
        shutil.rmtree(valid / ".out.journal")
        for name in arguments.environment or ENVIRONMENTS:
            for command in arguments.command or ("merge", "calibrate", "evaluate", "data"):
                folder = Path(scratch) / "run"
                shutil.copytree(valid, folder)
                fault = run(ENVIRONMENTS[name], COMMANDS[command], folder)
                shutil.rmtree(folder)
                runs, bad = runs + 1, bad + bool(fault)
                if fault:
                    print(f"{name}, {command}: {fault}", flush=True)
    print(f"{runs} runs, {bad} bad")
    return int(bad > 0)


def run(environment: Environment, command: tuple[str, ...], folder: Path) -> str:
    """Run a command in a folder and return what is wrong, if anything."""
    if environment.file:
        (folder / environment.file).write_text("raise SystemExit('the wrong module')\n")
    before, inputs = harness.tree(folder), cases.contents(folder)
    variables = {**os.environ, **environment.variables}
    with tempfile.TemporaryFile() as log:
        try:
            code = subprocess.run(
                [str(Path(sys.executable).with_name("moemerge")), *command],
                cwd=folder,
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=environment.before,
                timeout=SECONDS,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return "hang"
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    left = [path for path in harness.tree(folder) - before if ".partial-" in path]
    if code not in CODES or "Traceback" in output:
        return f"exit code {code}: {output[-500:]}"
    if left:
        return f"left behind: {left[0]}"
    after = {name: cases.contents(folder, name).get(name) for name in inputs}
    changed = [name for name in inputs if after[name] != inputs[name]]
    return f"changed an input: {changed[0]}" if changed else ""


if __name__ == "__main__":
    raise SystemExit(main())
