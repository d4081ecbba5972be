"""Check completions: they must equal the answer, or be a program with the same results.

Programs are expressions of `s`. `expressions.py` rejects all syntax but slices, operators and a few
string methods, and runs the others in a process with limits. It answers program by program. If a
program crashes its process, another process continues after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from moemerge.lab.testbed.tasks import expressions
from moemerge.lab.testbed.tasks.drawing import HIDDEN_INPUTS, SYNTHESIS, Problem, program_of

Results = list[list[str] | None]


def check(problem: Problem, completion: str) -> bool:
    """Return whether `completion` (without the end token) solves the problem."""
    return check_all([problem], [completion])[0]


def solves(row: Mapping[str, Any], response: str) -> bool:
    """Check a response to a row of a task file whose rows are problems (`verify:`)."""
    names = [field.name for field in fields(Problem)]
    return check(Problem(**{name: row[name] for name in names}), response)


def check_all(problems: Sequence[Problem], completions: Sequence[str]) -> list[bool]:
    """Check many completions, with all programs in few processes."""
    right = [
        problem.answer == completion
        for problem, completion in zip(problems, completions, strict=True)
    ]
    # Only programs that differ from the answer must run.
    unsure = [
        place
        for place, problem in enumerate(problems)
        if problem.kind == SYNTHESIS and not right[place]
    ]
    written = {program_of(completions[place]) for place in unsure}
    wanted = {program_of(problems[place].answer) for place in unsure}
    programs = sorted(written | wanted)
    results = dict(zip(programs, run_programs(programs, HIDDEN_INPUTS), strict=True))
    for place in unsure:
        expected = results[program_of(problems[place].answer)]
        assert expected is not None, problems[place]
        right[place] = results[program_of(completions[place])] == expected
    return right


def run_programs(programs: Sequence[str], inputs: Sequence[str]) -> Results:
    """Return each program's results for the inputs; None if it fails or returns no strings."""
    return all_answers(programs, lambda some: _evaluated(some, inputs))


def all_answers(programs: Sequence[str], ask: Callable[[Sequence[str]], Results]) -> Results:
    """Return one answer per program; `ask` answers the first ones, until a program crashes it."""
    results: Results = []
    while len(results) < len(programs):
        leading = ask(programs[len(results) :])
        results.extend(leading)
        # Earlier programs may have used up a process's limits, so the program at which it crashed
        # runs again first in the next process. If it crashes that one too, it has no result.
        if not leading:
            results.append(None)
    return results


def _evaluated(programs: Sequence[str], inputs: Sequence[str]) -> Results:
    request = json.dumps({"programs": list(programs), "inputs": list(inputs)})
    command = [sys.executable, "-I", "-S", expressions.__file__]
    answer = subprocess.run(command, input=request.encode(), capture_output=True, check=False)
    whole = answer.stdout[: answer.stdout.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole]
