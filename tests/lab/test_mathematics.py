"""Mathematical answers: what counts as the answer of a text, and what it is compared with."""

import time
from fractions import Fraction

import pytest

from moemerge.errors import DataError
from moemerge.lab.judgement import Grade
from moemerge.lab.mathematics import (
    MathVerifier,
    compare_numbers,
    conflict,
    gold_of,
    last_box,
    numbers_in,
    plain_number,
    stated,
    unit_of,
    value,
)


@pytest.fixture(scope="module")
def verifier():
    pytest.importorskip("math_verify")
    verifier = MathVerifier(workers=1, seconds=5)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", Fraction(18)),
        ("-18", Fraction(-18)),
        ("\N{MINUS SIGN}18", Fraction(-18)),
        ("$18.00", Fraction(18)),
        ("\\$1,234.50", Fraction("1234.5")),
        ("-$5", Fraction(-5)),
        ("$-5", Fraction(-5)),
        ("11,\\! 111,\\! 100", Fraction(11_111_100)),
        ("1{,}000", Fraction(1000)),
        ("3/4", Fraction(3, 4)),
        (".5", Fraction(1, 2)),
        ("50\\%", Fraction(50)),
        ("18.", Fraction(18)),
        ("1,23", None),
        ("1/0", None),
        ("2 x", None),
        ("", None),
        ("18 19 x", None),
        ("9" * 200, None),
    ],
)
def test_plain_numbers_are_exact(text, number):
    assert plain_number(text) == number


def test_signs_belong_to_numbers_unless_something_stands_before():
    assert [value(match) for match in numbers_in("10-5 gives -3, or 7-x, (2)-1")] == [
        10,
        5,
        -3,
        7,
        2,
        1,
    ]


def test_boxes_are_balanced_and_open_ones_left_out():
    text = r"\boxed{\frac{1}{2}} then \boxed {x_{1}} and \boxed{cut \frac{"
    assert last_box(text) == ("x_{1}", 2)
    assert last_box(r"\boxed{\{1, 2\}}") == (r"\{1, 2\}", 1)
    assert last_box(r"\boxed{a \boxed{b} c}") == ("b", 2)
    assert last_box(r"\boxed{1") == (None, 0)


def test_what_is_stated_last_counts():
    assert stated("The answer is 3. No: the answer is 3.5 m. Done.") == "3.5 m"
    assert stated("so\n#### 18\n") == "18"
    assert stated("**Answer:** 18") == "18"
    assert stated("no such words") is None


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("18", "She earns $18.00 every day."),
        ("18", "9 * 2 = 18\n#### 18"),
        ("18", r"The result is $\boxed{18}$ dollars"),
        ("18", r"\boxed{x = 18 \text{ cm}}"),
        ("18", r"\boxed{\frac{36}{2}}"),
        ("18", "The answer is 18 eggs, sold for $2 each."),
        ("18", "\\boxed{18}\n#### 19\nThe answer is 20. 21"),
        ("18", "#### 18\nThe answer is 20. 21"),
        ("7", "The answer is 3 + 4 = 7."),
        ("1000", "That makes 1,000"),
        ("50", "a rise of 50%"),
        ("0.5", "a rise of 50%"),
        ("3\\sqrt{13}", r"we get $\boxed{3\sqrt{13}}$"),
        ("x^2+1", "The answer is 1 + x^2."),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
        (r"\frac{1}{2}", r"First \boxed{\frac{1}{3}}, but rather \boxed{\frac{1}{2}}"),
        ("1,-2", r"either $\boxed{1}$ or $\boxed{-2}$"),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
        (r"36^\circ", r"\boxed{36}"),
        ("52_8", r"\boxed{52_{8}}"),
        (r"15\mbox{ cm}^2", r"\boxed{15 \text{ square centimeters}}"),
    ],
)
def test_right_answers(verifier, gold, response):
    assert verifier.check({"answer": gold}, response).right


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("18", r"We had 18 and get \boxed{19}"),
        ("18", "18 before, and the answer is 19."),
        ("18", "The answer is -18"),
        ("-5", "The answer is 5"),
        ("18", r"\boxed{18} and then \boxed{19}"),
        ("18", "18.5"),
        ("180", "18"),
        ("3\\sqrt{13}", r"\boxed{3}"),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
        ("6 - 5i", r"\boxed{6 + 5i}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        (r"\text{Evelyn}", r"\boxed{\text{Navin}}"),
        (r"5.4 \text{ cents}", r"\boxed{5.4 \text{ dollars}}"),
        (r"15\mbox{ cm}^2", r"\boxed{15\mbox{ cm}}"),
        ("52_8", r"\boxed{52_5}"),
    ],
)
def test_wrong_answers(verifier, gold, response):
    assert verifier.check({"answer": gold}, response).grade is Grade.WRONG


def test_texts_without_an_answer_are_told_from_wrong_ones(verifier):
    assert verifier.check({"answer": "18"}, "I do not know").grade is Grade.NO_ANSWER
    assert verifier.check({"answer": "18"}, "").grade is Grade.NO_ANSWER


def test_an_answer_that_hangs_is_stopped_and_the_next_is_judged(verifier):
    quick = MathVerifier(workers=1, seconds=1.0)
    monster = {"answer": "3"}, r"\boxed{10^{10^{10^{10}}}}"
    assert quick.check(*monster).grade is Grade.TIMEOUT
    assert quick.check({"answer": r"\sqrt{2}"}, r"\boxed{\sqrt 2}").right
    quick.close()


def test_the_gold_answer_of_a_row():
    assert gold_of({"answer": "3 + 4 = 7\n#### 7"}) == "7"
    assert gold_of({"answer": r"so $\boxed{\frac12}$"}) == r"\frac12"
    assert gold_of({"answer": 18}) == "18"
    for bad in ({}, {"answer": None}, {"answer": ["18"]}, {"answer": " "}, {"answer": True}):
        with pytest.raises(DataError, match="'answer' is"):
            gold_of(bad)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("5 cm", ("cm", 1)),
        (r"5 \text{ square feet}", ("ft", 2)),
        (r"864 \mbox{ inches}^2", ("in", 2)),
        (r"36^\circ", ("degree", 1)),
        (r"\$36", ("dollar", 1)),
        ("5 apples", None),
        ("5", None),
        ("east", None),
        (r"\frac{270}7\text{ degrees}", ("degree", 1)),
    ],
)
def test_units(text, unit):
    assert unit_of(text) == unit


def test_units_conflict_only_where_both_are_known():
    assert conflict("5 cm", "5 m")
    assert not conflict("5 cm", "5")
    assert not conflict("5 apples", "5 m")
    assert not conflict("5 hours", "5 h")


def test_numbers_that_look_alike_are_told_apart():
    judged = compare_numbers(Fraction(1, 3), "The answer is 0.333333.")
    assert judged.detail == "333333/1000000 instead of 1/3"


@pytest.mark.parametrize("text", [r"\boxed{" * 14_000, r"\boxed{" * 7_000 + "}" * 7_000])
def test_finding_boxes_takes_linear_time(text):
    began = time.process_time()
    last_box(text)
    assert time.process_time() - began < 1
    assert last_box(text + r"\boxed{\{1\}} \boxed{2")[0] == r"\{1\}"
