"""Tasks run in an order that fits, and a failure takes down only what needed it."""

from __future__ import annotations

import operator

from moemerge.experiments.tasks import Task, Workers, run_tasks


def chain(done):
    """a -> b -> c, and a division by zero with two tasks behind it."""

    def free(name):
        return lambda: done.append(name)

    return [
        Task("c", operator.add, (1, 2), ("b",), free("c")),
        Task("b", operator.add, (1, 1), ("a",), free("b")),
        Task("a", operator.add, (1, 0), (), free("a")),
        Task("bad", operator.truediv, (1, 0), (), free("bad")),
        Task("after bad", operator.add, (0, 0), ("bad", "a"), free("after bad")),
        Task("later", operator.add, (0, 0), ("after bad",), free("later")),
    ]


def test_order_results_and_failures():
    freed = []
    outcomes = list(run_tasks(chain(freed), Workers(1)))
    by = {o.task.key: o for o in outcomes}
    assert len(outcomes) == 6
    order = [o.task.key for o in outcomes]
    assert order.index("a") < order.index("b") < order.index("c")
    assert [by[k].result for k in "abc"] == [1, 2, 3]
    assert isinstance(by["bad"].error, ZeroDivisionError)
    assert by["after bad"].error == "needed: bad"
    assert by["later"].error == "needed: after bad"
    # What a task made is let go once, at the latest when all that needed it has ended.
    assert set(freed) == set(by)
    assert freed.index("a") > freed.index("b")  # one that was given up needed it, too


def test_nothing_to_do():
    assert list(run_tasks([], Workers(1))) == []


def test_the_more_urgent_goes_first():
    tasks = [Task(name, operator.neg, (1,), rank=(n,)) for n, name in enumerate("cab")]
    tasks.append(Task("first of all", operator.neg, (1,), rank=(-1,)))
    assert [o.task.key for o in run_tasks(tasks, Workers(1))] == ["first of all", "c", "a", "b"]
