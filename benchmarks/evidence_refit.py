"""The table of docs/evidence.md about refit after three merge methods, from measured cells.

    python benchmarks/evidence_refit.py docs/data/evidence-methods.jsonl.xz

Means over all seeds that were measured, with their number where it is not five. Differences to
refit are paired over seeds; those whose t-test gives p < 0.05 are bold.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence_methods import MERGES, Cells, Measured, difference, measured, read_cells, tenths
from moemerge.testbed.experiments.merges import EVERY

METHODS = ("average", "wudi", "regmean")
REFIT = "refit"
VARIANTS = {
    "as merged": "",
    "HARC": " calibrated[]",
    "source targets, exact": " calibrated[objective=exact,targets=source-features]",
    "fine-tuned, best of four": " tuned[1x0.0002|1x0.001|4x0.0002|4x0.001]",
    REFIT: " refitted[]",
    "refit, with the base on general text": " refitted[base=64]",
    "refit, with the base on text of chat": " refitted[base=64,kept=chat]",
}
HEAD = (
    "| merge | | soft: mean | against refit | chat | plain: mean | against refit | chat |",
    "|---|---|---:|---:|---:|---:|---:|---:|",
)
SEEDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cells", type=Path)
    args = parser.parse_args()
    regimes = [read_cells(args.cells, regime) for regime in ("soft", "plain")]
    print("\n".join(HEAD))
    for method in METHODS:
        title = EVERY[method].title
        for label in VARIANTS:
            columns = [column for cells in regimes for column in columns_of(cells, method, label)]
            print(f"| {title} | {label} | {' | '.join(columns)} |")
            title = ""


def columns_of(cells: Cells, method: str, label: str) -> list[str]:
    """Mean, difference to refit over the same seeds, and what is left of chat."""
    merge = MERGES["two"].format(method)
    name = merge + VARIANTS[label]
    seeds = [seed for seed in sorted(cells) if name in cells[seed]]

    def found(variant: str) -> Measured:
        one = measured(cells, seeds, merge + VARIANTS[variant])
        assert one is not None, (variant, seeds)
        return one

    own = found(label)
    mean = tenths(own.mean) + (f" ({len(seeds)})" if len(seeds) < SEEDS else "")
    return [mean, "" if label == REFIT else difference(own, found(REFIT)), tenths(own.chat or ())]


if __name__ == "__main__":
    main()
