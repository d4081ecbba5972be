"""Run the fast tests with the oldest supported releases and with the newest on the index.

`make versions` calls it and writes docs/compatibility.md. Each end gets a throw-away environment
under build/versions.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
FOLDER = ROOT / "build" / "versions"
ENDS = ("oldest", "newest")
# Packages whose releases decide whether we work; the page lists their versions.
SHOWN = (
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "pydantic",
    "typer",
    "numpy",
)
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.4", "pytest-xdist>=3.6", "plotly>=6.3")
TESTS = (
    "tests/forward",
    "tests/families",
    "tests/routing/test_cg.py",
    "tests/merging/test_families.py",
    "tests/repairs/calibration/test_algorithm.py",
    "tests/cli/test_quick.py",
)


def floors() -> list[str]:
    """Return the oldest supported release of every dependency, as exact requirements."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"([\w.-]+)>=([\d.]+)", line) for line in project["dependencies"])
    return [f"{match[1]}=={match[2]}" for match in found if match is not None]


def install(end: str, folder: Path, options: Sequence[str]) -> Path:
    """Create an environment with the releases of one end and return its interpreter."""
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    pinned = floors() if end == "oldest" else ["--upgrade"]
    command = [python, "-m", "pip", "install", "--quiet", "--no-compile", *options, *pinned]
    subprocess.run([*command, "-e", str(ROOT), *TEST_TOOLS], check=True)
    return python


def versions(python: Path) -> dict[str, str]:
    """Return the installed releases of the packages that the page lists."""
    code = (
        "import json, platform, sys; from importlib.metadata import version; "
        "names = sys.argv[1:]; found = {name: version(name) for name in names}; "
        "print(json.dumps({'Python': platform.python_version(), **found}))"
    )
    done = subprocess.run([python, "-c", code, *SHOWN], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run_tests(python: Path, jobs: int, log: Path) -> tuple[str, list[str]]:
    """Run the fast tests; return pytest's summary and the names of the tests that failed."""
    present = [path for path in TESTS if (ROOT / path).exists()]
    command = [python, "-m", "pytest", "-m", "not slow", "-n", str(jobs), "--dist", "loadfile"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-rfE", "--tb=short", *present],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = done.stdout.splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = next((line for line in reversed(lines) if " passed" in line), "no summary")
    return summary.strip("= ").partition(" in ")[0], failed


def render(results: dict[str, Any]) -> str:
    """Return the page with the results of both ends."""
    ends = [end for end in ENDS if end in results]
    lines = [
        "# Compatibility",
        "",
        "`make versions` installs the oldest supported releases and the newest on the index into",
        "throw-away environments, runs the fast tests in each, and writes this page.",
        "",
        "| | " + " | ".join(ends) + " |",
        "|---|" + "---|" * len(ends),
    ]
    for name in ("Python", *SHOWN):
        cells = [results[end]["versions"].get(name, "") for end in ends]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name in ("tests", "date", "commit"):
        lines.append(f"| {name} | {' | '.join(results[end][name] for end in ends)} |")
    lines += ["", f"Tests: `{'`, `'.join(TESTS)}`, without those marked slow.", ""]
    for end in ends:
        failed = results[end]["failed"]
        if failed:
            lines += [f"Failed with the {end} releases:", "", *(f"* `{t}`" for t in failed), ""]
    lines += [
        "The names of transformers and torch that are not public are collected in",
        "`forward/compat.py` and `runtime/torch_compat.py`. If a release removes one of them,",
        "`tests/forward/test_compat.py` fails and names it. With torch 2.9, pickled checkpoints",
        "(`pytorch_model.bin`) are refused: it cannot tell whether such a file is complete.",
        "",
    ]
    return "\n".join(lines)


def commit() -> str:
    """Return the short hash of the checked-out commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run one end or both, keep earlier results of the other, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=ENDS, help="run one end and keep the other's results")
    parser.add_argument("--jobs", type=int, default=2, help="parallel test workers")
    parser.add_argument(
        "--installed", action="store_true", help="use the environments of an earlier run"
    )
    parser.add_argument("--pip", default="", help="further options of pip install")
    chosen = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    store = FOLDER / "results.json"
    results = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    for end in [chosen.only] if chosen.only else ENDS:
        python = FOLDER / end / "bin" / "python"
        if not chosen.installed:
            print(f"{end}: installing", flush=True)
            python = install(end, FOLDER / end, chosen.pip.split())
        print(f"{end}: testing", flush=True)
        summary, failed = run_tests(python, chosen.jobs, FOLDER / f"{end}.log")
        results[end] = {
            "versions": versions(python),
            "tests": summary,
            "failed": failed,
            "date": date.today().isoformat(),
            "commit": commit(),
        }
        print(f"{end}: {summary}", flush=True)
        store.write_text(json.dumps(results, indent=1), encoding="utf-8")
    PAGE.write_text(render(results), encoding="utf-8")
    return 1 if any(results[end]["failed"] for end in results) else 0


if __name__ == "__main__":
    sys.exit(main())
