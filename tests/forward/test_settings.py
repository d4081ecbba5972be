"""How long batches are, what memory they take, and where parked ones go."""

import resource
from dataclasses import replace

import pytest
import torch

import processes
import zoo
from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import CheckpointError, ResourceError
from moemerge.families.opened import open_model
from moemerge.forward import settings
from moemerge.forward.loading import holds_scores
from moemerge.forward.settings import (
    PARKED_COPIES,
    MemoryEstimate,
    StreamSettings,
    batch_tokens,
    choose_offload,
)
from moemerge.forward.spill import SpillFactory, Tracker, held_by
from moemerge.forward.stream import ModelStream
from moemerge.forward.weights import PINNED_BYTES
from moemerge.runtime.devices import available_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_rows_of_a_model_with_an_indexer_are_never_padded(family, tmp_path):
    """Its attention counts padding among the keys it picks, so padding changes hidden states."""
    folder = zoo.build(family, tmp_path / family)
    assert batch_tokens(open_model("model", folder), CPU) == 1


def test_other_rows_share_a_batch(tmp_path):
    folder = zoo.build("olmoe", tmp_path / "olmoe")
    assert batch_tokens(open_model("model", folder), CPU) > 1


@pytest.mark.parametrize(("family", "shorter"), [("olmoe", False), ("gpt_oss", True)])
def test_long_batches_are_for_fused_attention_and_large_gpus(
    family, shorter, zoo_folder, monkeypatch
):
    model = open_model("model", zoo_folder(family))
    sizes = []
    for memory in (1 * 10**9, 141 * 10**9):
        monkeypatch.setattr(settings, "gpu_memory", lambda _, size=memory: size)
        sizes.append(batch_tokens(model, torch.device("cuda")))
    assert sizes == [2**14 if shorter else 2**20 // 32, 2**14 if shorter else 2**27 // 32]


SMALL = MemoryEstimate(CPU, "device", 1, 2, 4, 8, 16, 32)


def test_sizes_by_hand(zoo_folder):
    batches = reference.batches()
    with ModelStream(
        Checkpoint.open(zoo_folder("olmoe")), batches, StreamSettings(prefetch=True)
    ) as stream:
        memory = stream.memory
        layer = stream.model.get_submodule("model.layers.0")
        assert memory.layer == memory.ahead == sum(4 * p.numel() for p in layer.parameters())
        assert memory.root == 4 * (128 * 32 + 32)  # embeddings and norm, no head
    padded = sum(batch.input_ids.numel() for batch in batches)
    masks = sum(b.padded * b.input_ids.numel() * b.input_ids.shape[1] for b in batches)
    assert memory.parked == PARKED_COPIES * padded * 32 * 4 + masks
    assert memory.features == sum(batch.tokens for batch in batches) * 32 * 4
    spilled = replace(memory, offload="disk")
    assert spilled.on_disk == memory.parked
    assert memory.offload == "device"
    assert "parked activations" in memory.describe()


def test_what_is_where():
    assert SMALL.on_device == SMALL.on_host == 63
    disk = replace(SMALL, offload="disk")
    assert (disk.on_device, disk.on_disk) == (55, 8)
    gpu = replace(SMALL, device=torch.device("cuda"))
    assert (gpu.on_device, gpu.on_host) == (63, PINNED_BYTES)
    spilled = replace(gpu, offload="cpu")
    assert (spilled.on_device, spilled.on_host) == (55, PINNED_BYTES + 8)


def test_the_nearest_place_with_room():
    free = available_memory(CPU)
    assert choose_offload(SMALL).offload == "device"
    assert choose_offload(replace(SMALL, parked=2 * free)).offload == "disk"
    with pytest.raises(ResourceError, match=r"largest layer .* usable on cpu[^$]*`max_tokens`"):
        choose_offload(replace(SMALL, layer=2 * free))


def test_attention_that_keeps_scores_is_counted(zoo_folder):
    running = {}
    batches = reference.batches()
    for family in ("gpt_oss", "mixtral"):
        checkpoint = Checkpoint.open(zoo_folder(family))
        with ModelStream(checkpoint, batches) as stream:
            text = stream.model.config.get_text_config()
            running[holds_scores(checkpoint)] = stream.memory.running, text.num_attention_heads
            assert (text._attn_implementation == "eager") == holds_scores(checkpoint)
    pairs = max(batch.input_ids.numel() * batch.input_ids.shape[1] for batch in batches)
    (with_scores, heads), (without, _) = running[True], running[False]
    assert with_scores - without == 12 * pairs * heads  # two in float32, and the softmax


def test_a_full_disk_is_told(tmp_path):
    spill = SpillFactory("disk", CPU, tmp_path).spill(0)
    assert spill is not None
    with (
        processes.limited(resource.RLIMIT_FSIZE, 2**20),
        pytest.raises(CheckpointError, match="cannot be written"),
    ):
        spill.out([torch.ones(2**20)], keep=set(), smallest=0)


def test_every_reference_comes_back(tmp_path):
    room = SpillFactory("disk", CPU, tmp_path)
    spill = room.spill(0)
    value = torch.randn(64, 32)
    view, expected = value.t()[3:], value.clone()
    spill.out([value, view, value], keep=set(), smallest=0)
    assert value.untyped_storage().nbytes() == 0
    assert len(list(tmp_path.rglob("*.bin"))) == 1  # one storage, once
    spill.back()
    assert torch.equal(value, expected)
    assert torch.equal(view, expected.t()[3:])
    spill.out([value], keep=set(), smallest=0)  # and again, after numpy has been near it
    assert value.untyped_storage().nbytes() == 0
    spill.back()
    assert torch.equal(value, expected)
    room.close()
    assert not list(tmp_path.iterdir())


def test_shared_and_small_storages_stay(tmp_path):
    room = SpillFactory("disk", CPU, tmp_path)
    spill = room.spill(0)
    layer = torch.nn.Linear(8, 8)
    layer.cache = torch.ones(8, 8)
    small = torch.ones(4)
    spill.out([layer.weight, layer.cache, small], keep=held_by([layer]), smallest=16)
    assert layer.weight.untyped_storage().nbytes() == layer.cache.untyped_storage().nbytes() == 256
    assert small.untyped_storage().nbytes() == 16
    room.close()


def test_a_cpu_run_has_nothing_to_gain_from_the_cpu():
    assert not SpillFactory("cpu", CPU).active
    assert not SpillFactory("device", torch.device("cuda")).active
    assert SpillFactory("cpu", torch.device("cuda")).active


def test_the_tracker_knows_what_is_alive():
    tracker = Tracker()
    with tracker:
        kept = torch.ones(4) * 2
        part, _ = (kept + 1).split(2)
        torch.zeros(4)
    alive = tracker.alive()
    assert any(tensor is kept for tensor in alive)
    assert any(tensor is part for tensor in alive)
    assert not any(bool((tensor == 0).all()) for tensor in alive)  # nobody kept the zeros
