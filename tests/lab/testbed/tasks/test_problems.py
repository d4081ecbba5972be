"""Problems are drawn, split and checked as promised."""

import json

import pytest
import torch

from evidence.data import LENGTH
from evidence.layout import IDS, character_tokenizer, encode
from moemerge.errors import UsageError
from moemerge.lab.testbed.tasks import DOMAINS, KINDS, Problem, check, check_all, problems
from moemerge.lab.testbed.tasks.drawing import is_test


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("hard", [False, True])
def test_the_same_arguments_give_the_same_different_problems(domain, hard):
    found = problems(domain, split="test", count=200, seed=5, hard=hard)
    assert found == problems(domain, split="test", count=200, seed=5, hard=hard)
    assert len({p.prompt for p in found}) == 200
    assert {p.kind for p in found} == {f.name for f in KINDS[domain] if f.hard == hard}
    assert {p.hard for p in found} == {hard}
    assert found[:50] == problems(domain, split="test", count=50, seed=5, hard=hard)
    assert found != problems(domain, split="test", count=200, seed=6, hard=hard)


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_problem_is_on_both_sides_of_the_split(domain):
    train = {p.prompt for p in problems(domain, split="train", count=1500, seed=0)}
    test = {p.prompt for p in problems(domain, split="test", count=1500, seed=1)}
    assert not train & test
    assert not any(map(is_test, train))
    assert all(map(is_test, test))


@pytest.mark.parametrize("domain", DOMAINS)
def test_rows_fit_and_every_character_has_a_token(domain):
    for hard in (False, True):
        for p in problems(domain, split="train", count=500, seed=2, hard=hard):
            assert len(p.prompt) + len(p.answer) + 1 <= LENGTH
            assert set(p.prompt + p.answer) <= set(IDS)


def test_asking_for_too_many_or_for_an_unknown_domain_is_an_error():
    with pytest.raises(UsageError, match="has only"):
        problems("math", split="test", count=50_000, seed=0, hard=False)
    with pytest.raises(UsageError, match="did you mean 'math'"):
        problems("maths", split="test", count=1, seed=0)


def _right(prompt, kind):
    """The answer worked out again, by Python itself."""
    if kind == "chain":
        steps, total = [], None
        for term in prompt[:-1].replace("-", "+-").split("+"):
            total = int(term) if total is None else total + int(term)
            steps.append(str(total))
        return ";".join(steps[1:])
    if kind == "equation":
        left, right = prompt[:-1].split("=")
        factor, shift = left.split("x")
        product = int(right) - int(shift)
        return f"{factor}x={product};x={product // int(factor)}"
    if kind == "one-step":
        return str(eval(prompt[:-1]))
    if kind in {"list-operation", "list-expression"}:
        return str(eval(prompt[:-1])).replace(" ", "")
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("domain", "kind"),
    [
        ("math", "one-step"),
        ("math", "chain"),
        ("math", "equation"),
        ("code", "list-operation"),
        ("code", "list-expression"),
    ],
)
def test_answers_are_right(domain, kind):
    hard = next(f.hard for f in KINDS[domain] if f.name == kind)
    own = [
        p for p in problems(domain, split="train", count=300, seed=3, hard=hard)
        if p.kind == kind
    ]  # fmt: skip
    assert own
    for p in own:
        assert p.answer == _right(p.prompt, kind)


def test_word_problems_are_right():
    for p in problems("math", split="train", count=300, seed=4):
        if p.kind == "word-problem":
            words = p.prompt[:-1].split()
            signs = {"gets", "finds", "wins", "buys"}
            first = int(words[2]) + (1 if words[3] in signs else -1) * int(words[4])
            second = first + (1 if words[5] in signs else -1) * int(words[6])
            assert p.answer == f"{first};{second}"


def test_formats_are_followed():
    for p in problems("chat", split="train", count=300, seed=4):
        order, *words = p.prompt[:-1].split(" ")
        if p.kind == "json":
            pairs = dict(word.split("=") for word in words)
            assert {k: str(v) for k, v in json.loads(p.answer).items()} == pairs
            assert " " not in p.answer
        elif p.kind == "count":
            taken = [getattr(str, words[0])(word) for word in words[1:][: int(order)]]
            assert p.answer.split(" ")[1::2] == taken
            assert p.answer.split(" ")[::2] == [str(n + 1) for n in range(int(order))]
        else:
            separator, given = words[-4], words[-3:]
            wanted = {"sorted": sorted(given), "reversed": given[::-1], "as": given}[order]
            assert p.answer == separator.join(wanted)


def test_traces_are_right():
    for p in problems("code", split="train", count=300, seed=4):
        if p.kind == "trace":
            word = p.prompt[: min(p.prompt.find(mark) % 99 for mark in "[.")]
            whole = eval(f"'{word}'{p.prompt[len(word) : -1]}")
            first, last = p.answer.split(";")
            assert last == whole
            assert len(first) >= len(last)


def _problem(domain, kind, prompt, answer):
    return Problem(domain, kind, True, prompt, answer)


def test_exact_match_except_for_programs():
    p = _problem("math", "chain", "1+1+1+1=", "2;3;4")
    assert check_all([p, p, p], ["2;3;4", "2;3;4 ", "4"]) == [True, False, False]
    assert not check(_problem("code", "trace", "ab[::-1].upper()=", "ba;BA"), "BA")


def test_a_program_that_does_the_same_is_right():
    p = _problem("code", "synthesis", "abcd>DCBA efgh>HGFE s", "[::-1].upper()")
    written = [
        "[::-1].upper()",
        ".upper()[::-1]",
        ".lower().upper()[::-1]",
        "[::-1]",
        "[::-1].upper(",
        "[::-1].upper()[99]",
        "",
    ]
    assert check_all([p] * 7, written) == [True, True, True, False, False, False, False]


def test_tokens_are_those_of_the_tokenizer():
    tokenizer = character_tokenizer()
    text = 'Ann: {"k":[1,2]}?'
    assert encode(text).tolist() == tokenizer(text)["input_ids"]
    assert tokenizer(text + "<eos>")["input_ids"][-1] == IDS["<eos>"]
    assert encode("é|").tolist() == [IDS["<unk>"]] * 2
    assert encode("").dtype == torch.uint8
