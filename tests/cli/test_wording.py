"""Messages name settings as Python has them; the command line, as flags or keys of a config."""

from __future__ import annotations

from types import SimpleNamespace as Parameter

import pytest
from typer.testing import CliRunner

import moemerge
from moemerge.cli.app import app
from moemerge.cli.wording import in_flags, speak_of


def option(name: str) -> Parameter:
    return Parameter(name=name, opts=[f"--{name.replace('_', '-')}"], param_type_name="option")


CONFIG = Parameter(name="config", opts=["config"], param_type_name="argument")


@pytest.mark.parametrize(
    ("python", "flags"),
    [
        ("lower `max_tokens` or so", "lower --max-tokens or so"),
        ('use `offload="disk"`.', "use --offload disk."),
        ("`ridge=0.1`", "--ridge 0.1"),
        ("`overwrite=True`", "--overwrite"),
        ("`swaps=False`", "--no-swaps"),
        ('`sources={"base": "org/x"}`', "--source base=org/x"),
        ('`data={**data, "base": "b.jsonl"}`', "--data base=b.jsonl"),
        ("`sources={A: MODEL, B: OTHER}`", "--source A=MODEL --source B=OTHER"),
        ("`data=FILE.jsonl`", "--data FILE.jsonl"),
        ('`elsewhere="x"` of another verb', "--elsewhere x of another verb"),
        ("`models` and `linear` are no settings", "`models` and `linear` are no settings"),
        ("`offload=not python`", "--offload not python"),
    ],
)
def test_settings_are_named_as_flags_of_the_verb(python: str, flags: str) -> None:
    names = ("max_tokens", "offload", "ridge", "overwrite", "swaps", "source", "data")
    speak_of([option(name) for name in names])
    assert in_flags(python) == flags


def test_what_a_verb_with_a_config_has_no_flag_for_is_a_key() -> None:
    speak_of([CONFIG, option("device")])
    assert in_flags('`offload="disk"`, `device="cpu"`') == "`offload: disk`, --device cpu"
    assert in_flags('`data={"base": "b.jsonl", A: "a"}`') == "`data: {base: b.jsonl, A: a}`"


def test_one_error_in_both_languages(zoo_folder, tmp_path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3"}\n')
    model = str(zoo_folder("olmoe"))
    with pytest.raises(moemerge.CheckpointError, match="overwrite=True") as raised:
        moemerge.calibrate(
            model, tmp_path / "out", sources={"a": model}, data={"a": tmp_path / "a.jsonl"}
        )
    assert "--" not in str(raised.value)
    words = [model, str(tmp_path / "out"), f"--source=a={model}", f"--data=a={tmp_path}/a.jsonl"]
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert "allow it: --overwrite" in result.output
