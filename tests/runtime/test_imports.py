"""What transformers imports and we hardly ever use is put off, and there when it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from moemerge.runtime import imports

PACKAGE = {
    "__init__.py": "from slow.inner import Kind, double\nlimit = 7\n",
    "inner.py": """
class Kind:
    name = "kind"

def double(x):
    return 2 * x

def mark(*args, **options):
    raise RuntimeError("a decorator of the real package")
""",
}
USER = """
import slow
import slow.inner as inner
from slow import Kind, double

@inner.mark
def plain(x):
    return x + 1

@inner.mark(often=True)
def with_options(x: Kind | None = None) -> "list[Kind]":
    return x

def is_kind(x):
    return isinstance(x, Kind)
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A module that was imported while the package that it uses was put off."""
    (tmp_path / "slow").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "slow" / name).write_text(text)
    (tmp_path / "slow_user.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    with imports.put_off(["slow", "not_installed"]):
        import slow_user
    assert "slow" not in sys.modules
    yield slow_user
    for name in ("slow", "slow.inner", "slow_user"):
        sys.modules.pop(name, None)


def test_nothing_is_an_instance_before_the_package_is_loaded(user) -> None:
    assert not user.is_kind(3)
    assert "slow" not in sys.modules


def test_functions_are_left_as_they_are_by_decorators(user) -> None:
    assert user.plain(1) == 2
    assert user.with_options(5) == 5
    assert "slow" not in sys.modules


def test_what_is_used_is_loaded(user) -> None:
    assert user.double(4) == 8  # a function that was imported by name
    assert user.slow.limit == 7  # and one through its module
    assert user.Kind.name == "kind"
    import slow

    assert isinstance(user.Kind(), slow.Kind)
    assert user.is_kind(slow.Kind())
    assert not user.is_kind(3)


def test_a_package_that_is_not_installed_cannot_be_imported() -> None:
    with imports.put_off(["not_installed"]), pytest.raises(ModuleNotFoundError):
        __import__("not_installed")


def test_nor_can_a_module_that_a_package_lacks(user) -> None:
    with imports.put_off(["slow"]), pytest.raises(ModuleNotFoundError):
        __import__("slow.missing")
    with imports.put_off(["slow"]):
        __import__("slow.inner")


def test_what_is_loaded_already_stays(tmp_path) -> None:
    import json as before

    with imports.put_off(["json"]):
        import json
    assert json is before


def test_a_base_class_cannot_be_put_off(user) -> None:
    with imports.put_off(["slow"]):
        import slow

        with pytest.raises(ImportError, match=r"slow\.Kind is needed as a base class"):

            class Own(slow.Kind):
                pass


def test_a_callers_process_is_left_alone() -> None:
    before = set(sys.meta_path)
    imports.import_transformers()
    assert set(sys.meta_path) == before


MODEL = """
import torch
import transformers.models.olmoe.modeling_olmoe as olmoe
config = olmoe.OlmoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_experts=4,
    num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2, pad_token_id=0
)
with torch.random.fork_rng():
    torch.manual_seed(0)
    model = olmoe.OlmoeForCausalLM(config).eval()
ids = torch.arange(1, 9)[None]
logits = model(ids).logits.sum().item().hex()
# CHECKED
made = model.generate(ids, max_new_tokens=2, do_sample=False).tolist()
"""
CHECK = """
loaded = [name for name in (*PUT_OFF, "sympy") if name in sys.modules]
assert not loaded, loaded
assert not any(isinstance(module, StandIn) for module in sys.modules.values())
"""
IN_OUR_PROCESS = f"""
import sys
from moemerge.runtime.process import own_process
own_process()
import moemerge.features.loading
from moemerge.runtime.imports import PUT_OFF, StandIn
{MODEL.replace("# CHECKED", CHECK)}
print(logits, made)
# Whoever wants the compiler has it.
assert torch._dynamo.is_compiling() is False
import torch.distributed.tensor
assert isinstance(torch.distributed.tensor.DTensor, type)
"""


def test_models_compute_the_same_without_what_is_put_off() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_OUR_PROCESS], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here: dict[str, Any] = {}
    exec(MODEL, here)
    assert done.stdout == f"{here['logits']} {here['made']}\n"


SKELETON = """
import sys
from moemerge.runtime.process import own_process
own_process()
import torch
from moemerge.checkpoint.reader import Checkpoint
from moemerge.features.loading import build_skeleton
from moemerge.runtime.imports import PUT_OFF
draw = torch.Tensor.normal_
model = build_skeleton(Checkpoint.open(sys.argv[1]), torch.float32)
assert all(parameter.is_meta for parameter in model.parameters())
assert torch.Tensor.normal_ is draw
assert torch.zeros(8).normal_().any()  # elsewhere numbers are drawn as ever
from moemerge.features.fused import is_plain_norm
norm = model.model.norm
assert norm.weight.is_meta
assert is_plain_norm(norm, torch.device("cpu"), torch.bfloat16)
loaded = [name for name in (*PUT_OFF, "sympy") if name in sys.modules]
assert not loaded, loaded
"""


def test_a_model_is_built_without_what_is_put_off(zoo_folder, tmp_path) -> None:
    # transformers imports these where they are installed, and then nothing may load them.
    for name, package in (("torchvision", "torchvision"), ("sklearn", "scikit_learn")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('loaded')")
        (tmp_path / name / "transforms").mkdir()
        for module in ("io", "metrics", "transforms/functional"):
            (tmp_path / name / f"{module}.py").touch()
        (tmp_path / f"{package}-9.0.dist-info").mkdir()
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 9.0\n"
        (tmp_path / f"{package}-9.0.dist-info" / "METADATA").write_text(about)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SKELETON, str(zoo_folder("olmoe"))],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
