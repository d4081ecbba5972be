"""The vocabulary of the output, and what is refused before a tensor is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from merging.tokenizer.samples import Maker, plan, vocabularies
from moemerge.config.models import ModelRef
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.plan import refuse_unlike_sizes

Trio = tuple[ModelRef, ModelRef, ModelRef]


BASE_IDS = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}


def test_union_keeps_the_base_then_ordinary_then_added(trio: Trio) -> None:
    found = plan(trio, (8, 7, 9), trio[0], source="union")
    appended = {"ba": 5, "<im>": 6, "<end>": 7, "<t>": 8}
    assert found.vocabulary.ids == BASE_IDS | appended
    assert found.appended == ("ba", "<im>", "<end>", "<t>")
    assert found.output_rows == 9
    assert any("'ba'" in w for w in found.warnings)


def test_base_and_model_sources(trio: Trio) -> None:
    base, _, other = trio
    assert plan(trio, (8, 7, 9), base, source="base").vocabulary.ids == BASE_IDS
    of_other = plan(trio, (8, 7, 9), base, source=other.path)
    assert of_other.donor == other
    assert of_other.vocabulary.ids == vocabularies([other])[other].ids
    assert plan((other, base), (9, 8), None, source="base").donor == other  # no base: the first


def test_tokens_nobody_has_come_last_and_padding_rounds_up(trio: Trio) -> None:
    tokens = {"<new>": {"source": {"kind": "zero"}}, "a": {"source": trio[1].path}}
    found = plan(trio, (8, 7, 9), trio[0], source="base", tokens=tokens, pad_to_multiple_of=4)
    assert found.vocabulary.ids == BASE_IDS | {"<new>": 5}
    assert found.output_rows == 8


def test_tokens_beyond_the_embedding_do_not_count(trio: Trio) -> None:
    base, chat, _ = trio
    found = plan((base, chat), (5, 6), base, source="union")  # chat: <end> is id 6, no row
    assert found.vocabulary.ids == BASE_IDS | {"<im>": 5}
    assert not found.dropped
    of_chat = plan((base, chat), (5, 6), base, source=chat.path)
    assert of_chat.dropped == {"<end>"}
    assert of_chat.output_rows == 6
    assert any("<end>" in w for w in of_chat.warnings)


def test_a_model_vocabulary_beyond_the_embedding_is_refused(trio: Trio) -> None:
    with pytest.raises(TokenizerError, match="beyond its embedding of 2 rows"):
        plan(trio[:1], (2,), trio[0], source="base")


def test_gaps_are_kept_but_nothing_is_appended_into_them(make: Maker, trio: Trio) -> None:
    gaps = make("gaps", ["a", "b"])
    path = Path(gaps.path) / "tokenizer.json"
    path.write_text(path.read_text().replace('"b": 1', '"b": 3'))
    assert plan((gaps, trio[0]), (8, 8), gaps, source="base").output_rows == 4
    with pytest.raises(TokenizerError, match="gaps"):
        plan((gaps, trio[0]), (8, 8), gaps, source="union")


def test_all_impossible_overrides_in_one_message(trio: Trio) -> None:
    base, chat, other = trio
    tokens = {
        "<new>": {"source": chat.path},
        "a": {"source": {"kind": "model_token", "model": chat.path, "token": "<In>"}},
        "b": {"source": {"kind": "model_token", "model": chat.path, "token_id": 99}},
        "ab": {"source": other.path},
        "<s>": {"force": True},
        "<none>": {},
    }
    with pytest.raises(TokenizerError) as caught:
        plan((base, chat), (8, 7), base, source="union", tokens=tokens)
    message = str(caught.value)
    assert "'<new>': " in message
    assert "has no token '<In>', did you mean" in message
    assert "id 99 lies beyond the 7 rows" in message
    assert "takes no part in this merge" in message
    assert "`force` needs a `source`" in message
    assert "'<none>': no model has this token" in message


def test_unchanged_embeddings_are_known_as_such(trio: Trio) -> None:
    base, chat, _ = trio
    found = plan((base, chat), (5, 7), base, source="base")
    assert not found.changes(base, 5)
    assert found.changes(base, 8)
    assert found.changes(chat, 7)


def test_without_a_setting_sizes_must_agree(trio: Trio) -> None:
    refuse_unlike_sizes({trio[0]: 8, trio[1]: 8})
    with pytest.raises(TokenizerError, match=r"8(.|\n)*9(.|\n)*tokenizer_source"):
        refuse_unlike_sizes({trio[0]: 8, trio[1]: 9})
