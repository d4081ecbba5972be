"""Methods by singular vectors, masks and wrappers against fusion_bench, on plain tensors.

    python benchmarks/parity_methods.py --fusion-bench /path/to/venv/bin/python

Random task vectors of several shapes, two and three models, in float32 and with every direction
alive. fusion_bench 0.2.33 runs in its own environment, by calling its functions; both results are
compared with each other and with float64, where a plain formula exists. Exits 1 when a result
differs by more than 1e-5 (relative, Frobenius). mergekit's methods are compared by `parity.py`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import moemerge.methods  # noqa: F401  (registers methods and wrappers)
from moemerge.config.schema import KeptModels
from moemerge.families.roles import Role
from moemerge.merging.kept import emr_norms, keep_unit, unpack_bits
from moemerge.methods._spectra import Spectrum
from moemerge.methods.method import METHODS, UnitInfo
from moemerge.methods.wrappers import WRAPPERS

TOLERANCE = 1e-5
SHAPES = ((96, 64), (64, 96), (80, 80), (16, 200))
THRESHOLD = 0.4
UNIT = UnitInfo("unit", Role.EXPERT)
# Runs inside fusion_bench's own environment: {name: result} for every case of the input.
DRIVER = """
import sys, warnings, contextlib, io
warnings.filterwarnings("ignore")
import torch
from fusion_bench import BaseModelPool
from fusion_bench.method.emr_merging.utils import emr_merge
from fusion_bench.method.isotropic_merging.iso_utils import iso_c, iso_cts
from fusion_bench.method.knots.knots_utils import subspace_alignment
from fusion_bench.method.opcm.opcm_general import OPCM
from fusion_bench.method.singular_value_calibration.utils import (
    subspace_consistency_spectral_calibration as svc,
)
from fusion_bench.method.tall_mask.utils import generate_task_masks
from fusion_bench.method.task_singular_vector.utils.TSVM_utils import (
    compute_and_sum_svd_mem_reduction as tsv,
)
from fusion_bench.method.wudi.wudi import wudi_merging


def linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return torch.nn.Sequential(layer)


source, target, threshold = sys.argv[1], sys.argv[2], float(sys.argv[3])
results = []
for case in torch.load(source):
    base, vectors = case["base"], case["vectors"]
    named = lambda: [{"w": v.clone()} for v in vectors]
    found = {}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found["iso_c"] = base + iso_c(named(), accelerator="cpu")["w"]
        found["iso_cts"] = base + iso_cts(named(), 0.8, accelerator="cpu")["w"]
        found["tsv"] = base + tsv(named(), accelerator="cpu")["w"]
        pool = {f"m{i}": linear(base + v) for i, v in enumerate(vectors)}
        opcm = OPCM(alpha=0.5, shuffle_order=False, save_on_every_step=False)
        merged = opcm.run(BaseModelPool({"_pretrained_": linear(base), **pool}))
        found["opcm"] = merged[0].weight.data
        steps = wudi_merging(named(), accelerator="cpu", iter_num=300)
        found["wudi, 300 steps"] = base + steps["w"]
        united, masks, scales = emr_merge(named())
        found["emr"] = base + united["w"]
        found["emr, masks"] = torch.stack(list(masks["w"])).float()
        found["emr, scales"] = scales.float()
        u, s, parts = subspace_alignment([v.clone() for v in vectors], eps=1e-6)
        parts = [s.double()[:, None] * p.double() for p in parts]
        found["knots, aligned"] = torch.stack([(u.double() @ p).float() for p in parts])
        found["knots, sizes"] = torch.stack([p.float().abs() for p in parts])
        total = sum(vectors)
        merged = base + total
        models = [base + v for v in vectors]
        found["svc"] = svc(base, models, merged, alpha=1.0, accelerator=torch.device("cpu"))
        found["tall masks"] = generate_task_masks(
            torch.stack([v.flatten() for v in vectors]),
            torch.stack([m.flatten() for m in models]),
            base.flatten(), tv=total.flatten(), tall_mask_lambda=threshold,
        ).float()
    results.append({name: value.detach().contiguous() for name, value in found.items()})
torch.save(results, target)
"""


@dataclass(frozen=True)
class Models:
    """A base and task vectors of one shape."""

    base: Tensor
    vectors: Sequence[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.base + vector for vector in self.vectors]

    @property
    def label(self) -> str:
        return f"{self.base.shape[0]} × {self.base.shape[1]}, {len(self.vectors)} models"


def cases() -> Iterator[Models]:
    for seed, shape in enumerate(SHAPES):
        for count in (2, 3):
            g = torch.Generator().manual_seed(10 * seed + count)
            # Powers of two keep base + vector - base exact, so that rounding is not compared.
            base = torch.randn(shape, generator=g).mul(256).round() / 256
            vectors = [
                torch.randn(shape, generator=g).mul(2**12).round() / 2**16 for _ in range(count)
            ]
            yield Models(base, vectors)


def method(name: str, models: Models, **options: object) -> Tensor:
    chosen = METHODS.get(name)
    arguments = chosen.arguments([{}] * len(models.tensors), options, UNIT.key)
    return chosen.merge(models.tensors, models.base, arguments, UNIT)


def wrapped(name: str, models: Models) -> Tensor:
    """The sum of task vectors within a wrapper."""
    chosen = METHODS.get("task_arithmetic")
    arguments = chosen.arguments([{"weight": 1.0}] * len(models.tensors), {}, UNIT.key)

    def inner(tensors: Sequence[Tensor], base: Tensor) -> Tensor:
        return chosen.merge(tensors, base, arguments, UNIT)

    wrapper = WRAPPERS.get(name)
    call = wrapper.around(inner, wrapper.arguments([], {}, UNIT.key), UNIT, None)
    return call(models.tensors, models.base)


def masks(keep: str, models: Models, merged: Tensor) -> Tensor:
    values = {"keep": keep, "threshold": THRESHOLD} if keep == "tall" else {"keep": keep}
    settings = KeptModels.model_validate(values)
    shape = tuple(models.base.shape)
    kept = [keep_unit(settings, t, models.base, merged)["mask"] for t in models.tensors]
    return torch.stack([unpack_bits(mask, shape) for mask in kept]).float()


def scales(models: Models, merged: Tensor) -> Tensor:
    pairs = [emr_norms(tensor, models.base, merged) for tensor in models.tensors]
    return torch.tensor([own / agreed for own, agreed in pairs])


def aligned(models: Models) -> tuple[Tensor, Tensor]:
    """What the method inside `knots` sees, brought back, and its sizes."""
    vectors = [vector.double() for vector in models.vectors]
    basis = Spectrum.of(torch.cat(vectors, dim=1)).left
    inside = [basis.T @ vector for vector in vectors]
    return (
        torch.stack([basis @ part for part in inside]).float(),
        torch.stack([part.abs() for part in inside]).float(),
    )


def ours(models: Models) -> dict[str, Tensor]:
    emr = method("emr", models)
    shared, parts = aligned(models)
    total = models.base + torch.stack(list(models.vectors)).sum(0)
    return {
        "iso_c": method("iso_c", models),
        "iso_cts": method("iso_cts", models),
        "tsv": method("tsv", models),
        "opcm": method("opcm", models),
        "wudi, 300 steps": method("wudi", models),
        "emr": emr,
        "emr, masks": masks("emr", models, emr),
        "emr, scales": scales(models, emr),
        "knots, aligned": shared,
        "knots, sizes": parts,
        "svc": wrapped("svc", models),
        "tall masks": masks("tall", models, total).flatten(1),
    }


def difference(mine: Tensor, theirs: Tensor, base: Tensor) -> float:
    """Relative, of the change where it is a weight."""
    if mine.shape != theirs.shape:
        return float("inf")
    origin = base if mine.shape == base.shape else torch.zeros_like(mine)
    size = (theirs - origin).double().norm().clamp_min(1e-300)
    return float((mine.double() - theirs.double()).norm() / size)


def run_peer(python: str, models: Sequence[Models], folder: Path) -> list[dict[str, Tensor]]:
    inputs = [{"base": m.base, "vectors": list(m.vectors)} for m in models]
    torch.save(inputs, folder / "in.pt")
    script = folder / "driver.py"
    script.write_text(DRIVER)
    command = [python, str(script), str(folder / "in.pt"), str(folder / "out.pt"), str(THRESHOLD)]
    subprocess.run(command, check=True, cwd=folder)
    found: list[dict[str, Tensor]] = torch.load(folder / "out.pt")
    return found


def report(rows: dict[str, list[float]], show: Callable[[str], None]) -> bool:
    show("| | cases | largest relative difference | |\n|---|---|---|---|")
    agreed = True
    for name, values in rows.items():
        worst = max(values)
        agreed &= worst <= TOLERANCE
        show(
            f"| {name} | {len(values)} | {worst:.1e} | {'' if worst <= TOLERANCE else 'differs'} |"
        )
    return agreed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fusion-bench", required=True, help="python of its environment")
    parser.add_argument("-v", "--verbose", action="store_true", help="every case")
    args = parser.parse_args()
    models = list(cases())
    with tempfile.TemporaryDirectory() as folder:
        peer = run_peer(args.fusion_bench, models, Path(folder))
    rows: dict[str, list[float]] = {}
    for one, theirs in zip(models, peer, strict=True):
        for name, value in ours(one).items():
            away = difference(value, theirs[name], one.base)
            rows.setdefault(name, []).append(away)
            if args.verbose:
                print(f"{name:18} {one.label:24} {away:.2e}")
    return 0 if report(rows, print) else 1


if __name__ == "__main__":
    sys.exit(main())
