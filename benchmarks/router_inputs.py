"""Router inputs to solve on: kind ones, and ones with what makes real models' hard.

Zero-mean features and soft routers are kind to any solver. Hidden states of trained models have a
mean, channels that are huge and nearly constant, documents and domains that differ from each other
and steep spectra; trained routers are sure of themselves. `KINDS` has each of these alone, together
and to excess; `trained` streams a model of the package's own testbed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moemerge.routing import DomainFeatures

ROWS = 65536  # of features made at once
DOCUMENT = 256  # tokens
OUTLIERS, OUTLIER_SCALE = 4, 4.0


@dataclass(frozen=True)
class Inputs:
    """What synthetic features look like; lengths are in units of a token's own spread."""

    spectrum: float = 0.8  # singular values fall as k to minus this
    logits: float = 3.0  # times a soft router's
    documents: float = 0.0  # spread of the documents' means
    domains: float = 0.0  # length of each domain's mean
    channels: int = 0  # channels that are huge and constant,
    height: float = 30.0  # by this much
    shares: tuple[float, ...] = (0.6, 0.4)  # of the tokens, by domain
    dead: int = 0  # experts that next to no token is sent to
    copies: int = 1  # of each token


HARD = Inputs(documents=1.0, domains=1.0, channels=1)
KINDS: dict[str, Inputs] = {
    "kind": Inputs(spectrum=0.5, logits=1.0, shares=(0.5, 0.5)),
    "sure": Inputs(),
    "documents": Inputs(documents=1.0),
    "domains": Inputs(domains=1.0),
    "channel": Inputs(channels=1),
    "means": Inputs(documents=1.0, domains=1.0),
    "hard-soft": replace(HARD, logits=1.0),
    "hard": HARD,
    "hard-sure": replace(HARD, logits=6.0),
    "hard-surest": replace(HARD, logits=10.0),
    "hard-flat": replace(HARD, spectrum=0.5, logits=6.0),
    "hard-steep": replace(HARD, spectrum=1.2),
    "hard-steepest": replace(HARD, spectrum=1.5, logits=6.0),
    "hard-uneven": replace(HARD, shares=(0.99, 0.01)),
    "hard-single": replace(HARD, shares=(1.0,)),
    "hard-five": replace(HARD, shares=(0.3, 0.25, 0.2, 0.15, 0.1)),
    "hard-dead": replace(HARD, dead=4),
    "hard-copies": replace(HARD, copies=8),
    "extreme": replace(HARD, documents=3.0, domains=5.0, channels=3, height=100.0),
}
TRAINED = "trained"
NAMES = (*KINDS, TRAINED)


def synthetic(
    inputs: Inputs,
    *,
    tokens: int,
    width: int,
    experts: int,
    device: torch.device,
    seed: int = 0,
) -> list[DomainFeatures]:
    """Domains of features that look like a normalised residual stream; bf16 on a GPU."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    basis = torch.linalg.qr(randn(width, width)).Q
    spectrum = torch.arange(1, width + 1, device=device).float() ** -inputs.spectrum
    spectrum /= spectrum.square().mean().sqrt()
    norm_scale = torch.exp(0.3 * randn(width))
    order = torch.randperm(width, generator=generator, device=device)
    norm_scale[order[:OUTLIERS]] *= OUTLIER_SCALE
    channels = order[OUTLIERS : OUTLIERS + inputs.channels]
    base = randn(experts, width) / width**0.5
    sizes = [max(1, int(share * tokens)) // inputs.copies for share in inputs.shares]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # One block of memory, so that all domains can also be seen as one.
    whole = torch.empty(sum(sizes) * inputs.copies, width, dtype=dtype, device=device)
    made = []
    for index, features in enumerate(torch.split(whole, [n * inputs.copies for n in sizes])):
        own = spectrum * torch.exp(0.5 * randn(width))
        mean = inputs.domains * randn(width)
        mean[channels] += inputs.height * torch.sign(randn(inputs.channels))
        own_part = features[: sizes[index]]
        for block in torch.split(own_part, ROWS):
            x = (randn(len(block), width) * own) @ basis.T + mean
            if inputs.documents:
                documents = (randn(-(-len(block) // DOCUMENT), width) * own) @ basis.T
                x += inputs.documents * documents.repeat_interleave(DOCUMENT, 0)[: len(block)]
            block.copy_(x / x.square().mean(dim=1, keepdim=True).sqrt() * norm_scale)
        if inputs.copies > 1:
            features.copy_(own_part.repeat(inputs.copies, 1))
        router = inputs.logits * (base + 0.3 * randn(experts, width) / width**0.5)
        if inputs.dead:  # their logits are some 60 below the others'
            direction = own_part[:ROWS].float().mean(dim=0)
            router[: inputs.dead] -= 60.0 * direction / (direction @ direction)
        made.append(DomainFeatures(f"domain{index}", [features], router))
    return made


def trained(layer: int, *, rows: int = 400, seed: int = 0) -> list[DomainFeatures]:
    """One layer of the testbed's bundled specialists, averaged, on text of both domains.

    Small (d 96, K 24), but neither features nor routers were made by us.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import moemerge.lab.testbed

    bundle = Path(moemerge.lab.testbed.__file__).parent / "bundle"
    names = ("math", "code")
    models = [
        AutoModelForCausalLM.from_pretrained(bundle / name, dtype=torch.float32) for name in names
    ]
    routers = [model.model.layers[layer].mlp.gate.weight.detach().clone() for model in models]
    merged = models[0]
    with torch.no_grad():
        for one, *others in zip(*(model.parameters() for model in models), strict=True):
            one.add_(torch.stack(others).sum(dim=0)).div_(len(models))
    seen: list[Tensor] = []
    merged.model.layers[layer].mlp.gate.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach().reshape(-1, args[0].shape[-1]).clone())
    )
    tokenizer = AutoTokenizer.from_pretrained(bundle / "math")
    domains = []
    for name, router in zip(names, routers, strict=True):
        text = (bundle / "data" / f"{name}.jsonl").read_text().splitlines()
        order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))
        seen.clear()
        with torch.no_grad():
            for index in order[:rows].tolist():
                row = json.loads(text[index])
                ids = tokenizer(row["text"], return_tensors="pt").input_ids
                merged(input_ids=ids, use_cache=False)
        domains.append(DomainFeatures(name, [torch.cat(seen)], router))
    return domains
