"""Rows by hand: row r of model k holds 100 k + r, so each number tells where it comes from.

base: a0 b1 ab2 <s>3 </s>4. chat: the same, <im>5 <end>6. other: b0 a1 ba2 </s>3 <s>4 <end>5 <t>6.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from merging.tokenizer.samples import (
    bpe,
    entry,
    numbered,
    plan,
    tokenizer_json,
    vocabularies,
    write_json,
)
from moemerge.config.schema import TokenizerSettings
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.embeddings import to_output_vocabulary
from moemerge.merging.tokenizer.plan import plan_tokenizer
from moemerge.merging.tokenizer.vocab import read_vocabulary

ROWS = (8, 7, 9)


def mapped(trio, *, base, dtype=torch.float32, **settings):
    found = plan(trio, ROWS, base, **settings)
    tensors = [numbered(k + 1, rows).to(dtype) for k, rows in enumerate(ROWS)]
    out = to_output_vocabulary(found, trio, tensors)
    for before, after in zip(tensors, out, strict=True):
        assert after.shape == (found.output_rows, 2)
        assert after.dtype == before.dtype
        torch.testing.assert_close(after[:, 0], after[:, 1])
    return [t[:, 0].tolist() for t in out]


def test_union_fills_from_the_base_then_from_the_mean(trio):
    # a b ab <s> </s> | ba <im> <end> <t>; <end> is chat's 206 and other's 305: mean 255.5
    assert mapped(trio, base=trio[0], source="union") == [
        [100, 101, 102, 103, 104, 302, 205, 255.5, 306],
        [200, 201, 202, 203, 204, 302, 205, 206, 306],
        [301, 300, 102, 304, 303, 302, 205, 305, 306],
    ]


def test_without_a_base_the_mean_of_those_that_have_it(trio):
    other = mapped(trio, base=None, source="union")[2]
    assert other[2] == 152  # ab: base's 102 and chat's 202


def test_base_source(trio):
    assert mapped(trio, base=trio[0], source="base") == [
        [100, 101, 102, 103, 104],
        [200, 201, 202, 203, 204],
        [301, 300, 102, 304, 303],
    ]


def test_model_source_permutes_the_others(trio):
    assert mapped(trio, base=trio[0], source=trio[2].path) == [
        [101, 100, 302, 104, 103, 255.5, 306],
        [201, 200, 302, 204, 203, 206, 306],
        [300, 301, 302, 303, 304, 305, 306],
    ]


def test_overrides_fill_gaps_and_force_replaces(trio):
    tokens = {
        "<end>": {"source": trio[2].path},
        "a": {"source": {"kind": "zero"}, "force": True},
        "b": {"source": {"kind": "zero"}},
        "<s>": {
            "source": {"kind": "model_token", "model": trio[1].path, "token": "ab"},
            "force": True,
        },
        "<im>": {"source": {"kind": "model_token", "model": trio[0].path, "token_id": 7}},
        "<new>": {"source": {"kind": "model_token", "model": trio[0].path, "token": "ab"}},
    }
    assert mapped(trio, base=trio[0], source="union", tokens=tokens) == [
        [0, 101, 102, 202, 104, 302, 107, 305, 306, 102],
        [0, 201, 202, 202, 204, 302, 205, 206, 306, 102],
        [0, 300, 102, 202, 303, 302, 107, 305, 306, 102],
    ]


def test_new_token_on_a_base_with_spare_rows(trio):
    """The base's spare row 5 has nothing to do with the token that gets id 5."""
    tokens = {"<im>": {"source": trio[1].path}}
    rows = mapped(trio, base=trio[0], source="base", tokens=tokens)
    assert [r[5] for r in rows] == [205, 205, 205]


def test_padding_rows_hold_the_mean(trio):
    base = mapped(trio, base=trio[0], source="base", pad_to_multiple_of=8)[0]
    assert base == [100, 101, 102, 103, 104, 102, 102, 102]


def test_a_donor_outside_the_merge_leaves_zero_rows(trio):
    base, chat, other = trio
    found = plan_tokenizer(
        TokenizerSettings.model_validate({"source": other.path}),
        vocabularies(trio),
        base=base,
        order=(base, chat),
        embedding_rows={base: 8, chat: 7},
    )
    out = to_output_vocabulary(found, [base, chat], [numbered(1, 8), numbered(2, 7)])
    assert out[0][:, 0].tolist() == [101, 100, 0, 104, 103, 206, 0]
    assert any("in no model" in w for w in found.warnings)


def test_means_are_rounded_once(trio):
    rows = mapped(trio, base=trio[0], source="union", dtype=torch.bfloat16)
    exact = (torch.tensor(206.0).bfloat16().float() + torch.tensor(305.0).bfloat16().float()) / 2
    assert rows[0][7] == exact.bfloat16().item()


def test_inputs_are_left_alone_and_a_bias_works_too(trio):
    found = plan(trio, ROWS, trio[0], source="union", pad_to_multiple_of=4)
    sizes = enumerate(zip(trio, ROWS, strict=True))
    biases = {model: numbered(k + 1, rows)[:, 0].clone() for k, (model, rows) in sizes}
    before = {m: b.clone() for m, b in biases.items()}
    out = to_output_vocabulary(found, list(biases), list(biases.values()))
    assert out[2][:9].tolist() == [301, 300, 102, 304, 303, 302, 205, 305, 306]
    assert out[2].shape == (12,)
    assert all(torch.equal(biases[m], before[m]) for m in trio)


def test_what_does_not_fit_the_plan_is_refused(trio):
    found = plan(trio, ROWS, trio[0], source="base")
    first, _, last = (numbered(k, n) for k, n in enumerate(ROWS))
    with pytest.raises(TokenizerError, match="different width"):
        to_output_vocabulary(found, trio, [first, numbered(2, 7, width=3), last])
    with pytest.raises(TokenizerError, match="3 rows"):
        to_output_vocabulary(found, trio, [first, numbered(2, 3), last])


BASE_IDS = {"a": 0, "b": 1, "ab": 2, "<s>": 3, "</s>": 4}


def test_union_keeps_the_base_then_ordinary_then_added(trio):
    found = plan(trio, (8, 7, 9), trio[0], source="union")
    appended = {"ba": 5, "<im>": 6, "<end>": 7, "<t>": 8}
    assert found.vocabulary.ids == BASE_IDS | appended
    assert found.appended == ("ba", "<im>", "<end>", "<t>")
    assert found.output_rows == 9
    assert any("'ba'" in w for w in found.warnings)


def test_base_and_model_sources(trio):
    base, _, other = trio
    assert plan(trio, (8, 7, 9), base, source="base").vocabulary.ids == BASE_IDS
    of_other = plan(trio, (8, 7, 9), base, source=other.path)
    assert of_other.donor == other
    assert of_other.vocabulary.ids == vocabularies([other])[other].ids
    assert plan((other, base), (9, 8), None, source="base").donor == other  # no base: the first


def test_tokens_nobody_has_come_last_and_padding_rounds_up(trio):
    tokens = {"<new>": {"source": {"kind": "zero"}}, "a": {"source": trio[1].path}}
    found = plan(trio, (8, 7, 9), trio[0], source="base", tokens=tokens, pad_to_multiple_of=4)
    assert found.vocabulary.ids == BASE_IDS | {"<new>": 5}
    assert found.output_rows == 8


def test_tokens_beyond_the_embedding_do_not_count(trio):
    base, chat, _ = trio
    found = plan((base, chat), (5, 6), base, source="union")  # chat: <end> is id 6, no row
    assert found.vocabulary.ids == BASE_IDS | {"<im>": 5}
    assert not found.dropped
    of_chat = plan((base, chat), (5, 6), base, source=chat.path)
    assert of_chat.dropped == {"<end>"}
    assert of_chat.output_rows == 6
    assert any("<end>" in w for w in of_chat.warnings)


def test_a_model_vocabulary_beyond_the_embedding_is_refused(trio):
    with pytest.raises(TokenizerError, match="beyond its embedding of 2 rows"):
        plan(trio[:1], (2,), trio[0], source="base")


def test_gaps_are_kept_but_nothing_is_appended_into_them(make, trio):
    gaps = make("gaps", ["a", "b"])
    path = Path(gaps.path) / "tokenizer.json"
    path.write_text(path.read_text().replace('"b": 1', '"b": 3'))
    assert plan((gaps, trio[0]), (8, 8), gaps, source="base").output_rows == 4
    with pytest.raises(TokenizerError, match="gaps"):
        plan((gaps, trio[0]), (8, 8), gaps, source="union")


def test_all_impossible_overrides_in_one_message(trio):
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


def test_unchanged_embeddings_are_known_as_such(trio):
    base, chat, _ = trio
    assert not plan((base,), (5,), base, source="base").changes
    assert plan((base,), (8,), base, source="base").changes
    assert plan((base, chat), (5, 7), base, source="base").changes


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
MODELS = {
    "BPE": bpe(["a", "b", "ab"], [("a", "b")]),
    "WordLevel": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    "WordPiece": {
        "type": "WordPiece",
        "vocab": {"[UNK]": 0, "a": 1, "##b": 2},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
    "Unigram": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]},
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model(kind, tmp_path):
    added = [entry("<x>", len(MODELS[kind]["vocab"]), special=True)]
    write_json(tmp_path / "tokenizer.json", tokenizer_json(MODELS[kind], added))
    write_json(tmp_path / "tokenizer_config.json", FAST)
    loaded = AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert read_vocabulary(tmp_path, "x").ids == loaded
    assert "<x>" in loaded


@pytest.mark.parametrize(
    ("vocab", "added"),
    [
        ({"a": 0, "b": 1, "z": 5}, [("z", 5), ("x", 6), ("y", 7)]),  # gaps: x gets 3
        ({"a": 0, "b": 1, "z": 2}, [("x", 10), ("y", 7)]),  # written ids do not count
        ({"a": 0, "b": 1, "z": 2}, [("a", 0), ("x", 3)]),
    ],
)
def test_added_tokens_get_the_next_free_id(vocab, added, tmp_path):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    entries = [entry(t, i, special=True) for t, i in added]
    write_json(tmp_path / "tokenizer.json", tokenizer_json(model, entries))
    write_json(tmp_path / "tokenizer_config.json", FAST)
    assert read_vocabulary(tmp_path, "x").ids == AutoTokenizer.from_pretrained(tmp_path).get_vocab()


def test_tokens_named_only_in_the_config(make):
    decoder = {"3": entry("<d>"), "9": entry("<late>", special=True)}
    for value in decoder.values():
        del value["id"]
    ref = make(
        "m",
        ["a", "b"],
        special=["<s>"],
        bos_token="<s>",
        pad_token="<pad>",
        sep_token="<sep>",
        additional_special_tokens=["<m2>", "<m1>"],
        added_tokens_decoder=decoder,
    )
    expected = {"a": 0, "b": 1, "<s>": 2, "<d>": 3, "<late>": 4, "<sep>": 5, "<pad>": 6}
    expected |= {"<m2>": 7, "<m1>": 8}
    assert read_vocabulary(Path(ref.path), "m").ids == expected
    assert AutoTokenizer.from_pretrained(ref.path).get_vocab() == expected


def test_older_files(make):
    ref = make("m", ["a", "b"], special=["<s>"])
    folder = Path(ref.path)
    write_json(folder / "special_tokens_map.json", {"pad_token": "<pad>", "bos_token": "<s>"})
    write_json(folder / "added_tokens.json", {"<y>": 4, "<x>": 3})
    expected = {"a": 0, "b": 1, "<s>": 2, "<x>": 3, "<y>": 4, "<pad>": 5}
    assert read_vocabulary(folder, "m").ids == expected
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == expected


def test_vocab_json_with_merges(tmp_path):
    write_json(tmp_path / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    end = entry("<|endoftext|>", special=True)
    del end["id"]
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"3": end}}
    write_json(tmp_path / "tokenizer_config.json", {**config, "eos_token": "<|endoftext|>"})
    found = read_vocabulary(tmp_path, "q")
    assert found.ids == AutoTokenizer.from_pretrained(tmp_path).get_vocab()
    assert not found.has_tokenizer_json


def test_sentencepiece_alone_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x00")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json(.|\n)*save_pretrained"):
        read_vocabulary(tmp_path, "llama")


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {}}', '{"model": {"vocab": {}}}'])
def test_damaged_tokenizer_json(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path, "m")
