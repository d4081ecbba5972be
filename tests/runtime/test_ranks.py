import os

import pytest
import torch

from moemerge.errors import UsageError
from moemerge.runtime import devices, ranks
from moemerge.runtime.ranks import SINGLE, Ranks
from processes import fresh


def shares(groups, of):
    return [Ranks(of, rank).share(groups) for rank in range(of)]


@pytest.mark.parametrize("of", [1, 2, 3, 8])
def test_every_piece_is_somebodys_and_everybody_has_one_of_each_group(of):
    groups = [[900, 30, 30, 20, 20, 10, 5, 5, 1], [7] * 12, [50, 40, 30, 20, 10, 9, 8, 7]]
    dealt = shares(groups, of)
    for at, sizes in enumerate(groups):
        places = [place for own in dealt for place in own[at]]
        assert sorted(places) == list(range(len(sizes)))
        assert all(own[at] for own in dealt)


def test_the_load_is_even():
    sizes = [[100 - n for n in range(60)], [50 - n for n in range(40)]]
    dealt = shares(sizes, 4)
    loads = [sum(sizes[at][p] for at, own in enumerate(mine) for p in own) for mine in dealt]
    assert max(loads) < 1.05 * min(loads)


def test_in_one_process_nothing_happens():
    values = torch.arange(3.0)
    cpu = values.device
    alone = Ranks.join(cpu)
    assert alone is SINGLE
    assert (alone.count, alone.rank, alone.leads, ranks.leads()) == (1, 0, True, True)
    alone.all_reduce(values)
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert (alone.total(5, cpu), alone.broadcast_object("word")) == (5, "word")
    assert ranks.own_device(torch.device("cuda")) == torch.device("cuda")
    alone.reduce_to(0, values)
    alone.broadcast(0, values)
    alone.barrier()
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert alone.all_agree(True)
    assert not alone.all_agree(False)
    assert (alone.gather(3), alone.call_on_lead(lambda: 4)) == ([3], 4)
    assert (alone.sum_of(0.5, cpu), alone.totals([1, 2], cpu)) == (0.5, [1, 2])
    assert (ranks.neighbours(), ranks.sharing(values.device)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("WORLD_SIZE", "two", "1 or more"),
        ("WORLD_SIZE", "0", "1 or more"),
        ("WORLD_SIZE", "", "1 or more"),
        ("RANK", "-1", "0 to 1"),
        ("RANK", "2", "0 to 1"),  # it would wait for a rank 0 that never comes
        ("LOCAL_WORLD_SIZE", "٣", "0 or more"),
    ],
)
def test_variables_that_torchrun_would_not_set_are_refused(monkeypatch, name, text, expected):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=f"{name} is '{text}', expected {expected}"):
        (ranks.rank(), ranks.neighbours())
    ended = fresh("inspect", "nowhere")
    assert ended.returncode in (2, 3)
    assert ended.stderr.startswith("error: ")


def test_memory_and_cores_are_shared_out(monkeypatch):
    cpu = torch.device("cpu")
    cores, memory = devices.cpu_count(), devices.available_memory(cpu)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
    assert devices.cpu_count() == max(1, cores // 8)
    assert devices.available_memory(cpu) < memory / 4


def test_workers_count_on_a_share_of_memory(monkeypatch):
    cpu = torch.device("cpu")
    memory = devices.available_memory(cpu)
    monkeypatch.setattr(devices, "_workers", {})
    devices.share_memory(cpu=8, cuda=4)
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < devices.available_memory(cpu) <= min(1.1 * memory, everything // 8)


@pytest.mark.parametrize(
    ("device", "gpus", "backend"),
    [("cuda", 2, "nccl"), ("cuda", 1, "gloo"), ("cuda:0", 2, "gloo"), ("cpu", 0, "gloo")],
)
def test_ranks_talk_by_nccl_where_each_has_a_gpu(device, gpus, backend, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks._backend(torch.device(device)) == backend


def test_processes_that_cannot_meet(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="cannot meet"):
        Ranks.join(torch.device("cpu"))


def test_processes_of_several_machines_are_refused_where_files_are_shared(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    ranks.on_one_machine("merge")
    assert ranks.neighbours() == 6
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="merge runs on one machine, and 4 of its 6 processes"):
        ranks.on_one_machine("merge")
