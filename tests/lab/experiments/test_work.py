"""Items run in an order that fits, and a failure takes down only what needed it."""

import importlib
import operator
import os
import sys

import pytest

from moemerge.errors import ResourceError
from moemerge.lab.experiments.work import Workers, WorkItem, run_work
from processes import interpreter


def chain(done):
    """a -> b -> c, and a division by zero with two items behind it."""

    def free(name):
        return lambda: done.append(name)

    return [
        WorkItem("c", operator.add, (1, 2), ("b",), free("c")),
        WorkItem("b", operator.add, (1, 1), ("a",), free("b")),
        WorkItem("a", operator.add, (1, 0), (), free("a")),
        WorkItem("bad", operator.truediv, (1, 0), (), free("bad")),
        WorkItem("after bad", operator.add, (0, 0), ("bad", "a"), free("after bad")),
        WorkItem("later", operator.add, (0, 0), ("after bad",), free("later")),
    ]


def test_order_results_and_failures():
    freed = []
    outcomes = list(run_work(chain(freed), Workers(1)))
    by = {o.item.key: o for o in outcomes}
    assert len(outcomes) == 6
    order = [o.item.key for o in outcomes]
    assert order.index("a") < order.index("b") < order.index("c")
    assert [by[k].result for k in "abc"] == [1, 2, 3]
    assert isinstance(by["bad"].error, ZeroDivisionError)
    assert by["after bad"].error == "needed: bad"
    assert by["later"].error == "needed: after bad"
    # What an item made is let go once, at the latest when all that needed it has ended.
    assert set(freed) == set(by)
    assert freed.index("a") > freed.index("b")  # one that was given up needed it, too


def test_the_more_urgent_goes_first():
    items = [WorkItem(name, operator.neg, (1,), rank=(n,)) for n, name in enumerate("cab")]
    items.append(WorkItem("first of all", operator.neg, (1,), rank=(-1,)))
    assert [o.item.key for o in run_work(items, Workers(1))] == ["first of all", "c", "a", "b"]


# Calls that worker processes can import.
CALLS = '''
import os, signal

def die(mark):
    """As the kernel ends one that takes too much memory; once, if there is a mark to leave."""
    if mark is None or not mark.exists():
        if mark is not None:
            mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"

class Unreadable(Exception):
    """Can be sent, but not received."""
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def refuse():
    raise Unreadable(1, 2)

class AcceleratorError(RuntimeError):
    """Called as torch's is."""

def where():
    """This process, the GPUs it sees, and who shares them and the host's memory with it."""
    from moemerge.runtime import devices
    return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), dict(devices._workers)

def lose_the_gpu(mark):
    mark.write_text(str(os.getpid()))
    raise ValueError("no") from AcceleratorError("CUDA error: unspecified launch failure")
'''


@pytest.fixture
def calls(tmp_path, monkeypatch):
    (tmp_path / "deadly_calls.py").write_text(CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("deadly_calls")
    del sys.modules["deadly_calls"]


def test_a_worker_that_dies_takes_nothing_else_with_it(tmp_path, calls):
    items = [
        WorkItem("deadly", calls.die, (None,)),
        WorkItem("killed once", calls.die, (tmp_path / "mark",)),
        WorkItem("after it", operator.add, (1, 2), ("killed once",)),
        WorkItem("after deadly", operator.add, (1, 2), ("deadly",)),
        WorkItem("unreadable", calls.refuse, ()),
        *(WorkItem(f"plain {n}", operator.neg, (n,)) for n in range(4)),
    ]
    outcomes = {o.item.key: o for o in run_work(items, Workers(2))}
    assert len(outcomes) == len(items)
    assert isinstance(outcomes["deadly"].error, ResourceError)
    assert outcomes["after deadly"].error == "needed: deadly"
    assert outcomes["killed once"].result == "done"
    assert outcomes["after it"].result == 3
    assert str(outcomes["unreadable"].error) == "Unreadable: 1 and 2"
    assert [outcomes[f"plain {n}"].result for n in range(4)] == [0, -1, -2, -3]


def test_a_worker_whose_gpu_has_failed_gets_no_more_to_do(tmp_path, calls):
    mark = tmp_path / "pid"
    items = [
        WorkItem("lost", calls.lose_the_gpu, (mark,), rank=(0,)),
        *(WorkItem(f"later {n}", os.getpid, (), rank=(1,)) for n in range(4)),
    ]
    outcomes = list(run_work(items, Workers(2)))
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert [str(error) for error in errors] == ["no"]
    place = [outcome.item.key for outcome in outcomes].index("lost")
    later = [outcome.result for outcome in outcomes[place + 1 :]]
    assert int(mark.read_text()) not in later


def test_workers_with_gpus_are_processes_of_their_own(calls):
    """Even a single one: a process whose GPU has failed can use it no more."""
    (alone,) = run_work([WorkItem("a", calls.where, ())], Workers(1, gpus=("7",)))
    pid, seen, shares = alone.result
    assert pid != os.getpid()
    assert (seen, shares) == ("7", {"cpu": 1, "cuda": 1})
    items = [WorkItem(name, calls.where, ()) for name in "abc"]
    found = [o.result for o in run_work(items, Workers(3, gpus=("2", "GPU-5")))]
    assert {seen for _, seen, _ in found} <= {"2", "GPU-5"}
    assert all(shares == {"cpu": 3, "cuda": 2} for *_, shares in found)


def test_a_script_that_does_not_ask_for_its_name_is_run_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import operator\n"
        "from moemerge.lab.experiments.work import WorkItem, Workers, run_work\n"
        "print('begun')\n"
        "items = [WorkItem(str(n), operator.neg, (n,)) for n in range(3)]\n"
        "print(sorted(o.result for o in run_work(items, Workers(2))))\n"
    )
    done = interpreter(script)
    assert (done.stdout, done.stderr) == ("begun\n[-2, -1, 0]\n", "")
