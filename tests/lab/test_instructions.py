"""Instructions through lm-eval's checkers."""

import pytest

pytest.importorskip("lm_eval")

from moemerge.errors import DataError
from moemerge.lab.judgement import Grade
from moemerge.lab.verify import InstructionsVerifier


@pytest.fixture(scope="module")
def verifier():
    made = InstructionsVerifier()
    yield made
    made.close()


def row(*instructions):
    names, given = zip(*instructions, strict=True)
    return {"instruction_id_list": list(names), "kwargs": list(given), "prompt": "Write."}


WORDS = ("length_constraints:number_words", {"relation": "at least", "num_words": 3, "n": None})
COMMAS = ("punctuation:no_comma", {})


@pytest.mark.parametrize(
    ("response", "grade", "detail"),
    [
        ("one two three", Grade.RIGHT, ""),
        ("one, two three", Grade.WRONG, "1 of 2 instructions followed; not punctuation:no_comma"),
        ("one", Grade.WRONG, "1 of 2 instructions followed; not length_constraints:number_words"),
        (" \n", Grade.NO_ANSWER, "an empty response"),
    ],
)
def test_every_instruction_counts(verifier, response, grade, detail):
    judgement = verifier.check(row(WORDS, COMMAS), response)
    assert (judgement.grade, judgement.detail) == (grade, detail)


def test_what_cannot_be_told_is_undecided(verifier):
    judgement = verifier.check(row(("no_such:thing", {})), "words")
    assert judgement.grade is Grade.UNDECIDED
    assert "no_such:thing" in judgement.detail


def test_without_a_splitter_of_sentences_two_checks_are_undecided(verifier):
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pass
    else:
        pytest.skip("NLTK's splitter is here")
    sentences = {"relation": "at least", "num_sentences": 1}
    judgement = verifier.check(row(("length_constraints:number_sentences", sentences)), "One. Two.")
    assert judgement.grade is Grade.UNDECIDED
    assert "punkt_tab" in judgement.detail


def test_rows_without_instructions_are_refused(verifier):
    with pytest.raises(DataError, match="no instructions in a row with answer, prompt"):
        verifier.relevant({"prompt": "p", "answer": "a"})
    with pytest.raises(DataError, match="no instructions"):
        verifier.relevant({"instruction_id_list": ["a", "b"], "kwargs": [{}]})
