"""A journal gives back what was put into it, as far as it is whole."""

import pytest
import torch

from moemerge.errors import CheckpointError, UsageError
from moemerge.repairs.lockstep.journal import Entry, Journal


def entry(number, bias=False):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(number)).bfloat16()
    tensors = {f"r{number}.weight": weight}
    if bias:
        tensors[f"r{number}.bias"] = torch.ones(1, 3)
    return Entry(f"r{number}", tensors, {"layer": number})


def test_entries_come_back_as_they_were(tmp_path):
    journal = Journal(tmp_path / "out", {"merged": "m"})
    assert not journal.folder.exists()
    for number in range(3):
        journal.add(entry(number, bias=number == 1))
    journal.close()
    again = Journal(tmp_path / "out", {"merged": "m"})
    for number, stored in enumerate(again.entries):
        wanted = entry(number, bias=number == 1)
        assert stored.name == wanted.name
        assert stored.row == wanted.row
        assert list(stored.tensors) == list(wanted.tensors)
        assert len(stored.tensors) == len(wanted.tensors)
        for name, tensor in wanted.tensors.items():
            assert stored.tensors[name].dtype == tensor.dtype
            assert torch.equal(stored.tensors[name], tensor)
    assert len(again.entries) == 3
    again.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "json"])
def test_a_damaged_entry_ends_what_is_finished(damage, tmp_path):
    journal = Journal(tmp_path / "out", {})
    for number in range(3):
        journal.add(entry(number))
    journal.close()
    binary = journal.folder / "0001.bin"
    if damage == "missing":
        binary.unlink()
    elif damage == "json":
        (journal.folder / "0001.json").write_text('{"entry":')
    else:
        data = binary.read_bytes()
        binary.write_bytes(data[:-1] if damage == "cut" else data[:-1] + b"?")
    again = Journal(tmp_path / "out", {})
    assert [e.name for e in again.entries] == ["r0"]
    again.add(entry(1))
    again.close()
    assert len(Journal(tmp_path / "out", {}).entries) == 3


def test_a_journal_in_use_is_left_alone(tmp_path):
    first = Journal(tmp_path / "out", {})
    first.add(entry(0))
    for replace in (False, True):
        with pytest.raises(CheckpointError, match="another run is writing"):
            Journal(tmp_path / "out", {}, replace=replace)
    first.add(entry(1))
    first.close()
    assert len(Journal(tmp_path / "out", {}).entries) == 2


def test_tensors_are_read_when_they_are_asked_for(tmp_path):
    """A layer of a large model does not stay in memory once it is durable."""
    journal = Journal(tmp_path / "out", {})
    journal.add(entry(0))
    (kept,) = journal.entries
    assert torch.equal(kept.tensors["r0.weight"], entry(0).tensors["r0.weight"])
    first = kept.tensors["r0.weight"]
    assert kept.tensors["r0.weight"].data_ptr() != first.data_ptr()
    journal.remove()


def test_a_run_killed_before_its_key_was_written_is_started_anew(tmp_path):
    (tmp_path / ".out.journal").mkdir()
    journal = Journal(tmp_path / "out", {})
    assert journal.entries == []
    journal.add(entry(0))
    journal.remove()
    assert not list(tmp_path.iterdir())


def test_links_inside_a_journal_are_not_followed(tmp_path):
    journal = Journal(tmp_path / "out", {})
    journal.add(entry(0))
    secret = tmp_path / "secret"
    secret.write_text("s")
    (journal.folder / "0001.json").symlink_to(secret)
    journal.add(entry(1))
    (journal.folder / "0002.bin").symlink_to(secret)
    with pytest.raises(CheckpointError, match="cannot be written"):
        journal.add(entry(2))
    assert secret.read_text() == "s"
    journal.close()


def test_the_work_of_another_run_is_refused_until_it_is_replaced(tmp_path):
    journal = Journal(tmp_path / "out", {"alpha": 0.9})
    journal.add(entry(0))
    journal.close()
    with pytest.raises(UsageError, match=r"another run\n  alpha: 0\.9 then, 0\.5 now"):
        Journal(tmp_path / "out", {"alpha": 0.5})
    same = Journal(tmp_path / "out", {"alpha": 0.9}, replace=True)
    assert len(same.entries) == 1
    same.close()
    assert Journal(tmp_path / "out", {"alpha": 0.5}, replace=True).entries == []


def test_a_damaged_key_is_refused_until_it_is_replaced(tmp_path):
    journal = Journal(tmp_path / "out", {})
    journal.add(entry(0))
    journal.close()
    (journal.folder / "key.json").write_text("{")
    with pytest.raises(CheckpointError) as error:
        Journal(tmp_path / "out", {})
    assert "`overwrite=True`" in str(error.value.hint)
    assert Journal(tmp_path / "out", {}, replace=True).entries == []
