"""Build a folder of tiny valid files of every kind that moemerge reads."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import quantised_zoo
import zoo
from repairs.calibration.cases import write_text
from tools.fuzz.harness import command, in_child

HIDDEN, EXPERTS, RANK = 16, 4, 2
ROWS = (
    {"text": "one plus two is three"},
    {
        "messages": [
            {"role": "user", "content": "what is one"},
            {"role": "assistant", "content": "a number"},
        ]
    },
    {"prompt": "compute two plus two", "response": "four"},
    {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "one"}]},
    {"instruction": "add", "input": "one two", "output": "three"},
    {
        "prompt": [{"role": "user", "content": "how"}],
        "completion": [{"role": "assistant", "content": "x"}],
    },
)
MERGE = """merge_method: {method}
base_model: base
models:
  - model: {math}
    name: math
    parameters: {{weight: 0.5{more}}}
  - model: code
    name: code
    parameters:
      weight: [0.4, 0.6]
dtype: float32
parameters:
  normalize: true
"""
PLAIN = (
    "merge_method: linear\nmodels:\n"
    "  - {{model: {math}, name: math, parameters: {{weight: 0.5}}}}\n"
    "  - {{model: code, name: code, parameters: {{weight: 0.5}}}}\n"
)
STATISTICS = (
    "merge_method: {method}\nmodels:\n  - {{model: math, name: math}}\n  - {{model: code, name: \
code}}\nstatistics: {{math: math.{kind}, code: code.{kind}}}\n"
)
CALIBRATION = """calibration:
  data: {math: math.jsonl, code: [code.jsonl]}
  max_tokens: 200
  alpha: 0.9
"""
TOKENS = "tokenizer: {source: union, tokens: {<s>: {source: math}}}\nchat_template: auto\n"
QUESTIONS = ("what is one plus two", "compute two plus two", "why", "how is x equal to y", "what")
TASK = (
    "title: Sums\ndomain: math\ndata: sums.jsonl\nverify: exact\nmax_new_tokens: 6\nproblems: 5\n"
)
KEPT = (
    "merge_method: emr\nbase_model: base\nmodels:\n  - {model: math, name: math}\n"
    "  - {model: code, name: code}\ntasks: {keep: emr}\n"
)
WEIGHED = (
    "merge_method: task_arithmetic\nbase_model: base\nmodels:\n  - {model: math, name: math}\n"
    "  - {model: code, name: code}\nparameters: {weight: 1.0}\n"
    "data: {math: math.jsonl, code: code.jsonl}\n"
)
STUDY = (
    "title: Two\nbase: base\nsources: {math: math, code: code}\n"
    "data: {math: math.jsonl, code: code.jsonl}\n"
    "merges:\n  average: {merge_method: linear, parameters: {weight: 0.5}}\n"
    "repairs:\n  HARC: {calibrate: {max_tokens: 60}}\n"
    "evaluate: {tasks: [sums.yml], samples: 1, temperature: 0, limit: 3}\n"
    "diagnose: {limit: 2, holdout: 0.0}\n"
)
COMPOSED = (
    "base_model: dense\ngate_mode: fit\ndtype: float32\nexperts:\n"
    "  - {source_model: dense, data: math.jsonl}\n"
    "  - {source_model: dense-code, positive_prompts: [one plus two, why]}\n"
)
COEFFICIENTS = "coefficients:\n  math: {model: 0.5, model.layers.0: 1.0}\n  code: {model: 0.25}\n"
CONFIGS = {
    "linear.yml": PLAIN.format(math="math"),
    "ties.yml": MERGE.format(method="ties", math="math", more=", density: 0.5"),
    "adapted.yml": PLAIN.format(math="math+adapter"),
    "pickled.yml": PLAIN.format(math="pickled"),
    "tokens.yml": PLAIN.format(math="math") + TOKENS,
    "run.yml": PLAIN.format(math="math") + CALIBRATION,
    "gram.yml": STATISTICS.format(method="regmean", kind="gram"),
    "fisher.yml": STATISTICS.format(method="fisher", kind="fisher"),
    "fp8.yml": PLAIN.format(math="base-fp8").replace("model: code", "model: code-fp8"),
    "kept.yml": KEPT,
    "weighed.yml": WEIGHED,
}
OTHERS = {"sums.yml": TASK, "study.yml": STUDY, "moe.yml": COMPOSED}


def build(folder: Path) -> Path:
    """Write everything to `folder`; files refer to each other by relative paths."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = in_child(lambda: write_files(folder), folder, folder.with_suffix(".log"), limit=120)
    assert ended.code == 0, ended.output
    _run(folder, "merge", "linear.yml", "merged", "-q")
    _run(folder, "merge", "kept.yml", "shared", "-q")
    _run(folder, "prune", "merged", "pruned", "--data", "m=math.jsonl", "--keep", "0.75", "-q")
    report = json.loads((folder / "pruned" / "moemerge_report.json").read_bytes())
    (folder / "experts.json").write_text(json.dumps(report["prune"]["experts"]))
    for name in ("math", "code"):
        for kind in ("gram", "fisher"):
            out = (f"{name}.{kind}", "--data", f"{name}.jsonl")
            _run(folder, "stats", name, *out, "--kind", kind, "-q")
    _journal(folder)
    return folder


def write_files(folder: Path) -> None:
    """Write the files that no command makes."""
    base = zoo.build(
        "olmoe",
        folder / "base",
        num_hidden_layers=2,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        vocab_size=96,
        max_position_embeddings=64,
    )
    zoo.tiny_tokenizer(base, chat_template=True)
    (base / "LICENSE").write_text("Free.\n")
    math = zoo.perturb(base, folder / "math", seed=1, scale=0.3)
    _shard(math)
    code = zoo.perturb(base, folder / "code", seed=2, scale=0.3)
    pickled = folder / "pickled"
    shutil.copytree(code, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    for name in ("base", "code"):
        section, blocks = quantised_zoo.fp8_config(8, 8), quantised_zoo.block_fp8(8, 8)
        quantised_zoo.convert(folder / name, folder / f"{name}-fp8", section, blocks)
    sizes = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": 96}
    dense = zoo.build("llama", folder / "dense", intermediate_size=8, **sizes)
    zoo.tiny_tokenizer(dense)
    zoo.perturb(dense, folder / "dense-code", seed=3, scale=0.3)
    _adapter(folder / "adapter")
    for number, name in enumerate(("math", "code")):
        write_text(folder / f"{name}.jsonl", seed=number, rows=8)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress((folder / "rows.jsonl").read_bytes()))
    rows = [{"prompt": text, "response": "one", "answer": "one"} for text in QUESTIONS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (CONFIGS | OTHERS).items():
        (folder / name).write_text(text)


CALIBRATE = (
    "calibrate",
    "merged",
    "out",
    "--source",
    "math=math",
    "--source",
    "code=code",
    "--data",
    "math=math.jsonl",
    "--data",
    "code=code.jsonl",
    "-q",
)


def _run(folder: Path, *arguments: str, first: Callable[[], None] = lambda: None) -> None:
    ended = command(arguments, folder, folder.with_suffix(".log"), first=first)
    assert ended.code == 0, ended.output


def _journal(folder: Path) -> None:
    """Leave the journal of a calibration that is killed after its last router."""

    def die_at_the_end() -> None:
        from moemerge.checkpoint import CheckpointPatch

        CheckpointPatch.commit = lambda self: os._exit(0)  # type: ignore[method-assign]

    _run(folder, *CALIBRATE, first=die_at_the_end)
    for left in folder.glob(".out.partial-*"):
        shutil.rmtree(left)


def _shard(folder: Path) -> None:
    """Split the weights into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def _adapter(folder: Path) -> None:
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {"layers.0.*q_proj": RANK},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "modules_to_save": None,
        "base_model_name_or_path": "base",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=rng)
        tensors[f"{module}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
