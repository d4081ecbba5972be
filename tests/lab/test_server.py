"""The server engine: against a real `transformers serve`, and against servers that misbehave."""

import contextlib
import inspect
import json
import resource
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

import processes
import zoo
from evidence.scoring import generate
from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import ResourceError, UsageError
from moemerge.lab import engines
from moemerge.lab.engines import CompletionRequest, Finish, ServerEngine, engine_maker, public_url
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems
from moemerge.runtime.progress import Silent
from moemerge.text.tokens import load_tokenizer


def settings(*urls, **values):
    values = {"engine": "server", "url": urls, "max_new_tokens": 24, **values}
    return parse_settings(GenerationSettings, values, "settings")


@pytest.fixture(scope="module")
def folder():
    return bundled_set().models["math"]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def wanted(tokenizer, prompts):
    return [
        CompletionRequest(p, 0, tuple(tokenizer(text)["input_ids"]))
        for p, text in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def real_server(folder):
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    start = "from transformers.cli.transformers import main; main()"
    process = processes.start(start, *words, "--dtype", "float32")
    url = f"http://127.0.0.1:{port}/v1"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.3)
        yield url
    finally:
        process.kill()
        process.communicate()


def test_a_real_server_writes_what_the_testbed_writes(real_server, folder, tokenizer):
    prompts = [p.prompt for p in problems("math", split="test", count=12, seed=21)]
    engine = ServerEngine(
        tokenizer, settings(real_server, served_model=str(folder), batch_size=2), Silent()
    )
    answers = {c.prompt: c for c in engine.generate(wanted(tokenizer, prompts))}
    assert {c.detail for c in answers.values()} == {""}
    assert [answers[n].text for n in range(12)] == generate(folder, prompts, device="cpu")
    assert {c.finish for c in answers.values()} == {Finish.STOP}
    assert all(c.tokens > 0 for c in answers.values())
    # It takes no notice of a temperature that the model's own generation config does not ask for.
    hot = settings(real_server, served_model=str(folder), batch_size=2, temperature=5.0)
    again = ServerEngine(tokenizer, hot, Silent()).generate(wanted(tokenizer, prompts))
    assert {c.prompt: c.text for c in again} == {n: answers[n].text for n in range(12)}


DONE = object()  # `before` has answered


class Toy:
    """A server that echoes the number of prompt tokens, after whatever `before` does."""

    def __init__(self, before):
        toy, takes_handler = self, len(inspect.signature(before).parameters) == 2
        self.bodies: list[dict] = []

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_): ...

            def answer(self, status, content):
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer(200, {"data": [{"id": "toy"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                toy.bodies.append(body)
                special = before(body, self) if takes_handler else before(body)
                if special is DONE:
                    return
                if special is not None:
                    self.answer(*special)
                    return
                text = f"{len(body['prompt'])} tokens STOP more"
                choice = {"text": text, "finish_reason": "length"}
                usage = {"completion_tokens": 5}
                self.answer(200, {"choices": [choice], "usage": usage})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(openai._base_client, "INITIAL_RETRY_DELAY", 0.01)
    made = []

    def make(before=lambda body: None):
        made.append(Toy(before))
        return made[-1]

    yield make
    for toy in made:
        toy.close()


def asked(count):
    return [CompletionRequest(n, 0, tuple(range(n + 1))) for n in range(count)]


def test_requests_hold_tokens_seeds_and_settings(toys, tokenizer):
    toy = toys()
    given = settings(toy.url, temperature=0.5, top_p=0.9, top_k=7, stop=["STOP"], seed=3)
    engine = ServerEngine(tokenizer, given, Silent())
    answers = {c.prompt: c for c in engine.generate(asked(3))}
    assert [answers[n].text for n in range(3)] == ["1 tokens ", "2 tokens ", "3 tokens "]
    assert {(c.finish, c.tokens) for c in answers.values()} == {(Finish.STOP, 5)}
    body = next(body for body in toy.bodies if body["prompt"] == [0, 1])
    assert body["model"] == "toy"
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.5, 0.9, 7)
    assert len({body["seed"] for body in toy.bodies}) == 3


def test_a_busy_server_is_asked_again(toys, tokenizer):
    lock, left = threading.Lock(), [4]

    def busy(body):
        with lock:
            left[0] -= 1
            return (429, {"error": "busy"}) if left[0] >= 0 else None

    engine = ServerEngine(tokenizer, settings(toys(busy).url), Silent())
    assert len(list(engine.generate(asked(5)))) == 5


def test_a_refused_prompt_fails_alone(toys, tokenizer):
    def refuse(body):
        return (413, {"error": "too long"}) if len(body["prompt"]) == 2 else None

    engine = ServerEngine(tokenizer, settings(toys(refuse).url), Silent())
    answers = {c.prompt: c for c in engine.generate(asked(4))}
    assert answers[1].finish is Finish.FAILED
    assert "413" in answers[1].detail
    assert [answers[n].finish for n in (0, 2, 3)] == [Finish.LENGTH] * 3


def test_work_of_a_server_that_dies_goes_to_the_others(toys, tokenizer, monkeypatch):
    monkeypatch.setattr(engines, "RETRIES", 1)
    good = toys()
    bad = toys(lambda body: (503, {"error": "dying"}))
    engine = ServerEngine(tokenizer, settings(good.url, bad.url, batch_size=2), Silent())
    answers = list(engine.generate(asked(20)))
    assert sorted(c.prompt for c in answers) == list(range(20))
    assert all(c.finish is Finish.LENGTH for c in answers)


def test_what_a_dying_server_still_tries_is_not_lost(toys, tokenizer, monkeypatch):
    """One thread gives the server up while the other waits for it, and all else is done."""
    monkeypatch.setattr(engines, "RETRIES", 1)
    late = iter([0.0, 0.6, 0.6, 0.6])

    def dying(body):
        time.sleep(next(late, 0.6))
        return 503, {"error": "dying"}

    urls = toys().url, toys(dying).url
    engine = ServerEngine(tokenizer, settings(*urls, batch_size=2), Silent())
    assert len(list(engine.generate(asked(6)))) == 6


def test_when_all_servers_die_what_came_is_kept_and_it_is_said(toys, tokenizer, monkeypatch):
    monkeypatch.setattr(engines, "RETRIES", 1)
    count = [0]

    def dying(body):
        count[0] += 1
        return (503, {"error": "dying"}) if count[0] > 3 else None

    engine = ServerEngine(tokenizer, settings(toys(dying).url, batch_size=1), Silent())
    answers = engine.generate(asked(10))
    assert [next(answers).prompt for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ResourceError, match=r"(?s)no server answers any longer.*kept"):
        next(answers)


def test_servers_that_are_not_there_or_not_named(toys, tokenizer, folder):
    with pytest.raises(ResourceError, match=r"(?s)does not answer.*vllm serve"):
        ServerEngine(tokenizer, settings("http://127.0.0.1:9/v1"), Silent())
    for given, message in (
        (settings(), "no URL is given"),
        (settings("localhost:8000"), "expected http://"),
        (settings("http://x/v1", engine="transformers"), 'engine="server"'),
        (settings(engine="vllm"), "package vllm"),
    ):
        with pytest.raises(UsageError, match=message):
            engine_maker(folder, tokenizer, given, Silent())


def drip(body, handler):
    """One byte a tenth of a second, for ever."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    return DONE


def drip_headers(body, handler):
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        while True:
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.1)
    return DONE


def endless(body, handler, status=b"200 OK", header=b""):
    handler.wfile.write(b"HTTP/1.1 " + status + b"\r\nContent-Type: application/json\r\n")
    handler.wfile.write(header + b"\r\n")
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b" " * 2**20)
    return DONE


def endless_refusal(body, handler):
    return endless(body, handler, b"400 Bad Request")


def compressed(body, handler):
    return endless(body, handler, header=b"Content-Encoding: gzip\r\n")


@pytest.mark.parametrize("hostile", [drip, drip_headers, endless, endless_refusal, compressed])
def test_a_hostile_server_costs_little_time_and_memory(toys, tokenizer, monkeypatch, hostile):
    monkeypatch.setattr(engines, "RETRIES", 0)
    monkeypatch.setattr(engines, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(engines, "LARGEST_BODY", 8 << 20)
    notes = zoo.Notes()
    engine = ServerEngine(tokenizer, settings(toys(hostile).url), notes)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ResourceError, match="no server answers any longer"):
        list(engine.generate(asked(1)))
    engine.close()
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert "does not answer any longer" in notes.said[0]


def test_a_key_in_a_url_is_not_shown(tokenizer):
    assert public_url("http://user:key@h:1/v1?api_key=k#x") == "http://h:1/v1"
    with pytest.raises(ResourceError) as refused:
        ServerEngine(tokenizer, settings("http://user:secret@127.0.0.1:9/v1"), Silent())
    assert "secret" not in str(refused.value)
