"""Write a model with its experts in another layout, bit for bit: `moemerge convert`."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from moemerge.checkpoint import CheckpointWriter, TensorInfo, check_output, require_space
from moemerge.checkpoint.model_card import CARD_NAME, CONFIG_NAME, REPORT_NAME, report_file
from moemerge.config.job_settings import ExpertLayoutName
from moemerge.config.models import ModelLike
from moemerge.config.yaml_lines import config_for
from moemerge.conversion.units import StoredUnits
from moemerge.errors import ArchitectureError, NumericalError, UsageError
from moemerge.families.names import split_layer
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import WHOLE, Unit
from moemerge.forward.loading import loaded_architecture, map_stored
from moemerge.repairs.card import earlier_report
from moemerge.runtime.progress import Progress, counted, first_few

SHARD_BYTES: Final = 5 * 10**9
BLOCK_BYTES: Final = 64 * 2**20


@dataclass(frozen=True)
class ConvertReport:
    """What was converted."""

    model: str
    output: str
    layout: str
    tensors_before: int
    tensors_after: int
    output_bytes: int
    notices: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 3)}


Output = tuple[TensorInfo, tuple[Unit, ...]]  # a tensor, and its units in the output's layout


def convert(
    model: ModelLike,
    out: Path,
    layout: ExpertLayoutName,
    *,
    overwrite: bool,
    progress: Progress,
) -> ConvertReport:
    """Write `model` in another layout to `out`, which appears complete or not at all."""
    begin = time.perf_counter()
    opened = open_model(str(model), model)
    inputs = list(opened.checkpoint.folders)
    check_output(out, overwrite=overwrite, inputs=inputs)
    _require_convertible(opened)
    outputs, notices = _plan(opened, layout)
    infos = [info for info, _ in outputs]
    require_space(out, sum(info.nbytes for info in infos))
    with CheckpointWriter(
        out, infos, shard_bytes=SHARD_BYTES, overwrite=overwrite, inputs=inputs
    ) as writer:
        stored = StoredUnits(opened)
        progress.start("converting", len(outputs), unit="tensors")
        for info, units in outputs:
            for row, block in _blocks(info, units, stored):
                _require_finite(opened, info.name, block)
                writer.write(info.name, block, row=row)
            progress.advance(1)
        progress.finish()
        report = ConvertReport(
            model=opened.label,
            output=str(out),
            layout=layout,
            tensors_before=len(opened.checkpoint.tensors),
            tensors_after=len(infos),
            output_bytes=sum(info.nbytes for info in infos),
            notices=tuple(notices),
            seconds=time.perf_counter() - begin,
        )
        _add_companions(opened, report, writer)
        opened.checkpoint.require_unchanged()
        writer.commit()
    return report


def _require_finite(model: OpenModel, name: str, block: Tensor) -> None:
    if block.is_floating_point() and not bool(block.isfinite().all()):
        raise NumericalError(
            f"{model.label}: {name} has values that are not finite (NaN or infinity)",
            hint="repair that model first",
        )


def _require_convertible(model: OpenModel) -> None:
    if model.checkpoint.quantisation is not None or model.architecture.quantised:
        raise ArchitectureError(
            f"{model.label} is quantised, and its codes and scales cannot be rearranged",
            hint="write it as floats first: `moemerge merge` with `merge_method: passthrough`",
        )
    if model.architecture.family is None or not model.architecture.is_moe:
        raise ArchitectureError(
            f"{model.label}: {model.architecture.model_type!r} is not a known family with experts",
            hint="`moemerge ls architectures` lists them",
        )


def _plan(model: OpenModel, layout: ExpertLayoutName) -> tuple[list[Output], list[str]]:
    """Return the tensors of the output. Refuse a layout that transformers would not load."""
    skeleton, loaded = loaded_architecture(model.checkpoint)
    stored, tensors = StoredUnits(model), model.checkpoint.tensors
    before = map_stored(skeleton, tensors, model.label)
    unused = sorted(before.unused)
    outputs = [
        _output(stored, name, tensors[name].shape, model.architecture.units(name))
        for name in unused
    ]
    if layout == "fused":
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        for name in before.recipes:
            outputs.append(_output(stored, name, shapes[name], loaded.units(name)))
    else:
        for unit in (u for n in tensors if n not in unused for u in model.architecture.units(n)):
            name = _published_name(model, unit)
            outputs.append(_output(stored, name, unit.shape, (replace(unit, slot=WHOLE),)))
    kept = {unit.key for _, units in outputs for unit in units}
    dropped = [n for n in tensors if any(u.key not in kept for u in model.architecture.units(n))]
    if dropped:
        raise ArchitectureError(
            f"{model.label}: the {layout} layout has no place for "
            f"{counted(len(dropped), 'stored tensor')} ({first_few(dropped)})",
            hint="config.json states fewer experts or layers than the weights have: correct it, "
            "or remove these tensors",
        )
    made = {info.name: info.shape for info, _ in outputs}
    if made == {name: info.shape for name, info in tensors.items()}:
        raise UsageError(f"{model.label} has the {layout} layout already", hint="use it unchanged")
    after = map_stored(skeleton, made, f"the {layout} layout of {model.label}")
    lost = sorted({*before.recipes} ^ {*after.recipes} | {*after.unused} ^ {*unused})
    if lost:
        raise ArchitectureError(
            f"{model.label}: transformers would not load the {layout} layout of this family "
            f"({first_few(lost)})",
            hint="models of this family have one layout only: keep it",
        )
    if not unused:
        return outputs, []
    what = f"{counted(len(unused), 'stored tensor')} that transformers does not load"
    return outputs, [f"{what} keep their names and shapes: {first_few(unused)}"]


def _output(
    stored: StoredUnits, name: str, shape: tuple[int, ...], units: tuple[Unit, ...]
) -> Output:
    """Return a tensor of the output with the dtype of its units. Refuse different ones."""
    tensors = stored.model.checkpoint.tensors
    dtypes = {tensors[stored.find(unit).tensor].dtype for unit in units}
    if len(dtypes) > 1:
        raise ArchitectureError(
            f"{stored.model.label}: {name} would hold tensors of {' and '.join(map(str, dtypes))}",
            hint="write it in one dtype first: `moemerge merge` with `dtype:`",
        )
    return TensorInfo.of(name, dtypes.pop(), shape), units


def _published_name(model: OpenModel, unit: Unit) -> str:
    """Return the name of a unit in the original checkpoints of its family."""
    place = split_layer(unit.tensor)
    if not model.architecture.layer_key.section:
        return unit.key
    if place is None or model.architecture.family is None:
        return unit.tensor
    rest = unit.key.removeprefix(f"{model.architecture.family.container}.{place.layer}")
    return unit.tensor.removesuffix(place.rest) + rest


def _blocks(
    info: TensorInfo, units: Sequence[Unit], stored: StoredUnits
) -> Iterator[tuple[int, Tensor]]:
    """Yield the output tensor in rows: expert by expert, or in parts of a whole tensor."""
    if units[0].slot.squeeze:
        by_rows: dict[int, list[Unit]] = defaultdict(list)
        for unit in units:
            assert unit.slot.rows is not None  # of an expert
            by_rows[unit.slot.rows[0]].append(unit)
        for row, group in by_rows.items():
            yield row, stored.assemble(group, (1, *info.shape[1:]), info.dtype.torch, row)
    elif units[0].slot != WHOLE:
        yield 0, stored.assemble(units, info.shape, info.dtype.torch)
    elif info.shape and stored.find(units[0]).slot == WHOLE:
        step = max(1, BLOCK_BYTES // max(1, info.row_bytes))
        for start in range(0, info.rows, step):
            yield start, stored.read(units[0], (start, min(start + step, info.rows)))
    else:
        yield 0, stored.read(units[0])


def _add_companions(model: OpenModel, report: ConvertReport, writer: CheckpointWriter) -> None:
    """Add the model's own files, and this conversion to its report."""
    checkpoint = model.checkpoint
    config = (json.dumps(checkpoint.config, indent=2, ensure_ascii=False) + "\n").encode()
    writer.add_bytes("config.json", config)
    for name, path in checkpoint.companions().items():
        writer.add_file(path, name)
    files = {n: checkpoint.path / n for n in (CARD_NAME, CONFIG_NAME)}
    written = {n: path.read_bytes() for n, path in files.items() if os.path.isfile(path)}
    if CONFIG_NAME in written:
        # Its relative paths change, also where the card repeats it.
        old = written[CONFIG_NAME]
        new = config_for(files[CONFIG_NAME], writer.out).encode()
        written = {name: content.replace(old, new) for name, content in written.items()}
    for name, content in written.items():
        writer.add_bytes(name, content)
    earlier = earlier_report(checkpoint.path, writer.out)
    parts = {n: part for n, part in earlier.items() if isinstance(part, dict)}
    writer.add_bytes(REPORT_NAME, report_file(**{**parts, "convert": report.to_json()}))
