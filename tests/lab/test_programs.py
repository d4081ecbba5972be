"""Programs judged by their tests."""

import pytest

from moemerge.errors import DataError, UsageError
from moemerge.lab.judgement import Grade
from moemerge.lab.programs import CodeVerifier, program_of, row_tests
from moemerge.lab.sandbox import Limits
from moemerge.lab.verify import ThreeSecondsVerifier

HUMANEVAL = {
    "task_id": "HumanEval/x",
    "prompt": 'from math import floor\n\ndef half(x: float) -> int:\n    """Half, floored."""\n',
    "canonical_solution": "    return floor(x / 2)\n",
    "entry_point": "half",
    "test": "def check(candidate):\n    assert candidate(5) == 2\n    assert candidate(4) == 2\n",
}
MBPP = {
    "prompt": "Write a function to double.",
    "code": "def double(x):\n  return 2 * x\n",
    "test_imports": ["import math"],
    "test_list": ["assert double(2) == 4", "assert math.isclose(double(0.1), 0.2)"],
}
PLAIN = {"prompt": "double", "tests": "assert double(2) == 4"}

DATACLASS = """```python
from dataclasses import dataclass

@dataclass
class A:
    x: int

def double(x):
    return A(2 * x).x

if __name__ == "__main__":
    1 / 0
```"""


@pytest.fixture(scope="module")
def verifier():
    return CodeVerifier(allow_code=True, limits=Limits(cpu_seconds=2, wall_seconds=6))


def test_nothing_runs_unless_it_is_allowed():
    with pytest.raises(UsageError, match=r"(?s)programs that a model wrote.*allow_code=True"):
        CodeVerifier(allow_code=False)


@pytest.mark.parametrize(
    ("row", "response"),
    [
        (HUMANEVAL, "    return int(x // 2)\n"),
        (HUMANEVAL, "Sure:\n```python\ndef half(x):\n    return floor(x / 2)\n```\nDone."),
        (HUMANEVAL, "def half(x):\n    return x // 2\n```\nThis halves."),
        (MBPP, "```\ndef double(x):\n    return x + x\n```"),
        (PLAIN, "First\n```python\ndef double(x):\n    return x + x\n```\n```bash\npip\n```"),
        (PLAIN, DATACLASS),
    ],
)  # fmt: skip
def test_right_programs(verifier, row, response):
    judgement = verifier.check(row, response)
    assert judgement.right, judgement


@pytest.mark.parametrize(
    ("row", "response", "grade"),
    [
        (HUMANEVAL, "    return x\n", Grade.WRONG),
        (MBPP, "def double(x): return x ** 2", Grade.WRONG),
        (MBPP, "def doubled(x): return x + x", Grade.ERROR),
        (PLAIN, "def double(x) return x", Grade.NO_ANSWER),
        (PLAIN, "", Grade.NO_ANSWER),
        (PLAIN, "def double(x):\n    import nowhere", Grade.ERROR),
    ],
)
def test_wrong_programs(verifier, row, response, grade):
    assert verifier.check(row, response).grade is grade


def test_a_slow_problem_gives_as_much_time_as_its_reference_needs(verifier):
    busy = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
    quick = CodeVerifier(allow_code=True, limits=Limits(cpu_seconds=1, wall_seconds=10))
    slow = {"tests": busy.format(1.2) + "assert double(2) == 4", "code": MBPP["code"]}
    assert quick.check(slow, MBPP["code"]).right


def test_the_one_broken_test_of_humaneval_plus_is_mended():
    row = {**HUMANEVAL, "test": "def check(candidate):\n"
           "    for inp in []: assert _poly(*candidate(*inp), inp) <= 0.0001\n"}  # fmt: skip
    assert "abs(_poly(*inp, candidate(*inp))) <= 0.0001" in row_tests(row).source
    published = ThreeSecondsVerifier(allow_code=True)
    assert "_poly(*candidate(*inp), inp) <= 0.0001" in published.tests_of(row).source
    assert published.tests_of(row).reference is None  # so no row has more time than others
    assert published.relevant(row)[-1] == 3


@pytest.mark.parametrize("row", [{}, {"tests": []}, {"tests": 3}, {"test_list": [1]}])
def test_rows_without_tests_are_refused(row):
    with pytest.raises(DataError, match="no tests"):
        row_tests(row)


def test_the_block_that_defines_the_function_is_the_program():
    tests = row_tests(HUMANEVAL)
    response = "```python\nprint(half(3))\n```\n```python\ndef half(x): return 1\n```"
    program = program_of(response, tests)
    assert program.endswith("def half(x): return 1\n")
    assert program.startswith("from math import floor")
    future = "```python\nfrom __future__ import annotations\ndef half(x): return 1\n```"
    assert str(program_of(future, tests)).startswith("from __future__")


def test_a_program_that_waits_is_not_said_to_compute():
    limits = Limits(cpu_seconds=1, wall_seconds=2)
    judged = CodeVerifier(allow_code=True, limits=limits).check(
        PLAIN, "import time\ntime.sleep(60)"
    )
    assert judged.grade is Grade.TIMEOUT
    assert judged.detail == "stopped after 2 s on the clock: it waited"
