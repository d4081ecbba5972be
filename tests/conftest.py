"""Fixtures that all tests share: tiny checkpoints, built once per session."""

import gc
import os
import shutil
import signal

import pytest

# Imported modules stay. Searching them for garbage again and again took longer than many tests, so
# collection is off until all tests are imported, and then ignores what was imported.
gc.disable()
# Waiting for the disk took a tenth of the tests' time, and no test cuts the power.
os.fsync = os.fdatasync = lambda fd: None

import torch  # noqa: E402

import multimodal_zoo  # noqa: E402
import zoo  # noqa: E402
from moemerge.families import families  # noqa: E402
from moemerge.merging import METHODS, WRAPPERS  # noqa: E402
from repairs.calibration import cases  # noqa: E402


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="session")
def _imports_are_no_garbage():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A test run in the background of a script ignores SIGINT, and so would its children."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _registries():
    """What a test registers, others do not see, in whatever order they run."""
    tables = (
        METHODS._entries,
        WRAPPERS._entries,
        families.BY_MODEL_TYPE,
        families._BY_CLASS,
    )
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.fixture(autouse=True)
def _mkldnn():
    """A bfloat16 product on a CPU without such instructions turns mkldnn off for the process.

    Products in float32 would then differ in their last bits from those of other processes.
    """
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory):
    """`zoo_folder("olmoe", seed=1, fused=True)`: a family's tiny checkpoint; read it only.

    With `tokenizer=True` it has a tokenizer, too.
    """
    built = {}

    def folder(model_type, *, tokenizer=False, **options):
        if not zoo.installed(model_type):
            pytest.skip(f"the installed transformers has no {model_type}")
        named = sorted((name, repr(value)) for name, value in options.items())
        key = (model_type, tokenizer, *named)
        if key not in built:
            path = tmp_path_factory.mktemp(model_type)
            if tokenizer:
                shutil.copytree(folder(model_type, **options), path, dirs_exist_ok=True)
                zoo.tiny_tokenizer(path)
            else:
                whole = model_type in multimodal_zoo.FAMILIES
                (multimodal_zoo if whole else zoo).build(model_type, path, **options)
            built[key] = path
        return built[key]

    return folder


@pytest.fixture
def models(zoo_folder, tmp_path):
    """An OLMoE, which is read only, and two fine-tunes of it."""
    base = zoo_folder("olmoe")
    return [base, *(zoo.perturb(base, tmp_path / f"m{seed}", seed) for seed in (1, 2))]


@pytest.fixture(scope="session")
def case_of(zoo_folder, tmp_path_factory):
    """`case_of("olmoe", sources=3, dtype=torch.bfloat16)`: a merge to repair; read it only."""
    built = {}

    def case(family, *, sources=2, scale=0.3, rows=14, **options):
        shape = {"sources": sources, "scale": scale, "rows": rows}
        key = (family, *sorted((k, repr(v)) for k, v in {**shape, **options}.items()))
        if key not in built:
            base = zoo_folder(family, **options)
            built[key] = cases.make_case(base, tmp_path_factory.mktemp(family), **shape)
        return built[key]

    return case


@pytest.fixture(scope="session")
def case(case_of):
    """Two fine-tunes of OLMoE to merge and repair."""
    return case_of("olmoe")
