"""Whether a completion is right: equal to the answer, or a program that does the same.

Programs are expressions of `s`, run in the sandbox. What runs them
(`expressions.py`) refuses all syntax but slices, operators and a few string methods before it
runs anything. It answers program by program, so when one brings its process down, the next
process goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from moemerge.testbed.tasks.drawing import HIDDEN_INPUTS, SYNTHESIS, Problem, program_of
from moemerge.verification.sandbox.process import MIB, Limits
from moemerge.verification.sandbox.protections import strongest

EVALUATE = "moemerge.testbed.tasks.expressions:evaluate"
# For all programs of one process; a healthy thousand takes a tenth of a second.
LIMITS = Limits(cpu_seconds=5, wall_seconds=10, memory=512 * MIB, file_bytes=MIB)

Results = list[list[str] | None]


def check(problem: Problem, completion: str) -> bool:
    """Whether `completion` (without the end of text) solves the problem."""
    return check_all([problem], [completion])[0]


def solves(row: Mapping[str, Any], response: str) -> bool:
    """`check` for `verify:` of a task file whose rows are problems."""
    names = [field.name for field in fields(Problem)]
    return check(Problem(**{name: row[name] for name in names}), response)


def check_all(problems: Sequence[Problem], completions: Sequence[str]) -> list[bool]:
    """`check` for many, all programs in few processes."""
    right = [
        problem.answer == completion
        for problem, completion in zip(problems, completions, strict=True)
    ]
    # A program equal to the answer needs no run; the others may still do the same.
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
    """What each program gives for each input; None where it fails or gives no strings."""
    return all_answers(programs, lambda some: _confined(some, inputs))


def all_answers(programs: Sequence[str], ask: Callable[[Sequence[str]], Results]) -> Results:
    """One answer for each program; `ask` answers the leading ones, up to one that ends it."""
    results: Results = []
    while len(results) < len(programs):
        leading = ask(programs[len(results) :])
        results.extend(leading)
        # A process that ends may have been worn out by programs before the one it ended with, so
        # that one gets a process of its own; if it ends that as well, it is to blame.
        if not leading:
            results.append(None)
    return results


def _confined(programs: Sequence[str], inputs: Sequence[str]) -> Results:
    request = json.dumps({"programs": list(programs), "inputs": list(inputs)})
    sandbox, _protections = strongest()
    answer = sandbox.run(EVALUATE, request.encode(), LIMITS).answer
    whole = answer[: answer.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole[: len(programs)]]
