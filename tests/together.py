"""Jobs that several processes do together, as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import processes
import zoo

# Every job is a function of the package by name, with its arguments; its report goes to a file.
# Round by round the last processes drop out: importing torch takes longer than most jobs do.
SCRIPT = """
import json, os, sys
import torch
import moemerge
for ranks, port, jobs in json.loads(sys.argv[1]):
    if int(os.environ["RANK"]) >= ranks:
        break
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": port}
    for job in jobs:
        try:
            done = getattr(moemerge, job["name"])(*job["words"], **job["options"])
        except moemerge.MoeMergeError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        with open(f"{job['report']}.{os.environ['RANK']}", "w") as file:
            json.dump(done.to_json(), file)
    torch.distributed.destroy_process_group()
os._exit(0)
"""
Jobs = Sequence[Mapping[str, Any]]
LIMIT = 800  # seconds: on a busy machine three imports of torch alone may take minutes


def job(name: str, *words: object, report: Path, **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "words": [str(word) for word in words],
        "options": _plain(options),
        "report": str(report),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, Path) else value


def start(rounds: Mapping[int, Jobs], *, before: str = "") -> list[processes.Process]:
    """Jobs by so many processes, with `before` run in each. torchrun would end the others when
    one dies; here they must end by themselves."""
    plan = [(ranks, _free_port(), list(jobs)) for ranks, jobs in sorted(rounds.items())[::-1]]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    ranks = [{**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(max(rounds))]
    return [processes.start(before + SCRIPT, json.dumps(plan), env=rank) for rank in ranks]


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def off(one: Path, other: Path, merged: Path) -> float:
    """How far two results are apart, as a share of a tensor's move; the largest."""
    before, a, b = (zoo.tensors(path) for path in (merged, one, other))
    moved = [name for name in before if not torch.equal(before[name], a[name])]
    assert moved
    shares = [(a[n] - b[n]).norm() / (a[n] - before[n]).norm() for n in moved]
    assert all(torch.equal(b[name], before[name]) for name in before if name not in moved)
    return max(map(float, shares))


def together(rounds: Mapping[int, Jobs], *, before: str = "") -> list[tuple[int, str]]:
    """Exit code and words of every rank."""
    started = start(rounds, before=before)
    errors = [process.communicate(timeout=LIMIT)[1] for process in started]
    return [(p.returncode, error) for p, error in zip(started, errors, strict=True)]
