"""Several processes on one job (torchrun): each runs a share of the text, and sums are of all.

The only place that knows torch.distributed. In a process of its own everything here does nothing.
Every decision of a job is taken from summed numbers, which are the same bits in all ranks, so that
they cannot part ways; rank 0 alone writes and prints.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moemerge.errors import ResourceError, UsageError
from moemerge.runtime.lazy import torch
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
# A rank may take long for its share of a layer, and rank 0 for writing OUT; one that has died is
# noticed at once.
TIME_LIMIT: Final = timedelta(hours=2)
# In which all must have begun. torchrun ends the others if one does not come that far.
MEETING_LIMIT: Final = timedelta(minutes=5)

_apart = False
_thread = threading.local()  # the same for one thread: `apart`
# Where objects pass through a GPU: this rank's own. A thread's current one may be another.
_passage: torch.device | None = None


class LostRankError(ResourceError):
    """Another process of the job is gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"rank {rank()} of {count()}: another rank ended or could not be reached",
            hint="its own message says why; what rank 0 has finished is in its journal, and resume "
            "goes on with it, with any number of ranks",
        )
        self.__cause__ = error


def asked_for() -> int:
    """How many processes torchrun has started for this job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def count() -> int:
    """How many processes share this job."""
    if asked_for() == 1 or _apart or getattr(_thread, "apart", False):
        return 1
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return int(os.environ.get("RANK", "0")) if asked_for() > 1 else 0


def leads() -> bool:
    """Whether this process writes and prints."""
    return rank() == 0


def progress_of_lead(progress: Progress) -> Progress:
    """What rank 0 shows; the others work in silence."""
    return progress if leads() else Silent()


@contextmanager
def apart() -> Iterator[None]:
    """For what rank 0 does by itself: no sum inside is one of all ranks."""
    global _apart
    _apart = True
    try:
        yield
    finally:
        _apart = False


@contextmanager
def thread_apart() -> Iterator[None]:
    """The same for what this thread does beside others: their sums must not meet."""
    _thread.apart = True
    try:
        yield
    finally:
        _thread.apart = False


def own_device(device: torch.device) -> torch.device:
    """A GPU without a number is the one that belongs to this rank."""
    if str(device) != "cuda" or asked_for() == 1:
        return device
    return torch.device("cuda", _local("RANK", 0) % torch.cuda.device_count())


def _local(name: str, default: int) -> int:
    """What torchrun says of this machine's processes."""
    return int(os.environ.get(f"LOCAL_{name}", default))


def _backend(device: torch.device) -> str:
    """NCCL where every process of this machine has a GPU of its own."""
    if str(device) != "cuda":  # one with a number is shared by all
        return "gloo"
    return "nccl" if _local("WORLD_SIZE", 1) <= torch.cuda.device_count() else "gloo"


def join(device: torch.device) -> None:
    """Meet the other processes that torchrun started, once and for the life of this one.

    With one process, or where the caller has met them already, nothing happens.
    """
    if asked_for() == 1 or count() > 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(own_device(device))
    global _passage
    backend = _backend(device)
    _passage = own_device(device) if backend == "nccl" else None
    from torch.distributed.rendezvous import rendezvous  # when there are others to meet

    distributed = torch.distributed
    try:
        store, own, size = next(iter(rendezvous("env://", timeout=MEETING_LIMIT)))
        store.set(f"rank {own} is here", "")
        store.wait([f"rank {n} is here" for n in range(size)], MEETING_LIMIT)
        distributed.init_process_group(
            backend, store=store, rank=own, world_size=size, timeout=TIME_LIMIT
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{asked_for()} processes were asked for, but they cannot meet: {error}",
            hint="start them by torchrun, which says where they meet",
        ) from error
    atexit.register(torch.distributed.destroy_process_group)


def neighbours() -> int:
    """How many processes of the job share this machine, this one among them."""
    return min(_local("WORLD_SIZE", asked_for()), asked_for())


def sharing(device: torch.device) -> int:
    """How many processes of the job work on this device: all of the machine, or some on a GPU."""
    if device.type != "cuda":
        return neighbours()
    return max(1, -(-neighbours() // torch.cuda.device_count()))


def on_one_machine(job: str) -> None:
    """Refuse processes on several machines for a job whose processes share their files."""
    if neighbours() < asked_for():
        raise UsageError(
            f"{job} runs on one machine, and {asked_for() - neighbours()} of its {asked_for()} "
            "processes are on others",
            hint="start all of them on one machine",
        )


def alone(job: str) -> None:
    """Refuse several processes for a job that is made for one."""
    if asked_for() > 1:
        raise UsageError(
            f"{job} runs in one process, and torchrun started {asked_for()}",
            hint="start it without torchrun",
        )


def add_up(*tensors: Tensor) -> None:
    """Each becomes its sum over all ranks, in place, with the same bits everywhere."""
    if count() == 1:
        return
    with _exchange():
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


def add_up_for(owner: int, *tensors: Tensor) -> None:
    """Each becomes its sum over all ranks in rank `owner`, and is used up in the others."""
    if count() == 1:
        return
    with _exchange():
        for tensor in tensors:
            if tensor.is_cuda and _passage is None:  # gloo promises no other sum on a GPU
                torch.distributed.all_reduce(tensor)
            else:
                torch.distributed.reduce(tensor, dst=owner)


def spread(owner: int, tensor: Tensor) -> None:
    """It becomes that of rank `owner`, in place; it must lie in one block."""
    if count() == 1:
        return
    with _exchange():
        torch.distributed.broadcast(tensor.view(torch.uint8), src=owner)


def total(number: int, device: torch.device) -> int:
    """The sum of a count over all ranks."""
    return totals([number], device)[0]


def totals(numbers: Sequence[int], device: torch.device) -> list[int]:
    """The sums of several counts."""
    if count() == 1:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.int64, device=device)
    add_up(sums)
    added: list[int] = sums.tolist()
    return added


def sum_of(number: float, device: torch.device) -> float:
    """The sum of a number over all ranks, the same bits in each."""
    if count() == 1:
        return number
    total = torch.tensor(number, dtype=torch.float64, device=device)
    add_up(total)
    return float(total)


def all_say(word: bool) -> bool:
    """Whether this is so in every rank."""
    if count() == 1:
        return word
    return total(int(not word), _passage or torch.device("cpu")) == 0


def from_lead(value: T) -> T:
    """Rank 0's value, in every rank."""
    if count() == 1:
        return value
    box: list[Any] = [value if leads() else None]
    with _exchange():
        torch.distributed.broadcast_object_list(box, src=0, device=_passage)
    first: T = box[0]
    return first


def gathered(value: T) -> list[T]:
    """Every rank's value, in every rank."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with _exchange():
        torch.distributed.all_gather_object(values, value)
    return values


def meet() -> None:
    """Go on when all ranks are here."""
    gathered(None)


def made_by_lead(make: Callable[[], T]) -> T:
    """What rank 0 makes, in every rank; the others wait for it."""
    if count() == 1:
        return make()
    made = from_lead(make() if leads() else None)
    assert made is not None
    return made


def share(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """Which pieces of work are this rank's, by their sizes: places in each group.

    The largest of a group go first, to whoever has least so far, and nobody gets a second piece of
    a group before all have one. Every rank comes to the same answer, so all know who has what.
    """
    loads = [0] * count()
    mine: list[list[int]] = []
    for sizes in groups:
        own, without = [], set(range(count()))
        for place in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            least = min(without or range(count()), key=lambda at: (loads[at], at))
            loads[least] += sizes[place]
            without.discard(least)
            if least == rank():
                own.append(place)
        mine.append(sorted(own))
    return mine


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of the connection
        raise LostRankError(error) from error
