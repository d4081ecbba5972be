"""Run tasks of lm-eval with our engines: lm-eval poses and scores, the engines answer."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from moemerge.config.faults import parse_settings
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import EngineSettings, GenerationSettings
from moemerge.errors import DataError, UsageError
from moemerge.lab.answers import CompletionIndex
from moemerge.lab.benchmarks import TASK_SUFFIXES, EvaluationJob
from moemerge.lab.engines import Likelihood, TransformersEngine, engine_maker
from moemerge.lab.generate import complete, open_tokenizer
from moemerge.lab.scores import TaskScores
from moemerge.runtime.progress import Progress
from moemerge.text.templates import has_template

MOST_TOKENS: Final = 256  # lm-eval's default
ANY: Final = 1024  # the context, if the model's config does not state it


def load_lm_eval(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return lm-eval's index of tasks, and the requested ones: names, or lm-eval's task files.

    Loads their data sets, so that one that is missing is reported before a model is loaded.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "tasks of lm-eval need the package lm-eval", hint='pip install "moemerge[eval]"'
        )
    files = [Path(name) for name in names if name.lower().endswith(TASK_SUFFIXES)]
    for file in files:
        if not os.path.isfile(file):
            raise DataError(f"no such task file {file}")
    _go_offline_without_network()
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    plain = [name for name in names if Path(name) not in files]
    with contextlib.redirect_stdout(sys.stderr):
        manager = TaskManager(include_defaults=bool(plain))
        unknown = [name for name in plain if name not in manager.all_tasks]
        if unknown:
            raise UsageError(
                f"lm-eval has no task {', '.join(unknown)}", hint="`lm-eval ls tasks` lists them"
            )
        tasks = [*plain, *(load_yaml(file) for file in files)]
        for name, task in zip([*plain, *files], tasks, strict=True):
            try:
                manager.load([task])
            except Exception as error:  # its libraries raise many types
                raise DataError(
                    f"task {name} of lm-eval cannot be loaded ({type(error).__name__}: {error})",
                    hint="a data set that is not in the cache needs the network once",
                ) from error
    return manager, tasks


def _go_offline_without_network() -> None:
    """Without a network, read data sets from the cache at once: the hub's client retries for
    minutes.
    """
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if getproxies():
        return
    try:
        socket.create_connection((host.hostname or "", host.port or 443), 5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        hub = sys.modules.get("huggingface_hub.constants")  # it has read the variable already
        if hub is not None:
            hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


class Bridge:
    """Answers lm-eval's requests for one model, through `language_model`."""

    def __init__(self, job: EvaluationJob, model: ModelLike, progress: Progress) -> None:
        self._job = job
        self._model = model
        self._progress = progress
        self._likely: TransformersEngine | None = None
        self.tokenizer = open_tokenizer(model)
        if job.settings.plain:
            self.tokenizer.chat_template = None
        self.chats = has_template(self.tokenizer)

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Tokenise. A chat template writes its special tokens itself."""
        special = not self.chats if special is None else special
        return list(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return one text per request; a repeated request is another sample."""
        texts = [""] * len(requests)
        groups: dict[GenerationSettings, dict[str, list[int]]] = {}
        for place, (prompt, wishes) in enumerate(requests):
            group = groups.setdefault(self._settings(wishes), {})
            group.setdefault(prompt, []).append(place)
        for settings, prompts in groups.items():
            several = settings.model_copy(update={"samples": max(map(len, prompts.values()))})
            made = self._complete([self.encode(prompt) for prompt in prompts], several)
            for places, samples in zip(prompts.values(), made, strict=True):
                for place, text in zip(places, samples, strict=False):
                    texts[place] = text
        return texts

    def log_likelihoods(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[Likelihood]:
        if self._likely is None:
            if self._job.settings.engine != "transformers":
                raise UsageError(
                    "this task needs log-likelihoods, which only the engine transformers computes",
                    hint='`engine="transformers"`',
                )
            engine = engine_maker(self._model, self.tokenizer, self._settings({}), self._progress)()
            assert isinstance(engine, TransformersEngine)
            self._likely = engine
        return self._likely.log_likelihoods(pairs)

    def close(self) -> None:
        if self._likely is not None:
            self._likely.close()
            self._likely = None

    def _settings(self, wishes: Mapping[str, Any]) -> GenerationSettings:
        """Return the sampling settings of a request: greedy unless the task states otherwise."""
        own = self._job.settings
        until = wishes.get("until") or ()
        sampled = wishes.get("do_sample") or (wishes.get("temperature") or 0) > 0
        most = wishes.get("max_gen_toks", wishes.get("max_new_tokens", MOST_TOKENS))
        values = {
            **{name: getattr(own, name) for name in EngineSettings.model_fields},
            "temperature": float(wishes.get("temperature", 1.0) or 0) if sampled else 0.0,
            "top_p": float(wishes.get("top_p") or 1.0),
            "top_k": int(wishes.get("top_k") or 0),
            "max_new_tokens": own.max_new_tokens or int(most),
            "stop": [until] if isinstance(until, str) else [text for text in until if text],
        }
        return parse_settings(GenerationSettings, values, "settings of a task of lm-eval")

    def _complete(
        self, prompts: Sequence[Sequence[int]], settings: GenerationSettings
    ) -> list[list[str]]:
        index = CompletionIndex.of(self._job.out, self._model, settings)
        index.write()
        maker = engine_maker(self._model, self.tokenizer, settings, self._progress)
        with index.journal() as journal:
            made = complete(prompts, settings, maker, journal, self._progress)
        return [[one.text for one in samples] for samples in made.completions]


def language_model(bridge: Bridge) -> Any:
    """Return the bridge as a model class of lm-eval."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

    class BridgedModel(TemplateLM):  # type: ignore[misc,unused-ignore]
        tokenizer = bridge.tokenizer
        tokenizer_name = str(getattr(bridge.tokenizer, "name_or_path", ""))

        @property
        def eot_token_id(self) -> int:
            return int(bridge.tokenizer.eos_token_id or 0)

        @property
        def prefix_token_id(self) -> int:
            begin = bridge.tokenizer.bos_token_id
            return self.eot_token_id if begin is None else int(begin)

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return bridge.encode(string, add_special_tokens)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return str(
                bridge.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return bridge.generate([request.args for request in requests])

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[Likelihood]:
            return bridge.log_likelihoods([(before, after) for _text, before, after in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [self._loglikelihood_of(request.args[0]) for request in requests]

        def _loglikelihood_of(self, text: str) -> float:
            longest, ids = int(min(bridge.tokenizer.model_max_length, ANY)), self.tok_encode(text)
            windows = utils.get_rolling_token_windows(ids, self.prefix_token_id, longest, 1)
            pairs = [utils.make_disjoint_window(window) for window in windows]
            return sum(value for value, _likeliest in bridge.log_likelihoods(pairs))

    return BridgedModel()


def bridged_scores(
    job: EvaluationJob, manager: Any, tasks: Sequence[Any], progress: Progress
) -> list[TaskScores]:
    """Run tasks of lm-eval (`load_lm_eval`), and return every model's score on every problem."""
    by_model = []
    for model in job.models.values():
        bridge = Bridge(job, model, progress)
        try:
            by_model.append(samples_of(bridge, tasks, manager, job))
        finally:
            bridge.close()
    return [_scores(name, [samples[name] for samples in by_model]) for name in by_model[0]]


def samples_of(
    bridge: Bridge, tasks: Sequence[Any], manager: Any, job: EvaluationJob
) -> dict[str, list[dict[str, Any]]]:
    """Return lm-eval's record of every problem, by task."""
    import lm_eval

    settings = job.settings
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
        results = lm_eval.simple_evaluate(
            language_model(bridge),
            tasks=list(tasks),
            task_manager=manager,
            apply_chat_template=bridge.chats,
            limit=settings.limit,
            log_samples=True,
            bootstrap_iters=0,
            confirm_run_unsafe_code=settings.allow_code,
        )
    return dict(results["samples"])


def _scores(name: str, by_model: Sequence[Sequence[Mapping[str, Any]]]) -> TaskScores:
    """Return the task's first metric under its first filter, problem by problem."""
    first = by_model[0][0]
    chosen = next(
        (metric for metric in first["metrics"] if isinstance(first[metric], int | float)), None
    )
    if chosen is None:
        raise DataError(f"task {name} of lm-eval has no score for each problem")
    rows = [
        {s["doc_id"]: float(s[chosen]) for s in samples if s["filter"] == first["filter"]}
        for samples in by_model
    ]
    scores = np.array([[row[doc] for doc in rows[0]] for row in rows])
    if scores.min() < 0 or scores.max() > 1:
        raise DataError(
            f"task {name} of lm-eval: {chosen} goes from {scores.min():g} to {scores.max():g}, "
            "expected scores from 0 to 1"
        )
    filtered = "" if first["filter"] == "none" else f", {first['filter']}"
    return TaskScores(
        name=name,
        title=f"{name} (lm-eval)",
        domain="",
        problems=tuple(str(doc) for doc in rows[0]),
        scores=scores,
        single=bool(np.isin(scores, (0, 1)).all()),
        metric=f"{chosen}{filtered}",
    )
