"""A process with its own file system, network and process table (Linux 5.12, unprivileged).

It has its own user, mount, PID, network, IPC and host name namespaces, and a small root in memory
that contains a few read-only trees.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterable

from moemerge.verification.sandbox.system import PR_SET_PDEATHSIG, call, prctl, syscall

HOME = "/tmp"  # the working folder, which is writable
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
USER = 1000  # the user id inside; the kernel maps it to the real user
LARGEST_NUMBER_OF_FILES = 1000

_NEW_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000


def enter(readable: Iterable[str], root: str, room: int, seconds: float) -> None:
    """Return in a confined child. The calling process supervises it and never returns.

    `root` is an empty folder for the new root, and `room` the number of bytes that may be written
    there.
    """
    user, group = os.geteuid(), os.getegid()
    call("unshare", ctypes.c_int(_NEW_NAMESPACES))
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{USER} {user} 1")
    _write("/proc/self/gid_map", f"{USER} {group} 1")
    child = os.fork()
    if child:
        _supervise(child, seconds)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _build(readable, root, room)


def _supervise(child: int, seconds: float) -> None:
    """Wait for the child, kill it after its time limit, and exit with its status."""
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _pid, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _build(readable: Iterable[str], root: str, room: int) -> None:
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # Read-only trees are opened through the old root, so a tree below `root` would be hidden.
    options = f"size={room},nr_inodes={LARGEST_NUMBER_OF_FILES},mode=755"
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in readable:
        _show(path, root)
    for path in filter(os.path.exists, DEVICES):
        _show(path, root, read_only=False)
    os.makedirs(root + HOME, exist_ok=True)
    os.chdir(root)
    syscall(_PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", ctypes.c_int(_MNT_DETACH))
    os.chdir(HOME)


def _show(path: str, root: str, *, read_only: bool = True) -> None:
    place = root + path
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        _write(place, "")
    _mount(path, place, None, _MS_BIND | _MS_REC)
    if read_only:
        wanted = _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV
        attributes = struct.pack("=4Q", wanted, 0, 0, 0)
        where = (ctypes.c_int(_AT_FDCWD), os.fsencode(place), ctypes.c_uint(_AT_RECURSIVE))
        syscall(_MOUNT_SETATTR, *where, attributes, ctypes.c_size_t(len(attributes)))


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    call(
        "mount",
        encoded(source),
        encoded(target),
        encoded(kind),
        ctypes.c_ulong(flags),
        encoded(options),
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
