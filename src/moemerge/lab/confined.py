"""Run one program with its tests, in namespaces and without rights. `sandbox.py` starts this file.

Orders come as JSON on stdin, the result goes to stdout. Little of the standard library is imported,
because this starts thousands of times. Three processes make sure that nothing outlives the first:

P0  enters the namespaces, drops all rights, and waits
P1  is the first process of the PID namespace: it ends with P0, and all others end with it
P2  limits itself and runs the program

A program sees no process outside its PID namespace, so it can neither signal them nor change their
limits. It has no network, no files but the read-only trees that Python needs, and a small folder in
memory. It cannot start processes or threads, because the limit on their number is used up.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

READY = b"ready\n"  # the first line of an answer: the confinement is complete
HOME = "/sandbox"  # the working folder, which is writable
USER, NOBODY = 1000, 65534  # who runs a program if root starts it: inside, and outside
PROCESSES = 3  # P0 to P2 count as processes of the same user
MOST_FILES = 1000

# user, mount, PID, network, IPC and host name namespaces
_NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PIVOT_ROOT, _KEYCTL = {"x86_64": (155, 250), "aarch64": (41, 219)}[platform.machine()]
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY, _ATTR_NOSUID = 442, -100, 0x8000, 1, 2
_CAPABILITY_VERSION_3, _MNT_DETACH, _KEYCTL_JOIN_SESSION_KEYRING = 0x20080522, 2, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def main() -> None:
    orders = json.loads(sys.stdin.buffer.read())
    signal.setitimer(signal.ITIMER_REAL, orders["seconds"])  # ends P0
    os.umask(0o022)
    user = enter_namespaces()
    build_root(orders["readable"], orders["folder"], user, orders["limits"]["FSIZE"])
    drop_rights(user)
    fork()  # P1
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fork()  # P2
    answer = take_stdout()
    for name, most in orders["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
    sys.path += orders["packages"]
    answer(READY)
    judge(orders["program"], orders["tests"], orders["secret"], answer)
    os._exit(0)


def fork() -> None:
    """Return in a child. The parent waits for it, and exits with its status."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(code if code >= 0 else 128 - code)


def enter_namespaces() -> int:
    """Become root inside, and return the user who is to run the program.

    If root starts it, that is nobody, because the kernel does not limit the number of root's
    processes.
    """
    user, group = os.geteuid(), os.getegid()
    users, groups, program_user = f"0 {user} 1\n", f"0 {group} 1\n", 0
    if user == 0:
        os.setgroups([])
        more, program_user = f"{USER} {NOBODY} 1\n", USER
        users, groups = users + more, groups + more
    # Only a process outside may map several users.
    reading, writing = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.read(reading, 1)
        for name, text in (("setgroups", "deny"), ("uid_map", users), ("gid_map", groups)):
            write(f"/proc/{os.getppid()}/{name}", text)
        os._exit(0)
    call("unshare", ctypes.c_int(_NEW_NAMESPACES))
    os.write(writing, b"!")
    if os.waitpid(mapper, 0)[1]:
        raise OSError("the user namespace cannot be mapped")
    os.close(reading)
    os.close(writing)
    # Shared memory would not count as the process's. Before Linux 6.9 this is not permitted.
    with contextlib.suppress(OSError):
        write("/proc/sys/kernel/shmmni", "0")
    return program_user


def build_root(readable: Iterable[str], folder: str, user: int, room: int) -> None:
    """Replace the file system by read-only trees and a folder in memory of `room` bytes."""
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    mount("tmpfs", folder, "tmpfs", _MS_NOSUID, "mode=755")
    root = f"{folder}/root"
    for path in readable:
        place = root + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            write(place, "")
        mount(path, place, None, _MS_BIND | _MS_REC)
    os.makedirs(root + HOME)
    attributes = struct.pack("=4Q", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    where = (ctypes.c_int(_AT_FDCWD), os.fsencode(folder), ctypes.c_uint(_AT_RECURSIVE))
    syscall(_MOUNT_SETATTR, *where, attributes, ctypes.c_size_t(len(attributes)))
    options = f"size={room},nr_inodes={MOST_FILES},mode=700,uid={user},gid={user}"
    mount("tmpfs", root + HOME, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(folder)
    syscall(_PIVOT_ROOT, b".", b".")
    call("umount2", b".", ctypes.c_int(_MNT_DETACH))
    os.chroot("/root")  # inside a chroot, the kernel refuses further user namespaces
    os.chdir(HOME)


def drop_rights(user: int) -> None:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_DUMPABLE, 0)
    syscall(_KEYCTL, ctypes.c_int(_KEYCTL_JOIN_SESSION_KEYRING), None)


def take_stdout() -> Callable[[bytes], None]:
    """Keep stdout for the answer, and discard what the program prints."""
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)

    def answer(data: bytes) -> None:
        while data:
            data = data[os.write(channel, data) :]

    return answer


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library; a negative result raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def syscall(number: int, *arguments: object) -> None:
    call("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> None:
    call("prctl", ctypes.c_int(option), *[ctypes.c_ulong(n) for n in (value, 0, 0, 0)])


def mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    *names, data = [text and os.fsencode(text) for text in (source, target, kind, options)]
    call("mount", *names, ctypes.c_ulong(flags), data)


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# --- the program ----------------------------------------------------------------------------------

LONGEST_DETAIL = 300
MODULE = "solution"  # not "__main__": code under that guard is not part of the solution


def judge(program: str, tests: str, secret: str, answer: Callable[[bytes], None]) -> None:
    """Run a program and its tests; answer {"secret", "passed", "detail", "seconds"}.

    A pass counts only if the secret comes back with it. So a program that exits early, prints "ok"
    or returns 0 has not passed. A program that sets out to forge a pass can, since it shares the
    process with its tests: the sandbox protects the machine, not the score.
    """
    began, stage = time.process_time(), "program"
    report: dict[str, Any] = {"secret": secret, "passed": True, "detail": ""}
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses and pickle look up their module
    sys.argv = [""]
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
        stage = "tests"
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
    except BaseException as error:  # a program may raise anything, SystemExit included
        report |= {"passed": False, "detail": f"{stage}: {describe(error)}"}
    report["seconds"] = time.process_time() - began
    answer(json.dumps(report).encode())


def describe(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error).strip()
    except BaseException:  # its __str__ is code of the program
        text = ""
    return f"{kind}: {text.splitlines()[0]}"[:LONGEST_DETAIL] if text else kind


if __name__ == "__main__":
    main()
