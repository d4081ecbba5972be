import json
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.pickled import PickledFile
from moemerge.config.models import ModelRef
from moemerge.errors import CheckpointError
from processes import limited, python

from .conftest import sample_tensors


def test_single_file(make_folder):
    folder = make_folder()
    with Checkpoint.open(str(folder)) as checkpoint:
        assert checkpoint.label == str(folder)
        assert checkpoint.path == folder
        assert checkpoint.config == {"model_type": "olmoe"}
        assert set(checkpoint) == set(sample_tensors())
        assert checkpoint.total_bytes == sum(t.nbytes for t in sample_tensors().values())
        for name, tensor in sample_tensors().items():
            assert torch.equal(checkpoint[name], tensor)
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
        rows = checkpoint.read("model.layers.0.mlp.experts.gate_up_proj", (1, 3))
        expected = sample_tensors()["model.layers.0.mlp.experts.gate_up_proj"][1:3]
        assert torch.equal(rows, expected)


def test_sharded_reads_like_single(make_folder, sharded):
    checkpoint, single = Checkpoint.open(sharded), Checkpoint.open(ModelRef(str(make_folder())))
    assert len(checkpoint.files) == 2
    assert all(torch.equal(checkpoint[n], single[n]) for n in single)
    assert checkpoint.fingerprint() == single.fingerprint()


def test_models_with_equal_headers_share_their_structure(make_folder):
    first, second = (Checkpoint.open(make_folder(name=name)) for name in ("a", "b"))
    assert first.structure is second.structure
    assert first.files[0].path != second.files[0].path
    (make_folder(name="c") / "config.json").write_text('{"model_type": "mixtral"}')
    with Checkpoint.open(first.path.parent / "c") as third:
        assert third.structure is not first.structure
        assert third.files[0].tensors is first.files[0].tensors


def test_reads_are_fresh_memory(sharded):
    checkpoint = Checkpoint.open(sharded)
    checkpoint["model.norm.weight"].zero_()
    assert torch.equal(checkpoint["model.norm.weight"], torch.ones(8, dtype=torch.float16))


def test_an_adapter_beside_the_model_is_not_part_of_it(make_folder):
    files = {
        "a.safetensors": {"x": torch.ones(2)},
        "adapter_model.safetensors": {"y": torch.ones(1)},
    }
    assert list(Checkpoint.open(make_folder(files=files))) == ["x"]


def test_duplicate_tensors_without_an_index_are_refused(make_folder):
    files = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"x": torch.zeros(2)}}
    folder, before = make_folder(files=files), len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"'x' is in .*a.safetensors and in .*b.safetensors"):
        Checkpoint.open(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_duplicate_tensors_with_an_index_must_be_equal(make_folder):
    index = {"x": "a.safetensors", "y": "b.safetensors"}
    for value in (1.0, 2.0):
        files = {
            "a.safetensors": {"x": torch.ones(2)},
            "b.safetensors": {"x": torch.full((2,), value), "y": torch.ones(1)},
        }
        folder = make_folder(str(value), files, weight_map=index)
        if value == 1.0:
            assert sorted(Checkpoint.open(folder)) == ["x", "y"]
            continue
        with pytest.raises(CheckpointError, match=r"'x' is in .*a.safetensors and, with other"):
            Checkpoint.open(folder)


def test_a_missing_numbered_shard_is_noticed_without_an_index(make_folder):
    folder = make_folder(files={"model-00002-of-00002.safetensors": {"x": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=r"but not model-00001-of-00002\.safetensors"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd.safetensors", "a/../../b.safetensors", ""]
)
def test_an_index_that_leaves_the_folder_is_refused(make_folder, name):
    make_folder("other")
    folder = make_folder(weight_map={"x": name})
    with pytest.raises(CheckpointError, match="outside the model folder"):
        Checkpoint.open(folder)


def broken_index(make_folder, content):
    folder = make_folder(files={"a.safetensors": {"x": torch.ones(2)}})
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ([], "holds a JSON list"),
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"x": 3}}, "outside the model folder"),
        ({"weight_map": {"x": "config.json"}}, "expected a .safetensors or .bin file"),
        ({"weight_map": {"x": "gone.safetensors"}}, "gone.safetensors cannot be opened"),
        ({"weight_map": {"xx": "a.safetensors"}}, "which does not hold it"),
    ],
)
def test_broken_indexes(make_folder, content, message):
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(broken_index(make_folder, content))


def test_tensors_that_the_index_forgot_are_read(make_folder):
    files = {"a.safetensors": {"x": torch.ones(2), "forgotten": torch.ones(3)}}
    checkpoint = Checkpoint.open(make_folder(files=files, weight_map={"x": "a.safetensors"}))
    assert set(checkpoint) == {"x", "forgotten"}


def test_single_file_beside_an_index_is_ambiguous(make_folder):
    files = {"model.safetensors": {"x": torch.ones(2)}, "a.safetensors": {"x": torch.ones(2)}}
    with pytest.raises(CheckpointError, match="unclear which of the two"):
        Checkpoint.open(make_folder(files=files, weight_map={"x": "a.safetensors"}))


def test_config_missing_and_invalid(make_folder):
    folder = make_folder()
    for text, words in (("{", "is not valid JSON"), ("[]", "holds a JSON list")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json {words}"):
            Checkpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        Checkpoint.open(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a PEFT adapter; name it with its model"):
        Checkpoint.open(folder)


def test_a_folder_without_weights(make_folder):
    folder = make_folder()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint.open(folder)


def test_a_missing_tensor_is_suggested(sharded):
    checkpoint = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError, match=r"did you mean 'model.norm.weight'"):
        checkpoint.read("model.norm.weigth")
    with pytest.raises(KeyError):
        checkpoint["model.norm.weigth"]
    assert checkpoint.get("nothing") is None


def test_fingerprints_tell_models_apart(make_folder):
    tensors = sample_tensors()
    first = Checkpoint.open(make_folder("a")).fingerprint()
    assert first == Checkpoint.open(make_folder("b")).fingerprint()
    tensors["model.layers.0.mlp.gate.weight"] += 1
    changed = make_folder("c", {"model.safetensors": tensors})
    assert first != Checkpoint.open(changed).fingerprint()
    other_config = make_folder("d", config={"model_type": "mixtral"})
    assert first != Checkpoint.open(other_config).fingerprint()


def test_pickled_models(make_folder):
    tensors = sample_tensors()
    names = list(tensors)
    shards = {
        "pytorch_model-00001-of-00002.bin": {n: tensors[n] for n in names[:2]},
        "pytorch_model-00002-of-00002.bin": {n: tensors[n] for n in names[2:]},
    }
    single = make_folder("single", {"pytorch_model.bin": tensors})
    indexed = make_folder("indexed", shards, {n: f for f, ts in shards.items() for n in ts})
    loose = make_folder("loose", shards)
    for folder in (single, indexed, loose):
        checkpoint = Checkpoint.open(folder)
        assert set(checkpoint) == set(tensors)
        assert all(torch.equal(checkpoint[n], t) for n, t in tensors.items())
        gate_up = "model.layers.0.mlp.experts.gate_up_proj"
        assert torch.equal(checkpoint.read(gate_up, (2, 4)), tensors[gate_up][2:4])
        assert checkpoint.fingerprint() == Checkpoint.open(single).fingerprint()


def test_safetensors_go_before_pickles(make_folder):
    files = {"model.safetensors": {"x": torch.ones(1)}, "pytorch_model.bin": {"x": torch.zeros(1)}}
    assert Checkpoint.open(make_folder(files=files))["x"].item() == 1


MEASURE = """
import resource, sys
from moemerge.checkpoint import Checkpoint, pickled
pickled.REMAP_BYTES = 8 * 2**20
for folder in sys.argv[1:]:
    checkpoint = Checkpoint.open(folder)
    checkpoint.read("t0")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in checkpoint:
        checkpoint.read(name)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_bounded(make_folder):
    """Reading 80 MB, 4 MB at a time, must not hold them: that is why nothing is mapped."""
    tensors = {f"t{i}": torch.ones(2**20) for i in range(20)}
    kinds = ("model.safetensors", "pytorch_model.bin")
    folders = [str(make_folder(kind, {kind: tensors})) for kind in kinds]
    run = python(MEASURE, *folders)
    assert run.returncode == 0, run.stderr
    assert all(int(grown) < 40 * 1024 for grown in run.stdout.split()), run.stdout  # kilobytes


def test_too_many_open_files_is_explained(make_folder):
    folder = make_folder(files={f"m{i}.safetensors": {f"t{i}": torch.ones(1)} for i in range(20)})
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with (
        limited(resource.RLIMIT_NOFILE, lowest_free + 5),
        pytest.raises(CheckpointError, match="ulimit -n"),
    ):
        Checkpoint.open(folder)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("pwned"),))


def test_code_in_a_pickle_is_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Evil()}, tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        PickledFile(tmp_path / "evil.bin")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.ones(1)], "holds a list, expected a dict"),
        ({"x": 3}, "'x' is a int, expected a plain dense tensor"),
        ({"x": torch.eye(2).to_sparse()}, "expected a plain dense tensor"),
    ],
)
def test_other_contents_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=message):
        PickledFile(tmp_path / "x.bin")


def test_damaged_and_old_files(tmp_path):
    torch.save({"x": torch.ones(1000)}, tmp_path / "x.bin")
    whole = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "plain.bin").write_bytes(pickle.dumps({"x": 1}))
    torch.save({"x": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("cut.bin", "plain.bin", "old.bin", "missing.bin"):
        with pytest.raises(CheckpointError, match=name):
            PickledFile(tmp_path / name)


def test_views_come_out_whole(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    torch.save({"t": base.T, "tied": base}, tmp_path / "x.bin")
    file = PickledFile(tmp_path / "x.bin")
    assert torch.equal(file.read("t"), base.T)
    assert torch.equal(file.read("t", (1, 3)), base.T[1:3])
    file.read("tied").zero_()
    assert torch.equal(file.read("tied"), base)
