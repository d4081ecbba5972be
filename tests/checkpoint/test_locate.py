"""The hub is not reached from tests: a local cache is laid out as huggingface_hub does it."""

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.folder import companion_files
from moemerge.checkpoint.locate import hub_ids, locate, locate_data
from moemerge.errors import CheckpointError, DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A hub cache with org/model, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--org--model"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "refs", repo / "blobs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs" / "c").write_text("{}")
    save_file({"x": torch.ones(2)}, repo / "blobs" / "w")
    (snapshot / "config.json").symlink_to("../../blobs/c")
    (snapshot / "model.safetensors").symlink_to("../../blobs/w")
    return snapshot


def test_the_cache_serves_offline(offline):
    assert locate("org/model") == offline
    assert locate("org/model", COMMIT) == offline
    checkpoint = Checkpoint.open(f"org/model@{COMMIT}")
    assert checkpoint.label == f"org/model@{COMMIT}"
    assert torch.equal(checkpoint["x"], torch.ones(2))


@pytest.mark.parametrize(("repo", "revision"), [("org/other", None), ("org/model", "v2")])
def test_what_is_not_cached_cannot_be_had_offline(offline, repo, revision):
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        locate(repo, revision)


def test_a_folder_goes_before_the_hub(offline, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert locate("org/model") == Path("org/model")
    with pytest.raises(CheckpointError, match="is a folder, so it has no revision 'v1'"):
        locate("org/model", "v1")


def test_a_missing_folder_is_suggested(tmp_path):
    (tmp_path / "merged-model").mkdir()
    missing = str(tmp_path / "merged-modl")
    with pytest.raises(CheckpointError, match="does not exist, did you mean 'merged-model'"):
        locate(missing)
    with pytest.raises(CheckpointError, match="does not exist"):
        locate(str(tmp_path / "no" / "such" / "place"))


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file, expected a model folder"):
        locate(str(tmp_path / "model.safetensors"))


def test_a_folder_with_signs_in_its_name(make_folder):
    folder = make_folder("a+b@c", {"model.safetensors": {"x": torch.ones(2)}})
    assert list(Checkpoint.open(str(folder))) == ["x"]
    assert list(Checkpoint.open(folder)) == ["x"]


def test_hub_ids_of_a_reference(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "a+b").mkdir(parents=True)
    assert hub_ids("org/name@v1+other/lora@main") == ["org/name", "other/lora"]
    assert hub_ids("models/a+b") == []
    assert hub_ids("./model+org/lora") == ["org/lora"]
    assert hub_ids(str(tmp_path)) == []


@pytest.fixture
def data_set(tmp_path, monkeypatch):
    """A hub cache with the data set org/sums, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "datasets--org--sums"
    snapshot = repo / "snapshots" / ("a" * 40)
    (snapshot / "main").mkdir(parents=True)
    for name in ("main/train-0.jsonl", "main/test-0.jsonl", "train.txt"):
        (snapshot / name).write_text('{"question": "1+1", "answer": "2"}\n')
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_files_of_a_data_set(data_set):
    assert locate_data("org/sums") == [data_set / "main" / "train-0.jsonl"]
    assert locate_data("org/sums:main/*") == [
        data_set / "main" / "test-0.jsonl",
        data_set / "main" / "train-0.jsonl",
    ]
    old = data_set.parent / ("b" * 40)
    old.mkdir()
    (old / "train.jsonl").write_text("{}\n")
    (data_set.parents[1] / "refs" / "v1").write_text("b" * 40)
    assert locate_data("org/sums@v1") == locate_data("org/sums@v1:*.jsonl") == [old / "train.jsonl"]
    with pytest.raises(DataError, match=r"(?s)no file of text .*matches 'x\*'"):
        locate_data("org/sums:x*")
    with pytest.raises(DataError, match="org/none is not a file here"):
        locate_data("org/none")


def test_files_go_before_the_hub(data_set):
    Path("org").mkdir()
    Path("org/sums").write_text("x")
    assert locate_data("org/sums") == [Path("org/sums")]
    assert locate_data("some/where.jsonl") == [Path("some/where.jsonl")]
    assert locate_data("a.jsonl") == [Path("a.jsonl")]


CARRIED = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "qwen.tiktoken",
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modeling_custom.py",
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
    "README.md",
    ".gitattributes",
    "training_args.bin",
    "rng_state.pth",
    "trainer_state.json",
    "model.gguf",
    "adapter_config.json",
    "adapter_model.safetensors",
    "moemerge_report.json",
]


def test_a_folder(tmp_path):
    for name in [*CARRIED, *LEFT]:
        (tmp_path / name).touch()
    for folder in ("additional_chat_templates", "original", "tokenizer.json.d"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool_use.jinja").touch()
    found = companion_files(tmp_path)
    assert set(found) == {*CARRIED, "additional_chat_templates/tool_use.jinja"}
    assert list(found) == sorted(found)
    assert all((tmp_path / name) == path for name, path in found.items())


def test_a_link_out_of_the_model_is_refused_and_one_inside_followed(tmp_path):
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


def test_links_of_the_hubs_cache_are_its_own(tmp_path):
    snapshot, blobs = tmp_path / "m" / "snapshots" / "abc", tmp_path / "m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert set(companion_files(snapshot)) == {"tokenizer.json"}
