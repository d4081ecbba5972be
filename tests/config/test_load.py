"""Every rule of the reader with its message; the texts are whole configs, so lines count."""

import pytest

from moemerge.config.models import ModelRef
from moemerge.errors import ConfigError

HEAD = """merge_method: ties
base_model: ./base
parameters: {weight: 0.5}
models:
  - {model: ./math, name: math}
  - {model: ./code, name: code}
"""  # six lines: what a case adds begins on line 7

TIES = "merge_method: ties\nbase_model: b\n"
SLERP = "merge_method: slerp\nbase_model: a\nparameters: {t: 0.5}\n"

WRONG = [
    # keys
    (HEAD + "dtyp: float32\n", ["line 7: dtyp: unknown key, did you mean 'dtype'?"]),
    (
        HEAD + "normalize: true\n",
        ["line 7: normalize: unknown key here, did you mean `parameters: {normalize: ...}`?"],
    ),
    (
        "merge_method: linear\nmodels:\n  - model: a\n    weight: 1\nparameters: {weight: 1}\n",
        ["line 4: models[0].weight: unknown key here, did you mean `parameters: {weight: ...}`?"],
    ),
    (HEAD + "name: mine\n", ["line 7: name: a name for the merge belongs to files of several"]),
    (HEAD + "quirks: {}\n", ["line 7: quirks: unknown key; known here: models, slices"]),
    ("models: [{model: a}]\n", ["line 1: merge_method: is missing"]),
    ("merge_method: 3\nmodels: [{model: a}]\n", ["line 1: merge_method: must be text, not 3"]),
    ("merge_method:\nmodels: [{model: a}]\n", ["line 1: merge_method: is missing"]),
    # methods
    (
        "merge_method: tiess\nmodels: [{model: a}]\n",
        ["line 1: merge_method: unknown merge method 'tiess', did you mean 'ties'?"],
    ),
    (
        "merge_method: zzz\nmodels: [{model: a}]\n",
        ["line 1: merge_method: unknown merge method 'zzz'; known: fisher, linear"],
    ),
    # bodies
    ("merge_method: linear\n\n", ["line 1: nothing to merge: give `models` or `slices`"]),
    ("merge_method: linear\nmodels: []\n", ["line 2: models: must not be empty"]),
    ("merge_method: linear\nmodels: a\n", ["line 2: models: expected a list, not 'a'"]),
    ("merge_method: linear\nmodels: [a]\n", ["line 2: models[0]: expected keys and values"]),
    (
        HEAD + "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]\n",
        ["line 7: slices: give one of models, slices, modules, not several"],
    ),
    (
        "merge_method: linear\nmodules:\n  text: {models: [{model: a}]}\n",
        ["line 2: modules: only the module 'default' is supported, not text"],
    ),
    (
        "merge_method: linear\nmodules:\n  default: {parameters: {weight: 1}}\n",
        ["line 3: modules.default: nothing to merge"],
    ),
    # models
    (TIES + "models:\n  - name: x\n", ["line 4: models[0].model: is missing"]),
    (TIES + "models:\n  - model: 3\n", ["line 4: models[0].model: expected a model path or hub"]),
    (
        TIES + "models:\n  - model: a@b@c\n",
        ["line 4: models[0].model: model reference 'a@b@c' has"],
    ),
    (
        HEAD + "  - {model: ./math}\n",
        ["line 7: models[2].model: ./math is listed twice"],
    ),
    (
        HEAD + "  - {model: ./more, name: math}\n",
        ["line 7: models[2].name: 'math' is the name of ./math already"],
    ),
    (HEAD + "  - {model: ./more, name: 7}\n", ["line 7: models[2].name: must be text, not 7"]),
    (HEAD + "  - {model: ./more, name: ''}\n", ["line 7: models[2].name: must not be empty"]),
    (
        HEAD + "  - model: {model: {path: x, revison: y}, override_architecture: Z}\n",
        [
            "line 7: models[2].model.override_architecture: override_architecture is not supported",
            "line 7: models[2].model.model.revison: unknown key, did you mean 'revision'?",
        ],
    ),
    # base and numbers of models
    (
        "merge_method: ties\nmodels: [{model: a, parameters: {weight: 1}}]\n",
        ["line 1: base_model: merge method 'ties' needs a base_model"],
    ),
    (
        SLERP + "models:\n  - model: b\n  - model: c\n",
        ["line 4: models: 'slerp' merges 1 model besides the base, got 2: b, c"],
    ),
    (
        "merge_method: model_stock\nbase_model: a\nmodels: [{model: a}, {model: b}]\n",
        ["line 3: models: 'model_stock' merges at least 2 models besides the base, got 1: b"],
    ),
    (
        "merge_method: ties\nbase_model: a\nmodels: [{model: a}]\n",
        ["line 3: models: 'ties' merges at least 1 model besides the base, got 0: none"],
    ),
    (
        "merge_method: passthrough\nmodels: [{model: a}, {model: b}]\n",
        ["line 2: models: 'passthrough' merges 1 model, got 2: a, b"],
    ),
    # parameters
    (
        TIES + "models:\n  - model: a\n    parameters:\n      wieght: 1\n",
        ["line 6: models[0].parameters.wieght: unknown parameter, did you mean 'weight'?"],
    ),
    (
        HEAD.replace("weight: 0.5", "weight: 0.5, zzz: 1"),
        ["line 3: parameters.zzz: unknown parameter; 'ties' takes: weight, density"],
    ),
    (
        TIES + "models:\n  - model: a\n    parameters: {weight: 1, lambda: 2}\n",
        ["line 5: models[0].parameters.lambda: lambda is a parameter of the whole method"],
    ),
    (
        TIES + "models:\n  - model: a\n    parameters: {weight: 1}\n"
        "  - model: b\n    parameters: {weight: 1}\n",
        ["line 7: models[1].parameters: the base model's parameters have no effect in 'ties'"],
    ),
    (
        TIES + "models: [{model: x/a}, {model: x/c, parameters: {weight: 1}}]\n",
        [
            "line 1: 'ties' needs the parameter 'weight', which is not set for a: give it under "
            "each model or in the top `parameters:`"
        ],
    ),
    (
        "merge_method: linear\nbase_model: x/b\nmodels: [{model: a, parameters: {weight: 1}}]\n",
        [
            "line 1: 'linear' needs the parameter 'weight', which is not set for b: give it under "
            "each model or in the top `parameters:`. 'linear' merges base_model too: remove it to "
            "leave it out"
        ],
    ),
    (
        "merge_method: slerp\nbase_model: a\nmodels: [{model: b}]\n",
        ["line 1: 'slerp' needs the parameter 't', which is not set: give it in the top"],
    ),
    (
        SLERP.replace("0.5", "[0, 0.5, 1.5]") + "models: [{model: b}]\n",
        ["line 3: parameters.t[2]: t must lie in [0, 1], not 1.5"],
    ),
    (
        SLERP.replace("0.5", "[{filter: mlp, value: [0, -1]}, {value: 2}]")
        + "models: [{model: b}]\n",
        [
            "line 3: parameters.t[0].value[1]: t must lie in [0, 1], not -1",
            "line 3: parameters.t[1].value: t must lie in [0, 1], not 2",
        ],
    ),
    (
        SLERP.replace("0.5", "'0.5'") + "models: [{model: b}]\n",
        ["line 3: parameters.t: t must be a finite number, not '0.5' (remove the quotes)"],
    ),
    (
        SLERP.replace("0.5", "") + "models: [{model: b}]\n",
        ["line 3: parameters.t: expected a number, a list of numbers"],
    ),
    (
        "merge_method: wudi\nbase_model: a\nmodels: [{model: b}]\n"
        "parameters: {solver: sgd, steps: 1.5}\n",
        [
            "line 4: parameters.solver: solver must be one of adam, exact, not 'sgd'",
            "line 4: parameters.steps: steps must be a whole number, not 1.5",
        ],
    ),
    (
        HEAD.replace("0.5", "[{filter: 'role:ruter', value: 1}]"),
        ["line 3: parameters.weight[0].filter: unknown role 'ruter', did you mean 'router'?"],
    ),
    (HEAD.replace("{weight: 0.5}", "[1]"), ["line 3: parameters: expected keys and values"]),
    # slices
    (
        SLERP + "slices:\n  - sources:\n    - {model: a, layer_range: [0, 4]}\n"
        "    - {model: b, layer_range: [0, 3]}\n",
        ["line 5: slices[0].sources: all sources of a slice need the same number of layers, got 4"],
    ),
    (
        "merge_method: passthrough\nslices:\n  - sources: [{model: a, layer_range: [4, 4]}]\n"
        "  - sources: [{model: a, layer_range: [-1, 4]}]\n"
        "  - sources: [{model: a, layer_range: [0, 1, 2]}]\n"
        "  - sources: [{model: a, layer_range: 7}]\n"
        "  - sources: [{model: a}]\n"
        "  - sources: []\n"
        "  - parameters: {scale: 1}\n",
        [
            "line 3: slices[0].sources[0].layer_range: [4, 4] holds no layer",
            "line 4: slices[1].sources[0].layer_range: [-1, 4] holds no layer",
            "line 5: slices[2].sources[0].layer_range: expected [first, end]",
            "line 6: slices[3].sources[0].layer_range: expected [first, end]",
            "line 7: slices[4].sources[0].layer_range: is missing",
            "line 8: slices[5].sources: must not be empty",
            "line 9: slices[6].sources: is missing",
        ],
    ),
    (
        "merge_method: passthrough\nslices:\n"
        "  - sources: [{model: a, layer_range: [0, 4]}]\n    residual_weight: 0.5\n",
        ["line 4: slices[0].residual_weight: residual_weight has no effect"],
    ),
    (
        SLERP + "slices:\n  - sources: [{model: b, layer_range: [0, 4]}, "
        "{model: c, layer_range: [1, 5]}]\n",
        ["line 5: slices[0].sources: the sources have different layer ranges: list a"],
    ),
    (
        "merge_method: linear\nparameters: {weight: 1}\nslices:\n"
        "  - sources: [{model: b, layer_range: [0, 4]}, {model: b, layer_range: [1, 5]}]\n",
        ["line 4: slices[0].sources[1].model: b is listed twice in this slice"],
    ),
    (
        "merge_method: passthrough\nslices:\n"
        "  - sources: [{model: b, name: x, layer_range: [0, 4]}]\n"
        "  - sources: [{model: b, name: y, layer_range: [0, 4]}]\n",
        ["line 4: slices[1].sources[0].name: b is called 'x' already"],
    ),
    # dtypes, tokenizer, chat template
    (HEAD + "dtype: bfloat\n", ["line 7: dtype: unknown dtype 'bfloat', did you mean 'bfloat16'?"]),
    (HEAD + "out_dtype: int64\n", ["line 7: out_dtype: int64 cannot hold weights"]),
    (
        HEAD + "tokenizer_source: union\ntokenizer: {source: union}\n",
        ["line 7: tokenizer_source: give either tokenizer_source or tokenizer"],
    ),
    (
        "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n"
        "tokenizer_source: base\n",
        ["line 3: tokenizer_source: 'base' means the base_model's tokenizer, and there is no base"],
    ),
    (
        HEAD + "tokenizer:\n  source: union\n  pad_to_multiple_of: 0\n",
        ["line 9: tokenizer.pad_to_multiple_of: must be at least 1, not 0"],
    ),
    (
        HEAD + "tokenizer:\n  tokens:\n    <a>: {source: mth}\n",
        [
            "line 9: tokenizer.tokens.<a>.source: 'mth' is no model of this merge, did you mean "
            "'math'?",
        ],
    ),
    (
        HEAD + "tokenizer:\n  tokens:\n    <a>: {source: math}\n    <b>: {source: {kind: zer}}\n"
        "    <c>: {source: {kind: model_token, model: math}}\n    <d>: {force: 1}\n",
        [
            "line 10: tokenizer.tokens.<b>.source.kind: must be one of model_token, zero, "
            "not 'zer', did you mean 'zero'?",
            "line 11: tokenizer.tokens.<c>.source: model_token needs either `token` or `token_id`",
            "line 12: tokenizer.tokens.<d>.force: must be true or false, not 1",
        ],
    ),
    (HEAD + "chat_template: chatm\n", ["line 7: chat_template: 'chatm' is neither a known chat"]),
    (HEAD + "chat_template: '{{ x }}'\n", ["line 7: chat_template: '{{ x }}' is neither"]),
    # router
    (
        HEAD + "router: {keep: maths}\n",
        ["line 7: router.keep: 'maths' is no model of this merge, did you mean 'math'?"],
    ),
    (HEAD + "router: {}\n", ["line 7: router: give either `merge_method` or `keep`"]),
    (
        HEAD + "router: {merge_method: liner}\n",
        ["line 7: router.merge_method: unknown merge method 'liner', did you mean 'linear'?"],
    ),
    (
        HEAD + "router: {merge_method: linear, parameters: {density: 1, normalize: 2}}\n",
        [
            "line 7: router.parameters.density: unknown parameter; 'linear' takes: weight",
            "line 7: router.parameters.normalize: normalize must be true or false, not 2",
        ],
    ),
    (
        HEAD + "router: {merge_method: slerp, parameters: {t: 0.5}}\n",
        ["line 4: models: 'slerp' merges 1 model besides the base, got 2: math, code"],
    ),
    (
        HEAD + "router: {keep: math, parameters: {weight: 1}}\n",
        ["line 7: router.parameters: `keep` copies a router and takes no parameters"],
    ),
    # data and calibration
    (
        HEAD + "calibration:\n  alpha: 0.5\n",
        ["line 7: calibration: needs `data`, the text that calibrates each of: math, code"],
    ),
    (
        HEAD + "calibration:\n  data: {maths: m.jsonl, code: c.jsonl}\n",
        ["line 8: calibration.data.maths: no model is called 'maths', did you mean 'math'?"],
    ),
    (
        HEAD + "calibration:\n  data: {math: m.jsonl}\n",
        ["line 8: calibration.data: no data for code"],
    ),
    (
        HEAD + "data: {math: m}\ncalibration: {}\n",
        ["line 7: data: no data for code"],
    ),
    (
        HEAD + "data: {mth: m}\n",
        ["line 7: data.mth: no model is called 'mth', did you mean 'math'"],
    ),
    (
        HEAD + "calibration:\n  data: {math: m, code: c}\n  weights: {maths: 2}\n",
        ["line 9: calibration.weights.maths: no model is called 'maths', did you mean 'math'?"],
    ),
    (
        HEAD + "calibration:\n  data: {math: m, code: c}\n  sources: [math, cod]\n",
        ["line 9: calibration.sources[1]: no model is called 'cod', did you mean 'code'?"],
    ),
    (
        HEAD + "calibration:\n  data: {math: [], code: [c, 3]}\n",
        [
            "line 8: calibration.data.math: must not be empty",
            "line 8: calibration.data.code[1]: expected a file name, not 3",
        ],
    ),
    (
        HEAD + f"calibration:\n  data: {{math: m, code: c}}\n  seed: {2**64}\n",
        ["line 9: calibration.seed: must be less than 4294967296, not 18446744073709551616"],
    ),
    (
        HEAD + "calibration:\n  data: {math: m, code: c}\n  alpha: 0.5\n  gamma: 0.1\n",
        ["line 10: calibration.gamma: alpha and gamma exclude each other: give one"],
    ),
    (
        HEAD + "calibration:\n  data: {math: m, code: c}\n  curvature: ful\n  rtol: 0\n"
        "  max_steps: 1.5\n  holdout: 1\n  layers: 5-2\n  device: gpu\n  strict: 'no'\n"
        "  alpha: .nan\n  seed: -1\n  stepps: 3\n  dtype: float8\n",
        [
            "line 9: calibration.curvature: must be one of full, diagonal, identity, not 'ful', "
            "did you mean 'full'?",
            "line 10: calibration.rtol: must be greater than 0, not 0",
            "line 11: calibration.max_steps: must be a whole number, not 1.5",
            "line 12: calibration.holdout: must be auto or a number from 0 to less than 1, not 1",
            "line 13: calibration.layers: layers '5-2': '5-2' runs backwards: write 2-5",
            "line 14: calibration.device: unknown device 'gpu': use auto, cpu, cuda or cuda:N",
            "line 15: calibration.strict: must be true or false, not 'no'",
            "line 16: calibration.alpha: must be a finite number, not nan",
            "line 17: calibration.seed: must be at least 0, not -1",
            "line 18: calibration.stepps: unknown key",
            "line 19: calibration.dtype: must be one of auto, float32",
        ],
    ),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_every_problem_is_said(problems, text, expected):
    found = problems(text)
    assert len(found) == len(expected), found
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)
    said = " ".join(found).lower()
    for foreign in ("pydantic", "value error", "input should", "validation", "errors.", "type="):
        assert foreign not in said


def test_problems_come_in_the_order_of_the_file(problems):
    text = HEAD + "dtype: x\nout_dtype: y\nchat_template: z\nzzz: 1\n"
    lines = [int(line.split()[1].rstrip(":")) for line in problems(text)]
    assert lines == [7, 8, 9, 10]


def test_faults_of_the_structure_come_first(problems):
    text = (
        "merge_method: ties\nbase_model: b\nmodels:\n"
        "  - {modle: a}\n"
        "  - {model: 3}\n"
        "  - {model: c, parameters: {density: 2, wieght: [1, x]}}\n"
    )
    assert [line.split(": ")[:2] for line in problems(text)] == [
        ["line 4", "models[0].modle"],
        ["line 4", "models[0].model"],
        ["line 5", "models[1].model"],
        ["line 6", "models[2].parameters.wieght[1]"],
    ]
    right = text.replace("modle: a", "model: a").replace("model: 3", "model: d").replace("x]", "2]")
    assert [line.split(": ")[:2] for line in problems(right)] == [
        ["line 6", "models[2].parameters.density"],
        ["line 6", "models[2].parameters.wieght"],
    ]


IGNORED_BY_MERGEKIT = [
    HEAD + "normalize: true\n",
    HEAD + "quirks: {}\n",
    HEAD + "name: x\n",
    HEAD.replace("weight: 0.5", "weight: 0.5, zzz: 1"),
    HEAD.replace("name: math}", "name: math, parameters: {normalize: 1}}"),
    HEAD.replace("name: math}", "name: math, parameters: {wieght: 1}}"),
    HEAD + "  - {model: ./base, parameters: {weight: 1}}\n",
    HEAD.replace("0.5", "[{value: 1}, {filter: mlp, value: 2}]"),
    HEAD + "  - model: {model: {path: x}, override_architecture: Y}\n",
    "merge_method: passthrough\nslices:\n"
    "  - {sources: [{model: a, layer_range: [0, 4]}], residual_weight: 0.5}\n",
]


@pytest.mark.parametrize("text", IGNORED_BY_MERGEKIT)
def test_lenient_warns_where_mergekit_is_silent(load, problems, text):
    strict = problems(text)
    loaded = load(text, lenient=True)
    assert strict
    assert list(loaded.warnings) == [f"{line} (ignored)" for line in strict]


@pytest.mark.parametrize(
    ("changed", "which"),
    [
        ({"weight: 0.5": "weight: 0.5, zzz: 1"}, "this"),
        ({"weight: 0.5": "weight: 0.5, zzz: 1, yyy: 2"}, "these"),
        ({"weight: 0.5": "weight: x, zzz: 1"}, "1 of these"),
    ],
)
def test_the_hint_names_lenient_once_where_it_helps(load, changed, which):
    text = HEAD
    for old, new in changed.items():
        text = text.replace(old, new)
    with pytest.raises(ConfigError) as error:
        load(text, lenient=False)
    hint = f"mergekit ignores {which}: --lenient warns instead"
    assert error.value.hint == hint
    for lenient in (None, True):  # unavailable, or given already
        with pytest.raises(ConfigError) as error:
            load(text.replace("weight: ", "weight: x"), lenient=lenient)
        assert error.value.hint is None


def test_lenient_takes_the_ineffective_out(load):
    loaded = load(HEAD.replace("weight: 0.5", "weight: 0.5, zzz: 1"), lenient=True)
    assert dict(loaded.config.parameters) == {"weight": 0.5}


def test_lenient_ignores_a_key_called_filter_and_no_more(load):
    loaded = load(HEAD + "filter: 3\n", lenient=True)
    assert [len(loaded.warnings), len(loaded.config.models)] == [1, 2]
    loaded = load(HEAD.replace("{model: ./math", "{filter: mlp, model: ./math"), lenient=True)
    assert [len(loaded.warnings), len(loaded.config.models)] == [1, 2]


def test_lenient_never_forgives_real_errors(problems):
    for text, expected in WRONG:
        soft = (
            "unknown key",
            "unknown parameter",
            "no effect",
            "not supported",
            "belongs to files",
            "whole method",
        )
        real = [line for line in expected if not any(word in line for word in soft)]
        if real:
            assert problems(text, lenient=True), text


def test_a_misspelt_required_parameter_is_an_error_even_when_lenient(problems):
    text = TIES + "models:\n  - {model: a, parameters: {wieght: 1}}\n"
    assert len(problems(text)) == 1
    assert problems(text, lenient=True) == [
        "line 1: 'ties' needs the parameter 'weight', which is not set for a: give it under each "
        "model or in the top `parameters:`"
    ]


def test_reads_files_text_and_mappings(load, tmp_path):
    path = tmp_path / "merge.yml"
    path.write_text("\ufeff" + HEAD, encoding="utf-8")
    data = {
        "merge_method": "ties",
        "base_model": "./base",
        "parameters": {"weight": 0.5},
        "models": [
            {"model": "./math", "name": "math"},
            {"model": ModelRef("./code"), "name": "code"},
        ],
    }
    assert load(path).config == load(str(path)).config == load(HEAD).config == load(data).config


def test_a_mapping_is_left_as_it_was(problems):
    data = {"merge_method": "ties", "zzz": 1, "models": [{"model": 3}, {"model": "a"}]}
    found = problems(data)
    assert data == {"merge_method": "ties", "zzz": 1, "models": [{"model": 3}, {"model": "a"}]}
    assert found[0].startswith("zzz: unknown key")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: None, "No such file"),
        (lambda p: p.mkdir(), "Is a directory"),
        (lambda p: p.write_bytes(b"\xff\xfe\x00"), "not UTF-8 text"),
        (lambda p: p.write_text(""), "the file is empty"),
        (lambda p: p.write_text("a: [\n"), "not valid YAML"),
    ],
)
def test_unreadable_files(load, tmp_path, make, said):
    path = tmp_path / "merge.yml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_null_means_not_given(load):
    assert load(HEAD + "slices:\ndtype: ~\nchat_template:\n").config == load(HEAD).config


def test_an_empty_block_means_its_defaults(load, problems):
    data = "data: {math: m.jsonl, code: c.jsonl}\n"
    assert (
        load(HEAD + data + "calibration:\n").config == load(HEAD + data + "calibration: {}").config
    )
    assert load(HEAD + data + "refit:\n").config == load(HEAD + data + "refit: {}").config
    chain = load(HEAD + data + "distill:\nrefit:\ncalibration:\n").repairs
    assert [one.repair.key for one in chain] == ["calibration", "refit", "distill"]
    assert problems(HEAD + "calibration:\n") == [
        "line 7: calibration: needs `data`, the text that calibrates each of: math, code"
    ]
    assert problems(HEAD + "router:\n") == ["line 7: router: give either `merge_method` or `keep`"]
