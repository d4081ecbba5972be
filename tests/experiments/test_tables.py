from __future__ import annotations

from moemerge.experiments.tables import TextTable

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


def test_a_name_that_looks_like_a_formula_is_text_to_a_spreadsheet() -> None:
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
