"""Fuzz cases: a file of the corpus, a mutation, and a command that reads the file."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.fuzz import mutations, situations
from tools.fuzz.corpus import CALIBRATE
from tools.fuzz.harness import MEMORY_LIMIT, OURS, TIME_LIMIT, Ended, command, in_child, tree
from tools.fuzz.mutations import Mutation

if TYPE_CHECKING:
    from torch import Tensor

SOURCES = CALIBRATE[3:-1]  # --source and --data
LINEAR = ("merge", "linear.yml", "out", "-q")
DIAGNOSE = ("diagnose", "merged", *SOURCES)
REFIT = ("refit", "merged", "out", *SOURCES, "-q")
SWAP = ("swap-routers", "merged", "out", "--from", "code")
ROWS = tuple("math=rows.jsonl" if part == "math=math.jsonl" else part for part in CALIBRATE)
FEW = (*ROWS, "--max-tokens", "100")
PACKED = tuple("math=rows.jsonl.gz" if part == "math=math.jsonl" else part for part in CALIBRATE)
STATS = ("stats", "merged", "out", "--data", "rows.jsonl", "-q")
FP8 = (("merge", "fp8.yml", "out", "-q"), ("merge", "fp8.yml", "out", "--requantize", "same", "-q"))
RESUME = (*CALIBRATE, "--resume")
MESSAGE = re.compile(r"^(error: |╭─ Error ─)", re.MULTILINE)  # ours, or typer's of a flag
# What an unfinished run may leave next to OUT.
UNFINISHED = re.compile(r"\..*\.(journal|training|completions|judgements)(/|$)")


@dataclass(frozen=True)
class Kind:
    """Files of one format, their mutations, and the commands that read them."""

    files: tuple[str, ...]
    mutations: tuple[Mutation, ...]
    commands: tuple[tuple[str, ...], ...]
    journal: bool = False  # whether the folder has the journal of a killed run
    situation: situations.Situation | None = None  # changes more than one file


def _short(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((*situations.COMMANDS[name], "-q") for name in names)


KINDS: Mapping[str, Kind] = {
    "config.json of a source": Kind(
        ("math/config.json",), mutations.JSON, (LINEAR, ("inspect", "math"), CALIBRATE, DIAGNOSE)
    ),
    "config.json of a merge": Kind(
        ("merged/config.json",),
        mutations.JSON,
        (CALIBRATE, ("inspect", "merged"), DIAGNOSE, REFIT, STATS),
    ),
    "tokenizer": Kind(
        ("merged/tokenizer.json", "merged/tokenizer_config.json"), mutations.JSON, (ROWS, STATS)
    ),
    "tokenizer of a source": Kind(
        ("math/tokenizer.json", "math/tokenizer_config.json"),
        mutations.JSON,
        (("merge", "tokens.yml", "out"),),
    ),
    "chat template": Kind(("merged/chat_template.jinja",), mutations.BYTES, (ROWS, STATS)),
    "adapter config": Kind(
        ("adapter/adapter_config.json",),
        mutations.JSON,
        (("merge", "adapted.yml", "out"), ("inspect", "math+adapter")),
    ),
    "adapter weights": Kind(
        ("adapter/adapter_model.safetensors",),
        mutations.SAFETENSORS,
        (("merge", "adapted.yml", "out"),),
    ),
    "safetensors of a source": Kind(
        ("code/model.safetensors", "math/model-00001-of-00002.safetensors"),
        mutations.SAFETENSORS,
        (
            LINEAR,
            ("merge", "ties.yml", "out"),
            ("inspect", "code"),
            ("inspect", "math"),
            CALIBRATE,
            DIAGNOSE,
            ("swap-routers", "merged", "out", "--from", "code"),
        ),
    ),
    "safetensors of a merge": Kind(
        ("merged/model.safetensors",), mutations.SAFETENSORS, (CALIBRATE, DIAGNOSE, STATS, REFIT)
    ),
    "index": Kind(
        ("math/model.safetensors.index.json",), mutations.JSON, (LINEAR, ("inspect", "math"))
    ),
    "YAML": Kind(
        ("ties.yml", "tokens.yml", "run.yml", "gram.yml"),
        mutations.YAML,
        (("merge", "FILE", "out"), ("validate", "FILE"), ("run", "FILE", "out")),
    ),
    "rows": Kind(("rows.jsonl",), mutations.ROWS, (ROWS, FEW, STATS)),
    "packed rows": Kind(("rows.jsonl.gz",), mutations.ZIPPED, (PACKED,)),
    "statistics": Kind(
        ("math.gram",),
        mutations.SAFETENSORS,
        (("merge", "gram.yml", "out"), ("validate", "gram.yml")),
    ),
    "Fisher statistics": Kind(
        ("math.fisher",), mutations.SAFETENSORS, (("merge", "fisher.yml", "out"),)
    ),
    "journal": Kind((".out.journal/key.json",), mutations.JSON, (RESUME,), journal=True),
    "journal's lines": Kind(
        (".out.journal/layers.jsonl",), mutations.BYTES, (RESUME,), journal=True
    ),
    "journal's tensors": Kind(
        (".out.journal/0000.safetensors",), mutations.BYTES, (RESUME,), journal=True
    ),
    "pickle": Kind(
        ("pickled/pytorch_model.bin",),
        mutations.PICKLED,
        (("merge", "pickled.yml", "out"), ("inspect", "pickled")),
    ),
    "own report": Kind(("merged/moemerge_report.json",), mutations.JSON, (CALIBRATE, DIAGNOSE)),
    "own config": Kind(("merged/moemerge_config.yml",), mutations.YAML, (CALIBRATE, DIAGNOSE)),
    "quantised weights": Kind(("code-fp8/model.safetensors",), mutations.SAFETENSORS, FP8),
    "quantised config": Kind(("code-fp8/config.json",), mutations.JSON, FP8),
    "task": Kind(("sums.yml",), mutations.YAML, _short("evaluate")),
    "config of compose": Kind(("moe.yml",), mutations.YAML, _short("compose")),
    "study": Kind(("study.yml",), mutations.YAML, (("study", "study.yml", "out", "--dry-run"),)),
    "prompts": Kind(("sums.jsonl",), mutations.ROWS, _short("data", "evaluate", "tune")),
    "text of distill, prune and perplexity": Kind(
        ("math.jsonl",), mutations.ROWS, _short("distill", "prune", "perplexity", "coefficients")
    ),
    "kept experts": Kind(
        ("experts.json", "pruned/moemerge_report.json", "pruned/config.json"),
        mutations.JSON,
        _short("repair of pruning"),
    ),
    "kept models": Kind(
        ("shared/moemerge_tasks/tasks.json", "shared/moemerge_report.json"),
        mutations.JSON,
        _short("extract"),
    ),
    "masks": Kind(
        ("shared/moemerge_tasks/0/model.safetensors", "shared/model.safetensors"),
        mutations.SAFETENSORS,
        _short("extract"),
    ),
    **{name: Kind((), (), (), situation=one) for name, one in situations.SITUATIONS.items()},
}


@dataclass(frozen=True)
class Case:
    """One input, made by its seed; -1, -2, ...: the valid file, first, second ... command."""

    kind: str
    seed: int

    def prepare(self, corpus: Path, folder: Path) -> Sequence[str]:
        """Copy the corpus to `folder` with one file changed; return the command's arguments."""
        kind = KINDS[self.kind]
        rng = random.Random(f"{self.kind}/{self.seed}")
        skipped = shutil.ignore_patterns("tmp", *([] if kind.journal else [".out.journal"]))
        shutil.copytree(corpus, folder, ignore=skipped)
        if kind.situation is not None:
            return [*kind.situation(folder, rng), "-q"]
        file = rng.choice(kind.files)
        path = folder / file
        command = rng.choice(kind.commands)
        if self.seed >= 0:
            path.write_bytes(rng.choice(kind.mutations)(path.read_bytes(), rng))
        else:  # a control: the valid file, with each command in turn
            command = kind.commands[-self.seed - 1]
        return [file if part == "FILE" else part for part in command]


@dataclass(frozen=True)
class Result:
    case: Case
    arguments: Sequence[str]
    outcome: str  # accepted, refused, or a description of the failure
    ended: Ended

    @property
    def bad(self) -> bool:
        return self.outcome not in ("accepted", "refused")


def _is_only_output(folder: Path, name: str, arguments: Sequence[str]) -> bool:
    """Return whether a file may be replaced: it is OUT, and no argument names it as an input."""
    if "--overwrite" not in arguments or arguments[2:3] != [name]:
        return False
    others = (folder / (one.partition("=")[2] or one) for one in (*arguments[:2], *arguments[3:]))
    return not any(os.path.exists(one) and os.path.samefile(one, folder / name) for one in others)


def run(case: Case, corpus: Path, folder: Path, limit: float = TIME_LIMIT) -> Result:
    """Run a case in `folder` and remove the folder."""
    try:
        arguments = case.prepare(corpus, folder)
        (folder / "tmp").mkdir(exist_ok=True)
        before, inputs = tree(folder), contents(folder)
        replaceable = [name for name in inputs if _is_only_output(folder, name, arguments)]
        ended = command(arguments, folder, folder.with_suffix(".log"), limit)
        outcome = judge(ended, before, folder, arguments)
        changed = sorted(
            name
            for name, data in inputs.items()
            if contents(folder, name).get(name) != data and name not in replaceable
        )
        if changed and outcome in ("accepted", "refused"):
            outcome = f"changed an input: {changed[0]}"
        return Result(case, arguments, outcome, ended)
    finally:
        subprocess.run(["rm", "-rf", folder], check=False)  # rmtree fails in deep folders


def contents(folder: Path, only: str = "") -> dict[str, bytes]:
    """Return the content of the input files: all that are no output or unfinished work."""
    paths = [folder / only] if only else folder.rglob("*")
    return {
        name: path.read_bytes()
        for path in paths
        if path.is_file()
        and path.stat().st_size  # /dev/zero has none
        and not (name := str(path.relative_to(folder))).startswith(("out", ".out", "tmp"))
    }


def judge(ended: Ended, before: set[str], folder: Path, arguments: Sequence[str]) -> str:
    """Return `accepted` (sound output), `refused` (moemerge error) or the failure."""
    if ended.hung:
        return "hang"
    if ended.memory > MEMORY_LIMIT:
        return f"memory: {ended.memory / 2**30:.1f} GiB"
    if "Traceback (most recent call last)" in ended.output:
        return "traceback"
    if "\x1b" in ended.output:
        return "escape sequence on the terminal"
    made = tree(folder) - before
    if ended.code in OURS:
        if not MESSAGE.search(ended.output):
            return "no message"
        # Finished parts stay in OUT, and OUT itself if only the report could not be written.
        grows = arguments[0] in ("evaluate", "study") or "only this report" in ended.output
        left = {p for p in made if not UNFINISHED.match(p) and not (grows and p.startswith("out"))}
        return f"left behind: {sorted(left)[0]!r}" if left else "refused"
    if ended.code != 0:
        logs = [log.read_text() for log in (folder / "tmp").glob("moemerge-error-*")]
        return f"exit code {ended.code}: {' | '.join(' '.join(logs).splitlines()[-3:])}"
    named = {"out", "out.jsonl", *(_top(part, folder) for part in arguments)}
    left = {path for path in made if not {".", path.split(os.sep)[0]} & named}
    if left:
        return f"left behind: {sorted(left)[0]!r}"
    checked = in_child(
        lambda: check_outputs(folder, arguments, before), folder, folder.with_suffix(".check")
    )
    return "accepted" if checked.code == 0 else f"bad output: {checked.output.strip()[-300:]}"


def _top(argument: str, folder: Path) -> str:
    """Return the first part of a path inside the folder."""
    return os.path.relpath(os.path.realpath(folder / argument), os.path.realpath(folder)).split(
        "/"
    )[0]


def check_outputs(folder: Path, arguments: Sequence[str], before: set[str]) -> None:
    """Check every model that the command made."""
    for name in sorted({"out", *arguments}):
        config = f"{name}/config.json"
        if name and os.path.isfile(folder / config) and config not in before:
            check_output(folder, folder / name, arguments)


def check_output(folder: Path, out: Path, arguments: Sequence[str]) -> None:
    """Check that the output is finite, correct and loads in transformers."""
    import torch
    from transformers import AutoModelForCausalLM, logging

    import zoo

    logging.set_verbosity_error()
    tensors = zoo.tensors(out)
    copies = arguments[0] == "swap-routers"  # everything but the routers, unread
    for name, tensor in tensors.items():
        if copies and ".gate." not in name:
            continue
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise SystemExit(f"{name} is not finite")
    for name, tensor in expected(folder, arguments).items():
        if not torch.allclose(tensors[name].double(), tensor, rtol=1e-5, atol=1e-30):
            raise SystemExit(f"{name} differs from the expected value")
    if "quantization_config" in zoo.read_config(out):
        return  # transformers runs FP8 on a GPU only
    try:
        _, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    except ImportError:
        return  # the config names an implementation that this machine does not have
    for what in ("missing_keys", "mismatched_keys"):
        if loading[what]:
            raise SystemExit(f"{what}: {sorted(loading[what])[:3]}")


def expected(folder: Path, arguments: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors that can be computed without moemerge.

    These are all tensors of a linear merge, and all but the routers of a calibration.
    """
    import torch

    import zoo

    if tuple(arguments) == LINEAR:
        math, code = zoo.tensors(folder / "math"), zoo.tensors(folder / "code")
        return {name: (math[name].double() + code[name].double()) / 2 for name in math}
    if arguments[1] == "pickled.yml":
        math = torch.load(folder / "pickled/pytorch_model.bin", weights_only=True)
        code = zoo.tensors(folder / "code")
        return {name: (math[name].double() + code[name].double()) / 2 for name in math}
    if arguments[0] == "calibrate":
        merged = zoo.tensors(folder / "merged")
        return {name: value.double() for name, value in merged.items() if ".gate." not in name}
    return {}
