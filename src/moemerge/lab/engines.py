"""Engines that generate completions: transformers or vLLM in this process, or servers.

Each completion has its own random numbers, so that its neighbours in a batch, their order and an
interruption do not change it.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import importlib
import importlib.util
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moemerge.checkpoint import Checkpoint, format_size
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import NumericalError, ResourceError, UsageError
from moemerge.forward.loading import build_skeleton
from moemerge.forward.settings import stored_dtype
from moemerge.forward.weights import Weights
from moemerge.runtime.devices import available_memory, is_out_of_memory, resolve_device
from moemerge.runtime.dtypes import parse_dtype
from moemerge.runtime.files import read_object
from moemerge.runtime.progress import Progress

LARGEST_SEED: Final = 2**31 - 1  # of servers and vLLM


class Finish(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # the model ended it, or a stop text did
    LENGTH = "length"  # cut at the most tokens, or at the end of the context
    FAILED = "failed"  # the engine could not make it


@dataclass(frozen=True)
class CompletionRequest:
    """A requested completion: its prompt, its sample, and the prompt's token ids."""

    prompt: int  # index in the caller's list
    sample: int
    tokens: tuple[int, ...]

    def stream(self, seed: int) -> int:
        """The seed of its random numbers. Other prompts and their order do not change it."""
        content = struct.pack(f"<QQ{len(self.tokens)}q", seed, self.sample, *self.tokens)
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    def completed(self, text: str, tokens: int, stops: Sequence[str], *, cut: bool) -> Completion:
        """Return its completion: the text before the first stop text."""
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        if places:
            text, cut = text[: min(places)], False
        finish = Finish.LENGTH if cut else Finish.STOP
        return Completion(self.prompt, self.sample, text, tokens, finish)

    def failed(self, detail: str) -> Completion:
        return Completion(self.prompt, self.sample, "", 0, Finish.FAILED, detail)


@dataclass(frozen=True)
class Completion:
    """A finished or failed completion."""

    prompt: int
    sample: int
    text: str  # without stop texts and special tokens
    tokens: int  # number of generated tokens
    finish: Finish
    detail: str = ""  # the error, if it failed

    @property
    def has_failed(self) -> bool:
        return self.finish is Finish.FAILED


class Engine(Protocol):
    """Runs one model on prompts and returns completions as they end."""

    name: str

    def generate(self, wanted: Sequence[CompletionRequest]) -> Iterator[Completion]:
        """Yield completions as they end, in any order."""
        ...

    def close(self) -> None: ...


def engine_maker(
    model: ModelLike,
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationSettings,
    progress: Progress,
) -> Callable[[], Engine]:
    """Check the settings, and return a function that loads or connects to the model."""
    if settings.engine == "server":
        check_urls(settings)
        return lambda: ServerEngine(tokenizer, settings, progress)
    if settings.url:
        raise UsageError("`url` is for a server", hint='use `engine="server"`')
    if settings.engine == "vllm":
        _require_package("vllm", 'pip install "moemerge[vllm]"')
        return lambda: VllmEngine(model, settings)
    return lambda: TransformersEngine(model, tokenizer, settings)


def load_engine(make_engine: Callable[[], Engine]) -> Engine:
    """Return the engine; a model that does not fit into memory is our error."""
    try:
        return make_engine()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            "the model does not fit into the free memory of its device",
            hint='use `device="cpu"`, or fewer processes on the device',
        ) from error


def _require_package(name: str, hint: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"this engine needs the package {name}, which is not installed", hint=hint)


# --- transformers ---------------------------------------------------------------------------------

MOST_SLOTS: Final = {"cuda": 256, "cpu": 64}  # completions in one batch
HEADROOM: Final = 0.85  # share of the free memory; activations take the rest
UNBOUNDED: Final = 1 << 40  # a model that states no context length
AT_ONCE: Final = 1 << 12  # tokens of a batch of likelihoods, padding included
STOPS_EVERY: Final = 8  # tokens between two searches for stop texts; what follows one is cut off
PROBE: Final = (3, 5, 7, 4, 6)

Likelihood = tuple[float, bool]  # log-probability, and whether every token is the likeliest


class TransformersEngine:
    """Loads a whole model and generates in batches, padded on the left."""

    name = "transformers"

    def __init__(
        self, model: ModelLike, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._device = resolve_device(settings.device)
        with Checkpoint.open(model) as checkpoint:
            self._model = _load(checkpoint, settings.dtype, self._device)
            self._ends = end_tokens(self._model, tokenizer, checkpoint.path)
            label = checkpoint.label
        with torch.inference_mode():
            out = self._model(torch.tensor([PROBE], device=self._device), use_cache=True)
        if bool(out.logits.isnan().any()):  # its answers would be empty or random
            raise NumericalError(
                f"{label}: its logits are NaN",
                hint="its weights or config.json are damaged, or the dtype is too narrow for them",
            )
        cached = [getattr(layer, name, None) for layer in out.past_key_values.layers
                  for name in ("keys", "values")]  # fmt: skip
        nbytes = sum(tensor.nbytes for tensor in cached if isinstance(tensor, Tensor))
        self._bytes_per_token = max(1, nbytes // len(PROBE))
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._context = int(context or UNBOUNDED)

    def generate(self, wanted: Sequence[CompletionRequest]) -> Iterator[Completion]:
        for w in wanted:
            if len(w.tokens) >= self._context:
                detail = f"a prompt of {len(w.tokens)} tokens, the model reads {self._context}"
                yield w.failed(detail)
        fitting = [w for w in wanted if len(w.tokens) < self._context]
        # Texts of similar length share a batch, the longest first: if memory is too small, this
        # fails at once.
        fitting.sort(key=lambda w: (-len(w.tokens), w.prompt, w.sample))
        while fitting:
            slots = self._slots(len(fitting[0].tokens) + self._settings.max_new_tokens)
            yield from self._batch(fitting[:slots])
            del fitting[:slots]

    @torch.inference_mode()
    def _batch(self, batch: Sequence[CompletionRequest]) -> list[Completion]:
        settings, longest = self._settings, len(batch[0].tokens)
        limit = min(settings.max_new_tokens, self._context - longest)
        ids = torch.tensor([[0] * (longest - len(w.tokens)) + list(w.tokens) for w in batch])
        pads = torch.tensor([longest - len(w.tokens) for w in batch])
        ends = sorted(self._ends)
        draw = LogitsProcessorList()
        if settings.temperature:
            draw.append(_Draw(settings, batch, longest, limit, self._device))
        stops = _Stops(self._tokenizer, settings.stop, longest)
        generate: Any = self._model.generate
        out = generate(
            input_ids=ids.to(self._device),
            attention_mask=(torch.arange(longest) >= pads[:, None]).long().to(self._device),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=limit,
                do_sample=False,  # `_Draw` samples
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
            ),
            logits_processor=draw,
            stopping_criteria=StoppingCriteriaList([stops]),
        )
        completions = []
        for w, row in zip(batch, out[:, longest:].tolist(), strict=True):
            end = next((at for at, token in enumerate(row) if token in self._ends), None)
            text = str(self._tokenizer.decode(row[:end], skip_special_tokens=True))
            count = len(row) if end is None else end
            completions.append(w.completed(text, count, settings.stop, cut=end is None))
        return completions

    def _slots(self, capacity: int) -> int:
        """Return the batch size: as large as is useful and fits next to the weights."""
        each = self._bytes_per_token * min(capacity, self._context)
        room = int(HEADROOM * available_memory(self._device))
        if each > room:
            raise ResourceError(
                f"one completion of {capacity} tokens needs {format_size(each)} for its cache, "
                f"and {format_size(room)} are left on {self._device} next to the weights",
                hint="lower `max_new_tokens`, use shorter prompts, or a larger device",
            )
        wanted = self._settings.batch_size or MOST_SLOTS[self._device.type]
        return min(wanted, room // each)

    @torch.inference_mode()
    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Likelihood]:
        """Return the log-likelihood of each continuation given its context. Texts longer than the
        model's context lose their beginning.
        """
        results: dict[int, Likelihood] = {}
        texts = [[*before, *after][-self._context - 1 :] for before, after in pairs]
        order = sorted(range(len(pairs)), key=lambda place: -len(texts[place]))
        while order:
            longest = max(2, len(texts[order[0]])) - 1
            places = order[: max(1, AT_ONCE // longest)]
            del order[: len(places)]
            # Padded on the right, so that no text attends to padding. Last tokens are not needed.
            rows = [texts[p][:-1] + [0] * (longest - len(texts[p]) + 1) for p in places]
            logits = self._model(torch.tensor(rows, device=self._device), use_cache=False).logits
            for row, place in enumerate(places):
                end = len(texts[place]) - 1
                count = min(len(pairs[place][1]), end)
                scores = logits[row, end - count : end].float().log_softmax(-1)  # (tokens, words)
                target = torch.tensor(texts[place][end + 1 - count :], device=scores.device)
                chosen = scores.gather(-1, target[:, None]).sum()
                results[place] = (float(chosen), bool((scores.argmax(-1) == target).all()))
        return [results[place] for place in range(len(pairs))]

    def close(self) -> None:
        """Free the model."""
        del self._model


class _Draw(LogitsProcessor):
    """Samples a token and masks all others, so that greedy search selects it.

    Each row has its own random numbers, which transformers' sampling does not offer.
    """

    def __init__(
        self,
        settings: GenerationSettings,
        batch: Sequence[CompletionRequest],
        longest: int,
        limit: int,
        device: torch.device,
    ) -> None:
        self._warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
        if settings.top_k:
            self._warpers.append(TopKLogitsWarper(settings.top_k))
        if settings.top_p < 1:
            self._warpers.append(TopPLogitsWarper(settings.top_p))
        self._longest = longest
        numbers = [np.random.default_rng(w.stream(settings.seed)).random(limit) for w in batch]
        self._numbers = torch.tensor(np.array(numbers), device=device)  # (rows, steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = self._warpers(input_ids, scores.float())
        sums = scores.softmax(-1).double().cumsum(-1)
        wanted = self._numbers[:, input_ids.shape[1] - self._longest, None] * sums[:, -1:]
        place = torch.searchsorted(sums, wanted, right=True)
        # A number close to 1 can be rounded past the end.
        place = torch.where(place < scores.shape[-1], place, scores.argmax(-1, keepdim=True))
        return torch.full_like(scores, float("-inf")).scatter(-1, place, 0.0)


class _Stops(StoppingCriteria):
    """Ends a row that contains a stop text."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], longest: int) -> None:
        self._tokenizer, self._stops, self._longest = tokenizer, stops, longest

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        written = input_ids[:, self._longest :]
        done = [False] * len(written)
        if self._stops and written.shape[1] % STOPS_EVERY == 0:
            texts = self._tokenizer.batch_decode(written)
            done = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(done, device=input_ids.device)


def _load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> PreTrainedModel:
    if dtype != "auto":
        wanted = parse_dtype(dtype).torch
    else:  # a CPU gains nothing from bfloat16, and float32 is less sensitive to rounding
        wanted = torch.float32 if device.type == "cpu" else stored_dtype(checkpoint)
    model = build_skeleton(checkpoint, wanted)
    with closing(Weights(model, checkpoint, device, wanted)) as weights:
        names = list(model.state_dict())
        needed, room = weights.nbytes_of(names), int(HEADROOM * available_memory(device))
        if needed > room:
            raise ResourceError(
                f"{checkpoint.label} needs {format_size(needed)} for its weights, and "
                f"{format_size(room)} can be used on {device}",
                hint="serve it elsewhere (vllm serve, for instance) and use "
                '`engine="server"` `url="http://HOST:8000/v1"`, or choose a larger device',
            )
        weights.place(weights.fetch(names))
        weights.check(names, "the model")
    return model


def end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> frozenset[int]:
    """Return all end tokens of the generation config, the config and the tokenizer."""
    named: list[Any] = [model.config.get_text_config().eos_token_id, tokenizer.eos_token_id]
    if os.path.exists(folder / "generation_config.json"):
        named.append(read_object(folder / "generation_config.json").get("eos_token_id"))
    ends: set[int] = set()
    for value in named:
        ends.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(token for token in ends if isinstance(token, int))


# --- vLLM -----------------------------------------------------------------------------------------

AT_A_TIME: Final = 2048  # completions per call, between two writes to disk


class VllmEngine:
    """Loads a model into vLLM's `LLM`, which batches by itself."""

    name = "vllm"

    def __init__(self, model: ModelLike, settings: GenerationSettings) -> None:
        # Its workers must not inherit our CUDA context.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self._vllm: Any = importlib.import_module("vllm")
        self._settings = settings
        with Checkpoint.open(model) as checkpoint:
            folder = str(checkpoint.path)
        self._llm = self._vllm.LLM(model=folder, dtype=settings.dtype, seed=settings.seed)

    def generate(self, wanted: Sequence[CompletionRequest]) -> Iterator[Completion]:
        for begin in range(0, len(wanted), AT_A_TIME):
            some = wanted[begin : begin + AT_A_TIME]
            prompts = [{"prompt_token_ids": list(w.tokens)} for w in some]
            answers = self._llm.generate(prompts, [self._sampling(w) for w in some], use_tqdm=False)
            for w, answer in zip(some, answers, strict=True):
                output = answer.outputs[0]
                cut = output.finish_reason == "length"
                yield w.completed(output.text, len(output.token_ids), self._settings.stop, cut=cut)

    def close(self) -> None:
        """Free the model."""
        del self._llm

    def _sampling(self, wanted: CompletionRequest) -> Any:
        s = self._settings
        return self._vllm.SamplingParams(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            max_tokens=s.max_new_tokens,  # vLLM's default is 16
            seed=wanted.stream(s.seed) & LARGEST_SEED,
            stop=list(s.stop) or None,
        )


# --- servers --------------------------------------------------------------------------------------

PER_SERVER: Final = 32  # concurrent requests, which the server batches
RETRIES: Final = 6
ANSWER_SECONDS: Final = 3600.0  # one answer, retries included; a busy server may queue it
CONNECT_SECONDS: Final = 30.0
LARGEST_BODY: Final = 64 << 20
BUSY: Final = frozenset({408, 409, 429})


def public_url(url: str) -> str:
    """Return a URL without user, password and query, which may contain a key."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, query="", fragment="").geturl()


def check_urls(settings: GenerationSettings) -> None:
    if not settings.url:
        raise UsageError(
            "the engine is a server, but no URL is given",
            hint='name it: `url="http://localhost:8000/v1"`',
        )
    for url in settings.url:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"`url` is {public_url(url)}, expected http://HOST:PORT/v1")
    _require_package("openai", 'pip install "moemerge[server]"')


@dataclass
class _Server:
    url: str
    client: Any  # openai.AsyncOpenAI
    model: str = ""
    running: int = 0
    takes_tokens: bool = True  # some servers accept text only
    alive: bool = True


class ServerEngine:
    """Sends requests to OpenAI-compatible servers of the same model (POST /v1/completions).

    Each request is one completion with its own seed. So servers may answer in any order, and a run
    continues if one of them stops. The client `openai` retries.
    """

    name = "server"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: GenerationSettings, progress: Progress
    ) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._progress = progress
        self._loop = asyncio.Runner()
        self._servers = [self._loop.run(self._connected(url)) for url in settings.url]

    def generate(self, wanted: Sequence[CompletionRequest]) -> Iterator[Completion]:
        results: asyncio.Queue[Completion | BaseException] = asyncio.Queue()
        each = self._settings.batch_size or PER_SERVER
        limit = asyncio.Semaphore(each * len(self._servers))

        async def complete(w: CompletionRequest) -> None:
            async with limit:
                try:
                    results.put_nowait(await self._complete(w))
                except Exception as error:  # for the caller
                    results.put_nowait(error)

        async def start() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(complete(w)) for w in wanted]

        async def stop(tasks: list[asyncio.Task[None]]) -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        tasks = self._loop.run(start())
        try:
            for _ in wanted:
                result = self._loop.run(results.get())
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._loop.run(stop(tasks))

    def close(self) -> None:
        """Close the connections. The servers keep running."""
        self._loop.close()

    async def _complete(self, wanted: CompletionRequest) -> Completion:
        """Request one completion from the least busy server, and from another one if that dies."""
        import openai

        while alive := [server for server in self._servers if server.alive]:
            server = min(alive, key=lambda one: one.running)
            server.running += 1
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._ask(server, wanted)
            except (openai.APIConnectionError, TimeoutError) as error:
                problem = str(error.__cause__ or error) or f"no answer in {ANSWER_SECONDS:g} s"
            except openai.APIStatusError as error:
                if error.status_code not in BUSY and error.status_code < 500:
                    return wanted.failed(_words(error))
                problem = _words(error)
            finally:
                server.running -= 1
            if server.alive:
                server.alive = False
                self._progress.note(f"{server.url} does not answer any longer ({problem})")
        raise ResourceError(
            f"no server answers any longer ({', '.join(s.url for s in self._servers)})",
            hint="finished completions are kept: restart them and repeat the command",
        )

    async def _ask(self, server: _Server, wanted: CompletionRequest) -> Completion:
        import openai

        s = self._settings
        body: dict[str, Any] = {
            "model": server.model,
            "max_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "seed": wanted.stream(s.seed) & LARGEST_SEED,
            "stop": list(s.stop) or openai.omit,
            "extra_body": {"top_k": s.top_k} if s.top_k else {},
        }
        create = server.client.completions.create
        answer = None
        if server.takes_tokens:
            try:
                answer = await create(prompt=list(wanted.tokens), **body)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if "prompt" not in _words(error):
                    raise
        if answer is None:
            text = self._text(wanted)
            if text is None:
                return wanted.failed(
                    "the server takes text, and this prompt's text has other tokens"
                )
            answer = await create(prompt=text, **body)
            server.takes_tokens = False
        try:
            text, cut = str(answer.choices[0].text), answer.choices[0].finish_reason == "length"
            tokens = int(answer.usage.completion_tokens) if answer.usage else 0
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            return wanted.failed(f"an answer of another form ({type(error).__name__}: {error})")
        return wanted.completed(text, tokens, s.stop, cut=cut)

    def _text(self, wanted: CompletionRequest) -> str | None:
        """Return the prompt as text, for a server without token input; None if its tokens would
        differ.
        """
        text = str(self._tokenizer.decode(list(wanted.tokens), skip_special_tokens=False))
        start = self._tokenizer.bos_token
        for candidate in (text, text.removeprefix(str(start)) if start else text):
            if list(self._tokenizer(candidate)["input_ids"]) == list(wanted.tokens):
                return candidate
        return None

    async def _connected(self, url: str) -> _Server:
        """Return a server that answers, with the name of its model."""
        import openai

        client = openai.AsyncOpenAI(
            base_url=url.rstrip("/").removesuffix("/completions"),
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            max_retries=RETRIES,
            timeout=ANSWER_SECONDS,
            http_client=openai.DefaultAsyncHttpxClient(transport=_bounded_transport()),
        )
        server = _Server(public_url(url), client, self._settings.served_model or "")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                page = await client.with_options(max_retries=0).models.list()
            listed = [str(model.id) for model in page.data]
        except openai.APIStatusError as error:
            if server.model:  # a server without a list of models
                return server
            listed, problem = [], _words(error)
        except (openai.APIConnectionError, TimeoutError, AttributeError, TypeError) as error:
            listed, problem = [], str(error.__cause__ or error) or "no answer"
        else:
            problem = "it lists no models"
        if not listed:
            raise ResourceError(
                f"{server.url} does not answer ({problem})",
                hint="start it first: vllm serve MODEL, for instance; the URL ends with /v1",
            )
        if not server.model and len(listed) > 1:
            raise UsageError(
                f"{server.url} serves {len(listed)} models: {', '.join(listed[:8])}",
                hint="name one with `served_model=NAME`",
            )
        server.model = server.model or listed[0]
        return server


def _words(error: Any) -> str:
    """Return the status and text of a refusal."""
    return f"{error.status_code}: {error.response.text[:500]}"


def _bounded_transport() -> Any:
    """Return a transport that refuses bodies larger than `LARGEST_BODY`, and compressed ones, whose
    size is not known.
    """
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for piece in self._stream:
                size += len(piece)
                if size > LARGEST_BODY:
                    raise httpx2.ReadError(f"an answer of more than {format_size(LARGEST_BODY)}")
                yield piece

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"
            response = await super().handle_async_request(request)
            if response.headers.get("Content-Encoding", "identity") != "identity":
                await response.aclose()
                raise httpx2.ReadError("a compressed answer, which was not requested")
            response.stream = Bounded(response.stream)
            return response

    return Transport()
