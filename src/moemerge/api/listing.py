"""Look at a model, without loading it or by its completions; list methods, families, plugins."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moemerge.checkpoint import Checkpoint
from moemerge.config.models import ModelLike
from moemerge.config.parameters import REQUIRED, BasePolicy, MethodSchema, WrapperSchema
from moemerge.errors import MoeMergeError, UsageError
from moemerge.families.describe import Description, describe
from moemerge.families.families import families
from moemerge.registry import add_plugin
from moemerge.runtime.checksums import Verification, verify_checksums
from moemerge.runtime.process import paused_collector
from moemerge.runtime.progress import Progress, Silent


@paused_collector()
def inspect(model: str | Path) -> Description:
    """Describe a model folder or hub model from its headers."""
    checkpoint = Checkpoint.open(model)
    return describe(checkpoint.config, checkpoint.tensors)


def verify(folder: str | Path) -> Verification:
    """Compare the files of a folder that moemerge has written with the checksums in its report."""
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        raise UsageError(
            f"{folder} is not a folder", hint="name a folder that moemerge has written"
        )
    return verify_checksums(path)


def config_schema() -> dict[str, Any]:
    """Return a JSON schema of config files, with all methods, for editors."""
    from moemerge.config.dump import config_schema

    return config_schema({**wrapper_schemas(), **method_schemas()})


def method_schemas() -> dict[str, MethodSchema]:
    """Return the declaration of every merge method, by name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.METHODS.get(name).schema for name in sorted(merging.METHODS)}


def wrapper_schemas() -> dict[str, WrapperSchema]:
    """Return the declaration of every wrapper, by name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.WRAPPERS.get(name).schema for name in sorted(merging.WRAPPERS)}


def list_wrappers() -> list[dict[str, Any]]:
    """Return every wrapper with its parameters."""
    return [
        {
            "wrapper": name,
            "what_it_does": schema.summary,
            "statistics": schema.statistics,
            "options": _parameters(schema, per_model=False),
        }
        for name, schema in wrapper_schemas().items()
    ]


# The groups of `ls methods`, in their order.
AVERAGES = "without task vectors: models and, where one is given, the base"
CHANGES = "changes against a base, in passes over the weights"
MATRICES = "matrix by matrix: decompositions of each, or steps"
INFORMED = "from statistics of each model's own text"


def _group(schema: MethodSchema) -> str:
    if schema.statistics is not None:
        return INFORMED
    if schema.time != "passes":
        return MATRICES
    return CHANGES if schema.base is BasePolicy.REQUIRED else AVERAGES


def list_methods() -> list[dict[str, Any]]:
    """Return every merge method with its parameters and requirements, by group."""
    from moemerge import merging

    order = (AVERAGES, CHANGES, MATRICES, INFORMED)
    schemas = sorted(method_schemas().items(), key=lambda item: order.index(_group(item[1])))
    return [
        {
            "method": name,
            "group": _group(schema),
            "what_it_does": schema.summary,
            "base_model": schema.base.value,
            "statistics": schema.statistics,
            "memory": "runs" if merging.METHODS.get(name).elementwise else "units",
            "time": schema.time,
            "per_model": _parameters(schema, per_model=True),
            "options": _parameters(schema, per_model=False),
        }
        for name, schema in schemas
    ]


def _parameters(schema: MethodSchema, *, per_model: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": p.name,
            "default": "required" if p.default is REQUIRED else p.default,
            "help": p.help,
        }
        for p in schema.parameters
        if p.per_model == per_model
    ]


def list_architectures() -> list[dict[str, Any]]:
    """Return every MoE family, and whether its routers can be calibrated."""
    return [
        {
            "family": family.model_type,
            "also": [name for name in family.model_types if name != family.model_type],
            "calibration": "yes" if family.served else "no",
            "why": family.reason,
        }
        for family in families()
    ]


_ADVICE = "a plugin is a Python file that registers something when it is imported: see docs/methods"


def load_plugin(path: str | Path) -> None:
    """Import the file `path` under its own name, once, and register its content.

    Its functions can also verify answers: those of `judge.py` as `verify="judge:FUNCTION"`.
    """
    file = Path(path)
    if not os.path.isfile(file) or file.suffix != ".py":
        what = "is no Python file (.py)" if os.path.exists(file) else "does not exist"
        raise UsageError(f"the plugin {path} {what}", hint=_ADVICE)
    name = file.stem
    origin = _origin(name)
    if origin is not None and not (os.path.exists(origin) and file.samefile(origin)):
        raise UsageError(
            f"the plugin {path} has the name of another module, {name!r}", hint="rename the file"
        )
    add_plugin(name, str(path))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # whatever the user's file does when it is imported
        del sys.modules[name]
        raise UsageError(
            f"the plugin {path} cannot be imported: {_line(error, file)}"
            f"{type(error).__name__}: {error}",
            hint=_ADVICE,
        ) from error


def _origin(name: str) -> str | None:
    """Return the file of the module with this name, whether it is imported yet or not."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) or "built-in"
    spec = importlib.util.find_spec(name)
    return None if spec is None else spec.origin or "built-in"


def _line(error: BaseException, file: Path) -> str:
    """Return the line of the file that raised the error, if it is in this file."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    return f"line {lines[-1]}: " if lines else ""


def sample(
    models: Mapping[str, ModelLike],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 48,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, list[str]]:
    """Return each model's greedy completion of each prompt, without special tokens.

    One model at a time is loaded whole. If a model cannot run, its entry states why.
    """
    result = {}
    for name, model in models.items():
        try:
            result[name] = _completions(
                model, prompts, max_new_tokens, device, progress or Silent()
            )
        except MoeMergeError as error:
            result[name] = [f"(could not run: {error.message})"]
    return result


def _completions(
    model: ModelLike, prompts: Sequence[str], most: int, device: str, progress: Progress
) -> list[str]:
    from moemerge.config.text_settings import GenerationSettings
    from moemerge.lab.generation.engine import CompletionRequest
    from moemerge.lab.generation.prompts import PromptRow, open_tokenizer, tokenized
    from moemerge.lab.generation.run import engine_maker, load_engine

    given = {"max_new_tokens": most, "device": device}
    settings = GenerationSettings.model_validate(given)
    tokenizer = open_tokenizer(model)
    rows = [
        PromptRow(f"prompt {i}", ({"role": "user", "content": text},), {}, "")
        for i, text in enumerate(prompts)
    ]
    _, tokens = tokenized(rows, tokenizer, "")
    requests = [CompletionRequest(i, 0, tuple(ids)) for i, ids in enumerate(tokens)]
    engine = load_engine(engine_maker(model, tokenizer, settings, progress))
    try:
        completions = list(engine.generate(requests, len(requests)))
    finally:
        engine.close()
    return [c.text for c in sorted(completions, key=lambda c: c.prompt)]
