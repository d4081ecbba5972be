"""Judgements by content: what was judged once is not judged again, in this run or the next.

Time limits depend on the machine's mood and undecided cases on its installation, so these two are
remembered within a run only.
"""

from __future__ import annotations

import hashlib
import json
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from moemerge.verification.judgement import Grade, Judgement, Row, Verifier

LASTING: Final = frozenset(Grade) - {Grade.TIMEOUT, Grade.UNDECIDED}
# Part of every key: raise it when a check of ours judges differently than before.
EDITION: Final = 1


class CachedVerifier:
    """Another verifier, with a memory; with a file, one that lasts. Threads may share it."""

    def __init__(self, verifier: Verifier, path: Path | None = None) -> None:
        self.name = verifier.name
        self.inner = verifier
        self._lock = threading.Lock()
        self._known: dict[str, Future[Judgement]] = {}
        self._file: IO[bytes] | None = None
        if path is not None:
            self._file = path.open("ab+")
            self._load(self._file)

    def relevant(self, row: Row) -> Any:
        return self.inner.relevant(row)

    def check(self, row: Row, response: str) -> Judgement:
        key = self._key(row, response)
        with self._lock:
            future = self._known.get(key)
            mine = future is None
            if future is None:
                future = self._known[key] = Future()
        if mine:
            try:
                judgement = self.inner.check(row, response)
            except BaseException as error:
                with self._lock:
                    del self._known[key]
                future.set_exception(error)
                raise
            future.set_result(judgement)
            self._remember(key, judgement)
        return future.result()

    def close(self) -> None:
        self.inner.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> CachedVerifier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _key(self, row: Row, response: str) -> str:
        content = [EDITION, self.name, self.inner.relevant(row), response]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _remember(self, key: str, judgement: Judgement) -> None:
        if self._file is None or judgement.grade not in LASTING:
            return
        line = json.dumps({"key": key, **judgement.to_json()}).encode() + b"\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def _load(self, file: IO[bytes]) -> None:
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # the last line of a run that was killed while it wrote
            file.truncate(len(whole))
        for line in whole.splitlines():
            values = json.loads(line)
            future: Future[Judgement] = Future()
            future.set_result(Judgement.from_json(values))
            self._known[values["key"]] = future
