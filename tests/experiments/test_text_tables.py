from __future__ import annotations

from moemerge.experiments.text_tables import TextTable

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


def test_csv_quotes_what_needs_it():
    assert TABLE.csv() == 'merge,variant,Δ\nA_1,"x, y",1 ± 2\nA_1,z,\nB,α,<4\n'


def test_a_name_that_looks_like_a_formula_is_text_to_a_spreadsheet() -> None:
    table = TextTable(("merge", "score"), (("=1+1", "-3.5"), ("@x", "+2.0"), ("-x", "-.5")), left=1)
    assert table.csv().splitlines() == ["merge,score", "'=1+1,-3.5", "'@x,+2.0", "'-x,-.5"]
