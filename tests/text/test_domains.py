"""Rows of every form become the tokens a person expects, or an error that says where."""

import gzip
import json
import sys

import pytest

import zoo
from moemerge.errors import DataError, TokenizerError
from moemerge.text.domains import TextSettings, load_domain, load_domains
from moemerge.text.rows import TextRow, parse_row, source_names
from moemerge.text.tokens import load_tokenizer


def write(path, *rows):
    return zoo.write_rows(path, rows)


def words(tokenizer, domain):
    return [tokenizer.convert_ids_to_tokens(row.tolist()) for row in domain.rows]


def test_text_has_the_default_special_tokens(tmp_path, plain, chat):
    file = write(tmp_path / "a.jsonl", {"text": "one plus two"})
    for tokenizer in (plain, chat):
        domain = load_domain("math", file, tokenizer)
        assert words(tokenizer, domain) == [["<s>", "one", "plus", "two"]]


def test_gzip_and_blank_lines(tmp_path, plain):
    file = tmp_path / "a.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.write('{"text": "one"}\n\n{"text": "two"}\n')
    assert len(load_domain("math", file, plain).rows) == 2
    file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(DataError, match="damaged gzip"):
        load_domain("math", file, plain)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # as if it were not installed
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"pip install 'moemerge\[parquet\]'"):
        load_domain("math", tmp_path / "a.parquet", plain)


def test_parquet(tmp_path, chat):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"text": "one", "messages": None},
        {"text": None, "messages": [{"role": "user", "content": "two"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    domain = load_domain("math", tmp_path / "a.parquet", chat)
    assert words(chat, domain) == [["<s>", "one"], ["<|user|>", "two", "<|end|>"]]
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    days = pyarrow.array([2**31 - 1], pyarrow.date32())  # a date that Python cannot represent
    parquet.write_table(pyarrow.table({"text": ["one"], "day": days}), tmp_path / "c.parquet")
    for name in ("b", "c"):
        with pytest.raises(DataError, match=rf"{name}\.parquet: not a readable"):
            load_domain("math", tmp_path / f"{name}.parquet", chat, TextSettings(group="day"))
    domain = load_domain("math", tmp_path / "c.parquet", chat)  # reads what it needs
    assert domain.notices == (
        f"{tmp_path / 'c.parquet'}: only text of each row is used, not 'day'",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ('{"text": "one"}\nnot json\n', r"a\.jsonl, row 2 is not valid JSON"),
        ("[1, 2]\n", r"a\.jsonl, row 1 holds a JSON list"),
        ('{"text": "one"}\n{"problem": "a", "answer": "b"}\n', "row 2: .*'problem', 'answer'"),
        ('{"text": 3}\n', "'text' is int, expected a string"),
        ('{"prompt": ["a"]}\n', "a message is 'a'"),
        ('{"prompt": 3}\n', "'prompt' is int"),
        ('{"messages": "hello"}\n', "'messages' is str, expected a list"),
        ('{"messages": []}\n', "empty list"),
        ('{"messages": [{"from": "a"}]}\n', "role and content"),
    ],
)
def test_bad_files_are_named_with_their_row(content, message, tmp_path, chat):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        load_domain("math", file, chat)


def test_missing_and_unknown_files(tmp_path, plain):
    bad = {
        "a.jsonl": "no such file",
        "a.csv": r"unknown kind '\.csv'",
        ".": "is a folder, expected",
    }
    for name, words in bad.items():
        with pytest.raises(DataError, match=words):
            load_domain("math", tmp_path / name, plain)
    with pytest.raises(DataError, match="no calibration text"):
        load_domains({}, plain)


def test_messages_without_a_template(tmp_path, plain):
    file = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "one"}]})
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: .*needs a chat template"):
        load_domain("math", file, plain)


def test_a_template_that_refuses_a_row_names_it(tmp_path, chat):
    chat.chat_template = "{{ raise_exception('roles must alternate') }}"
    file = write(tmp_path / "a.jsonl", {"prompt": "one"})
    with pytest.raises(DataError, match=r"row 1: .*roles must alternate"):
        load_domain("math", file, chat)


def test_no_token_for_a_domain(tmp_path, chat):
    file = write(tmp_path / "a.jsonl", {"prompt": ""})
    chat.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(DataError, match="no token for domain 'math'"):
        load_domain("math", file, chat)


def test_answers_are_found(tmp_path, chat, plain):
    rows = [
        {"prompt": "one plus", "response": "two x"},
        {"text": "one two"},
        {"prompt": "one"},  # nothing answers it
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    settings = TextSettings(answers=True)
    found = {}
    for name, tokenizer in (("chat", chat), ("plain", plain)):
        domain = load_domain("math", file, tokenizer, settings)
        assert [len(mask) for mask in domain.answers] == [len(row) for row in domain.rows]
        found[name] = [
            tokenizer.convert_ids_to_tokens(row[mask].tolist())
            for row, mask in zip(domain.rows, domain.answers, strict=True)
        ]
    assert found["chat"][0] == ["two", "x", "<|end|>"]
    assert found["plain"][0] == ["two", "x"]
    for name in found:
        assert found[name][1] == ["<s>", "one", "two"]
        assert "one" in found[name][2]
    domain = load_domain("math", file, chat, TextSettings(answers=True, holdout=0.34, max_length=5))
    assert list(map(len, domain.held_out.answers)) == list(map(len, domain.holdout))
    assert list(map(len, domain.answers)) == list(map(len, domain.rows))
    assert load_domain("math", file, chat).answers == ()
    text = write(tmp_path / "b.jsonl", {"text": "one two"})
    assert load_domain("math", text, chat, settings).answers == ()


def numbered(path, count):
    return write(path, *({"text": "one two three " + " ".join("x" * n)} for n in range(count)))


def test_bounds(tmp_path, plain):
    file = numbered(tmp_path / "a.jsonl", 20)
    everything = load_domain("math", file, plain)
    assert [len(row) for row in everything.rows] == [4 + n for n in range(20)]
    cut = load_domain("math", file, plain, TextSettings(max_length=6))
    assert [len(row) for row in cut.rows] == [4, 5] + [6] * 18
    assert load_domain("math", file, plain, TextSettings(max_tokens=50)).tokens == 50
    some = load_domain("math", file, plain, TextSettings(limit=5))
    lengths = [len(row) for row in some.rows]
    assert len(lengths) == 5
    assert lengths == sorted(lengths)  # the order of the file
    assert lengths != [4, 5, 6, 7, 8]  # but not just its beginning


def test_sampling_is_a_matter_of_the_seed(tmp_path, plain):
    file = numbered(tmp_path / "a.jsonl", 40)

    def lengths(name, seed):
        options = TextSettings(limit=10, seed=seed)
        return [len(row) for row in load_domain(name, file, plain, options).rows]

    assert lengths("math", 0) == lengths("math", 0)
    assert lengths("math", 0) != lengths("math", 1)
    assert lengths("math", 0) != lengths("code", 0)


def test_holdout_takes_rows_out(tmp_path, plain):
    file = numbered(tmp_path / "a.jsonl", 20)
    domain = load_domain("math", file, plain, TextSettings(holdout=0.1))
    assert len(domain.holdout) == 2
    both = sorted(len(row) for row in (*domain.rows, *domain.holdout))
    assert both == [4 + n for n in range(20)]
    assert domain.tokens + sum(map(len, domain.holdout)) == sum(both)
    single = numbered(tmp_path / "b.jsonl", 1)
    with pytest.raises(DataError, match="leaves none"):
        load_domain("math", single, plain, TextSettings(holdout=0.1))


@pytest.mark.parametrize(
    ("name", "key"), [("tokenizer_config.json", "bos_token"), ("tokenizer.json", "added_tokens")]
)
def test_keys_that_would_reach_the_terminal_are_refused(tmp_path, name, key):
    folder = zoo.tiny_tokenizer(tmp_path)
    path = folder / name
    token = {"__type": "AddedToken", "content": "<s>", "\x1b]0;x\x07": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), key: [token]}))
    with pytest.raises(TokenizerError, match=rf"{name}: the key '\\x1b"):
        load_tokenizer(folder)


GROWING = {"type": "Replace", "pattern": {"String": "o"}, "content": "o" * 1000}
TWICE = [{"Sequence": {"id": "A", "type_id": 0}}] * 2


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [GROWING] * 4}),
        ("normalizer", {**GROWING, "pattern": {"Regex": ""}}),
        ("decoder", {"type": "Sequence", "decoders": [GROWING] * 4}),
        (
            "post_processor",
            {
                "type": "Sequence",
                "processors": [
                    {
                        "type": "TemplateProcessing",
                        "single": TWICE,
                        "pair": TWICE,
                        "special_tokens": {},
                    }
                ]
                * 40,
            },
        ),
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path, part, step):
    path = zoo.tiny_tokenizer(tmp_path) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: step}))
    with pytest.raises(TokenizerError, match=f"its {part} may make a text more than 100 times"):
        load_tokenizer(tmp_path)


def test_a_longest_input_that_is_no_number_is_refused(tmp_path):
    path = zoo.tiny_tokenizer(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": "x"}))
    with pytest.raises(TokenizerError, match=r"model_max_length of .* is 'x'"):
        load_tokenizer(tmp_path)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tenth_is_held_out_by_default_where_there_are_many_rows(tmp_path, plain):
    many = write(tmp_path / "many.jsonl", *({"text": f"one {'two ' * n}"} for n in range(100)))
    few = write(tmp_path / "few.jsonl", *({"text": f"one {'two ' * n}"} for n in range(99)))
    auto = TextSettings(holdout="auto")
    assert len(load_domain("math", many, plain, auto).holdout) == 10
    assert not load_domain("math", few, plain, auto).holdout
    tenth = load_domain("math", many, plain, TextSettings(holdout=0.1))
    assert [r.tolist() for r in load_domain("math", many, plain, auto).holdout] == [
        r.tolist() for r in tenth.holdout
    ]


def split(file, tokenizer, **options):
    """The first word of every row that is fitted, and of every row held out."""
    domain = load_domain("math", file, tokenizer, TextSettings(**options))
    sides = domain, domain.held_out
    kept, held = ([row[1] for row in words(tokenizer, side)] for side in sides)
    return kept, held


def test_rows_of_one_group_are_held_out_together(tmp_path, plain):
    names = zoo._WORDS.split()[:12]
    rows = [{"text": f"{names[n % 12]} {n // 10} {n % 10}", "doc": n % 12} for n in range(60)]
    file = write(tmp_path / "a.jsonl", *rows)
    kept, held = split(file, plain, holdout=0.25, group="doc")
    assert len(set(held)) == 3  # a quarter of the documents, with all their rows
    assert len(held) == 15
    assert not set(kept) & set(held)
    by_row = split(file, plain, holdout=0.25)
    assert set(by_row[0]) & set(by_row[1])
    domain = load_domain("math", file, plain, TextSettings(holdout=0.25, group="doc"))
    assert not domain.notices  # the field is used
    assert len(set(domain.groups)) == 9
    assert len(domain.held_out.groups) == 15


def test_equal_rows_are_never_on_both_sides(tmp_path, plain):
    names = zoo._WORDS.split()[:10]
    file = write(tmp_path / "a.jsonl", *({"text": names[n % 10]} for n in range(40)))
    for seed in range(5):
        kept, held = split(file, plain, holdout=0.2, seed=seed)
        assert len(held) == 8
        assert not set(kept) & set(held)


def test_equal_neighbours_join_their_groups(tmp_path, plain):
    names = zoo._WORDS.split()
    texts = [names[0], names[1], names[1], names[2], *names[3:9]]
    docs = ["a", "a", "b", "b", "c", "d", "e", "f", "g", "h"]
    rows = [{"text": text, "doc": doc} for text, doc in zip(texts, docs, strict=True)]
    file = write(tmp_path / "a.jsonl", *rows)
    for seed in range(10):
        _, held = split(file, plain, holdout=0.3, seed=seed, group="doc")
        assert len([one for one in held if one in names[:3]]) in (0, 4)


def test_a_group_that_cannot_be_used_is_an_error(tmp_path, plain):
    rows = [{"text": "one", "doc": 1}, {"text": "two", "page": 2}]
    file = write(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError, match=r"row 2: no field 'doc', which `group` names"):
        split(file, plain, group="doc")
    file = write(tmp_path / "b.jsonl", *({"text": f"one {n}", "doc": 1} for n in range(9)))
    with pytest.raises(DataError, match=r"1 value\(s\) of 'doc': a holdout of 0.5 leaves none"):
        split(file, plain, holdout=0.5, group="doc")
    settings = TextSettings(group="doc", holdout="auto")
    assert load_domain("math", file, plain, settings).held_out is None


def test_questions_with_answers_as_in_gsm8k(tmp_path, chat, plain):
    rows = [{"question": "one plus one", "answer": "two"}, {"question": "one"}]
    file = write(tmp_path / "a.jsonl", *rows)
    assert words(chat, load_domain("math", file, chat)) == [
        ["<|user|>", "one", "plus", "one", "<|end|>", "<|assistant|>", "two", "<|end|>"],
        ["<|user|>", "one", "<|end|>"],
    ]
    domain = load_domain("math", file, plain, TextSettings(answers=True))
    assert words(plain, domain) == [["<s>", "one", "plus", "one", "two"], ["<s>", "one"]]
    assert domain.answers[0].tolist() == [False, False, False, False, True]
    (notice,) = domain.notices
    assert "joined by a newline" in notice
    assert not load_domain("math", file, chat).notices
    lone = write(tmp_path / "b.jsonl", {"prompt": "one"})
    assert not load_domain("math", lone, plain).notices


def test_columns_can_be_named(tmp_path, chat, plain):
    rows = [{"problem": "one", "solution": "two", "level": 3}]
    file = write(tmp_path / "a.jsonl", *rows)
    columns = {"prompt": "problem", "response": "solution"}
    domain = load_domain("math", file, chat, TextSettings(map=columns))
    assert words(chat, domain) == [
        ["<|user|>", "one", "<|end|>", "<|assistant|>", "two", "<|end|>"]
    ]
    assert not domain.notices
    domain = load_domain("math", file, plain, TextSettings(map={"text": "solution"}))
    assert words(plain, domain) == [["<s>", "two"]]
    wrong = TextSettings(map={"prompt": "problem", "response": "solutoin"})
    with pytest.raises(DataError, match=r"row 1: no column 'solutoin' for response, did you mean"):
        load_domain("math", file, chat, wrong)
    with pytest.raises(DataError, match=r"row 1: unknown form, keys found: 'problem'"):
        load_domain("math", file, chat, TextSettings(map={"text": "body"}))
    other = write(tmp_path / "b.jsonl", {"text": "one"})
    domain = load_domain("math", [file, other], plain, TextSettings(map=columns))
    assert words(plain, domain) == [["<s>", "one", "two"], ["<s>", "one"]]
    assert any("b.jsonl: there are rows without problem, solution" in n for n in domain.notices)


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
def test_every_form_of_a_conversation_reads_question_and_answer(row):
    parsed = parse_row(TextRow("here", row))
    assert parsed.turns == (USER, ASSISTANT)
    assert parse_row(TextRow("here", json.dumps(row).encode())) == parsed


def test_the_input_of_an_alpaca_row_stands_below_its_instruction():
    parsed = parse_row(TextRow("here", {"instruction": "add", "input": "1 2", "output": "3"}))
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
def test_bad_rows(row, message):
    with pytest.raises(DataError, match=message):
        parse_row(TextRow("here", row))


def test_keys_that_no_form_reads_are_named_once_for_each_file(tmp_path, chat):
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


def test_rows_that_are_cut_are_counted(tmp_path, chat):
    rows = [{"text": "one " * count} for count in (1, 5, 9)]
    file = write(tmp_path / "a.jsonl", *rows)
    (notice,) = load_domain("math", file, chat, TextSettings(max_length=4)).notices
    assert notice.startswith("math: 2 of 3 rows longer than `max_length`, 4")
    assert load_domain("math", file, chat, TextSettings(max_length=10)).notices == ()
    # A row that the bound of the whole domain ends is not one of them.
    assert load_domain("math", file, chat, TextSettings(max_length=10, max_tokens=3)).notices == ()


def test_rows_in_memory_are_the_same_as_in_a_file(tmp_path, chat):
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


def test_names_in_upper_case(tmp_path, chat):
    file = write(tmp_path / "A.JSONL", {"text": "one"})
    assert len(load_domain("math", file, chat).rows) == 1
