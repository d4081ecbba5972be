"""Campaigns that try to break the package: hostile files, failing calls, kills, power loss.

Run them from the repository root: `python -m tools.fuzz.run`, `python -m tools.faults.run`. They
build their models with the tests' tiny model zoo, so the tests folder must be importable.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
