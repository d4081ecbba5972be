"""Render chat templates of checkpoints, which are untrusted programs.

A process of its own renders them (`text.rendering`), with limits on memory and processor time. A
template sees the same variables as in transformers.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from moemerge.errors import DataError, ResourceError, TokenizerError, library_errors

MOST_SECONDS: Final = 5.0  # processor time for one row: the machine may be busy
PROGRAM: Final = Path(__file__).with_name("rendering.py")


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def render_turns(
    turns: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    add_generation_prompt: bool,
) -> str:
    """Render turns with the tokenizer's chat template."""
    unusable = "the tokenizer's chat template cannot be used"
    with library_errors(TokenizerError, unusable):
        source = str(tokenizer.get_chat_template())
        names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    own = {"messages": list(turns), "tools": None, "documents": None}
    values = {**names, **own, "add_generation_prompt": add_generation_prompt}
    what = f"{where}: the tokenizer's chat template refuses this row"
    hint = "if the row is correct, fix the template: chat_template.jinja of the model"
    with library_errors(DataError, what, hint=hint):
        request = json.dumps({"source": source, "values": values, "seconds": MOST_SECONDS})
    answer = _RENDERER.ask(request)
    if "broken" in answer:
        raise TokenizerError(f"{unusable} ({answer['broken']})")
    if "refused" in answer:
        raise DataError(f"{what} ({answer['refused']})", hint=hint)
    text = answer["text"]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the tokenizer's chat template makes half a character (a lone surrogate)",
            hint="remove it from chat_template.jinja or tokenizer_config.json of the model",
        ) from error
    return text


class _Renderer:
    """The process that renders; a new one is started if a template ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def ask(self, request: str) -> dict[str, str]:
        with self._lock:
            process = self._running()
            try:
                answer = _exchange(process, request)
            except BaseException:
                process.kill()  # an answer that nobody read would be taken for the next one
                raise
            finally:
                if process.poll() is not None:
                    self.close()
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid():  # a fork shares the pipes
            self._owner = os.getpid()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="ascii",
                )
            except OSError as error:
                raise ResourceError(
                    f"chat templates are rendered in another process, which cannot be started "
                    f"({error.strerror or error})"
                ) from error
        return self._process

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()


def _exchange(process: subprocess.Popen[str], request: str) -> dict[str, str]:
    assert process.stdin is not None
    assert process.stdout is not None
    line = ""
    try:
        process.stdin.write(request + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        pass
    if line:
        answer: dict[str, str] = json.loads(line)
        return answer
    if process.wait() == -signal.SIGPROF:
        return {"refused": f"it takes more than {MOST_SECONDS:g} seconds"}
    return {"refused": "it makes something too large, or ended its process"}


_RENDERER: Final = _Renderer()
atexit.register(_RENDERER.close)
