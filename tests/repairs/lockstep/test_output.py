"""Finished entries on their way into OUT, with the journal written in the background."""

import pytest
import torch

import zoo
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import CheckpointError, NumericalError, UsageError
from moemerge.repairs.lockstep.journal import Entry
from moemerge.repairs.lockstep.output import Output, PatchedOutput, RefusedResultError
from repairs.calibration import cases

KEY = {"merged": "m"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return zoo.build("olmoe", tmp_path_factory.mktemp("model") / "olmoe")


def entries(model):
    """New routers, as a job would find them."""
    tensors = zoo.tensors(model)
    names = [f"model.layers.{number}.mlp.gate.weight" for number in range(3)]
    return [Entry(name, {name: tensors[name] + 1}, {"layer": name}) for name in names]


def opened(model, out):
    return PatchedOutput(Checkpoint.open(model), out, in_background=True)


def add_and_raise(output, some, error):
    with output:
        output.begin(KEY, [entry.name for entry in some])
        for entry in some:
            output.add(entry)
        raise error


def test_what_is_added_later_is_written_all_the_same(model, tmp_path):
    out, some = tmp_path / "out", entries(model)
    with pytest.raises(KeyboardInterrupt):
        add_and_raise(opened(model, out), some[:2], KeyboardInterrupt())
    assert cases.leftovers(out) == [".out.journal"]
    with opened(model, out) as output:
        output.begin(KEY, [entry.name for entry in some])
        assert output.resumed == 2
        finished = [output.finished(entry.name) for entry in some]
        assert [e and e.name for e in finished] == [some[0].name, some[1].name, None]
        output.add(some[2])
        output.check()
        assert len(output.entries) == 3
        output.finish({"note.txt": b"done"})
    changed = zoo.tensors(out)
    for name, tensor in zoo.tensors(model).items():
        assert torch.equal(changed[name], tensor + 1 if "gate.weight" in name else tensor)
    assert (out / "note.txt").read_bytes() == b"done"
    assert not cases.leftovers(out)


def test_an_entry_of_something_else_is_not_replayed(model, tmp_path):
    out, some = tmp_path / "out", entries(model)
    with pytest.raises(KeyboardInterrupt):
        add_and_raise(opened(model, out), some[:1], KeyboardInterrupt())
    with opened(model, out) as output:
        output.begin(KEY, [])
        with pytest.raises(CheckpointError, match=r"entry 0 is of .*layers\.0.*runs other"):
            output.finished("other")


def test_a_journal_that_cannot_be_written_is_an_error(model, tmp_path):
    out = tmp_path / "out"
    with opened(model, out) as output:
        output.begin(KEY, [])
        (tmp_path / ".out.journal").write_text("in the way")
        output.add(entries(model)[0])
        with pytest.raises(CheckpointError, match="in use"):
            output.check()
    assert not out.exists()


def test_a_hopeless_error_leaves_nothing(model, tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(UsageError):
        add_and_raise(opened(model, out), entries(model)[:1], UsageError("no"))
    assert not list(tmp_path.iterdir())


def test_what_only_the_settings_refuse_is_kept(model, tmp_path):
    with pytest.raises(NumericalError):
        add_and_raise(opened(model, tmp_path / "out"), entries(model)[:1], RefusedResultError("no"))
    assert cases.leftovers(tmp_path / "out") == [".out.journal"]


def test_without_writing_rows_stay_in_memory_and_tensors_do_not(model):
    some = entries(model)
    with Output() as output:
        output.begin(KEY, [])
        for entry in some:
            assert output.finished(entry.name) is None
            output.add(entry)
        output.finish({})
    assert [(entry.name, entry.row) for entry in output.entries] == [
        (entry.name, entry.row) for entry in some
    ]
    assert any(entry.tensors for entry in some)
    assert not any(entry.tensors for entry in output.entries)
