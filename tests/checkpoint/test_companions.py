from __future__ import annotations

from pathlib import Path

import pytest

from moemerge.checkpoint.companions import companion_files, is_companion

CARRIED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "qwen.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "modeling_custom.py",
    "configuration_custom.py",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "tekken.json",
]
LEFT = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "README.md",
    ".gitattributes",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "consolidated.00.pth",
    "model.gguf",
    "tf_model.h5",
    "adapter_config.json",
    "adapter_model.safetensors",
    "moemerge_report.json",
]


@pytest.mark.parametrize("name", CARRIED)
def test_carried(name: str) -> None:
    assert is_companion(name)


@pytest.mark.parametrize("name", LEFT)
def test_left_behind(name: str) -> None:
    assert not is_companion(name)


def test_a_folder(tmp_path: Path) -> None:
    for name in [*CARRIED, *LEFT]:
        (tmp_path / name).touch()
    for folder in ("additional_chat_templates", "original", "tokenizer.json.d"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool_use.jinja").touch()
    found = companion_files(tmp_path)
    assert set(found) == {*CARRIED, "additional_chat_templates/tool_use.jinja"}
    assert list(found) == sorted(found)
    assert all((tmp_path / name) == path for name, path in found.items())
