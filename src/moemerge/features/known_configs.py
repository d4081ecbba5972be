"""config.json as transformers reads it: whether it takes it at all, and what it fills in.

A merge runs no model and does without transformers, whose import takes longer than many a merge. So
a process of its own imports it while the merge runs, and is asked before OUT appears. It needs
neither torch nor the classes of models. What only building one would find besides (an unknown
activation, sizes other than the tensors') is found by comparing with the inputs' configs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from moemerge.errors import ArchitectureError, in_one_line

if TYPE_CHECKING:
    from moemerge.architectures.opened import OpenModel
    from moemerge.architectures.reading import Header

logger = logging.getLogger(__name__)

SECONDS: Final = 120.0  # for an import on a busy machine
HINT: Final = "compare it with the config.json of the model that this one was made of"
DTYPES: Final = {"auto", "float16", "half", "bfloat16", "float32", "float", "float64", "double"}
# What a model's code or its shapes depend on, and what models with the same tensors share.
_STRUCTURE = re.compile(
    r"(hidden_act|activation|activation_function|_heads|_groups|_rank|head_dim|intermediate_size"
    r"|hidden_size|_bias)$"
)


@dataclass(frozen=True)
class ReadConfig:
    """What transformers makes of a config: all values, or why it refuses it, or nothing of either
    where it does not know the model."""

    filled: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None


def read_config(config: Mapping[str, Any]) -> ReadConfig:
    """Read by the class of its `model_type`, as loading a model does."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return ReadConfig()
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        cls = CONFIG_MAPPING[kind]
        # Reading a file undoes how transformers writes infinity; reading a dictionary does not.
        plain = getattr(cls, "_decode_special_floats", dict)(dict(config))
        made = cls.from_dict(plain)
        filled = made.to_dict()
        filled = json.loads(json.dumps(filled, default=str))  # keys are texts
    except Exception as error:  # classes promise little about what they raise
        words = " ".join(str(error).split())[:300]
        return ReadConfig(refused=f"{type(error).__name__}: {words}")
    for part in _parts(made):
        # A model of images may have a type of its own, which its class then names as the default.
        known = (None, "default", *ROPE_INIT_FUNCTIONS, getattr(part, "default_rope_type", None))
        for rope in _values(vars(part), "rope_type"):
            if rope not in known:
                return ReadConfig(refused=f"rope_type {rope!r} is none that it has")
    own = {name: value for name, value in filled.items() if name != "quantization_config"}
    for dtype in _values(own, "dtype"):
        if dtype is not None and str(dtype).removeprefix("torch.") not in DTYPES:
            return ReadConfig(refused=f"dtype {dtype!r} is none that a model can have")
    return ReadConfig(filled=filled)


class ConfigCheck:
    """Whether the config.json that is about to be written can be loaded; see `result`."""

    def __init__(
        self,
        written: Mapping[str, Any],
        tensors: Mapping[str, Header],
        inputs: Mapping[str, Mapping[str, Any]],
        where: str,
        hint: str = HINT,
    ) -> None:
        """`written` goes beside `tensors`; `inputs` are the models' own configs by label, `where`
        is the file that `written` was made of, and `hint` what to do if it is refused."""
        self._hint = hint
        self._written, self._tensors, self._where = dict(written), tensors, where
        self._inputs = inputs
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False

    def __enter__(self) -> Self:
        if "transformers" in sys.modules:  # then it costs nothing here
            return self
        command = [sys.executable, "-P", "-m", __name__]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null)
        except OSError as error:
            self._give_up(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _give_up(self, error: Exception) -> None:
        self._asked = True
        logger.warning("config.json was not tried with transformers (%s)", in_one_line(error))

    def result(self) -> None:
        """Raises where transformers refuses the config, reads other numbers from it than the
        tensors have, or another structure than from the inputs'. Models that it does not know pass,
        as does everything where it cannot be asked."""
        if self._asked:
            return
        self._asked = True
        configs = [self._written, *map(dict, self._inputs.values())]
        if self._process is None:
            own, *others = map(read_config, configs)
        else:
            try:
                own, *others = _ask(self._process, configs)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._give_up(error)
                return
        if own.refused is not None:
            raise self._error(f"transformers cannot read it: {own.refused}")
        if own.filled:
            self._compare_with_tensors(own.filled)
            for label, other in zip(self._inputs, others, strict=True):
                self._compare(own.filled, label, other.filled)

    def _compare_with_tensors(self, filled: Mapping[str, Any]) -> None:
        from moemerge.architectures.architecture import Architecture

        try:
            architecture = Architecture.of(filled, self._tensors)
        except ArchitectureError as error:
            raise self._error(f"as transformers reads it: {error.message}") from error
        name = architecture.embedding_names().input
        words = architecture.text_config.get("vocab_size")
        if name is not None and words is not None and words != self._tensors[name].shape[0]:
            rows = self._tensors[name].shape[0]
            raise self._error(f"vocab_size is {words}, as transformers reads it; {name} has {rows}")

    def _compare(self, own: Mapping[str, Any], label: str, other: Mapping[str, Any]) -> None:
        if own.get("model_type") != other.get("model_type"):
            return
        theirs = dict(_structure(other))
        for name, value in _structure(own):
            if name in theirs and value != theirs[name]:
                raise self._error(
                    f"{name} is {value!r:.80}, as transformers reads it, but {theirs[name]!r:.80} "
                    f"in {label}"
                )

    def _error(self, what: str) -> ArchitectureError:
        return ArchitectureError(f"{self._where}: {what}", hint=self._hint)


def require_loadable(model: OpenModel) -> None:
    """For what copies a model with its config: refuse a config that cannot be loaded, now."""
    checkpoint = model.checkpoint
    where = str(checkpoint.path / "config.json")
    with ConfigCheck(checkpoint.config, checkpoint.tensors, {}, where) as check:
        check.result()


def _parts(config: Any) -> Iterator[Any]:
    """A config of transformers and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(getattr(type(value), "model_type", None), str):
            yield from _parts(value)


def _values(config: Mapping[str, Any], key: str) -> Iterator[Any]:
    """What stands under this name, at whatever depth."""
    for name, value in config.items():
        if name == key:
            yield value
        elif isinstance(value, Mapping):
            yield from _values(value, key)


def _structure(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _structure(value, f"{before}{name}.")
        elif _STRUCTURE.search(name) and not isinstance(value, list):  # an entry for each layer
            yield before + name, value


def _ask(
    process: subprocess.Popen[bytes], configs: Sequence[Mapping[str, Any]]
) -> list[ReadConfig]:
    said, _ = process.communicate(json.dumps(configs).encode(), timeout=SECONDS)
    return [ReadConfig(**answer) for answer in json.loads(said)]


def _serve() -> None:
    """The other process: configs on stdin, what was made of them on stdout, where libraries print
    nothing. The import comes first: it takes the time, and would take twice as much with torch,
    which configs do without."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.modules["torch"] = None  # type: ignore[assignment]
    read_config({})
    readings = [asdict(read_config(config)) for config in json.load(sys.stdin)]
    channel.write(json.dumps(readings).encode())
    channel.close()


if __name__ == "__main__":
    _serve()
