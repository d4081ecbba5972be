"""The file of statistics: what is written comes back; what does not fit is refused."""

import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.errors import CheckpointError, TokenizerError
from moemerge.families.architecture import Architecture
from moemerge.statistics import Provenance, Statistics, StatisticsWriter
from moemerge.statistics.file import pack_symmetric, packed_size, unpack_symmetric
from moemerge.statistics.provenance import (
    model_fingerprint,
    tokenizer_fingerprint,
)

WIDTH = 32  # of the tiny models
Q, K, OUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qko")


def opened(folder):
    checkpoint = Checkpoint.open(folder)
    return checkpoint, Architecture.of(checkpoint.config, checkpoint.tensors)


def provenance(folder):
    checkpoint, architecture = opened(folder)
    return Provenance(
        model=str(folder),
        family="olmoe",
        model_fingerprint=model_fingerprint(checkpoint, architecture),
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        data_fingerprint="d" * 64,
        tokens=100,
        sequences=7,
        seed=3,
        version="0",
        dtype="float32",
        device="cpu",
    )


def symmetric(width, seed):
    x = torch.randn(width, width, generator=torch.Generator().manual_seed(seed))
    return x @ x.T


def write(folder, out, *, overwrite=False):
    """Grams of three units in two tensors; nothing came to the last."""
    keys = [Q, K, OUT]
    with StatisticsWriter(
        out, kind="gram", provenance=provenance(folder), keys=keys, overwrite=overwrite
    ) as writer:
        size = [packed_size(WIDTH)]
        shapes = {Q: (32, WIDTH), K: (16, WIDTH)}
        writer.add(Q, size, pack_symmetric(symmetric(WIDTH, 0)), units=shapes, tokens=11)
        writer.add(OUT, size, None, units={OUT: (32, WIDTH)}, tokens=0)
        writer.commit(sequences=6, notices=["a word"])
    return out


@pytest.fixture(scope="module")
def olmoe(zoo_folder):
    return zoo_folder("olmoe", tokenizer=True)


@pytest.mark.parametrize("width", [1, 5, 128, 129, 300])
def test_a_packed_matrix_comes_back(width):
    matrix = symmetric(width, width)
    packed = pack_symmetric(matrix)
    assert packed.shape == (packed_size(width),)
    assert torch.equal(unpack_symmetric(packed, width), matrix)


def test_what_is_written_comes_back(olmoe, tmp_path):
    with Statistics.open(write(olmoe, tmp_path / "a.stats")) as found:
        assert found.kind == "gram"
        assert found.provenance == provenance(olmoe)
        assert found.notices == ("a word",)
        for key in (Q, K):
            gram = found.read("gram", key)
            assert torch.equal(gram.values, symmetric(WIDTH, 0))
            assert gram.tokens == found.tokens(key) == 11
        empty = found.read("gram", OUT)
        assert empty.tokens == 0
        assert not empty.values.any()
        assert found.read("gram", "model.norm.weight") is None
        assert found.tokens("model.norm.weight") is None
        with pytest.raises(CheckpointError, match=r"holds gram statistics, but fisher"):
            found.read("fisher", Q)
        checkpoint, architecture = opened(olmoe)
        found.check_fits("math", checkpoint, architecture)


def test_two_files_of_one_content_have_the_same_bytes(olmoe, tmp_path):
    one = write(olmoe, tmp_path / "a.stats").read_bytes()
    assert write(olmoe, tmp_path / "b.stats").read_bytes() == one


def test_a_file_is_not_overwritten_unasked(olmoe, tmp_path):
    out = write(olmoe, tmp_path / "a.stats")
    with pytest.raises(CheckpointError, match="exists"):
        write(olmoe, out)
    write(olmoe, out, overwrite=True)
    with pytest.raises(CheckpointError, match="is a folder"):
        write(olmoe, tmp_path)
    with pytest.raises(CheckpointError, match="no folder"):
        write(olmoe, tmp_path / "none" / "a.stats")


def test_without_a_commit_nothing_is_left(olmoe, tmp_path):
    with StatisticsWriter(
        tmp_path / "a.stats", kind="gram", provenance=provenance(olmoe), keys=[Q]
    ) as writer:
        writer.add(Q, [3], torch.ones(3), units={Q: (3,)}, tokens=1)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_removed(olmoe, tmp_path):
    dead = tmp_path / ".a.stats.partial-999999999-0123abcd"
    mine = tmp_path / f".a.stats.partial-{os.getpid()}-0123abcd"
    for path in (dead, mine):
        path.write_bytes(b"")
    write(olmoe, tmp_path / "a.stats")
    assert not dead.exists()
    assert mine.exists()  # of a process that still runs


def test_a_disk_that_takes_a_part_of_the_header_gets_the_rest(olmoe, tmp_path, monkeypatch):
    whole = write(olmoe, tmp_path / "whole").read_bytes()
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    assert write(olmoe, tmp_path / "parts").read_bytes() == whole


def test_a_value_of_another_shape_is_refused(olmoe, tmp_path):
    with StatisticsWriter(
        tmp_path / "a.stats", kind="fisher", provenance=provenance(olmoe), keys=[Q]
    ) as writer:
        with pytest.raises(CheckpointError, match="announced"):
            writer.add(Q, [3], torch.ones(4), units={Q: (3,)}, tokens=1)
        writer.add(Q, [3], torch.ones(3), units={Q: (3,)}, tokens=1)
        with pytest.raises(CheckpointError, match="second time"):
            writer.add(Q, [3], torch.ones(3), units={Q: (3,)}, tokens=1)


@pytest.mark.parametrize("keep", [0, 4, 1000, -8])
def test_a_truncated_file_is_refused(olmoe, tmp_path, keep):
    path = write(olmoe, tmp_path / "a.stats")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError):
        Statistics.open(path)


def test_a_foreign_file_is_refused(olmoe, tmp_path):
    with pytest.raises(CheckpointError, match="holds no statistics"):
        Statistics.open(olmoe / "model.safetensors")
    with pytest.raises(CheckpointError, match="folder"):
        Statistics.open(olmoe)
    later = tmp_path / "later.stats"
    save_file({"x": torch.ones(1)}, later, metadata={"moemerge_statistics": "2", "content": "{}"})
    with pytest.raises(CheckpointError, match="format 2"):
        Statistics.open(later)
    damaged = tmp_path / "damaged.stats"
    metadata = {"moemerge_statistics": "1", "content": '{"kind": "gram"}'}
    save_file({"x": torch.ones(1)}, damaged, metadata=metadata)
    with pytest.raises(CheckpointError, match="damaged"):
        Statistics.open(damaged)


def test_values_of_another_dtype_are_refused(olmoe, tmp_path):
    path = write(olmoe, tmp_path / "a.stats")
    with safe_open(path, framework="pt") as found:
        metadata = found.metadata()
    wide = {name: value.double() for name, value in load_file(path).items()}
    save_file(wide, path, metadata=metadata)
    with pytest.raises(CheckpointError, match="does not hold what"):
        Statistics.open(path)


# --- fitting ------------------------------------------------------------------------------------


def refused(path, folder):
    checkpoint, architecture = opened(folder)
    with Statistics.open(path) as found, pytest.raises(CheckpointError) as error:
        found.check_fits("math", checkpoint, architecture)
    return str(error.value)


def test_statistics_of_another_model_are_refused(olmoe, tmp_path):
    path = write(olmoe, tmp_path / "a.stats")
    other = zoo.perturb(olmoe, tmp_path / "other", seed=1)
    assert "same shapes but other weights" in refused(path, other)
    wide = zoo.build("olmoe", tmp_path / "wide", hidden_size=64)
    assert "in 'math'" in refused(path, wide)
    family = zoo.build("mixtral", tmp_path / "family")
    assert "of the family olmoe" in refused(path, family)


def test_statistics_of_another_tokenizer_are_refused(olmoe, tmp_path):
    path = write(olmoe, tmp_path / "a.stats")
    moved = shutil.copytree(olmoe, tmp_path / "moved")
    zoo.tiny_tokenizer(moved)  # the same once more
    checkpoint, architecture = opened(moved)
    with Statistics.open(path) as found:
        found.check_fits("math", checkpoint, architecture)
        zoo.tiny_tokenizer(moved, extra_words=("another",))
        with pytest.raises(TokenizerError, match="another tokenizer"):
            found.check_fits("math", checkpoint, architecture)


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "gpt_oss", "qwen3_moe"])
def test_a_model_has_one_fingerprint_in_every_layout(family, zoo_folder):
    plain, fused = (zoo_folder(family, fused=fused) for fused in (False, True))
    other = zoo_folder(family, seed=1)
    assert model_fingerprint(*opened(plain)) == model_fingerprint(*opened(fused))
    assert model_fingerprint(*opened(plain)) != model_fingerprint(*opened(other))


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_one_expert_makes_another_model(family, fused, zoo_folder, tmp_path):
    folder = zoo_folder(family, fused=fused)
    before = model_fingerprint(*opened(folder))
    for unit in opened(folder)[1].units_by_key.values():
        if unit.layer != 1 or unit.expert not in (0, 5) or len(unit.shape) != 2:
            continue
        moved = tmp_path / unit.key
        with zoo.edited(folder, moved) as tensors:
            first, stop = unit.slot.rows or (0, len(tensors[unit.tensor]))
            unit.slot.take(tensors[unit.tensor][first:stop]).mul_(1.5)
        assert model_fingerprint(*opened(moved)) != before, unit.key


def test_any_tensor_makes_another_model(olmoe, tmp_path):
    before = model_fingerprint(*opened(olmoe))
    tensors = load_file(olmoe / "model.safetensors")
    moved = shutil.copytree(olmoe, tmp_path / "moved")
    for name in tensors:
        if "experts" in name or ".layers.0." in name or ".layers.2." in name:
            continue
        changed = {**tensors, name: 1.5 * tensors[name]}
        save_file(changed, moved / "model.safetensors", metadata={"format": "pt"})
        assert model_fingerprint(*opened(moved)) != before, name


def test_a_link_is_replaced_and_what_it_points_to_is_kept(olmoe, tmp_path):
    other, out = tmp_path / "elsewhere" / "mine.json", tmp_path / "out.stats"
    other.parent.mkdir()
    write(olmoe, other)
    before = other.read_bytes()
    out.symlink_to(other)
    write(olmoe, out, overwrite=True)
    assert other.read_bytes() == before
    assert not out.is_symlink()
    assert os.listdir(other.parent) == ["mine.json"]
    assert Statistics.open(out).tokens
