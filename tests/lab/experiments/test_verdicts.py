"""What the tables of a study say first: against the base, the best source and the control."""

import json
from dataclasses import dataclass

import pytest

from moemerge.errors import DataError
from moemerge.lab.experiments.cells import CELLS, CellJournal
from moemerge.lab.experiments.report import comparison_table, legend, main_table, markdown, verdicts
from moemerge.lab.experiments.summary import packed, summarise
from moemerge.lab.experiments.tables import REFERENCE, Row, TableForm, TextTable
from moemerge.lab.experiments.tree import StudySet

CONTROL = "routers averaged"
PROBLEMS = 80
ROWS = {
    (REFERENCE, "base"): 40,
    (REFERENCE, "math"): 44,
    (REFERENCE, "code"): 10,
    ("TIES", "as merged"): 12,
    ("TIES", CONTROL): 42,
    ("TIES", "HARC"): 43,
    ("TIES", "refit"): 20,
    ("average", "as merged"): 41,
    ("average", "HARC"): 41,
}


@dataclass(frozen=True)
class Cell:
    name: str
    domains: tuple[str, ...] = ("math",)


def summary_of(folder, solved, **values):
    """Rows that solve the first so many of the problems of one task."""
    form = {"control": CONTROL, "singles": ("base", "math", "code"), **values}
    form = TableForm(
        "t", "T", "", ("math",), "none",
        tasks={"math": {"sums": "Sums"}}, paired_by="problems", **form,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    journal, seed = CellJournal(folder, {}), StudySet()
    rows = []
    for (group, label), right in solved.items():
        rows.append(Row(group, label, Cell(f"{group}, {label}")))
        task = {"accuracy": right / PROBLEMS}
        task |= packed([float(n < right) for n in range(PROBLEMS)])
        domain = {"accuracy": right / PROBLEMS, "problems": PROBLEMS, "tasks": {"sums": task}}
        journal.add(seed, rows[-1].cell, {"domains": {"math": domain}})
    journal.close()
    return summarise(form, rows, [seed], journal.get)


def test_the_base_comes_first_then_the_best_source_then_the_control(tmp_path):
    summary = summary_of(tmp_path, ROWS)
    assert verdicts(summary) == [
        "Not distinguishable from the base (50.0 %): TIES, HARC, the highest row (+3.8 points, "
        "p 0.250). Worse than the base: 2 of 6 rows.",
        "Not distinguishable from the best single source, math (55.0 %): TIES, HARC, the highest "
        "row (-1.2 points, p 1.000). Worse than the best single source, math: 2 of 6 rows.",
        f"HARC against the control ({CONTROL}): not distinguishable from it for TIES, average.",
        f"refit against the control ({CONTROL}): worse than it for TIES.",
    ]
    text = markdown(summary)
    assert text.index("Not distinguishable from the base") < text.index("| merge |")


def test_a_row_is_called_better_only_by_the_paired_test(tmp_path):
    summary = summary_of(tmp_path / "up", {**ROWS, ("TIES", "HARC"): 70, (REFERENCE, "math"): 79})
    base, source, control, _ = verdicts(summary)
    assert base.startswith("Better than the base (50.0 %): TIES, HARC. ")
    assert source.startswith("Worse than the best single source, math (98.8 %): TIES, HARC, ")
    assert "better than it for TIES; not distinguishable from it for average" in control
    one = summary_of(tmp_path / "one", ROWS, singles=("base", "math"))
    assert "Not distinguishable from the source math (55.0 %)" in verdicts(one)[1]
    alone = summary_of(tmp_path / "no", {("TIES", "as merged"): 3}, control="", singles=())
    assert verdicts(alone) == []


def test_differences_are_from_the_control_and_no_column_is_empty(tmp_path):
    summary = summary_of(tmp_path, ROWS)
    table = main_table(summary)
    assert table.headings == (
        "merge", "variant", "overall", "Δ", "p", "95 %", "won : lost", "Sums",
    )  # fmt: skip
    shown = {row[:2]: row[3:5] for row in table.rows}
    assert shown["TIES", "HARC"] == ("+1.2", "1.000")
    assert shown["TIES", "as merged"] == ("-37.5", "< 1e-4")
    assert shown["TIES", CONTROL] == shown[REFERENCE, "base"] == ("", "")
    assert shown["average", "HARC"] == ("+0.0", "1.000")  # its routers are averaged already
    further = [row[1] for row in comparison_table(summary).rows]
    assert "HARC − base" in further
    assert "HARC − math" in further
    assert "HARC − as merged" in further
    assert f"HARC − {CONTROL}" not in further  # the main table shows it
    assert "mismatch" not in legend([summary])
    assert "the control" in legend([summary])
    plain = summary_of(tmp_path / "plain", {("TIES", "as merged"): 9, ("TIES", "a"): 8}, control="")
    assert "the first row of the same merge" in legend([plain])
    assert [row[3] for row in main_table(plain).rows] == ["", "-1.2"]


TABLE = TextTable(
    ("merge", "variant", "Δ"), (("A_1", "x, y", "1 ± 2"), ("A_1", "z", ""), ("B", "α", "<4"))
)


def test_latex_escapes_and_groups():
    assert TABLE.latex().splitlines() == [
        r"\begin{tabular}{llr}",
        r"\toprule",
        r"merge & variant & $\Delta$ \\",
        r"\midrule",
        r"A\_1 & x, y & 1 $\pm$ 2 \\",
        r" & z &  \\",
        r"\midrule",
        r"B & $\alpha$ & $<$4 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_a_name_that_looks_like_a_formula_is_text_to_a_spreadsheet():
    table = TextTable(("merge", "score"), (("=1+1", "-3.5"), ("@x", "+2.0"), ("-x", "-.5")), left=1)
    assert table.csv().splitlines() == ["merge,score", "'=1+1,-3.5", "'@x,+2.0", "'-x,-.5"]


def test_a_minus_is_a_minus_in_latex():
    table = TextTable(("m", "v", "Δ"), (("a-1", "b", "-1.2 to -0.1"), ("a", "b", "2e-04")))
    assert r"a-1 & b & $-$1.2 to $-$0.1 \\" in table.latex()
    assert r"a & b & 2e-04 \\" in table.latex()


def test_bars_in_names_do_not_end_a_cell():
    table = TextTable(("m", "v", "x"), (("a|b", "c", "1"),))
    assert table.markdown().splitlines()[2] == r"| a\|b | c | 1 |"


def test_csv_has_one_number_a_cell_and_quotes_what_needs_it():
    headings = ("merge", "variant", "mean", "95 %", "p", "won : lost")
    rows = (
        ("A", "x, y", "1.5 ± 2.0", "-1.0 to +3.0", "< 1e-20", "3 : 4"),
        ("A", "z", "2.0", "", "", ""),
    )
    assert TextTable(headings, rows).csv().splitlines() == [
        'merge,variant,mean,"mean, ±","95 %, from","95 %, to",p,won,lost',
        'A,"x, y",1.5,2.0,-1.0,+3.0,1e-20,3,4',
        "A,z,2.0,,,,,,",
    ]


SCALE = {"problems": 3}


@dataclass(frozen=True)
class OneSet:
    seed: int

    def to_json(self):
        return {"seed": self.seed}


@dataclass(frozen=True)
class OneCell:
    name: str


def journal(folder):
    return CellJournal(folder, SCALE)


@pytest.fixture
def written(tmp_path):
    one = journal(tmp_path)
    for seed, name in ((0, "linear"), (0, "a line\u2028and another"), (1, "linear")):
        one.add(OneSet(seed), OneCell(name), {"score": 0.1 + seed})
    return tmp_path


def score(folder, seed, name="linear"):
    entry = journal(folder).get(OneSet(seed), OneCell(name))
    return None if entry is None else entry["score"]


def test_cells_are_read_again(written):
    assert score(written, 0) == 0.1
    assert score(written, 1) == 1.1
    assert score(written, 0, "a line\u2028and another") == 0.1
    assert CellJournal(written, {"problems": 4}).get(OneSet(0), OneCell("linear")) is None


def test_lines_without_a_digest_are_taken_as_they_are(tmp_path):
    line = {"set": {"seed": 0}, "cell": "linear", "scale": SCALE, "score": 0.5}
    (tmp_path / CELLS).write_text(json.dumps(line) + "\n")
    assert score(tmp_path, 0) == 0.5


@pytest.mark.parametrize("line", ["[1]", "{}", '{"set": 1, "cell": "a", "scale": {}}'])
def test_a_line_that_is_no_cell(tmp_path, line):
    (tmp_path / CELLS).write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        journal(tmp_path)
