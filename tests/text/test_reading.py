"""Files that are larger than what is held in memory give the rows that a small one would."""

import gzip
import json
import os
import random
import threading

import pytest

from moemerge.config.text_settings import DataSettings
from moemerge.errors import DataError
from moemerge.lab.data.job import DataRequest, select_prompts, select_texts
from moemerge.text import reading, rows
from moemerge.text.answers import load_answers
from moemerge.text.domains import TextSettings, load_domain
from moemerge.text.reading import Rows
from processes import python

WORDS = ["one", "two", "three", "four", "five"]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")


def write(path, count=60):
    """Rows of a prompt (every seventh a repetition), its answer and plain text."""
    made = [
        {
            "prompt": f"what is {number - number % 7 // 6}",
            "response": WORDS[(number + 1) % 5],
            "text": f"{WORDS[number % 5]} {number}",
        }
        for number in range(count)
    ]
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(made), path, row_group_size=16)
        return path
    lines = "".join(json.dumps(row) + "\n" for row in made).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


@pytest.fixture
def little(monkeypatch):
    """Memory for some ten rows."""
    monkeypatch.setattr(reading, "HELD_BYTES", 1000)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_are_taken_in_the_order_asked_for(tmp_path, suffix, little):
    found = Rows([write(tmp_path / f"a{suffix}"), {"text": "in memory"}])
    assert len(found) == 61
    order, rows = found.drawn(random.Random(3))
    everything = list(found)
    assert sorted(order) == list(range(61))
    assert [row.where for row in rows] == [everything[n].where for n in order]
    assert everything[60].content == {"text": "in memory"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_jobs_choose_the_same_rows_of_a_large_file(tmp_path, suffix, plain, monkeypatch):
    file = write(tmp_path / f"a{suffix}")

    def chosen():
        bounded, whole = TextSettings(limit=20, max_tokens=50, seed=1), TextSettings()
        data = DataSettings.model_validate({"limit": 15, "keep": "all"})
        asked = DataRequest("m", tmp_path / "out.jsonl", data, prompts=[file])
        read = DataRequest("m", tmp_path / "out.jsonl", data, text=[file])
        return [
            *(
                [r.tolist() for r in load_domain("d", file, plain, s).rows]
                for s in (bounded, whole)
            ),
            load_answers([file], plain, TextSettings(limit=9)).rows,
            load_answers([file], plain, whole).rows,
            select_prompts(asked),
            select_texts(read),
        ]

    held = chosen()
    assert held[4][1].repeated == 8
    assert len(held[4][0]) == len(held[5][0]) == 15
    monkeypatch.setattr(reading, "HELD_BYTES", 1000)
    assert chosen() == held


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, little):
    found = Rows([write(tmp_path / "a.jsonl")])
    write(tmp_path / "a.jsonl", 59)
    with pytest.raises(DataError, match="60 rows when read first, now 59"):
        list(found.take([3]))


def test_a_pipe_is_held(tmp_path, little):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines = write(tmp_path / "a.jsonl").read_bytes()
    writer = threading.Thread(target=pipe.write_bytes, args=(lines,))
    writer.start()
    found = Rows([pipe])
    writer.join()
    assert len(found) == len(list(found)) == len(list(found)) == 60


def test_all_of_a_large_file_is_too_much_for_one_domain(tmp_path, plain, monkeypatch, little):
    file = write(tmp_path / "a.jsonl")
    monkeypatch.setattr("moemerge.text.domains.MOST_TEXT_BYTES", 2000)
    with pytest.raises(DataError, match="the text of one domain has more than") as caught:
        load_domain("d", file, plain)
    assert "limit=" in str(caught.value.hint)
    assert len(load_domain("d", file, plain, TextSettings(limit=5)).rows) == 5


def test_what_unpacks_to_far_more_than_text_does_is_refused(tmp_path, monkeypatch, little):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "one"}\n' * 10**5 + b"\n" * 10**5))
    monkeypatch.setattr(rows, "MOST_TEXT_BYTES", 10**5)
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        Rows([file])
    monkeypatch.setattr(rows, "MOST_TIMES", 2000)
    assert len(Rows([file])) == 10**5


@pytest.mark.parametrize("nested", [True, False])
def test_parquet_that_repeats_a_large_text_is_refused(nested, tmp_path, plain, monkeypatch):
    """A dictionary holds it once on disk, and 4,000 rows point to it."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file, large = tmp_path / "a.parquet", "x" * 20_000
    texts, strings = arrow.array([large]), arrow.array([0] * 4000, arrow.int32())
    column = arrow.DictionaryArray.from_arrays(strings, texts)
    if nested:
        column = arrow.StructArray.from_arrays([column], ["content"])
        column = arrow.ListArray.from_arrays(arrow.array(range(4001), arrow.int32()), column)
    table = arrow.table({"text": ["one"] * 4000, "unused": column})
    parquet.write_table(table, file, compression="zstd")
    monkeypatch.setattr(rows, "MOST_TEXT_BYTES", 10**6)
    assert len(load_domain("d", file, plain, TextSettings(limit=4)).rows) == 4
    with pytest.raises(DataError, match=r"row 1: the file unpacks to more than 200 times"):
        list(Rows([file]))


def test_a_row_is_bounded(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n' + json.dumps({"text": "two " * 100}) + "\n")
    monkeypatch.setattr(rows, "MOST_ROW_BYTES", 100)
    with pytest.raises(DataError, match=r"a\.jsonl, row 2 has more than"):
        list(Rows([file]))


@pytest.mark.parametrize("bound", [{"max_length": 8}, {"max_tokens": 8}])
def test_of_a_long_row_only_the_beginning_is_tokenized(bound, plain, monkeypatch):
    seen = []
    call = type(plain).__call__

    def counting(self, text, **how):
        seen.extend(map(len, [text] if isinstance(text, str) else text))
        return call(self, text, **how)

    monkeypatch.setattr(type(plain), "__call__", counting)
    domain = load_domain("d", [{"text": "one " * 10**5}], plain, TextSettings(**bound))
    assert [len(row) for row in domain.rows] == [8]
    assert 0 < max(seen) < 10**4


def test_a_large_file_is_read_in_less_memory(tmp_path):
    file = tmp_path / "large.jsonl"
    count = 160
    with open(file, "wb") as out:
        for number in range(count):
            out.write(json.dumps({"text": f"row {number}"}).encode().ljust(2**20 - 1) + b"\n")
    code = (
        "import resource, sys\n"
        "from moemerge.text.reading import Rows\n"
        "from moemerge.text.rows import row_fields\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = Rows([sys.argv[1]])\n"
        "print(len(rows), [row_fields(row)['text'] for row in rows.take([150, 3, 8])])\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    done = python(code, file)
    assert done.returncode == 0, done.stderr
    told, grown = done.stdout.splitlines()
    assert told == f"{count} ['row 150', 'row 3', 'row 8']"
    assert int(grown) < 2 * (reading.HELD_BYTES >> 20) < count
