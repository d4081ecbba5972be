"""Fuzzing, models on paper, and tests with other releases. Run them from the repository root.

They build their models with the tests' tiny model zoo, so the tests folder must be importable.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
