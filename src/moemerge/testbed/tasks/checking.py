"""Whether a completion is right: equal to the answer, or a program that does the same."""

from __future__ import annotations

from collections.abc import Sequence

from moemerge.testbed.tasks.expressions import run_programs
from moemerge.testbed.tasks.problem import Problem
from moemerge.testbed.tasks.programs import HIDDEN_INPUTS, SYNTHESIS, program_of


def check(problem: Problem, completion: str) -> bool:
    """Whether `completion` (without the end of text) solves the problem."""
    return check_all([problem], [completion])[0]


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
