"""OUT to the hub, once it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moemerge.runtime.progress import Progress


@contextmanager
def uploaded(out: Path, repo: str | None, progress: Progress) -> Iterator[None]:
    """Upload what the block has written to `out`; whether that can be done is asked before."""
    if repo is None:
        yield
        return
    from moemerge.checkpoint.upload import check_upload, upload

    check_upload(repo)
    yield
    progress.note(f"uploading {out} to {repo}")
    progress.note(f"uploaded: {upload(out, repo)}")
