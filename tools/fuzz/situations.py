"""Hostile situations around valid files: where outputs point, what files are, which flags are set.

A situation changes a copy of the corpus and returns the arguments of a command. Seeds choose.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.fuzz import mutations
from tools.fuzz.corpus import CALIBRATE

Situation = Callable[[Path, random.Random], list[str]]

SOURCES = CALIBRATE[3:-1]  # --source and --data
SMALL = ("--max-tokens", "60")
GREEDY = ("--samples", "1", "--temperature", "0", "--max-new-tokens", "4")
DISTILL = ("--steps", "2", "--batch", "2", "--learning-rate", "1e-3", "--no-measure")
# A short run of every command, with OUT as the word "out".
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "merge": ("merge", "linear.yml", "out"),
    "validate": ("validate", "linear.yml"),
    "run": ("run", "run.yml", "out"),
    "calibrate": ("calibrate", "merged", "out", *SOURCES, *SMALL),
    "refit": ("refit", "merged", "out", *SOURCES, *SMALL),
    "distill": ("distill", "merged", "out", *SOURCES, *DISTILL),
    "prune": ("prune", "merged", "out", "--data", "math=math.jsonl", "--keep", "0.75"),
    "repair of pruning": (
        *("refit", "pruned", "out", "--source", "all=merged", "--data", "all=math.jsonl"),
        *("--experts", "all=experts.json", *SMALL),
    ),
    "diagnose": ("diagnose", "merged", *SOURCES, "--check", "math=code.jsonl", *SMALL),
    "stats": ("stats", "merged", "out", "--data", "math.jsonl", *SMALL),
    "data": ("data", "math", "out.jsonl", "--prompts", "sums.jsonl", "--keep", "all", *GREEDY),
    "evaluate": ("evaluate", "math", "code", "--task", "sums.yml", "--out", "out", *GREEDY),
    "perplexity": (
        *("evaluate", "math", "--task", "perplexity", "--data", "general=math.jsonl"),
        *("--out", "out"),
    ),
    "tune": (
        *("tune", "merged", "out", "--data", "sums.jsonl", "--steps", "1", "--batch", "2"),
        *("--lora", "2"),
    ),
    "study": ("study", "study.yml", "out", "--dry-run"),
    "coefficients": ("coefficients", "acm", "weighed.yml", "out", *SMALL),
    "extract": ("extract", "shared", "math", "out"),
    "swap-routers": ("swap-routers", "merged", "out", "--from", "code"),
    "compose": ("compose", "moe.yml", "out"),
    "convert": ("convert", "merged", "out", "--layout", "fused"),
    "extract-lora": ("extract-lora", "math", "base", "out", "--rank", "2"),
    "inspect": ("inspect", "math+adapter"),
}
INPUTS = (
    *("math/config.json", "code/model.safetensors", "merged/model.safetensors", "math.jsonl"),
    *("linear.yml", "run.yml", "sums.jsonl", "sums.yml", "weighed.yml", "code/tokenizer.json"),
    *("shared/model.safetensors", "code", "math", "merged", "base", "code.jsonl", "experts.json"),
)
FLAGS: Mapping[str, tuple[str, ...]] = {
    "--json": ("merge", "validate", "calibrate", "refit", "distill", "prune", "stats", "data"),
    "--report": ("calibrate", "refit", "distill", "prune", "diagnose", "evaluate", "perplexity"),
    "--completions": ("data",),
}


def command(name: str, out: str = "out") -> list[str]:
    """Return the arguments of a short run that writes `out`."""
    rows = out if out.endswith(".jsonl") else f"{out}.jsonl"
    return [{"out": out, "out.jsonl": rows}.get(part, part) for part in COMMANDS[name]]


def any_command(rng: random.Random) -> str:
    return rng.choice(list(COMMANDS))


def writing_command(rng: random.Random) -> str:
    return rng.choice([name for name, parts in COMMANDS.items() if {"out", "out.jsonl"} & {*parts}])


# --- outputs --------------------------------------------------------------------------------------


def output_is_an_input(folder: Path, rng: random.Random) -> list[str]:
    """Point OUT or an output flag at an input: itself, inside it, or by a link."""
    flag = rng.choice(["OUT", *FLAGS])
    name = writing_command(rng) if flag == "OUT" else rng.choice(FLAGS[flag])
    path = rng.choice(inputs_of(name, folder))
    way = rng.randrange(5)
    if way == 0 and (folder / path).is_dir():
        path = f"{path}/{rng.choice(('out', 'deep/out', 'config.json', '.hidden'))}"
    elif way == 1:
        (folder / "link.jsonl").symlink_to(path)
        path = "link.jsonl"
    elif way == 2 and (folder / path).is_file():
        os.link(folder / path, folder / "hard.jsonl")
        path = "hard.jsonl"
    elif way == 3:
        path = rng.choice((f"./{path}", f"math/../{path}", str(folder / path)))
    arguments = command(name, path) if flag == "OUT" else [*command(name), flag, path]
    return [*arguments, *(["--overwrite"] if rng.random() < 0.7 else [])]


def inputs_of(name: str, folder: Path) -> list[str]:
    """Return the files and folders that a command reads, and files in these folders."""
    # In NAME=FILE the name is a label, even if a folder is called so.
    words = {word for part in COMMANDS[name] for word in part.rpartition("=")[2].split("+")}
    configs = [word for word in words if word.endswith(".yml")]
    for config in configs:
        words |= set(re.findall(r"[\w.]+", (folder / config).read_text()))
    found = sorted(word for word in words if (folder / word).exists())
    return found + [str(p.relative_to(folder)) for w in found for p in (folder / w).glob("*.*")]


NAMES: tuple[bytes, ...] = (
    *(b"out\xff", b"\xed\xa0\x80", b"o" * 255, b"o" * 256, b"o" * 240, b"o" * 220, b"o" * 200),
    *("é".encode() * 127, b"out\n", b"out ", b" ", b".", b"..", b"", b"-out", b"--out", b"out/"),
    *(b"out/.", b"out/..", b"rows.jsonl/out", b"none/out", b"none/none/none/out", b"~", b"out.yml"),
    *(
        b"/dev/null",
        b"/dev/full",
        b"/proc/self/out",
        b"/",
        b"out\x1b[31m",
        b"[red]out[/]",
        b"out+a",
    ),
    *(b"out:x", b"out=x", b"a,b", b"loop", b"loop/out", b"dangling", b"dangling/out", b"empty"),
    *(b"link", b"fifo", b"file", b"d/" * 1500 + b"out", b"con", b"out*", b"out.jsonl.gz", b"-"),
)


def output_names(folder: Path, rng: random.Random) -> list[str]:
    """Write to names that are long, odd, impossible, or taken by something else."""
    name = _odd_name(folder, rng)
    if rng.random() < 0.75:
        arguments = command(writing_command(rng), out=name)
    else:
        flag = rng.choice(list(FLAGS))
        arguments = [*command(rng.choice(FLAGS[flag])), flag, name]
    return [*arguments, *(["--overwrite"] if rng.random() < 0.5 else [])]


def _odd_name(folder: Path, rng: random.Random) -> str:
    """Return one of the names, after making what some of them refer to."""
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to("empty")
    os.mkfifo(folder / "fifo")
    (folder / "file").write_text("mine\n")
    return os.fsdecode(rng.choice(NAMES))


def input_names(folder: Path, rng: random.Random) -> list[str]:
    """Replace the path of an input, in the arguments or in the config, by an odd name."""
    name = any_command(rng)
    arguments = command(name)
    odd = _odd_name(folder, rng)
    paths = inputs_of(name, folder)
    configs = [folder / part for part in arguments if part.endswith(".yml")]
    if configs and rng.random() < 0.6:
        text = configs[0].read_text()
        old = rng.choice([word for word in re.findall(r"[\w.]+", text) if word in paths])
        new = json.dumps(rng.choice((odd, f"{odd}\0", f"math+{odd}", f"{odd}/x", f"~{odd}")))
        configs[0].write_text(re.sub(rf"(?<=[:,[] ){re.escape(old)}\b", lambda _: new, text))
        return arguments
    words = [n for n, part in enumerate(arguments) if set(re.split("[=+]", part)) & set(paths)]
    at = rng.choice(words)
    head, separator, _ = arguments[at].partition("=")
    arguments[at] = f"{head}={odd}" if separator else rng.choice((odd, f"math+{odd}", f"{odd}/x"))
    return arguments


LEFT = (
    *("out.jsonl", ".out.jsonl.completions", ".out.jsonl.judgements", "out/losses"),
    *("out", "out/results.json", "out/answers", "out/answers/sums/math.jsonl", "out/completions"),
    *("out/completions/sums/math.jsonl", "out/judgements", ".out.journal", ".out.journal/key.json"),
    *(
        ".out.journal/layers.jsonl",
        ".out.journal/0000.safetensors",
        ".out.training",
        ".out.completions",
    ),
    *(".out.judgements", ".out.partial", "out/model.safetensors", "out/config.json", "out/work"),
    *(".out.training/key.json", ".out.training/state.safetensors", "out/README.md"),
)


def links_in_the_way(folder: Path, rng: random.Random) -> list[str]:
    """Put links to inputs at the names that a job writes."""
    name = rng.choice(("evaluate", "perplexity", writing_command(rng)))
    for _ in range(rng.choice((1, 1, 3))):
        place = folder / rng.choice(LEFT)
        blocked = any(parent.is_symlink() or parent.is_file() for parent in place.parents)
        if os.path.lexists(place) or blocked:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        target = folder / rng.choice(inputs_of(name, folder))
        if rng.random() < 0.8 or target.is_dir():
            place.symlink_to(target)
        else:
            os.link(target, place)
    return [*command(name), *(["--overwrite"] if rng.random() < 0.5 else [])]


# --- files ----------------------------------------------------------------------------------------


def other_kinds_of_files(folder: Path, rng: random.Random) -> list[str]:
    """Replace a file by a folder, a pipe, a device, a socket, a link to nowhere, or nothing."""
    name = any_command(rng)
    path = rng.choice([p for p in (folder / one for one in inputs_of(name, folder)) if p.is_file()])
    path.unlink()
    what = rng.randrange(8)
    if what == 0:
        path.mkdir()
    elif what == 1:
        os.mkfifo(path)
    elif what == 2:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/dev/full", "/proc/self/mem")))
    elif what == 3:
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            try:
                os.chdir(path.parent)
                server.bind(path.name)
            finally:
                os.chdir(here)
    elif what == 4:
        path.symlink_to(path.name)
    elif what == 5:
        path.write_bytes(b"")
    elif what == 6:
        # Another config would be a valid request for another model.
        path.symlink_to(folder / rng.choice([n for n in INPUTS if not n.endswith(".yml")]))
    return command(name)


NUMBERS = (float("nan"), float("inf"), -float("inf"), 3e38, 1e30, 1e20, 1e-45, 0.0, -0.0)


def extreme_weights(folder: Path, rng: random.Random) -> list[str]:
    """Put NaN, infinities, zeros or extreme numbers into tensors, so that features overflow."""
    name = any_command(rng)
    weights = [p for p in inputs_of(name, folder) if p.endswith(".safetensors")]
    if not weights:
        return extreme_weights(folder, rng)
    file = folder / rng.choice(weights)
    header, body = mutations.split_safetensors(file.read_bytes())
    values = bytearray(body)
    names = [name for name in header if name != "__metadata__"]
    wanted = rng.choice(("gate.weight", "norm", "experts", "embed", "lm_head", "q_proj", ""))
    chosen = [name for name in names if wanted in name] or names
    number = struct.pack("<f", rng.choice(NUMBERS))
    for tensor in chosen if rng.random() < 0.3 else [rng.choice(chosen)]:
        begin, end = header[tensor]["data_offsets"]
        if rng.random() < 0.5:
            values[begin:end] = number * ((end - begin) // 4)
        else:
            values[begin : begin + 4] = number
    file.write_bytes(mutations.join_safetensors(mutations.as_json(header), bytes(values)))
    return command(name)


# --- flags ----------------------------------------------------------------------------------------

VALUES: Mapping[str, tuple[str, ...]] = {
    "X": ("0", "1", "-1", "0.5", "nan", "inf", "-inf", "1e300", "1e-300", "x", "", "auto", "1e400"),
    "N": ("0", "1", "2", "-1", "3", "x", "1.5", "", "1e3", "nan"),
    "NAME=FILE": ("math=math.jsonl", "x=math.jsonl", "math=", "=math.jsonl", "math", "math=none",
                  "math=math", "math=experts.json", "all=experts.json", "math=rows.jsonl", "==",
                  "math=math.jsonl,code.jsonl", "code=linear.yml", "math=/dev/zero",
                  "math=rows.jsonl.gz"),
    "NAME=MODEL": ("math=math", "code=pickled", "math=none", "x=code", "=", "math=code",
                   "math=pruned"),
    "NAME=X": ("math=1", "math=0", "math=-1", "math=nan", "math=inf", "x=1", "math=1e300", "math"),
    "MAP": ("prompt=text", "text=text", "text=none", "prompt=prompt,response=answer", "=", "x=y",
            "text=a,text=b", "prompt", ",", "text=", "response=answer", "text=messages"),
    "GROUP": ("text", "none", "", "answer", "prompt", "messages"),
    "LAYERS": ("all", "0", "last:1", "last:0", "last:9", "0-1", "1-0", "5", "-1", "0,0", "", "x",
               "0-", "0-99999999999"),
    "WORD": ("auto", "none", "x", "", "float32", "float16", "bfloat16", "float64", "cpu", "disk",
             "same", "routers", "experts", "attention", "exact", "refit", "all", "paper",
             "adafactor", "jacobi"),
    "SIZE": ("1", "0", "1KB", "-1", "x", "1e9", "5GB", "", "1.5MB", "9" * 400),
    "MODEL": ("merged", "none", "math", "pruned", "math+adapter", "", "a/b/c", "math+none", "+",
              "code@x"),
    "FILE": ("out.x", "none/x", "math.jsonl", "", "out", "-", "math"),
    "PARTS": ("experts", "attention", "x", "", "experts,attention", "all"),
    "BASE": ("base", "none", "merged", "math", ""),
    "KEY=VALUE": ("title=x", "x=1", "merges.average.merge_method=ties", "=", "a", "data=1"),
}  # fmt: skip
# Options that reach the network or other machines, run code, or only change what is printed.
UNUSED = ("--push-to-hub", "--device", "--url", "--engine", "--lm-eval", "--plugin", "--workers")
# Counts that a job must work off: a large one takes long, and that is no fault.
LONG = ("--steps", "--epochs", "--samples", "--max-new-tokens", "--max-steps", "--jobs")


def options(name: str) -> dict[str, tuple[str, bool]]:
    """Return the options of a command: the kind of value of each, and whether it is a switch."""
    import typer

    from moemerge.cli.app import app

    group: Any = typer.main.get_command(app)
    return {
        parameter.opts[0]: (str(parameter.metavar), bool(parameter.is_flag))
        for parameter in group.commands[name].params
        if parameter.opts and parameter.opts[0].startswith("--")
    }


def odd_flags(folder: Path, rng: random.Random) -> list[str]:
    """Add options of the command with odd values."""
    arguments = command(any_command(rng))
    known = options(arguments[0])
    usable = sorted(set(known) - set(UNUSED))
    for flag in rng.sample(usable, min(len(usable), rng.choice((1, 1, 2, 3)))):
        kind, switch = known[flag]
        if switch:
            arguments.append(flag)
            continue
        values = VALUES.get(kind.removesuffix("|auto"), VALUES["WORD"])
        if kind == "N" and flag not in LONG:
            values = (*values, "1000000000", str(2**31), str(2**63), str(2**64), "9" * 400)
        value = rng.choice(values)
        if flag in LONG and flag in arguments:
            at = arguments.index(flag)
            del arguments[at : at + 2]
        arguments += [flag, value]
    return arguments


SITUATIONS: Mapping[str, Situation] = {
    "outputs that are inputs": output_is_an_input,
    "names of outputs": output_names,
    "names of inputs": input_names,
    "links in the way": links_in_the_way,
    "other kinds of files": other_kinds_of_files,
    "extreme weights": extreme_weights,
    "odd flags": odd_flags,
}
