"""The forms of a row, and what is said of keys that no form reads."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import zoo
from moemerge.errors import DataError
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.rows import Conversation, TextRow, check_file, parse_row, read_rows, source_names
from moemerge.text.tokens import load_tokenizer


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(zoo.tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=True))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


USER, ASSISTANT = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT]},
        {"prompt": "one", "response": "two"},
        {"prompt": "one", "completion": "two"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
        {"conversations": [USER, ASSISTANT]},
        {"instruction": "one", "output": "two"},
        {"instruction": "one", "input": "", "output": "two"},
    ],
)
def test_every_form_of_a_conversation_reads_question_and_answer(row: dict[str, Any]) -> None:
    parsed = parse_row(TextRow("here", row))
    assert isinstance(parsed, Conversation)
    assert parsed.turns == (USER, ASSISTANT)
    assert parse_row(TextRow("here", json.dumps(row).encode())) == parsed


def test_the_input_of_an_alpaca_row_stands_below_its_instruction() -> None:
    parsed = parse_row(TextRow("here", {"instruction": "add", "input": "1 2", "output": "3"}))
    assert isinstance(parsed, Conversation)
    assert [turn["content"] for turn in parsed.turns] == ["add\n\n1 2", "3"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": "b", "completion": "c"}, "expected one answer"),
        ({"prompt": "a", "completion": 3}, "'completion' is int"),
        ({"conversations": [{"from": "robot", "value": "a"}]}, "from 'robot', expected one of"),
        ({"conversations": [{"value": "a"}]}, "role and content"),
        ({"instruction": "a", "output": ["b"]}, "a message is 'b'"),
        ({"instruction": "a", "input": 3}, "'input' is int"),
        ({}, "keys found: none"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_row(TextRow("here", row))


def test_keys_that_no_form_reads_are_named_once_for_each_file(tmp_path: Path, chat: Any) -> None:
    one = write(
        tmp_path / "one.jsonl",
        {"prompt": "one", "respnse": "two", "id": 1},
        {"prompt": "two", "respnse": "one", "id": 2},
    )
    two = write(tmp_path / "two.jsonl", {"text": "one"}, {"prompt": "one", "completion": "two"})
    three = write(tmp_path / "three.jsonl", {"text": "one", "id": 3, "prompt_id": 7})
    assert load_domain("math", [one, two, three], chat).notices == (
        f"{one}: only prompt of each row is used, not 'respnse' (did you mean 'response'?), 'id'",
        f"{three}: only text of each row is used, not 'id', 'prompt_id'",
    )


def test_rows_that_are_cut_are_counted(tmp_path: Path, chat: Any) -> None:
    rows = [{"text": "one " * count} for count in (1, 5, 9)]
    file = write(tmp_path / "a.jsonl", *rows)
    (notice,) = load_domain("math", file, chat, TextSettings(max_length=4)).notices
    assert notice.startswith("math: 2 of 3 rows longer than `max_length`, 4")
    assert load_domain("math", file, chat, TextSettings(max_length=10)).notices == ()
    # A row that the bound of the whole domain ends is not one of them.
    assert load_domain("math", file, chat, TextSettings(max_length=10, max_tokens=3)).notices == ()


def test_rows_in_memory_are_the_same_as_in_a_file(tmp_path: Path, chat: Any) -> None:
    rows = [{"text": "one two"}, {"prompt": "one", "completion": "two", "id": 4}]
    file = write(tmp_path / "a.jsonl", *rows)
    here, there = load_domain("math", rows, chat), load_domain("math", file, chat)
    assert [row.tolist() for row in here.rows] == [row.tolist() for row in there.rows]
    assert here.notices == (
        "rows in memory: only prompt, completion of each row is used, not 'id'",
    )
    assert source_names([file, *rows]) == (str(file), "<2 rows in memory>")
    with pytest.raises(DataError, match="row 2 in memory: unknown form"):
        load_domain("math", [rows[0], {"words": "a"}], chat)


def test_names_in_upper_case(tmp_path: Path, chat: Any) -> None:
    file = write(tmp_path / "A.JSONL", {"text": "one"})
    assert len(load_domain("math", file, chat).rows) == 1


def test_a_pipe_is_read_as_json_lines(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_file(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"text": "one"}\n',))
    writer.start()
    assert [row.content for row in read_rows([pipe])] == [b'{"text": "one"}\n']
    writer.join()
    check_file(Path("/dev/stdin"))
