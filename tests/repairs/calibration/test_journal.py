"""A killed run goes on where it ended, and ends with the same bytes."""

import json
import shutil

import pytest

from moemerge.errors import CheckpointError, NumericalError, UsageError
from moemerge.forward import settings
from moemerge.runtime.journals import journal_path
from processes import python
from repairs.calibration import cases

KILLED = """
import json, os, signal, sys
import moemerge.repairs.harc

class Killer:
    def start(self, *a, **k): ...
    def advance(self, n): ...
    def finish(self): ...
    def note(self, message):
        if message.startswith("layer 1:"):
            os.kill(os.getpid(), signal.SIGKILL)

for job in json.loads(sys.argv[1]):  # each in a process of its own; imports are shared
    child = os.fork()
    if child == 0:
        moemerge.calibrate(job["merged"], job["out"], sources=job["sources"], data=job["data"],
                           progress=Killer(), **job["settings"])
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def kill_after_two_layers(case, settings_of):
    jobs = [
        {
            "merged": str(case.merged),
            "out": str(out),
            "sources": {name: str(path) for name, path in case.sources.items()},
            "data": {name: str(path) for name, path in case.data.items()},
            "settings": settings,
        }
        for out, settings in settings_of.items()
    ]
    python(KILLED, json.dumps(jobs)).check_returncode()
    for out in settings_of:
        assert not out.exists()
        assert (journal_path(out) / "0001.safetensors").exists()
        assert not (journal_path(out) / "0002.safetensors").exists()


def interrupt_after_two_layers(case, out, **settings):
    """The journal of a killed run, without the seconds that another process takes to start."""
    with pytest.raises(KeyboardInterrupt):
        case.calibrate(out, progress=cases.Interrupting("layer 1:"), device="cpu", **settings)
    assert not out.exists()
    names = {"0000.safetensors", "0001.safetensors", "key.json", "layers.jsonl"}
    assert {path.name for path in journal_path(out).iterdir()} == names


def test_a_killed_run_resumes_to_the_same_bytes(case_of, tmp_path):
    case = case_of("gpt_oss")
    settings_of = {
        tmp_path / "plain" / "out": {"device": "cpu"},
        tmp_path / "sources" / "out": {
            "device": "cpu",
            "targets": "source-features",
            "holdout": 0.2,
        },
    }
    kill_after_two_layers(case, settings_of)
    for out, chosen in settings_of.items():
        uninterrupted = out.parent / "whole" / "out"
        whole = case.calibrate(uninterrupted, **chosen)
        resumed = case.calibrate(out, **chosen)
        assert resumed.resumed == 2
        assert cases.weights(out) == cases.weights(uninterrupted)
        assert [_timeless(r) for r in resumed.layers] == [_timeless(r) for r in whole.layers]
        assert not cases.leftovers(out)


def _timeless(row):
    return {key: value for key, value in row.items() if key != "seconds"}


def test_another_run_is_not_resumed(case_of, tmp_path):
    case = case_of("olmoe")
    out = tmp_path / "out"
    interrupt_after_two_layers(case, out)
    with pytest.raises(UsageError, match=r"settings\.alpha: 0\.9 then, 0\.5 now"):
        case.calibrate(out, alpha=0.5)
    other = {**case.data, "math": cases.write_text(tmp_path / "math.jsonl", seed=9)}
    with pytest.raises(UsageError, match=r"data\.math: its content has changed"):
        case.calibrate(out, data=other)
    swapped = {"math": case.sources["code"], "code": case.sources["math"]}
    with pytest.raises(UsageError, match=r"sources\.math: its content has changed"):
        case.calibrate(out, sources=swapped)
    other_merge = case_of("olmoe", sources=3).merged
    with pytest.raises(UsageError, match="merged: its content has changed"):
        cases.Case(other_merge, case.sources, case.data).calibrate(out)
    assert not out.exists()
    # What does not change the result may change, and the refusals cost nothing of the journal.
    report = case.calibrate(out, offload="disk", strict=True)
    assert report.resumed == 2


def test_other_batches_are_another_run(case, tmp_path, monkeypatch):
    """A larger GPU takes longer batches, which round otherwise."""
    out = tmp_path / "out"
    interrupt_after_two_layers(case, out)
    monkeypatch.setattr(settings, "CPU_BATCH_TOKENS", 64)
    with pytest.raises(UsageError, match="batch_tokens: 2048 then, 64 now"):
        case.calibrate(out, device="cpu")


def test_another_order_of_the_sources_is_another_run(case, tmp_path):
    interrupt_after_two_layers(case, tmp_path / "out")
    order = dict(reversed(case.sources.items()))
    with pytest.raises(UsageError, match=r"order: \['math', 'code'\] then"):
        case.calibrate(tmp_path / "out", sources=order)


def test_a_torn_line_does_not_count(case, tmp_path):
    out = tmp_path / "out"
    interrupt_after_two_layers(case, out)
    path = journal_path(out) / "layers.jsonl"
    path.write_text(path.read_text()[:-20])
    assert case.calibrate(out, device="cpu").resumed == 1


def test_what_was_noticed_before_the_end_is_not_forgotten(case, tmp_path):
    out = tmp_path / "out"
    whole = case.calibrate(tmp_path / "whole", max_steps=2)
    assert len(whole.notices) >= 3

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            case.calibrate(out, max_steps=2, progress=cases.Interrupting(" s left"))

    interrupted()
    resumed = case.calibrate(out, max_steps=2)
    assert resumed.resumed == 2  # time is estimated from the second layer on
    assert resumed.notices == whole.notices
    shutil.rmtree(out)
    interrupted()
    with pytest.raises(NumericalError, match=r"layer 0: .* did not converge"):
        case.calibrate(out, max_steps=2, strict=True)
    assert not out.exists()


def test_what_strict_refuses_is_not_lost(case, tmp_path):
    """Layers that were finished before serve a run without --strict."""
    out = tmp_path / "out"
    slow = {"layers": "0-1", "preconditioner": "none"}  # the second layer takes more steps
    whole = case.calibrate(tmp_path / "whole", **slow)
    first, second = (row["iterations"] for row in whole.layers)
    assert first < second
    settings = {**slow, "max_steps": first}
    with pytest.raises(NumericalError, match=r"layer 1: .* did not converge"):
        case.calibrate(out, strict=True, **settings)
    assert cases.leftovers(out) == [".out.journal"]
    assert case.calibrate(out, **settings).resumed == 1
    assert not cases.leftovers(out)


def test_a_journal_that_is_a_link_is_refused(case, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    journal_path(out).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="not a moemerge folder"):
        case.calibrate(out)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_that_cannot_succeed_leaves_no_journal(case, tmp_path):
    with pytest.raises(NumericalError, match="did not converge"):
        case.calibrate(tmp_path / "deep" / "out", max_steps=2, strict=True)
    assert not list(tmp_path.iterdir())
