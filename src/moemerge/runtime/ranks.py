"""The processes that share one job (torchrun): each processes a share of the text.

This is the only module that uses torch.distributed. A job joins the process group once and passes
the `Ranks` object along. Every decision of a job is computed from all-reduced sums, which have the
same bits in all ranks, so all ranks decide alike. Only rank 0 writes and prints.

The functions of this module read torchrun's environment variables. They can be called before the
processes have met.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moemerge.errors import ResourceError, UsageError
from moemerge.runtime.lazy import torch
from moemerge.runtime.process import disk_bytes_read
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
# A rank may take long for its share of a layer, and rank 0 for writing OUT. A rank that has died is
# noticed at once.
TIME_LIMIT: Final = timedelta(hours=2)
# Until then all processes must have started. torchrun ends the others if one does not.
MEETING_LIMIT: Final = timedelta(minutes=5)


# --- torchrun's environment ---------------------------------------------------------------------


def asked_for() -> int:
    """Return the number of processes that torchrun started for this job."""
    return _number("WORLD_SIZE", 1, least=1)


def rank() -> int:
    """Return the rank that torchrun gave to this process."""
    count = asked_for()
    return _number("RANK", 0, most=count - 1) if count > 1 else 0


def _number(name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
    """Return the whole number in one of torchrun's variables."""
    text = os.environ.get(name, str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if number < least or (most is not None and number > most):
        expected = f"{least} or more" if most is None else f"{least} to {most}"
        raise UsageError(
            f"the environment variable {name} is {text!r}, expected {expected}",
            hint="torchrun sets it; without torchrun, unset WORLD_SIZE, RANK and LOCAL_RANK",
        )
    return number


def leads() -> bool:
    """Return whether this process writes and prints."""
    return rank() == 0


def own_device(device: torch.device) -> torch.device:
    """Return the GPU of this rank if the device is a GPU without an index."""
    if str(device) != "cuda" or asked_for() == 1:
        return device
    return torch.device("cuda", _local("RANK", 0) % torch.cuda.device_count())


def _local(name: str, default: int) -> int:
    """Return torchrun's value for the processes on this machine."""
    return _number(f"LOCAL_{name}", default)


def neighbours() -> int:
    """Return the number of processes of the job on this machine, this one included."""
    return min(_local("WORLD_SIZE", asked_for()), asked_for())


def sharing(device: torch.device) -> int:
    """Return how many processes of the job use this device. All of the machine share its CPU."""
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
    """Refuse several processes for a job that runs in one."""
    if asked_for() > 1:
        raise UsageError(
            f"{job} runs in one process, and torchrun started {asked_for()}",
            hint="start it without torchrun",
        )


# --- the processes of a job ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The processes that share a job. With one process, all methods return what they were given."""

    count: int = 1
    rank: int = 0
    # The GPU of this rank, if objects are sent with NCCL. A thread's current GPU may be another.
    gpu: torch.device | None = None

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Meet the other processes that torchrun started, if this has not happened before."""
        if asked_for() == 1:
            return SINGLE
        distributed = torch.distributed
        if not distributed.is_initialized():
            _meet(device)
        by_nccl = distributed.get_backend() == "nccl"
        gpu = own_device(torch.device("cuda")) if by_nccl else None
        return cls(distributed.get_world_size(), distributed.get_rank(), gpu)

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def progress(self, progress: Progress) -> Progress:
        """Return the progress bar on rank 0, and a silent one on the others."""
        return progress if self.leads else Silent()

    # --- tensors and numbers ---

    def all_reduce(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over all ranks, with the same bits in every rank."""
        if self.count == 1:
            return
        with self._exchange():
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def reduce_to(self, owner: int, *tensors: Tensor) -> None:
        """Replace each tensor by its sum on rank `owner`. On other ranks it is undefined."""
        if self.count == 1:
            return
        with self._exchange():
            for tensor in tensors:
                if tensor.is_cuda and self.gpu is None:  # gloo reduces GPU tensors to all only
                    torch.distributed.all_reduce(tensor)
                else:
                    torch.distributed.reduce(tensor, dst=owner)

    def broadcast(self, owner: int, tensor: Tensor) -> None:
        """Replace a contiguous tensor by that of rank `owner`."""
        if self.count == 1:
            return
        with self._exchange():
            torch.distributed.broadcast(tensor.view(torch.uint8), src=owner)

    def total(self, number: int, device: torch.device) -> int:
        """Return the sum of an integer over all ranks."""
        return self.totals([number], device)[0]

    def totals(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Return the sums of several integers over all ranks."""
        if self.count == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.int64, device=device)
        self.all_reduce(sums)
        added: list[int] = sums.tolist()
        return added

    def sum_of(self, number: float, device: torch.device) -> float:
        """Return the sum of a number over all ranks, with the same bits in every rank."""
        if self.count == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64, device=device)
        self.all_reduce(total)
        return float(total)

    def all_agree(self, condition: bool) -> bool:
        """Return whether the condition holds in every rank."""
        if self.count == 1:
            return condition
        return self.total(int(not condition), self.gpu or torch.device("cpu")) == 0

    # --- modules ---

    def can_shard(self, device: torch.device) -> bool:
        """Return whether modules on this device can be distributed: not if ranks share a GPU."""
        return self.count > 1 and (device.type == "cpu" or self.gpu is not None)

    def shard(self, module: torch.nn.Module, device: torch.device) -> None:
        """Distribute the parameters of a module over all ranks (FSDP).

        Its forward pass gathers them. Its backward pass leaves the gradients' mean over ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        fully_shard(module, mesh=init_device_mesh(device.type, (self.count,)))
        assert isinstance(module, FSDPModule)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no mean

    # --- objects ---

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value in every rank."""
        if self.count == 1:
            return value
        box: list[Any] = [value if self.leads else None]
        with self._exchange():
            torch.distributed.broadcast_object_list(box, src=0, device=self.gpu)
        first: T = box[0]
        return first

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks in every rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self._exchange():
            torch.distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def call_on_lead(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0 and return its result in every rank."""
        if self.count == 1:
            return function()
        result = self.broadcast_object(function() if self.leads else None)
        assert result is not None
        return result

    # --- work ---

    def share(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return which pieces of work belong to this rank, as places in each group of sizes.

        The largest pieces of a group are assigned first, each to the rank with the least work. No
        rank gets a second piece of a group before all have one. The assignment needs no exchange.
        """
        loads = [0] * self.count
        mine: list[list[int]] = []
        for sizes in groups:
            own, without = [], set(range(self.count))
            for place in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
                least = min(without or range(self.count), key=lambda at: (loads[at], at))
                loads[least] += sizes[place]
                without.discard(least)
                if least == self.rank:
                    own.append(place)
            mine.append(sorted(own))
        return mine

    def disk_bytes_since(self, before: int | None) -> int | None:
        """Return what all ranks have read from disks since; None if it is not counted."""
        now = disk_bytes_read()
        known = self.gather(None if now is None or before is None else now - before)
        return None if None in known else sum(number or 0 for number in known)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # of the connection
            raise LostRankError(self) from error


SINGLE: Final = Ranks()


class LostRankError(ResourceError):
    """Another process of the job is gone."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(
            f"rank {ranks.rank} of {ranks.count}: another rank ended or could not be reached",
            hint="its own message says why; what rank 0 has finished is in its journal, and the "
            "same command continues with it, with any number of ranks",
        )


def _backend(device: torch.device) -> str:
    """Return NCCL if every process on this machine has its own GPU."""
    if str(device) != "cuda":  # a GPU with an index is shared by all
        return "gloo"
    return "nccl" if _local("WORLD_SIZE", 1) <= torch.cuda.device_count() else "gloo"


def _meet(device: torch.device) -> None:
    """Start the process group, for the life of this process."""
    if device.type == "cuda":
        torch.cuda.set_device(own_device(device))
    from torch.distributed.rendezvous import rendezvous  # only if there are others to meet

    distributed = torch.distributed
    try:
        store, own, size = next(iter(rendezvous("env://", timeout=MEETING_LIMIT)))
        store.set(f"rank {own} is here", "")
        store.wait([f"rank {n} is here" for n in range(size)], MEETING_LIMIT)
        distributed.init_process_group(
            _backend(device), store=store, rank=own, world_size=size, timeout=TIME_LIMIT
        )
    except (ValueError, RuntimeError) as error:
        raise UsageError(
            f"{asked_for()} processes were asked for, but they cannot meet: {error}",
            hint="start them by torchrun, which says where they meet",
        ) from error
    atexit.register(distributed.destroy_process_group)


def own_shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; any other tensor as a whole."""
    take: Any = getattr(tensor.detach(), "to_local", None)
    shard: Tensor = tensor if take is None else take()
    return shard


def gathered(tensor: Tensor) -> Tensor:
    """Return a distributed tensor as a whole, in every rank; any other tensor unchanged."""
    gather: Any = getattr(tensor.detach(), "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole
