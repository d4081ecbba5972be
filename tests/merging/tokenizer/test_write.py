"""Tokenizers and chat templates as written load in transformers, with the ids of the rows."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from merging.tokenizer.samples import entry, plan, vocabularies, write_json
from moemerge.config.models import ModelRef
from moemerge.merging.tokenizer.write import (
    config_for,
    donor_files,
    is_tokenizer_file,
    read_chat_template,
    resolve_chat_template,
    tokenizer_files,
    with_chat_template,
)


def written(files, out):
    out.mkdir()
    for name, content in files.items():
        (out / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(out)


def test_union_loads_with_our_ids(trio, tmp_path):
    found = plan(trio, (8, 7, 9), trio[0], source="union")
    tokenizer = written(tokenizer_files(found), tmp_path / "out")
    assert tokenizer.get_vocab() == found.vocabulary.ids
    ids = found.vocabulary.ids
    assert tokenizer.encode("ab<im>b<end><t>") == [
        ids[t] for t in ("ab", "<im>", "b", "<end>", "<t>")
    ]
    assert tokenizer.decode([ids["ab"], ids["<end>"]], skip_special_tokens=True) == "ab"
    assert tokenizer.eos_token_id == 4
    kept = json.loads(tokenizer_files(found)["tokenizer.json"])["added_tokens"]
    assert {e["content"]: (e["special"], e["lstrip"]) for e in kept} == {
        "<s>": (True, False),
        "</s>": (True, False),
        "ba": (False, False),
        "<im>": (True, False),
        "<end>": (True, False),
        "<t>": (False, True),
    }


def test_an_unchanged_tokenizer_is_carried_over_byte_for_byte(trio):
    (Path(trio[0].path) / "chat_template.jinja").write_text("{{ messages }}")
    (Path(trio[0].path) / "config.json").write_text("{}")
    files = tokenizer_files(plan(trio, (8, 7, 9), trio[0], source="base"))
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    for name, content in files.items():
        assert content == (Path(trio[0].path) / name).read_bytes()


def test_every_file_that_lists_added_tokens_follows(make, trio, tmp_path):
    decoder = {"2": {k: v for k, v in entry("<s>", special=True).items() if k != "id"}}
    base = make("b", ["a", "b"], special=["<s>"], bos_token="<s>", added_tokens_decoder=decoder)
    write_json(Path(base.path) / "added_tokens.json", {"<s>": 2})
    found = plan((base, trio[1]), (8, 7), base, source="union")
    files = tokenizer_files(found)
    assert written(files, tmp_path / "out").get_vocab() == found.vocabulary.ids
    listed = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    assert {v["content"]: int(i) for i, v in listed.items()} == found.vocabulary.added_ids
    assert json.loads(files["added_tokens.json"]) == found.vocabulary.added_ids


def test_tokens_that_only_the_config_named_keep_their_ids(make, trio, tmp_path):
    base = make("b", ["a", "b"], special=["<s>"], bos_token="<s>", pad_token="<pad>")
    found = plan((base, trio[1]), (8, 7), base, source="union")
    assert found.vocabulary.ids["<pad>"] == 3
    tokenizer = written(tokenizer_files(found), tmp_path / "out")
    assert tokenizer.get_vocab() == found.vocabulary.ids
    assert tokenizer.pad_token_id == 3


def test_dropped_tokens_do_not_come_back(make, trio, tmp_path):
    """A pad token without an embedding row, as many fine-tunes have it."""
    base = make(
        "b",
        ["a", "b"],
        special=["<s>", "<pad>"],
        bos_token="<s>",
        pad_token={"content": "<pad>", "__type": "AddedToken", "special": True},
        additional_special_tokens=["<s>", "<pad>"],
    )
    write_json(Path(base.path) / "special_tokens_map.json", {"pad_token": "<pad>"})
    found = plan((base, trio[0]), (3, 5), base, source="base")
    tokenizer = written(tokenizer_files(found), tmp_path / "out")
    assert tokenizer.get_vocab() == {"a": 0, "b": 1, "<s>": 2} == found.vocabulary.ids
    assert tokenizer.pad_token is None


def test_a_tokenizer_of_vocab_json_and_merges_grows(trio, tmp_path):
    folder = tmp_path / "qwen"
    write_json(folder / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    end = {k: v for k, v in entry("<|endoftext|>", special=True).items() if k != "id"}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", {**config, "added_tokens_decoder": {"3": end}})
    own = ModelRef(str(folder))
    found = plan((own, trio[1]), (8, 7), own, source="union")
    tokenizer = written(tokenizer_files(found), tmp_path / "out")
    assert tokenizer.get_vocab() == found.vocabulary.ids
    assert tokenizer.encode("ab<im>") == [2, found.vocabulary.ids["<im>"]]


def test_config_sizes_and_ids_follow_the_tokenizer(trio):
    base, _, other = trio
    found = plan(trio, (8, 7, 9), trio[0], source=other.path, pad_to_multiple_of=8)
    own = vocabularies([base])[base]
    config = {
        "vocab_size": 8,
        "bos_token_id": 3,
        "eos_token_id": [4, 3],
        "mask_token_id": 2,
        "hidden_size": 2,
        "text_config": {"vocab_size": 8, "bos_token_id": 3},
    }
    out, warnings = config_for(config, found, own=own, donor={"bos_token_id": 4, "pad_token_id": 3})
    assert out == {
        "vocab_size": 8,
        "bos_token_id": 4,
        "eos_token_id": [3, 4],  # </s> and <s> changed places
        "pad_token_id": 3,
        "mask_token_id": None,  # `ab` is no token of the donor
        "hidden_size": 2,
        "text_config": {"vocab_size": 8, "bos_token_id": 4},
    }
    assert warnings == ["mask_token_id: 2 has no counterpart in the output's tokenizer"]


def test_config_ids_stand_when_the_tokenizer_is_their_own(trio):
    found = plan(trio, (8, 7, 9), trio[0], source="union")
    own = vocabularies(trio)[trio[0]]
    config = {"vocab_size": 8, "eos_token_id": 4, "pad_token_id": None}
    assert config_for(config, found, own=own, donor=config)[0] == {**config, "vocab_size": 9}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("chat_template.jinja", True),
        ("additional_chat_templates/tool_use.jinja", True),
        ("generation_config.json", False),
        ("preprocessor_config.json", False),
        ("LICENSE", False),
    ],
)
def test_which_companions_are_the_tokenizers(name, expected):
    assert is_tokenizer_file(name) is expected


OWN = "{% for m in messages %}X{{ m.content }}{% endfor %}"
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
RENDERED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s>"
    + "".join(HEAD.format(m["role"], m["content"] + "<|eot_id|>") for m in TALK)
    + HEAD.format("assistant", ""),
    "mistral": "<s> [INST] S\n\nU [/INST] A</s> [INST] V [/INST]",
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA\n\n"
    "### Instruction:\nV\n\n### Response:\n",
    "exaone": "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n[|user|]V\n"
    "[|assistant|]",
}


@pytest.fixture
def model(make):
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    ref = make("m", ["a", "b"], special=["<s>", "</s>"], chat_template="old {{ messages }}", **ends)
    return Path(ref.path)


@pytest.mark.parametrize("name", RENDERED)
def test_known_formats(name, model):
    template = resolve_chat_template(name, ())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        TALK, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text == RENDERED[name]


def test_formats_without_a_system_message_or_prompt(model):
    tokenizer = AutoTokenizer.from_pretrained(model)

    def render(name):
        template = resolve_chat_template(name, ())
        return str(tokenizer.apply_chat_template(TALK[1:3], chat_template=template, tokenize=False))

    assert render("exaone") == "[|system|][|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n"
    assert render("mistral") == "<s> [INST] U [/INST] A</s>"
    assert render("alpaca") == "### Instruction:\nU\n\n### Response:\nA"


def test_the_written_template_is_the_only_one(model, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name, content in with_chat_template(donor_files(model), OWN).items():
        (out / name).write_bytes(content)
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template(TALK[1:2], tokenize=False) == "XU"


def test_templates_are_found_in_file_key_and_list(model):
    assert read_chat_template(model) == "old {{ messages }}"
    config = model / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(model) == "D"
    (model / "chat_template.jinja").write_text("file")
    assert read_chat_template(model) == "file"


def test_auto_takes_the_most_frequent_and_then_the_first(make):
    texts = {"none": None, "one": "1 {{ messages }}", "two": "2 {{ messages }}", "also": None}
    texts["also"] = texts["two"]
    folders = []
    for name, text in texts.items():
        ref = make(name, ["a"], **({} if text is None else {"chat_template": text}))
        folders.append(Path(ref.path))
    assert resolve_chat_template("auto", folders) == texts["two"]
    assert resolve_chat_template("auto", folders[:3]) == texts["one"]
    assert resolve_chat_template("auto", folders[:1]) is None


def test_a_template_of_ones_own():
    assert resolve_chat_template(OWN, ()) == OWN
