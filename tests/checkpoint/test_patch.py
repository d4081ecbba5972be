import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zoo
from moemerge.checkpoint import Checkpoint, CheckpointPatch
from moemerge.errors import CheckpointError

from .conftest import sample_tensors

GATE = "model.layers.0.mlp.gate.weight"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def new_gate():
    return torch.full((4, 8), 3.0, dtype=torch.bfloat16)


def test_only_the_given_tensor_changes(sharded):
    (sharded / "tokenizer.json").write_text("T")
    (sharded / "README.md").write_text("card")
    (sharded / "consolidated.safetensors").write_bytes(b"stale")
    (sharded / "optimizer.pt").write_bytes(b"state")
    (sharded / ".hidden").write_bytes(b"")
    source, out = Checkpoint.open(sharded), sharded.parent / "out"
    with CheckpointPatch(source, out) as patch:
        patch.write(GATE, new_gate())
        patch.add_bytes("README.md", b"new card")
        assert not out.exists()
        patch.commit()
    expected = sample_tensors() | {GATE: new_gate()}
    result = Checkpoint.open(out)
    assert all(torch.equal(result[n], t) for n, t in expected.items())
    assert torch.equal(source[GATE], sample_tensors()[GATE])
    assert sorted(os.listdir(out)) == sorted(
        ["README.md", "config.json", "model.safetensors.index.json", "tokenizer.json", *SHARDS]
    )
    assert (out / "README.md").read_text() == "new card"
    assert (out / SHARDS[1]).read_bytes() == (sharded / SHARDS[1]).read_bytes()


def test_linked_blobs_of_the_hub_cache_become_files(make_folder):
    blobs = make_folder("blobs")
    snapshot = blobs.parent / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(blobs / name)
    for link in (False, True):
        out = blobs.parent / f"out-{link}"
        with CheckpointPatch(Checkpoint.open(snapshot), out, link=link) as patch:
            patch.commit()
        assert not (out / "model.safetensors").is_symlink()
        assert len(Checkpoint.open(out)) == len(sample_tensors())


def test_pickled_sources_become_safetensors(make_folder):
    shards = {
        "pytorch_model-00001-of-00001.bin": sample_tensors(),
    }
    weight_map = {n: f for f, ts in shards.items() for n in ts}
    folder = make_folder(files=shards, weight_map=weight_map)
    (folder / "tokenizer.json").write_text("T")
    out = folder.parent / "out"
    with CheckpointPatch(Checkpoint.open(folder), out) as patch:
        patch.write(GATE, new_gate())
        patch.write(GATE_UP, torch.zeros(1, 6, 8), 2)
        patch.add_bytes("config.json", json.dumps({"new": 1}).encode())
        patch.commit()
    expected = sample_tensors() | {GATE: new_gate()}
    expected[GATE_UP][2] = 0
    result = Checkpoint.open(out)
    assert all(torch.equal(result[n], t) for n, t in expected.items())
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert result.config == {"new": 1}


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_misfits_are_refused_and_leave_nothing(make_folder, kind):
    folder = make_folder(files={kind: sample_tensors()})
    before = sorted(os.listdir(folder.parent))
    with CheckpointPatch(Checkpoint.open(folder), folder.parent / "out") as patch:
        for tensor, row in ((new_gate().float(), 0), (new_gate()[:, 1:], 0), (new_gate(), 1)):
            with pytest.raises(CheckpointError):
                patch.write(GATE, tensor, row)
        with pytest.raises(CheckpointError, match="did you mean"):
            patch.write(GATE + "s", new_gate())
        patch.write(GATE, new_gate())
    assert sorted(os.listdir(folder.parent)) == before


@pytest.mark.parametrize("where", [".", "inside"])
def test_the_source_itself_is_never_the_output(sharded, where):
    with pytest.raises(CheckpointError, match="the input folder"):
        CheckpointPatch(Checkpoint.open(sharded), sharded / where, overwrite=True)
    assert len(Checkpoint.open(sharded)) == len(sample_tensors())


def test_existing_outputs(sharded, make_folder):
    out = make_folder("out")
    source = Checkpoint.open(sharded)
    with pytest.raises(CheckpointError, match="exists"):
        CheckpointPatch(source, out)
    with CheckpointPatch(source, out, overwrite=True) as patch:
        patch.write(GATE, new_gate())
        patch.commit()
    assert torch.equal(Checkpoint.open(out)[GATE], new_gate())
    assert not (out / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match="closed already"):
        patch.write(GATE, new_gate())


def test_threads_patch_one_copy(sharded):
    out = sharded.parent / "out"
    block = torch.arange(48.0).view(1, 6, 8)
    with CheckpointPatch(Checkpoint.open(sharded), out) as patch, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda row: patch.write(GATE_UP, block + row, row), range(4)))
        patch.commit()
    expected = torch.cat([block + row for row in range(4)])
    assert torch.equal(Checkpoint.open(out)[GATE_UP], expected)


@pytest.mark.parametrize("link", [False, True])
def test_copies_are_made_beforehand(sharded, link):
    out = sharded.parent / "out"
    with CheckpointPatch(Checkpoint.open(sharded), out, link=link) as patch:
        patch.begin([GATE])
        patch.write(GATE, new_gate())
        assert not out.exists()
        patch.commit()
        patch.poll()
    touched = [sharded / SHARDS[0]] if link else [sharded / name for name in SHARDS]
    assert patch.copied[1] == sum(path.stat().st_size for path in touched)
    assert os.path.samefile(out / SHARDS[1], sharded / SHARDS[1]) == link
    expected = sample_tensors() | {GATE: new_gate()}
    result = Checkpoint.open(out)
    assert all(torch.equal(result[n], t) for n, t in expected.items())
    assert torch.equal(Checkpoint.open(sharded)[GATE], sample_tensors()[GATE])


def test_a_failing_copy_is_told_and_leaves_nothing(sharded):
    source = Checkpoint.open(sharded)
    (sharded / SHARDS[1]).unlink()  # after it was opened
    before = sorted(os.listdir(sharded.parent))
    with CheckpointPatch(source, sharded.parent / "out") as patch:
        patch.begin([GATE])
        with pytest.raises(CheckpointError, match=SHARDS[1]):
            patch.commit()
    assert sorted(os.listdir(sharded.parent)) == before


def test_giving_up_ends_the_copies(sharded):
    before = sorted(os.listdir(sharded.parent))
    with CheckpointPatch(Checkpoint.open(sharded), sharded.parent / "out") as patch:
        patch.begin([GATE])
    assert sorted(os.listdir(sharded.parent)) == before
    with pytest.raises(CheckpointError, match="closed already"):
        patch.begin([GATE])


@pytest.mark.parametrize("how", ["touched", "grown", "replaced", "gone"])
def test_a_model_that_changes_while_it_is_read_gives_no_output(zoo_folder, tmp_path, how):
    source = zoo.perturb(zoo_folder("olmoe"), tmp_path / "source", seed=1)
    weights = source / "model.safetensors"
    checkpoint = Checkpoint.open(source)
    patch = CheckpointPatch(checkpoint, tmp_path / "out")
    if how == "touched":
        os.utime(weights)
    elif how == "grown":
        weights.open("ab").write(b"x")
    elif how == "replaced":
        (tmp_path / "other").write_bytes(weights.read_bytes())
        (tmp_path / "other").replace(weights)
    else:
        weights.unlink()
    with pytest.raises(CheckpointError, match="was changed or replaced while it was read"):
        patch.commit()
    patch.abort()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "other") == ["source"]
