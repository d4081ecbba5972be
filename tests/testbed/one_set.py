"""One small set, trained for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moemerge.runtime.progress import Progress
from moemerge.testbed.tasks import DOMAINS
from moemerge.testbed.training import Job, TrainedSet
from moemerge.testbed.training import train as train_job


def train(
    out: Path,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    resume: bool = False,
    **job: Any,
) -> TrainedSet:
    wanted = Job(out, **{"domains": DOMAINS, **job})
    return train_job(wanted, device=device, progress=progress, resume=resume)
