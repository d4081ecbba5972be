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
from typing import Any, Final

from moemerge.errors import DataError
from moemerge.runtime.journals import LineStore
from moemerge.verification.judgement import Grade, Judgement, Row, Verifier

KIND: Final = "moemerge judgements"
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
        self._file: LineStore | None = None
        if path is not None:
            self._file = LineStore(path, {"kind": KIND, "edition": EDITION})
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, row: Row, response: str) -> str:
        content = [EDITION, self.name, self.inner.relevant(row), response]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _remember(self, key: str, judgement: Judgement) -> None:
        if self._file is None or judgement.grade not in LASTING:
            return
        with self._lock:
            self._file.add({"key": key, **judgement.to_json()})

    def _load(self, file: LineStore) -> None:
        try:
            for values in file.lines:
                future: Future[Judgement] = Future()
                future.set_result(Judgement.from_json(values))
                self._known[values["key"]] = future
        except (ValueError, KeyError, TypeError) as error:
            file.close()
            raise DataError(
                f"{file.path} is damaged ({type(error).__name__}: {error})",
                hint="remove it: what it holds is judged again",
            ) from error
