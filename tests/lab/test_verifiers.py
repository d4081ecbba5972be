"""Words, choices, checks of the user's own, the memory for judgements, and checks by name."""

import json
import sys

import pytest

from moemerge.errors import DataError, UsageError
from moemerge.lab.judgement import RIGHT, Grade, Judgement
from moemerge.lab.verify import (
    NAMES,
    CachedVerifier,
    ChoiceVerifier,
    CustomVerifier,
    ExactVerifier,
    check_all,
    check_rows,
    make_verifier,
)


def test_exact_words():
    check = ExactVerifier().check
    assert check({"answer": "yes"}, " yes\n").right
    assert check({"answer": "yes"}, "Yes").grade is Grade.WRONG
    assert check({"answer": "yes"}, " ").grade is Grade.NO_ANSWER


def test_long_texts_are_shown_where_they_differ():
    judged = make_verifier("exact").check({"answer": "a" * 60 + "b"}, "a" * 60 + "c")
    assert judged.detail == f"'{'a' * 20}c' instead of '{'a' * 20}b'"


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("the answer is b", "B"),
        ("(A) is wrong, so (C)", "C"),
        ("I think the answer is (A). No, the answer is **D**.", "D"),
        ("B", "B"),
        ("B. because", "B"),
        ("(E) since", "E"),
        ("Answer: C", "C"),
        ("A dog is an animal", None),
        ("The answer is a dog", "A"),  # a letter by itself after these words is taken for a choice
        ("nothing", None),
        ("", None),
    ],
)
def test_choices(response, letter):
    assert ChoiceVerifier().chosen(response) == letter


def test_a_choice_is_compared_by_its_letter():
    verifier = ChoiceVerifier()
    assert verifier.check({"answer": "(b)"}, "The answer is B").right
    assert verifier.check({"answer": "B"}, "The answer is C").grade is Grade.WRONG
    assert verifier.check({"answer": "B"}, "hm").grade is Grade.NO_ANSWER
    with pytest.raises(DataError, match="expected one letter"):
        verifier.relevant({"answer": "both"})


def test_a_function_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_checks.py").write_text(
        "from moemerge.lab.judgement import Grade, Judgement\n"
        "def longer(row, response): return len(response) > row['length']\n"
        "def raises(row, response): return row['missing']\n"
        "def own(row, response): return Judgement(Grade.NO_ANSWER, 'mine')\n"
        "def number(row, response): return 1\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    longer = make_verifier("my_checks:longer")
    assert longer.check({"length": 2}, "abc").right
    assert longer.check({"length": 3}, "abc").grade is Grade.WRONG
    assert CustomVerifier("my_checks:raises").check({}, "").grade is Grade.UNDECIDED
    assert CustomVerifier("my_checks:own").check({}, "").detail == "mine"
    with pytest.raises(UsageError, match="returned int, expected True, False"):
        CustomVerifier("my_checks:number").check({}, "")
    for name in ("my_checks:value", "my_checks:nothing", "no_such_module:f"):
        with pytest.raises(UsageError, match="MODULE:FUNCTION"):
            make_verifier(name)


def test_unknown_checks_are_refused_with_a_guess():
    with pytest.raises(UsageError, match=r"unknown check 'maths', did you mean 'math'\?"):
        make_verifier("maths")
    assert set(NAMES) == {"math", "code", "exact", "choice", "instructions"}


@pytest.mark.parametrize(
    ("name", "package"), [("math", "math_verify"), ("instructions", "langdetect")]
)
def test_without_the_extra_it_is_said_what_to_install(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError) as caught:
        make_verifier(name)
    assert caught.value.hint == 'pip install "moemerge[eval]"'


def test_rows_that_cannot_be_judged_are_named_before_work_begins():
    with pytest.raises(DataError, match=r"problems\.jsonl, row 2: 'answer' is NoneType"):
        check_rows(
            make_verifier("exact"),
            [("problems.jsonl, row 1", {"answer": "a"}), ("problems.jsonl, row 2", {})],
        )


class Counting:
    """Judges by equality, and counts; a response "slow" is a timeout."""

    name = "counting"

    def __init__(self):
        self.asked: list[str] = []
        self.closed = False

    def relevant(self, row):
        return row["answer"]

    def check(self, row, response):
        self.asked.append(response)
        if response == "slow":
            return Judgement(Grade.TIMEOUT)
        return RIGHT if response == row["answer"] else Judgement(Grade.WRONG, "é")

    def close(self):
        self.closed = True


def test_equal_content_is_judged_once_also_by_threads_and_the_next_run(tmp_path):
    path = tmp_path / "judgements.jsonl"
    items = [({"answer": "a", "id": n}, text) for n in range(20) for text in ("a", "b", "slow")]
    first = Counting()
    with CachedVerifier(first, path) as cached:
        judgements = check_all(cached, items, workers=4)
    assert sorted(first.asked) == ["a", "b", "slow"]
    assert first.closed
    assert [v.right for v in judgements] == [True, False, False] * 20
    second = Counting()
    with CachedVerifier(second, path) as cached:
        assert check_all(cached, items) == judgements
        assert not cached.check({"answer": "c"}, "a").right
    # A time limit says something about that run only.
    assert sorted(second.asked) == ["a", "slow"]


def test_a_memory_cut_short_by_a_kill_goes_on(tmp_path):
    path = tmp_path / "judgements.jsonl"
    with CachedVerifier(Counting(), path) as cached:
        cached.check({"answer": "a"}, "a")
        cached.check({"answer": "a"}, "b")
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    again = Counting()
    with CachedVerifier(again, path) as cached:
        cached.check({"answer": "a"}, "a")
        cached.check({"answer": "a"}, "b")
    assert again.asked == ["b"]
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [
        json.loads(line) for line in whole.splitlines()
    ]


def test_a_check_that_fails_is_not_remembered(tmp_path):
    class Failing(Counting):
        def check(self, row, response):
            self.asked.append(response)
            raise RuntimeError("no")

    failing = Failing()
    cached = CachedVerifier(failing, tmp_path / "judgements.jsonl")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            cached.check({"answer": "a"}, "a")
    assert len(failing.asked) == 2
