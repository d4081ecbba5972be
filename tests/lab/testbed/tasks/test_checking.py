"""Programs of a model run elsewhere, under limits, and can do nothing but fail."""

import sys

import pytest

from moemerge.lab.testbed.tasks.checking import all_answers, run_programs


def test_results_come_in_order():
    assert run_programs(["s", "s[::-1].upper()", "s[1:]+s[:1]"], ["ab", "xyz"]) == [
        ["ab", "xyz"],
        ["BA", "ZYX"],
        ["ba", "yzx"],
    ]
    assert run_programs([], ["ab"]) == []


@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd').read()",
        "__import__('os').system('true')",
        "().__class__.__bases__[0].__subclasses__()",
        "s.__class__",
        "s.format(s)",
        "[c for c in s]",
        "(lambda: s)()",
        "s if s else s",
        "s\nimport os",
        "eval('s')",
        "9**9**9",
        "s*10**9",
        "s*999999999999999",
        "s[",
        "len(s)",
        "s" + "[::-1]" * 200,
        "s\x00",
    ],
)
def test_what_is_no_harmless_expression_fails_and_the_next_still_runs(program):
    assert run_programs([program, "s[:1]"], ["ab"]) == [None, ["a"]]


def test_a_program_that_brings_its_process_down_costs_only_itself():
    def ask(programs):
        leading = programs[: programs.index("die")] if "die" in programs else programs
        return [[program] for program in leading]

    answers = all_answers(["a", "die", "b", "die", "die"], ask)
    assert answers == [["a"], None, ["b"], None, None]


def test_a_process_worn_out_by_others_is_not_held_against_the_next():
    answers = all_answers(list("abcde"), lambda programs: [[p] for p in programs[:2]])
    assert answers == [["a"], ["b"], ["c"], ["d"], ["e"]]


@pytest.mark.skipif(sys.platform != "linux", reason="limits on memory are Linux's")
def test_memory_is_limited():
    assert run_programs(["(s*500000000)[:1]", "s"], ["ab"]) == [None, ["ab"]]
