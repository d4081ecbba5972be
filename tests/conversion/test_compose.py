"""`moemerge compose`: the tensors of each target, routers from prompts, and what is refused."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

import moemerge
import terminal
import zoo
from moemerge.conversion.compose_targets import TARGETS
from moemerge.errors import MoeMergeError

MATH = ["compute one plus two", "what is seven times nine"]
CODE = ["def return print", "for x in range"]
DENSE = sorted({kind for target in TARGETS for kind in target.dense})


@pytest.fixture
def build(zoo_folder):
    """`build("llama", seed=1)`: a tiny dense model with a tokenizer; read it only."""

    def folder(kind, **options):
        return zoo_folder(kind, tokenizer=True, **{"num_hidden_layers": 2, **options})

    return folder


def config_of(base, *experts, **values):
    prompts = [MATH, CODE]
    listed = [
        {"source_model": str(model), "positive_prompts": prompts[n % 2]}
        for n, model in enumerate(experts)
    ]
    return {"base_model": str(base), "experts": listed, **values}


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 40).reshape(1, -1), use_cache=False).logits


@pytest.mark.parametrize("kind", DENSE)
def test_a_model_composed_of_itself_computes_the_same(kind, build, tmp_path):
    dense = build(kind, num_experts=1)  # as some dense configs still say
    config = config_of(dense, dense, dense, dense)
    if kind == "qwen2":  # its MoE always has a shared expert
        shared = {"source_model": str(dense), "positive_prompts": MATH, "residual_scale": 1e-9}
        config["shared_experts"] = [shared]
    report = moemerge.compose(config, tmp_path / "out", device="cpu")
    zoo.assert_loads(tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(dense), rtol=1e-4, atol=1e-5)
    assert report.notices  # the first and the third expert have the same prompts


def unit(row):
    return row / row.norm()


def test_tensors_come_from_their_models_and_routers_from_prompts(build, tmp_path):
    base, math, code = (build("llama", seed=seed) for seed in range(3))
    config = config_of(base, math, code, dtype="bfloat16")
    config["experts"][0]["negative_prompts"] = ["write code"]
    moemerge.compose(config, tmp_path / "hidden", device="cpu")
    ours = zoo.tensors(tmp_path / "hidden")
    for number, source in enumerate((math, code)):
        theirs = zoo.tensors(source)
        for spelled, name in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            own = ours[f"model.layers.1.block_sparse_moe.experts.{number}.{spelled}.weight"]
            assert torch.equal(own, theirs[f"model.layers.1.mlp.{name}_proj.weight"].bfloat16())
    for name, tensor in zoo.tensors(base).items():
        assert ".mlp." in name or torch.equal(ours[name], tensor.bfloat16())

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    ids = {text: tokenizer(text)["input_ids"] for text in (*MATH, *CODE, "write code")}

    def last(texts, layer):
        with torch.no_grad():
            states = [
                model(torch.tensor([ids[text]]), output_hidden_states=True).hidden_states
                for text in texts
            ]
        return torch.stack([s[layer][0, -1] for s in states]).mean(dim=0)

    for layer in range(2):
        router = ours[f"model.layers.{layer}.block_sparse_moe.gate.weight"].float()
        against = last(MATH, layer) - last(["write code"], layer)
        expected = torch.stack([unit(against), unit(last(CODE, layer))])
        torch.testing.assert_close(router, expected, rtol=0, atol=4e-3)  # bfloat16

    config |= {"gate_mode": "cheap_embed", "dtype": "float32"}
    moemerge.compose(config, tmp_path / "cheap", device="cpu")
    table = zoo.tensors(base)["model.embed_tokens.weight"]

    def embedded(texts):
        return unit(table[[token for text in texts for token in ids[text]]].sum(dim=0))

    router = zoo.tensors(tmp_path / "cheap")["model.layers.1.block_sparse_moe.gate.weight"]
    expected = torch.stack([unit(embedded(MATH) - embedded(["write code"])), embedded(CODE)])
    torch.testing.assert_close(router, expected, rtol=0, atol=1e-6)


def test_a_shared_expert_is_scaled_and_gated(build, tmp_path):
    base, math = build("qwen2"), build("qwen2", seed=1)
    config = config_of(base, math, base, gate_mode="cheap_embed", architecture="qwen")
    shared = {"source_model": str(math), "residual_scale": 0.1}
    config["shared_experts"] = [shared]
    with pytest.raises(MoeMergeError, match="positive_prompts"):
        moemerge.compose(config, tmp_path / "out")
    config["shared_experts"] = [{**shared, "positive_prompts": ["please answer"]}]
    moemerge.compose(config, tmp_path / "out", device="cpu")
    ours, theirs = zoo.tensors(tmp_path / "out"), zoo.tensors(math)
    for name, factor in (("up_proj", 1.0), ("down_proj", 0.1)):
        own = ours[f"model.layers.0.mlp.shared_expert.{name}.weight"]
        torch.testing.assert_close(own, theirs[f"model.layers.0.mlp.{name}.weight"] * factor)
    assert ours["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, zoo.HIDDEN)
    zoo.assert_loads(tmp_path / "out")


def test_the_command_writes_all_files_and_repeats(build, tmp_path):
    base, math = build("llama"), build("llama", seed=1)
    file, out = tmp_path / "moe.yml", tmp_path / "out"
    file.write_text(
        f"base_model: {base}\ngate_mode: random\nexperts:\n"
        f"- source_model: {base}\n- source_model: {math}\n  positive_prompts: []\n"
    )
    terminal.succeed("compose", file, out, "--json", "-")
    report = json.loads((out / "moemerge_report.json").read_text())["composition"]
    assert report["experts"] == [str(base), str(math)]
    assert "expert 1: `" in (out / "README.md").read_text()
    again = tmp_path / "again"
    result = terminal.succeed("compose", out / "moemerge_config.yml", again, "--sample", "compute")
    samples = [line.split(": 'compute' -> ")[0] for line in result.stdout.splitlines()[-4:]]
    assert samples == ["OUT", "base", "expert 0", "expert 1"]
    zoo.assert_same(out, again)
    result = terminal.moemerge("compose", file, out)
    assert result.exit_code == 3
    assert "exists" in result.output


def test_deepseek_is_written_for_its_own_code(build, tmp_path):
    base, math = build("llama"), build("llama", seed=1)
    config = config_of(base, math, base, gate_mode="random")
    config["shared_experts"] = [{"source_model": str(base), "residual_scale": 0.5}]
    report = moemerge.compose(config, tmp_path / "out", device="cpu")
    assert "trust_remote_code" in report.notices[0]
    made = zoo.read_config(tmp_path / "out")
    assert (made["model_type"], made["n_shared_experts"]) == ("deepseek", 1)
    ours, theirs = zoo.tensors(tmp_path / "out"), zoo.tensors(base)
    for root, factor in (("experts.1", 1.0), ("shared_experts", 0.5)):
        own = ours[f"model.layers.0.mlp.{root}.down_proj.weight"]
        torch.testing.assert_close(own, theirs["model.layers.0.mlp.down_proj.weight"] * factor)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"experts_per_token": 3}, "but there are 2 experts"),
        ({"gate_mode": "hiden"}, "must be one of"),
        ({"gate_mod": "random"}, "did you mean"),
        ({"architecture": "qwen"}, "cannot be composed of llama"),
        ({"other": {"num_hidden_layers": 3}}, "has 3 layers"),
        ({"other": {"intermediate_size": 32}}, "experts of a layer have the same size"),
        ({"other": {"hidden_act": "gelu"}}, "activation"),
        ({"base": {"attention_bias": True}}, "no place for"),
        ({"base": {"mlp_bias": True}}, "three matrices"),
        ({"shared_experts": "base", "architecture": "mixtral"}, "has no shared experts"),
        ({"architecture": "deepseek", "gate_mode": "fit"}, "trust_remote_code"),
        ({"no_prompts": True}, "positive_prompts"),
        ({"base": {"vocab_size": 12}, "gate_mode": "cheap_embed"}, "embedding has 12 rows"),
        ({"base": {"vocab_size": 12}, "gate_mode": "fit"}, "embedding has 12 rows"),
    ],
)
def test_unusable_requests_are_refused(values, words, build, tmp_path):
    values = dict(values)
    base = build("llama", **values.pop("base", {}))
    other = build("llama", **values.pop("other", {}))
    config = config_of(base, base, other)
    if values.pop("no_prompts", None):
        del config["experts"][1]["positive_prompts"]
    if values.pop("shared_experts", None):
        config["shared_experts"] = [{"source_model": str(base)}]
    with pytest.raises(MoeMergeError, match=words):
        moemerge.compose({**config, **values}, tmp_path / "out", device="cpu")
    assert not list(tmp_path.iterdir())


# --- fitted routers, added experts, merged attention ----------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Rows of two domains with different words."""
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    words = zoo._WORDS.split()
    files = {}
    for name, own in {"math": words[:20], "code": words[20:40]}.items():
        rows = [{"text": " ".join(rng.choices(own, k=24))} for _ in range(110)]
        files[name] = str(zoo.write_rows(folder / f"{name}.jsonl", rows))
    return files


def fit_config(base, experts, texts):
    listed = [{"source_model": str(model), "data": texts[n]} for n, model in experts.items()]
    return {"base_model": str(base), "gate_mode": "fit", "experts": listed}


def test_fitted_routers_send_text_to_the_expert_of_its_domain(build, texts, tmp_path):
    base, math, code = (build("llama", seed=seed) for seed in range(3))
    config = fit_config(base, {"math": math, "code": code}, texts)
    report = moemerge.compose(config, tmp_path / "out", device="cpu")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    zoo.assert_loads(tmp_path / "out")
    # Measured in transformers, on the rows: the features are those of the composed model.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    seen = {}
    for path, module in model.named_modules():
        if path.endswith("mlp.gate"):
            module.register_forward_pre_hook(lambda m, args, p=path: seen.__setitem__(p, args[0]))
    for expert, name in enumerate(("math", "code")):
        right = []
        for row in Path(texts[name]).read_text().splitlines()[:20]:
            with torch.no_grad():
                model(torch.tensor([tokenizer(json.loads(row)["text"])["input_ids"]]))
            x = seen["model.layers.1.mlp.gate"].reshape(-1, zoo.HIDDEN)[1:]  # the first is the bos
            router = model.get_parameter("model.layers.1.mlp.gate.weight")
            right.append(float(((x @ router.T).argmax(dim=1) == expert).float().mean()))
        figures = report.routers[1]["domains"][f"expert {expert}"]
        assert sum(right) / len(right) > 0.8
        assert figures["held_out"]["own"] > 0.75


@pytest.mark.parametrize("fused", [False, True])
def test_added_experts_keep_the_routing_of_the_base_on_its_text(fused, build, texts, tmp_path):
    shape = {"num_hidden_layers": 2, "intermediate_size": 24, "moe_intermediate_size": 24}
    base = zoo.build("qwen3_moe", tmp_path / "base", fused=fused, mlp_only_layers=[0], **shape)
    zoo.tiny_tokenizer(base)
    dense = build("qwen3", **shape)
    config = fit_config(base, {"math": dense}, texts)
    with pytest.raises(MoeMergeError, match="base_data is missing"):
        moemerge.compose(config, tmp_path / "out")
    config["base_data"] = texts["code"]
    report = moemerge.compose(config, tmp_path / "out", device="cpu")
    figures = report.routers[0]["domains"]
    assert figures["expert 8"]["own"] > 0.8
    assert figures["base"]["own"] > 0.8  # the first expert is the same as before
    assert figures["base"]["kl"] < 0.2  # of the whole distribution, the new expert included
    zoo.assert_loads(tmp_path / "out")
    ours, theirs, new = (zoo.tensors(f) for f in (tmp_path / "out", base, dense))
    for name, tensor in theirs.items():  # also the old rows of the router
        assert torch.equal(ours[name][: len(tensor)], tensor)
    mlp = {p: new[f"model.layers.1.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")}
    root = "model.layers.1.mlp.experts"
    if fused:
        both = torch.cat([mlp["gate"], mlp["up"]])
        assert torch.equal(ours[f"{root}.gate_up_proj"][8], both)
        assert torch.equal(ours[f"{root}.down_proj"][8], mlp["down"])
    else:
        for name, tensor in mlp.items():
            assert torch.equal(ours[f"{root}.8.{name}_proj.weight"], tensor)


def test_attention_may_be_merged(build, tmp_path):
    base, math, code = (build("llama", seed=seed) for seed in range(3))
    models = [{"model": str(m), "parameters": {"weight": 0.5}} for m in (math, code)]
    config = config_of(base, math, code, gate_mode="random")
    config["attention"] = {"merge_method": "linear", "models": models}
    report = moemerge.compose(config, tmp_path / "out", device="cpu")
    assert report.attention == "linear"
    ours = zoo.tensors(tmp_path / "out")
    name = "model.layers.0.self_attn.q_proj.weight"
    mean = (zoo.tensors(math)[name] + zoo.tensors(code)[name]) / 2
    torch.testing.assert_close(ours[name], mean)
    expert = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    assert torch.equal(ours[expert], zoo.tensors(code)["model.layers.0.mlp.gate_proj.weight"])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
