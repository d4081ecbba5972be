import pytest

import zoo
from moemerge.errors import DataError, TokenizerError
from moemerge.text import templates
from moemerge.text.tokens import load_tokenizer

TURNS = [
    {"role": "user", "content": "what is one", "tool_calls": [{"a": 1}]},
    {"role": "assistant", "content": "two é"},
]
SAME = [
    zoo.CHAT_TEMPLATE,
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m.content ~ bos_token ~ loop.length }}"
    "{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for m in messages %}{% generation %}{{ m.content | trim }}"
    "{% endgeneration %}{% set ns.x = ns.x + 1 %}{% if loop.last %}{% break %}{% endif %}"
    "{% endfor %}{{ ns.x }}",
    "{{ messages | tojson }}{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) }}{{ 'a' * 3 }}"
    "{{ '%s-%05d' % ('x', 3) }}{{ '{:>5}'.format(3) }}{{ 'oo'.replace('o', '0') }}",
    "{% for k, v in messages[0].items() if k != 'role' %}{{ loop.index }}{{ k }}{{ v }}{% endfor %}"
    "{{ tools is none }}{% for x in nothing %}{% else %}none{% endfor %}",
]
HOSTILE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{% set ns = namespace(s='ab') %}"
    "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{% for a in range(99999) %}{{ 'a' * 999999 }}{% endfor %}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ ('a' * 999999).replace('a', 'a' * 999999) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(zoo.tiny_tokenizer(folder, chat_template=True))


@pytest.mark.parametrize("template", SAME)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_what_transformers_writes(tokenizer, template, add_generation_prompt):
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert (
        templates.render_turns(
            TURNS, tokenizer, "row 1", add_generation_prompt=add_generation_prompt
        )
        == expected
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("template", HOSTILE)
def test_what_grows_or_digs_without_end_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="row 1: the tokenizer's chat template refuses this row"):
        templates.render_turns(TURNS, tokenizer, "row 1", add_generation_prompt=False)


@pytest.mark.timeout(60)
def test_loops_end(tokenizer, monkeypatch):
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.2)
    loops = ["{% for a in range(99999) %}" * depth + "{% endfor %}" * depth for depth in (2, 3)]
    for tokenizer.chat_template in loops:
        with pytest.raises(DataError, match=r"more than 0\.2 seconds"):
            templates.render_turns(TURNS, tokenizer, "row 1", add_generation_prompt=False)


def test_a_template_that_is_none_is_named(tokenizer):
    tokenizer.chat_template = "{% if"
    with pytest.raises(TokenizerError, match="chat template cannot be used"):
        templates.render_turns(TURNS, tokenizer, "row 1", add_generation_prompt=False)


def test_half_a_character_is_named(tokenizer):
    tokenizer.chat_template = "{{ 'x\\ud800' }}"
    with pytest.raises(DataError, match=r"row 1: .* makes half a character"):
        templates.render_turns(TURNS, tokenizer, "row 1", add_generation_prompt=False)
