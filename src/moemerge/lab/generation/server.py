"""An engine for one or more OpenAI-compatible servers of the same model: POST /v1/completions.

Each request is one completion with its own seed. So servers may answer in any order, and a run
continues if one of them stops.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import ResourceError, UsageError
from moemerge.lab.generation.engine import Completion, CompletionRequest
from moemerge.runtime.progress import Progress

AT_A_TIME: Final = 32  # concurrent requests per server, which batches them itself
RETRIES: Final = 6
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between two retries, doubled each time
ANSWER_SECONDS: Final = 3600.0  # timeout of one answer; a busy server may queue it
BUSY: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LARGEST_SEED: Final = 2**31 - 1
_PROBLEMS = (urllib.error.URLError, http.client.HTTPException, OSError, TimeoutError)


class RefusalError(Exception):
    """The server understood the request and refused it."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


@dataclass
class _Server:
    url: str
    model: str
    takes_tokens: bool = True  # some servers accept text only
    alive: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServerEngine:
    """Sends requests to every server that answers, up to a limit per server."""

    name = "server"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings, progress: Progress
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._progress = progress
        self._servers = [_Server(url, _model_at(url, settings)) for url in check_urls(settings)]

    def generate(self, wanted: Sequence[CompletionRequest], total: int) -> Iterator[Completion]:
        todo: queue.SimpleQueue[CompletionRequest] = queue.SimpleQueue()
        for w in wanted:
            todo.put(w)
        done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        stop = threading.Event()
        each = min(self._settings.batch_size or AT_A_TIME, len(wanted))
        threads = [
            threading.Thread(target=self._work, args=(server, todo, done, stop), daemon=True)
            for server in self._servers
            for _ in range(each)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in wanted:
                yield self._next(done, threads)
        finally:
            stop.set()

    def close(self) -> None:
        """Do nothing: the servers keep running."""

    def _next(
        self,
        done: queue.SimpleQueue[Completion | BaseException],
        threads: Sequence[threading.Thread],
    ) -> Completion:
        while True:
            try:
                result = done.get(timeout=1.0)
            except queue.Empty:
                if any(thread.is_alive() for thread in threads):
                    continue
                raise ResourceError(
                    f"no server answers any longer ({', '.join(s.url for s in self._servers)})",
                    hint="finished completions are kept: restart them and repeat the command",
                ) from None
            if isinstance(result, BaseException):
                raise result
            return result

    def _work(
        self,
        server: _Server,
        todo: queue.SimpleQueue[CompletionRequest],
        done: queue.SimpleQueue[Completion | BaseException],
        stop: threading.Event,
    ) -> None:
        while not stop.is_set() and server.alive:
            try:
                wanted = todo.get(block=False)
            except queue.Empty:
                # Another server may stop and return its work to the queue, also a request that is
                # being retried. Waiting threads check again until all is done.
                stop.wait(0.2)
                continue
            try:
                done.put(self._complete(server, wanted, stop))
            except _PROBLEMS as problem:
                todo.put(wanted)  # for the other threads
                self._give_up(server, problem)
            except Exception as problem:
                done.put(problem)
                return

    def _give_up(self, server: _Server, problem: BaseException) -> None:
        with server.lock:
            if server.alive:
                server.alive = False
                self._progress.note(f"{server.url} does not answer any longer ({problem})")

    def _complete(
        self, server: _Server, wanted: CompletionRequest, stop: threading.Event
    ) -> Completion:
        """Request one completion, and retry while the server is busy or unreachable."""
        wait = FIRST_WAIT
        for attempt in range(RETRIES + 1):
            try:
                answer = self._ask(server, wanted)
                return _completion(wanted, answer, self._settings)
            except RefusalError as refusal:
                if refusal.status not in BUSY:
                    return wanted.failed(str(refusal))
                problem: Exception = ConnectionError(str(refusal))
            except _PROBLEMS as error:
                problem = error
            if attempt == RETRIES or stop.wait(wait) or not server.alive:
                raise problem
            wait = min(2 * wait, LONGEST_WAIT)
        raise AssertionError("the loop returns or raises")

    def _ask(self, server: _Server, wanted: CompletionRequest) -> dict[str, Any]:
        body = {
            "model": server.model,
            "max_tokens": self._settings.max_new_tokens,
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
            "seed": wanted.stream(self._settings.seed) & LARGEST_SEED,
        }
        if self._settings.top_k:
            body["top_k"] = self._settings.top_k
        if self._settings.stop:
            body["stop"] = list(self._settings.stop)
        url = f"{server.url}/completions"
        if server.takes_tokens:
            try:
                return _post(url, {**body, "prompt": list(wanted.tokens)})
            except RefusalError as refusal:
                if refusal.status not in (400, 422) or "prompt" not in str(refusal):
                    raise
        answer = _post(url, {**body, "prompt": self._text(wanted)})
        server.takes_tokens = False
        return answer

    def _text(self, wanted: CompletionRequest) -> str:
        """Return the prompt as text, for a server without token input. Refuse if tokens would
        differ.
        """
        text = str(self._tokenizer.decode(list(wanted.tokens), skip_special_tokens=False))
        start = self._tokenizer.bos_token
        for candidate in (text, text.removeprefix(str(start)) if start else text):
            if list(self._tokenizer(candidate)["input_ids"]) == list(wanted.tokens):
                return candidate
        raise RefusalError(400, "it takes text only, and this prompt's text has other tokens")


def check_urls(settings: GenerationSettings) -> list[str]:
    if not settings.url:
        raise UsageError(
            "the engine is a server, but no URL is given",
            hint='name it: `url="http://localhost:8000/v1"`',
        )
    for url in settings.url:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"`url` is {url}, expected http://HOST:PORT/v1")
    return [url.rstrip("/").removesuffix("/completions") for url in settings.url]


def _model_at(url: str, settings: GenerationSettings) -> str:
    """Return the served model's name, and check that the server answers."""
    try:
        answer = _opened(urllib.request.Request(f"{url}/models"), 30.0)
        listed = [str(entry["id"]) for entry in answer["data"]]
    except (*_PROBLEMS, RefusalError, KeyError, TypeError, ValueError) as problem:
        if settings.served_model is not None and isinstance(problem, RefusalError):
            return settings.served_model  # a server without a list of models
        raise ResourceError(
            f"{url} does not answer ({problem})",
            hint="start the server first: vllm serve MODEL, for instance; the URL ends with /v1",
        ) from None
    if settings.served_model is not None:
        return settings.served_model
    if len(listed) != 1:
        raise UsageError(
            f"{url} serves {len(listed)} models: {', '.join(listed[:8])}",
            hint="name one with `served_model=NAME`",
        )
    return listed[0]


def _completion(
    wanted: CompletionRequest, answer: dict[str, Any], settings: GenerationSettings
) -> Completion:
    try:
        choice = answer["choices"][0]
        text, cut = str(choice["text"]), choice.get("finish_reason") == "length"
        tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
    except (KeyError, IndexError, TypeError, ValueError) as problem:
        return wanted.failed(f"an answer of another form ({type(problem).__name__}: {problem})")
    return wanted.completed(text, tokens, settings.stop, cut=cut)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return _opened(urllib.request.Request(url, data=data, headers=headers), ANSWER_SECONDS)


def _opened(request: urllib.request.Request, seconds: float) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            content = json.loads(response.read())
    except urllib.error.HTTPError as error:
        words = ""
        with contextlib.suppress(OSError):
            words = error.read(500).decode(errors="replace")
        raise RefusalError(error.code, words or str(error.reason)) from None
    except (ValueError, RecursionError) as error:
        raise RefusalError(200, f"no JSON in the answer ({error})") from None
    if not isinstance(content, dict):
        raise RefusalError(200, "no JSON object in the answer")
    return content
