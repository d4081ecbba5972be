"""The package's tasks: what is asked of a row of each set, and how both protocols judge."""

import pytest

from lab.evaluation_cases import request
from moemerge.errors import ConfigError
from moemerge.lab.benchmarks import find_task, prepare
from moemerge.lab.verify import make_verifier

ROWS = {
    "gsm8k": {"question": "How many?", "answer": "1 + 1 = 2\n#### 2"},
    "math500": {"problem": "How long?", "answer": "3\\sqrt{13}", "unique_id": "t/1.json"},
    "humaneval+": {
        "task_id": "HumanEval/0", "prompt": 'def two():\n    """Give 2."""\n',
        "canonical_solution": "    return 2\n", "entry_point": "two",
        "test": "def check(candidate):\n    assert candidate() == 2\n",
    },
    "mbpp+": {
        "task_id": 7, "prompt": "Write two.", "code": "def two():\n    return 2\n",
        "test_imports": [], "test_list": ["assert two() == 2", "assert two()"],
        "test": "assert two() == 2\n",
    },
    "ifeval": {
        "key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
    },
    "commonsense_qa": {
        "id": "x", "question": "Where?", "answerKey": "B",
        "choices": {"label": ["A", "B"], "text": ["here", "there"]},
    },
}  # fmt: skip
ASKED = {
    "gsm8k": "How many? Let's think step by step.",
    "math500": "How long? Let's think step by step.",
    "humaneval+": "Write a solution to the following problem and make sure that it passes the "
    'tests:\n```python\ndef two():\n    """Give 2."""\n\n```',
    "mbpp+": "Write two. Your code should satisfy the following assertion:\nassert two() == 2",
    "ifeval": "No commas.",
    "commonsense_qa": "Where?\n(A) here\n(B) there\n"
    'Think step by step, and end with "The answer is (X)".',
}
NAMES = {
    "gsm8k": "1", "math500": "t/1.json", "humaneval+": "HumanEval/0", "mbpp+": "7",
    "ifeval": "1", "commonsense_qa": "x",
}  # fmt: skip
PROGRAM = "def two():\n    return 2\n```\nThat is it."
# A response, whether it is right, and whether the published scoring says so.
JUDGED = [
    ("gsm8k", "so it is 2", True, True),
    ("gsm8k", "The answer is $2.00", True, False),
    ("gsm8k", "The answer is 2, which is less than 7", True, False),
    ("gsm8k", "It is 2, and so on ...", True, False),
    ("gsm8k", "3", False, False),
    ("math500", "\\boxed{3\\sqrt{13}}", True, False),
    ("math500", "\\boxed{3}", False, True),
    ("humaneval+", PROGRAM, True, True),
    ("humaneval+", "def two():\n    return 3\n```", False, False),
    ("mbpp+", PROGRAM, True, True),
    ("commonsense_qa", "The answer is (B)", True, True),
    ("commonsense_qa", "The answer is B, not (A)", True, False),
    ("commonsense_qa", "The answer is (A)", False, False),
]


@pytest.fixture(scope="module")
def judged():
    """Makes each check once."""
    made = {}

    def judge(posed, text):
        if posed.verify not in made:
            made[posed.verify] = make_verifier(posed.verify, allow_code=True, workers=1)
        response = posed.task.settings.prefill + text
        return made[posed.verify].check(posed.problems[0].fields, response).right

    yield judge
    for verifier in made.values():
        verifier.close()


def posed_task(name, protocol, tmp_path):
    wanted = request(["m"], [name], tmp_path, data={name: [ROWS[name]]}, protocol=protocol)
    return prepare(wanted).tasks[0]


@pytest.mark.parametrize("protocol", ["correct", "paper"])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_asked(name, protocol, tmp_path):
    posed = posed_task(name, protocol, tmp_path)
    assert posed.problems[0].user_text == ASKED[name]
    assert posed.names == (NAMES[name],)


@pytest.mark.parametrize(("name", "response", "right", "published"), JUDGED)
def test_both_protocols(name, response, right, published, judged, tmp_path):
    assert judged(posed_task(name, "correct", tmp_path), response) is right
    assert judged(posed_task(name, "paper", tmp_path), response) is published


def test_published_ifeval_counts_one_sample(tmp_path):
    wanted = request(
        ["m"], ["ifeval"], tmp_path, data={"ifeval": [ROWS["ifeval"]]}, protocol="paper", samples=4
    )
    assert prepare(wanted).tasks[0].samples == 1


def test_faults_of_a_task_file_come_with_their_lines(tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("title: Own\ntemplat: '{prompt}'\nmax_new_tokens: 0\n")
    with pytest.raises(ConfigError) as caught:
        find_task(str(path))
    text = str(caught.value)
    assert "line 2: templat: unknown key, did you mean 'template'?" in text
    assert "line 3: max_new_tokens: must be at least 1, not 0" in text
    assert "verify: is missing" in text
    with pytest.raises(ConfigError, match=r"cannot read config .*nowhere\.yml"):
        find_task(str(tmp_path / "nowhere.yml"))
