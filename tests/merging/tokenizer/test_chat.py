"""Chat templates: which one is taken, where it is written, and what the well-known ones render."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from merging.tokenizer.samples import Maker
from moemerge.config.models import ModelRef
from moemerge.errors import TokenizerError
from moemerge.merging.tokenizer.write import (
    donor_files,
    read_chat_template,
    resolve_chat_template,
    with_chat_template,
)

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
def model(make: Maker) -> Path:
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    ref = make("m", ["a", "b"], special=["<s>", "</s>"], chat_template="old {{ messages }}", **ends)
    return Path(ref.path)


@pytest.mark.parametrize("name", RENDERED)
def test_known_formats(name: str, model: Path) -> None:
    template = resolve_chat_template(name, {}, ())
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        TALK, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert text == RENDERED[name]


def test_formats_without_a_system_message_or_prompt(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)

    def render(name: str) -> str:
        template = resolve_chat_template(name, {}, ())
        return str(tokenizer.apply_chat_template(TALK[1:3], chat_template=template, tokenize=False))

    assert render("exaone") == "[|system|][|endofturn|]\n[|user|]U\n[|assistant|]A[|endofturn|]\n"
    assert render("mistral") == "<s> [INST] U [/INST] A</s>"
    assert render("alpaca") == "### Instruction:\nU\n\n### Response:\nA"


def test_the_written_template_is_the_only_one(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, content in with_chat_template(donor_files(model), OWN).items():
        (out / name).write_bytes(content)
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template(TALK[1:2], tokenize=False) == "XU"


def test_templates_are_found_in_file_key_and_list(model: Path) -> None:
    assert read_chat_template(model) == "old {{ messages }}"
    config = model / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(model) == "D"
    (model / "chat_template.jinja").write_text("file")
    assert read_chat_template(model) == "file"


def test_auto_takes_the_most_frequent_and_then_the_first(make: Maker) -> None:
    texts = {"none": None, "one": "1 {{ messages }}", "two": "2 {{ messages }}", "also": None}
    texts["also"] = texts["two"]
    folders: dict[ModelRef, Path] = {}
    for name, text in texts.items():
        ref = make(name, ["a"], **({} if text is None else {"chat_template": text}))
        folders[ref] = Path(ref.path)
    order = list(folders)
    assert resolve_chat_template("auto", folders, order) == texts["two"]
    assert resolve_chat_template("auto", folders, order[:3]) == texts["one"]
    assert resolve_chat_template("auto", folders, order[:1]) is None


def test_a_template_of_ones_own_and_a_misspelt_name() -> None:
    assert resolve_chat_template(OWN, {}, ()) == OWN
    with pytest.raises(TokenizerError, match="did you mean 'chatml'"):
        resolve_chat_template("chatlm", {}, ())
