"""The tables about refit and about every method, as many of their cells as a time limit allows, the
weightiest first.

    python benchmarks/evidence.py OUT --device cuda --work /dev/shm --limit 590
    python benchmarks/evidence.py OUT --device cpu --preset tiny --seeds 0-1 --limit 3600

`moemerge testbed table refit ...` trains first and measures then; here sets are measured as soon as
they are trained, while the next architecture's are, and at the limit all stops: OUT has
cells.jsonl, which a later run (of this, or of the command with the same scale) goes on with, and
the tables of what was measured (results.md, index.html). Order: weight averaging of OLMoE, soft
then plain; the same of Qwen3-MoE; λ, text and parts; every method; WUDI and RegMean; three models.
"""

from __future__ import annotations

import time

BEGIN = time.time()

import argparse  # noqa: E402
import contextlib  # noqa: E402
import importlib  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import asdict, replace  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from moemerge.experiments.cells import SetCells, work_of  # noqa: E402
from moemerge.experiments.journal import CELLS, SECONDS, CellJournal  # noqa: E402
from moemerge.experiments.report import ALL_TABLES, PAGE, write_report  # noqa: E402
from moemerge.experiments.tables import EXACT_BASE, REFIT_FIXED  # noqa: E402
from moemerge.experiments.work import Outcome, Workers, WorkItem, run_work  # noqa: E402
from moemerge.runtime.devices import resolve_device  # noqa: E402
from moemerge.runtime.progress import Silent  # noqa: E402
from moemerge.testbed.experiments.ablations import Scope  # noqa: E402
from moemerge.testbed.experiments.bench import Bench, Scale  # noqa: E402
from moemerge.testbed.experiments.catalogue import EXPERIMENTS  # noqa: E402
from moemerge.testbed.experiments.merges import EVERY  # noqa: E402
from moemerge.testbed.experiments.recipes import Cell, SetKey  # noqa: E402
from moemerge.testbed.experiments.run import (  # noqa: E402
    Plan,
    TableRequest,
    left_to_measure,
    make_plan,
    set_folder,
)
from moemerge.testbed.tasks import DOMAINS  # noqa: E402
from moemerge.testbed.training import Job, train_many  # noqa: E402

TABLES = ("refit", "refit-qwen3", "refit-ridge", "refit-text", "refit-parts", "refit-three")
METHODS = ("average", "wudi", "regmean")
OF_METHODS = ("methods", "methods-three")  # with every method there is
REGIMES = ("soft", "plain")
ARCHITECTURES = ("olmoe", "qwen3_moe")
SLOW = ("adamerging",)  # a method whose cells come last
ENDED = "ended"  # a trainer's last word, in the folder of its sets
TEST_PROBLEMS = 60  # a set's own accuracy is not what is looked at here
NEEDED = 8e9  # bytes: twenty sets of the small preset, what trains, and models being measured
WRITING = 6.0  # seconds kept for the tables
TIME_IS_UP = "the time limit"
# Of clients of one GPU: the training that everything waits for comes before all else.
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="for sets and models (default: OUT/work)")
    parser.add_argument("--limit", type=float, default=225.0, help="seconds from the start")
    parser.add_argument("--jobs", type=int, help="default: a worker for each core not training")
    parser.add_argument("--problems", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps-scale", type=float, default=1.0)
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--first", nargs="+", default=[], metavar="TABLE", help="before all else")
    parser.add_argument("--no-mps", action="store_true")
    parser.add_argument("--train", choices=ARCHITECTURES, help=argparse.SUPPRESS)
    parser.add_argument("--after", choices=ARCHITECTURES, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        keep_to(args.core)
        train(request_of(args), args.train, args.after)
    else:
        args.work = roomy(args.work)
        measure(args)


def request_of(args: argparse.Namespace) -> TableRequest:
    first, _, last = args.seeds.partition("-")
    work = (args.work or args.out) / "moemerge-evidence"
    held_out = min(Scale.held_out, args.problems)
    return TableRequest(
        TABLES,
        args.out,
        preset=args.preset,
        regimes=REGIMES,
        seeds=tuple(range(int(first), int(last or first) + 1)),
        sets=work / "sets",
        work=work,
        methods=METHODS,
        device=args.device,
        jobs=args.jobs,
        scale=Scale(args.problems, held_out, args.rows, args.tuning_steps),
        steps_scale=args.steps_scale,
    )


def roomy(folder: Path | None) -> Path | None:
    """Or the usual place for temporary files, where a folder has no room for all sets."""
    if folder is None or not folder.exists() or shutil.disk_usage(folder).free >= NEEDED:
        return folder
    return Path(tempfile.gettempdir())


def models_of(request: TableRequest) -> Path:
    assert request.work is not None
    return request.work / "models"


def say(text: str) -> None:
    print(f"{time.time() - BEGIN:6.1f} s  {text}", flush=True)


# --- training, in processes of its own ----------------------------------------------------------


class Told(Silent):
    def note(self, message: str) -> None:
        say(message)


def train(request: TableRequest, arch: str, after: str | None) -> None:
    """All sets of an architecture, soft ones first, each written as soon as it is done; once those
    of another are, for two at a time share the GPU's time and both end late."""
    assert request.sets is not None
    while after and not (request.sets / f"{after}.{ENDED}").exists():
        time.sleep(0.2)
    jobs = [
        Job(
            set_folder(request, SetKey(arch, request.preset, regime, seed)),
            request.preset,
            regime,
            arch,
            seed,
            DOMAINS,
            request.steps_scale,
        )
        for regime in request.regimes
        for seed in request.seeds
    ]
    try:
        train_many(
            jobs,
            device=request.device,
            progress=Told(),
            resume=True,
            test_problems=TEST_PROBLEMS,
        )
        say("all sets are trained")
    finally:
        (request.sets / f"{arch}.{ENDED}").touch()


def start_training(
    args: argparse.Namespace, request: TableRequest, archs: Sequence[str]
) -> list[subprocess.Popen[bytes]]:
    assert request.sets is not None
    request.sets.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    spare = cores[-len(archs) :] if len(cores) > 2 * len(archs) else []
    trainers = []
    for arch in archs:
        (request.sets / f"{arch}.{ENDED}").unlink(missing_ok=True)
    for number, arch in enumerate(archs):
        environment = {**os.environ, PRIORITY: "0" if number == 0 else "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--train", arch]
        command += ["--work", str(args.work)] if args.work else []
        command += ["--after", archs[number - 1]] if number else []
        if spare:  # a core of its own, which no worker uses
            command += ["--core", str(spare[number])]
        log = (args.out / f"training-{arch}.log").open("wb")
        trainers.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
    if spare:
        os.sched_setaffinity(0, cores[: -len(spare)])
    return trainers


def keep_to(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, [core])
        torch.set_num_threads(1)


# --- measuring ----------------------------------------------------------------------------------


def wait_for_sets(folders: Sequence[Path], ended: Path) -> None:
    """Until all are trained: a worker sleeps here, and what needs the sets waits for its end."""
    while not all(folder.exists() for folder in folders):
        if ended.exists() and not all(folder.exists() for folder in folders):
            raise RuntimeError(f"training ended without {folders[0].name} and its like")
        time.sleep(0.2)


def warm_up(device: str) -> None:
    """What a worker's first item would wait for: imports, a context, the libraries it loads."""
    for name in ("calibration.run", "refitting.run", "diagnosis.run", "features.loading"):
        importlib.import_module(f"moemerge.{name}")
    importlib.import_module("transformers.models.olmoe.modeling_olmoe")
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    some = torch.eye(64, device=resolve_device(device), dtype=torch.float64)
    torch.cholesky_solve(some @ some, torch.linalg.cholesky(some)).sum().item()
    time.sleep(1.0)  # so that nobody does it twice


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def measure(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    archs = args.arch or list(ARCHITECTURES)
    with gpu_shared(args):
        request = request_of(args)
        trainers = start_training(args, request, archs)
        every = replace(request, experiments=OF_METHODS, methods=())
        plans = make_plan(request), make_plan(every)
        journal = CellJournal(request.out, asdict(request.scale))
        gates, items = items_of(plans, journal, archs, weights(args.first))
        alarm = WorkItem(TIME_IS_UP, sleep_until, (BEGIN + args.limit - WRITING,), rank=(-1,))
        say(f"{sum(': measure ' in item.key for item in items)} cells to measure")
        jobs = args.jobs or len(os.sched_getaffinity(0))
        warming = [
            WorkItem(f"warm up {n}", warm_up, (args.device,), rank=(-1,)) for n in range(jobs)
        ]
        workers = Workers(jobs + len(gates) + 1)
        outcomes = run_work([alarm, *gates, *warming, *items], workers)
        follow(outcomes, journal, len(items) + len(gates) + jobs)
        write_tables(plans, journal)
        for trainer in trainers:
            trainer.kill()
        for worker in multiprocessing.active_children():
            worker.kill()
        shutil.rmtree(models_of(request), ignore_errors=True)  # the sets stay, for a later run
    say("done")
    sys.stdout.flush()
    os._exit(0)  # nothing is waited for that may hang: all that counts is on disk


def follow(outcomes: Iterator[Outcome], journal: CellJournal, count: int) -> None:
    """Note what ends, until all or the time has ended."""
    left, cells, failures = count, 0, 0
    for outcome in outcomes:
        key = outcome.item.key
        if key == TIME_IS_UP:
            say(f"the time is up; {left} items are left")
            return
        left -= 1
        if outcome.error is None:
            journal.add_seconds(key, outcome.seconds, outcome.cpu_seconds)
            if ": measure " in key:
                journal.add(*outcome.result)
                cells += 1
                if cells % 20 == 0:
                    say(f"{cells} cells; the last: {key}")
        elif not isinstance(outcome.error, str):
            failures += 1
            say(f"failed: {key}: {type(outcome.error).__name__}: {outcome.error}")
        elif ": measure " in key:
            failures += 1
        if left == 0:
            say(f"all is measured; {failures} failures")
            return


def items_of(
    plans: Sequence[Plan],
    journal: CellJournal,
    archs: Sequence[str],
    order: Sequence[tuple[str, set[str]]],
) -> tuple[list[WorkItem], list[WorkItem]]:
    """A gate for each regime of an architecture, and all items of its sets behind it."""
    request = plans[0].request
    assert request.sets is not None
    left: dict[SetKey, dict[str, Cell]] = {}
    for plan in plans:
        for key, some in left_to_measure(plan, journal).items():
            left.setdefault(key, {}).update({cell.name: cell for cell in some})
    gates: dict[tuple[str, str], list[Path]] = {}
    items: list[WorkItem] = []
    for number, (key, named) in enumerate(left.items()):
        if key.arch not in archs:
            continue
        cells = list(named.values())
        folder = set_folder(request, key)
        gates.setdefault((key.arch, key.regime), []).append(folder)
        models = models_of(request) / key.name
        bench = Bench(folder, models, DOMAINS, request.scale, request.device)
        own = list(work_of(SetCells(key, bench, cells), number))
        items += ranked(own, key, cells, order, f"wait for {key.arch} {key.regime}")
    waiting = [
        WorkItem(
            f"wait for {arch} {regime}",
            wait_for_sets,
            (tuple(folders), request.sets / f"{arch}.{ENDED}"),
            rank=(-1,),
        )
        for (arch, regime), folders in gates.items()
    ]
    return waiting, items


def weights(first: Sequence[str]) -> list[tuple[str, set[str]]]:
    """Architectures and cells, the weightiest first."""

    def cells(table: str, *methods: str, but: Sequence[str] = ()) -> set[str]:
        rows = EXPERIMENTS[table].rows(Scope(methods, layers=1))
        return {row.cell.name for row in rows if row.label not in but}

    usual = [name for name in EVERY if name not in SLOW]
    core = cells("refit", "average", but=(EXACT_BASE, REFIT_FIXED))
    swept = [cells(f"refit-{name}", "average") for name in ("ridge", "text", "parts")]
    return [
        *((arch, cells(table, *usual)) for table in first for arch in ARCHITECTURES),
        ("olmoe", core),
        ("qwen3_moe", core),
        ("olmoe", cells("refit", "average")),
        *(("olmoe", names) for names in swept),
        ("olmoe", cells("methods", *usual)),
        ("olmoe", cells("refit", *METHODS, but=(EXACT_BASE, REFIT_FIXED))),
        ("olmoe", cells("refit-three", "average", but=(EXACT_BASE, REFIT_FIXED))),
        ("qwen3_moe", cells("refit", "average")),
    ]


def ranked(
    items: list[WorkItem],
    key: SetKey,
    cells: Sequence[Cell],
    order: Sequence[tuple[str, set[str]]],
    gate: str,
) -> list[WorkItem]:
    """Tasks by the weight of what needs them, then by set, then as they were."""
    after = {item.key: item.after for item in items}
    rank = dict.fromkeys(after, len(order) + 1)

    def needed(name: str, weight: int) -> None:
        if weight < rank[name]:
            rank[name] = weight
            for earlier in after[name]:
                needed(earlier, weight)

    for cell in cells:
        places = [n for n, (arch, own) in enumerate(order) if arch == key.arch and cell.name in own]
        needed(f"{key.name}: measure {cell.name}", min(places, default=len(order)))
    return [
        replace(item, rank=(rank[item.key], *item.rank), after=item.after or (gate,))
        for item in items
    ]


def write_tables(plans: Sequence[Plan], journal: CellJournal) -> None:
    """Two files of all tables: what a machine sends back may be few files."""
    summaries = [table.summary(journal) for plan in plans for table in plan.tables]
    out = plans[0].request.out
    with tempfile.TemporaryDirectory() as made:
        write_report(Path(made), [s for s in summaries if s.rows], figures=False)
        for name in (ALL_TABLES, PAGE):
            shutil.copy(Path(made) / name, out / name)
    say(f"{out / ALL_TABLES}, {PAGE}, {CELLS}, {SECONDS}")


# --- one GPU for many processes -----------------------------------------------------------------


@contextlib.contextmanager
def gpu_shared(args: argparse.Namespace) -> Iterator[None]:
    """NVIDIA's MPS daemon, where there is one and it works: processes then share a GPU's time."""
    control = shutil.which("nvidia-cuda-mps-control")
    if args.device == "cpu" or args.no_mps or control is None or PIPES in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        before = dict(os.environ)
        os.environ.update({PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder, PRIORITY: "1"})
        subprocess.run([control, "-d"], check=False)
        if not context_can_be_made():
            say("MPS does not work here; going on without")
            subprocess.run([control], input=b"quit\n", check=False, timeout=10)
            os.environ.clear()
            os.environ.update(before)
        else:
            say("MPS shares the GPU")
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input=b"quit\n", check=False, timeout=5)


def context_can_be_made() -> bool:
    """In another process, as this one must not have a context that it does not need."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], check=False, timeout=20, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        say("no context within 20 s")
        return False
    if done.returncode:
        say(f"no context: {done.stderr.strip() or f'CUDA error {done.returncode}'}")
    return done.returncode == 0


PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
status = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
status = status or cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
status = status or cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20))
sys.exit(status)
"""


if __name__ == "__main__":
    import evidence  # under a name by which workers find its functions

    evidence.main()
