from __future__ import annotations

from pathlib import Path

import pytest

from moemerge.checkpoint.folder import companion_files
from moemerge.errors import CheckpointError

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


def test_a_link_out_of_the_model_is_refused_and_one_inside_followed(tmp_path: Path) -> None:
    """What a link shows would be published with the output."""
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret").write_text("key")
    (model / "vocab.json").write_text("{}")
    (model / "tokenizer.json").symlink_to("vocab.json")
    (model / "model.safetensors").symlink_to(tmp_path / "secret")  # weights may lie elsewhere
    assert set(companion_files(model)) == {"tokenizer.json", "vocab.json"}
    (model / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"is a link to .*secret, outside the model's folder"):
        companion_files(model)
    (model / "LICENSE").unlink()
    (model / "additional_chat_templates").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="outside the model's folder"):
        companion_files(model)


def test_links_of_the_hubs_cache_are_its_own(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "m" / "snapshots" / "abc", tmp_path / "m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert set(companion_files(snapshot)) == {"tokenizer.json"}
