"""Which tokens of a row are learnt, and that its tokens are those that every job reads."""

from dataclasses import replace

import pytest
import torch

from moemerge.errors import DataError, TokenizerError, UsageError
from moemerge.text import templates
from moemerge.text.answers import load_answers
from moemerge.text.batches import BATCH_VALUES, gpu_batch_tokens, make_batches
from moemerge.text.domains import Domain, TextSettings, load_domain

TURNS = [
    {"role": "user", "content": "what is one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and three"},
    {"role": "assistant", "content": "four five"},
]


def read(tokenizer, *rows, **settings):
    return load_answers(rows, tokenizer, TextSettings(**settings))


def words(tokenizer, answers):
    """What is learnt of each row, in words."""
    return [
        " ".join(tokenizer.convert_ids_to_tokens([t for t, on in zip(*pair, strict=True) if on]))
        for pair in ((row.tokens, row.learnt) for row in answers.rows)
    ]


def test_every_answer_of_a_conversation_is_learnt_with_its_end(chat):
    answers = read(chat, {"messages": TURNS})
    assert words(chat, answers) == ["two <|end|> four five <|end|>"]
    assert answers.tokens == 16
    assert answers.learnt == 5
    assert answers.notices == ()


def test_plain_text_is_learnt_whole(plain):
    answers = read(plain, {"text": "one two three"})
    assert words(plain, answers) == ["one two three"]
    assert "does not learn where to stop" in answers.notices[0]


def test_without_a_template_the_end_token_ends_an_answer(plain):
    answers = read(plain, {"prompt": "what is one", "response": "two"})
    assert words(plain, answers) == ["two </s>"]


def test_a_token_that_holds_some_of_the_answer_is_learnt(chat):
    chat.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    answers = read(chat, {"prompt": "what is one ninety", "response": "nine and two"})
    assert words(chat, answers) == ["<unk> and two"]  # ninetynine


def test_tokens_are_those_of_every_other_job(chat):
    rows = [{"messages": TURNS}, {"text": "one two"}, {"prompt": "one", "response": "two " * 40}]
    settings = TextSettings(max_length=16)
    theirs = load_domain("x", rows, chat, settings).rows
    ours = load_answers(rows, chat, settings).rows
    assert [list(row.tokens) for row in ours] == [row.tolist() for row in theirs]


def test_rows_without_an_answer_are_left_out_and_counted(chat):
    answers = read(chat, {"messages": TURNS}, {"messages": TURNS[:1]}, {"prompt": "one"})
    assert len(answers.rows) == 1
    assert answers.read == 3
    assert "2 rows hold no answer" in answers.notices[0]
    with pytest.raises(DataError, match="no answer to learn in 1 row"):
        read(chat, {"prompt": "one"})


def test_an_answer_after_the_cut_is_no_answer(chat):
    row = {"prompt": "one " * 20, "response": "two"}
    with pytest.raises(DataError, match="begins after `max_length`, 8 tokens"):
        read(chat, row, max_length=8)
    answers = read(chat, row, {"prompt": "one", "response": "two " * 9}, max_length=8)
    assert [len(r.tokens) for r in answers.rows] == [8]
    assert [note.partition(":")[0] for note in answers.notices[:1]] == ["1 row left out"]


def test_a_limit_takes_the_same_rows_again(chat):
    rows = [{"prompt": "one", "response": f"two {n}"} for n in range(10)]
    first, again = (read(chat, *rows, limit=4, seed=3) for _ in range(2))
    assert len(first.rows) == 4
    assert first.rows == again.rows != read(chat, *rows, limit=4, seed=4).rows


def test_a_template_that_rewrites_earlier_turns_leaves_the_last_answer(chat):
    chat.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %} .{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|> {% endif %}"
    )
    answers = read(chat, {"messages": TURNS})
    assert words(chat, answers) == ["four five . <|end|>"]
    assert answers.notices[0].startswith("in 1 row the chat template")
    assert "are not learnt" in answers.notices[0]


def test_a_template_that_hides_where_the_answer_begins_is_refused(chat):
    chat.chat_template = "{{ messages | length }} {{ messages[-1]['content'] }}"
    with pytest.raises(DataError, match="where the answer begins is not known"):
        read(chat, {"messages": TURNS})


def test_without_places_of_tokens_the_same_are_learnt(chat, monkeypatch):
    rows = [{"messages": TURNS}, {"text": "one two"}]
    fast = read(chat, *rows)
    monkeypatch.setattr(type(chat), "is_fast", property(lambda _: False))
    assert read(chat, *rows).rows == fast.rows


def domain(name, lengths, held=()):
    generator = torch.Generator().manual_seed(len(name))

    def row(length):
        return torch.randint(5, 100, (length,), generator=generator)

    kept, held = (Domain(name, tuple(map(row, own))) for own in (lengths, held))
    return replace(kept, held_out=held if held.rows else None)


def test_every_row_comes_back():
    domains = [domain("math", [3, 9, 1, 9, 4, 7], (5, 2)), domain("code", [8, 2, 2])]
    batches = make_batches(domains, batch_tokens=20)
    found = {}
    for batch in batches:
        assert batch.input_ids.numel() <= 20
        assert bool((batch.input_ids[~batch.mask] == 0).all())
        assert batch.padded == bool((~batch.mask).any())
        for at, place in enumerate(batch.places):
            key = (batch.domain, batch.holdout, place)
            assert key not in found
            found[key] = batch.input_ids[at][batch.mask[at]]
            assert bool(batch.mask[at, 0])  # padding is on the right
    expected = {
        (d.name, holdout, place): row
        for d in domains
        for holdout, rows in ((False, d.rows), (True, d.holdout))
        for place, row in enumerate(rows)
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], row) for key, row in expected.items())
    assert sum(batch.tokens for batch in batches) == sum(len(row) for row in expected.values())


def test_longest_first_and_a_long_row_alone():
    batches = make_batches([domain("math", [2, 50, 3, 4])], batch_tokens=12)
    assert [batch.places for batch in batches] == [(1,), (3, 2, 0)]


def test_refusals():
    with pytest.raises(UsageError, match="batch_tokens is 0"):
        make_batches([domain("math", [1])], batch_tokens=0)
    with pytest.raises(DataError, match="must differ"):
        make_batches([domain("math", [1]), domain("math", [1])])


def test_smaller_gpus_take_smaller_batches():
    sizes = {gb: gpu_batch_tokens(2048, gb * 10**9) for gb in (12, 24, 25, 48, 80, 85, 150)}
    assert sizes == {12: 8192, 24: 16384, 25: 16384, 48: 32768, 80: 65536, 85: 65536, 150: 65536}
    assert gpu_batch_tokens(4096, 150 * 10**9) == BATCH_VALUES // 4096
    assert gpu_batch_tokens(2**40, 0) == 1


WITH_TOOLS = [
    {"role": "user", "content": "what is one", "tool_calls": [{"a": 1}]},
    {"role": "assistant", "content": "two é"},
]
REFUSED = [
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{% for i in range(999999) %}{% endfor %}",
    "{{ 'a' * 10 ** 8 }}",
]


def test_what_transformers_writes(chat):
    for add_generation_prompt in (False, True):
        expected = chat.apply_chat_template(
            WITH_TOOLS, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        written = templates.render_turns(
            WITH_TOOLS, chat, "row 1", add_generation_prompt=add_generation_prompt
        )
        assert written == expected


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_fails_is_refused_with_the_row(chat, template):
    chat.chat_template = template
    with pytest.raises(DataError, match="row 1: the tokenizer's chat template refuses this row"):
        templates.render_turns(WITH_TOOLS, chat, "row 1", add_generation_prompt=False)


def test_a_template_that_is_none_is_named(chat):
    chat.chat_template = "{% if"
    with pytest.raises(TokenizerError, match="chat template cannot be used"):
        templates.render_turns(WITH_TOOLS, chat, "row 1", add_generation_prompt=False)


def test_half_a_character_is_named(chat):
    chat.chat_template = "{{ 'x\\ud800' }}"
    with pytest.raises(DataError, match=r"row 1: .* makes half a character"):
        templates.render_turns(WITH_TOOLS, chat, "row 1", add_generation_prompt=False)
