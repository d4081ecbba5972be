"""Which prompts are taken: columns, repetitions, benchmarks, shares."""

import random

import pytest

from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import DataSettings
from moemerge.errors import ConfigError, DataError
from moemerge.lab.data.job import Benchmark, balanced, normal, text_of
from moemerge.lab.generate import read_prompts
from moemerge.text.rows import TextRow


def settings(**values):
    return parse_settings(DataSettings, values, "settings")


def prompt(fields, **values):
    row, chosen = TextRow("f.jsonl, row 1", fields), settings(**values)
    return read_prompts([row], chosen, chosen.balance)[0]


@pytest.mark.parametrize(
    ("fields", "asked", "answer", "reference"),
    [
        ({"question": "2+2?", "answer": "so\n#### 4"}, "2+2?", "so\n#### 4", "so\n#### 4"),
        ({"problem": "x?", "solution": "s", "answer": "4"}, "x?", "4", "s"),
        (
            {"problem": "x?", "generated_solution": "g", "expected_answer": "4"},
            "x?",
            "4",
            "g",
        ),
        ({"prompt": "def f():", "canonical_solution": " pass"}, "def f():", None, " pass"),
        ({"instruction": "Sort", "input": "3 1", "output": "1 3"}, "Sort\n\n3 1", None, "1 3"),
        (
            {"messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]},
            "a\nb\nc", None, "d",
        ),
        ({"prompt": [{"role": "user", "content": "a"}]}, "a", None, None),
    ],
)  # fmt: skip
def test_common_sets_are_read_as_they_are(fields, asked, answer, reference):
    row = prompt(fields)
    assert row.user_text == asked
    assert row.fields.get("answer") == answer
    assert row.reference == reference
    assert row.group == "f.jsonl"


def test_columns_can_be_named():
    row = prompt(
        {"q": "2+2?", "final": "4", "how": "add", "kind": "sums"},
        map="prompt=q, answer=final,reference=how",
        balance="kind",
    )
    assert (row.user_text, row.fields["answer"], row.group) == ("2+2?", "4", "sums")
    assert row.reference == "add"
    with pytest.raises(DataError, match="no column 'quest' for prompt, did you mean 'question'"):
        prompt({"question": "2+2?"}, map="prompt=quest")
    with pytest.raises(DataError, match=r"(?s)no prompt in a row with q.*map=..prompt.: COLUMN"):
        prompt({"q": "2+2?"})


@pytest.mark.parametrize("wrong", ["prompt", "prompt=", "=q", "prompt=q,,x", "prmpt=q"])
def test_wrong_maps_are_refused(wrong):
    with pytest.raises(ConfigError, match="map"):
        settings(map=wrong)


def test_templates_hold_prompts_and_other_columns():
    row = prompt(
        {"prompt": "2+2?", "unit": "apples"},
        template="{prompt} In {unit}, as \\boxed{x}, \\frac{1}{2}.",
        system="Be brief.",
    )
    assert [turn["role"] for turn in row.turns] == ["system", "user"]
    assert row.user_text == "2+2? In apples, as \\boxed{x}, \\frac{1}{2}."
    with pytest.raises(ConfigError, match=r"no \{prompt\} in it"):
        settings(template="solve this")


def test_plain_text():
    rows = [TextRow("a, row 1", {"text": "x"}), TextRow("b, row 1", {"content": "y"})]
    assert [text_of(row, settings()) for row in rows] == [("a", "x"), ("b", "y")]
    with pytest.raises(DataError, match="no text in column 'body'"):
        text_of(rows[0], settings(map={"text": "body"}))


def test_repetitions_are_found_whatever_their_case_and_spacing():
    texts = ["What is 2?", "what  is\n2?", "What is 3?", "Ｗhat is 2?"]
    one, spaced, other, wide = map(normal, texts)
    assert one == spaced == wide != other


def test_groups_get_equal_shares_and_what_small_ones_leave_goes_to_others():
    items = [("a", n) for n in range(50)] + [("b", n) for n in range(3)]
    items += [("c", n) for n in range(30)]
    taken = balanced(items, lambda item: item[0], 23, random.Random(0))
    counts = {name: sum(group == name for group, _ in taken) for name in "abc"}
    assert counts == {"a": 10, "b": 3, "c": 10}
    assert taken == sorted(taken, key=items.index)
    assert taken == balanced(items, lambda item: item[0], 23, random.Random(0))
    assert taken != balanced(items, lambda item: item[0], 23, random.Random(1))
    assert balanced(items, lambda item: item[0], None, random.Random(0)) == items
    assert len(balanced(items, lambda item: item[0], 7, random.Random(0))) == 7


def test_overlap_with_a_benchmark_is_n_words_in_a_row():
    benchmark = Benchmark("b", ["One two three, four five six seven!", "Short one"], n=4)
    assert benchmark.overlaps("zero ONE two  three four")
    assert not benchmark.overlaps("one two three five four")
    assert benchmark.overlaps("short one?")
    assert not benchmark.overlaps("a short one")
