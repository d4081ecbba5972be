"""A picture of what benchmarks/calibrate.py measured: parts beside their floors, and growth.

    python benchmarks/plot.py calibrate.json calibrate.svg

Left: where the time of the first run went, with the least that the machine's measured rates allow.
Right: the time of every run, from its start to the last router solved, over its tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")
TAKEN, FLOOR = "#0072b2", "#e69f00"
SHOWN = 0.02  # of a run; smaller parts are put together


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="what calibrate.py --json wrote")
    parser.add_argument("picture", type=Path, help="its ending chooses the format")
    args = parser.parse_args()
    draw(json.loads(args.measured.read_text()), args.picture)


def draw(measured: dict[str, Any], picture: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    runs = measured["runs"]
    draw_parts(left, runs[0])
    draw_growth(right, runs)
    figure.suptitle(f"{measured['shape']}, {measured['layers']} layers, {measured['device']}")
    # Without a date and with fixed names: the same numbers give the same bytes.
    with plt.rc_context({"svg.hashsalt": "moemerge", "svg.fonttype": "none"}):
        metadata = {"Date": None} if picture.suffix == ".svg" else None
        figure.savefig(picture, metadata=metadata)
    plt.close(figure)


def draw_parts(axes: Any, run: dict[str, Any]) -> None:
    seconds: dict[str, float] = run["report"]["timings"]["seconds"]
    whole = sum(seconds.values())
    parts = {name: s for name, s in seconds.items() if s >= SHOWN * whole and name != "other"}
    parts["all else"] = whole - sum(parts.values())
    names = list(parts)
    rows = range(len(names))
    axes.barh(rows, [parts[name] for name in names], color=TAKEN, label="measured")
    floors = [run["floors"].get(name) or 0.0 for name in names]
    axes.barh(rows, floors, height=0.35, color=FLOOR, label="floor")
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(f"{run['tokens'] / 1e6:g} M tokens", fontsize="medium")
    axes.legend(frameon=False)


def draw_growth(axes: Any, runs: list[dict[str, Any]]) -> None:
    tokens = [run["tokens"] / 1e6 for run in runs]
    seconds = [run["report"]["timings"]["solved"] for run in runs]
    axes.plot(tokens, seconds, "o-", color=TAKEN)
    for run, x, y in zip(runs, tokens, seconds, strict=True):
        peak = run["report"]["timings"]["peak_gpu_memory"]
        note = f"{y:.1f} s" + (f", {peak / 1e9:.0f} GB" if peak else "")
        axes.annotate(note, (x, y), textcoords="offset points", xytext=(8, -12))
    axes.set_xlim(0, 1.4 * max(tokens))
    axes.set_ylim(0, 1.1 * max(seconds))
    axes.set_xlabel("million tokens")
    axes.set_ylabel("seconds to the last router")


if __name__ == "__main__":
    main()
