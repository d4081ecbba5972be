"""Interrupted trainings: what is left, and that they end as if nothing had happened."""

import pytest

import zoo
from lab.tuning.cases import InterruptedAt, rows, tune
from moemerge.errors import UsageError
from moemerge.repairs.states import SavedStates, mark_complete
from moemerge.runtime.journals import saved_path
from repairs.calibration.cases import changed_tensors


@pytest.mark.parametrize(
    "how", [{}, pytest.param({"lora": 2}, marks=pytest.mark.slow)], ids=["whole", "lora"]
)
def test_resuming_ends_with_the_same_bytes(how, base, tmp_path):
    how = {**how, "steps": 6, "save_every": 2}
    whole = tune(base, tmp_path / "a", **how)
    with pytest.raises(KeyboardInterrupt):
        tune(base, tmp_path / "b", progress=InterruptedAt(5), **how)
    assert [p.name for p in saved_path(tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-4"]
    assert not (tmp_path / "b").exists()
    resumed = tune(base, tmp_path / "b", **how)
    assert (whole.resumed, resumed.resumed) == (0, 4)
    assert resumed.curve == whole.curve
    assert changed_tensors(tmp_path / "a", tmp_path / "b") == set()
    assert {p.name for p in tmp_path.iterdir()} == {"base", "a", "b"}


def test_before_the_first_state_nothing_is_left(base, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(base, tmp_path / "new" / "out", progress=InterruptedAt(1), save_every=3)
    assert {p.name for p in tmp_path.iterdir()} == {"base"}
    assert tune(base, tmp_path / "out", resume=True).resumed == 0


def test_states_of_another_training_are_not_mixed_in(base, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(base, tmp_path / "out", progress=InterruptedAt(3), save_every=1)
    with pytest.raises(
        UsageError, match=r"another run\n  settings\.learning_rate: .* then, 0\.001 now"
    ):
        tune(base, tmp_path / "out", overwrite=True, resume=True, learning_rate=1e-3)
    with pytest.raises(UsageError, match=r"rows: its content has changed"):
        tune(base, tmp_path / "out", data=rows(31))
    other = zoo.perturb(base, tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"model: its content has changed"):
        tune(other, tmp_path / "out")
    assert saved_path(tmp_path / "out").exists()
    assert tune(base, tmp_path / "out", overwrite=True, learning_rate=1e-3).resumed == 0
    assert not saved_path(tmp_path / "out").exists()


def test_states_are_a_tenth_of_the_way_apart(base, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(base, tmp_path / "out", progress=InterruptedAt(5), steps=20)
    assert [p.name for p in saved_path(tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-4"]


@pytest.mark.slow
def test_a_state_that_was_not_saved_whole_does_not_count(base, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tune(base, tmp_path / "out", progress=InterruptedAt(3), save_every=1)
    (half,) = saved_path(tmp_path / "out").glob("checkpoint-*")
    (half / "complete").unlink()
    assert tune(base, tmp_path / "out", resume=True).resumed == 0


def test_only_states_whose_files_are_complete_count(tmp_path):
    states = SavedStates(tmp_path / "out", {"rows": "a"})
    for step in (1, 2):
        state = states.folder / f"checkpoint-{step}"
        state.mkdir()
        (state / "trained.pt").write_bytes(b"12345")
        mark_complete(state)
    assert states.latest() == state
    (state / "trained.pt").write_bytes(b"1234")
    assert states.latest() == states.folder / "checkpoint-1"
    states.close(keep=True)
    assert [p.name for p in states.folder.glob("checkpoint-*")] == ["checkpoint-1"]


def test_states_of_an_older_format_are_refused(tmp_path):
    states = SavedStates(tmp_path / "out", {"rows": "a"})
    (states.folder / "checkpoint-1").mkdir()
    mark_complete(states.folder / "checkpoint-1")
    states.close(keep=True)
    (states.folder / "key.json").write_text('{"rows": "a"}')
    with pytest.raises(UsageError, match="another run\n  format: None then"):
        SavedStates(tmp_path / "out", {"rows": "a"})
