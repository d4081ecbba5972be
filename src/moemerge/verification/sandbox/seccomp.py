"""A filter of system calls: no network, no other processes, no signals to others, no new mounts.

The filter is a list of refused calls. Whatever it forgets is still bounded by the namespaces, the
limits and the missing capabilities; in return ordinary programs run with any C library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from moemerge.verification.sandbox.system import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, call

# (audit architecture, place of a call in the table below)
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Numbers on x86_64 and aarch64; None where the call does not exist.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes and programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154),
    # other processes' memory and signals
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "kcmp": (312, 272), "process_madvise": (440, 440),
    # network (a socketpair reaches nobody else, and event loops need one)
    "socket": (41, 198),
    # memory that the limits do not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "userfaultfd": (323, 282),
    # mounts, namespaces, handles around them
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "mknod": (133, None), "mknodat": (259, 33),
    # the kernel's more delicate corners
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "personality": (135, 92),
    "syslog": (103, 116), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL = (62, 129), (234, 131)
_PRCTL = (157, 167)

_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # x86_64's second table of numbers, which would slip past the first

# Classic BPF: load a word, jump if equal / if at least / if a bit is set, return.
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT0 = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def supported() -> bool:
    return platform.machine() in _MACHINES


def filter_calls() -> None:
    """Refuse the calls above in this process from now on. Needs `gain_no_privileges` first."""
    code = program(platform.machine(), os.getpid())

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    whole = Program(len(code) // 8, code)
    rest = (ctypes.byref(whole), ctypes.c_ulong(0), ctypes.c_ulong(0))
    call("prctl", ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), *rest)


def program(machine: str, own_pid: int) -> bytes:
    """The filter's instructions, 8 bytes each, for a process that knows itself as `own_pid`."""
    architecture, place = _MACHINES[machine]
    refuse, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JEQ, architecture, 1, 0),
        _line(_RETURN, _KILL_PROCESS),
        _line(_LOAD, _NUMBER),
        _line(_JGE, _X32, 0, 1),
        _line(_RETURN, _KILL_PROCESS),
    ]
    for numbers in _REFUSED.values():
        number = numbers[place]
        if number is not None:
            lines += [_line(_JEQ, number, 0, 1), _line(_RETURN, refuse)]
    # The C library tries clone3 first, whose flags a filter cannot see, and then clone.
    lines += [_line(_JEQ, _CLONE3[place], 0, 1), _line(_RETURN, missing)]
    lines += _unless(_CLONE[place], [_line(_JSET, _CLONE_THREAD, 1, 0)], refuse)
    for number in (_KILL[place], _TGKILL[place]):
        lines += _unless(number, [_line(_JEQ, own_pid, 1, 0)], refuse)
    # Without these the process would outlive its supervisor, or could be looked into.
    unwanted = [_line(_JEQ, PR_SET_PDEATHSIG, 1, 0), _line(_JEQ, PR_SET_DUMPABLE, 0, 1)]
    lines += _unless(_PRCTL[place], unwanted, refuse)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _unless(number: int, tests: list[bytes], refuse: int) -> list[bytes]:
    """For one call: load its first argument; the tests skip the refusal or run into it."""
    body = [_line(_LOAD, _ARGUMENT0), *tests, _line(_RETURN, refuse), _line(_RETURN, _ALLOW)]
    return [_line(_JEQ, number, 0, len(body)), *body]


def _line(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
