"""The calls of Linux that Python has no names for."""

from __future__ import annotations

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """A function of the C library; a negative result becomes an OSError."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """A system call by its number."""
    return call("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> None:
    rest = [ctypes.c_ulong(n) for n in (value, 0, 0, 0)]
    call("prctl", ctypes.c_int(option), *rest)


def gain_no_privileges() -> None:
    """From here on no program this process becomes can gain rights. Filters need it."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Root, inside or outside of a namespace, becomes a user like any other."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, for 64 capabilities
    call("capset", ctypes.byref(header), ctypes.byref(nothing))
