"""Linux's means to confine a process, by system calls that Python has no functions for.

These are namespaces with their own file system, Landlock, seccomp filters, and prctl.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> int:
    """Call a function of the C library; a negative result raises OSError."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by its number."""
    return call("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> None:
    rest = [ctypes.c_ulong(n) for n in (value, 0, 0, 0)]
    call("prctl", ctypes.c_int(option), *rest)


def gain_no_privileges() -> None:
    """Prevent this process from ever gaining rights. Filters require it."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up root's capabilities, inside or outside a namespace."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, for 64 capabilities
    call("capset", ctypes.byref(header), ctypes.byref(nothing))


# --- namespaces -----------------------------------------------------------------------------------
# A process with its own user, mount, PID, network, IPC and host name namespaces, and a small root
# in memory that contains a few read-only trees (Linux 5.12, unprivileged).

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


def enter_namespaces(readable: Iterable[str], root: str, room: int, seconds: float) -> None:
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
    *names, data = [text and os.fsencode(text) for text in (source, target, kind, options)]
    call("mount", *names, ctypes.c_ulong(flags), data)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# --- Landlock -------------------------------------------------------------------------------------
# Keeps files out of reach without namespaces, which containers often forbid (Linux 5.13).

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on every architecture
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# Number of access rights in each version of the interface; unknown rights are an error.
_KINDS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_KINDS_NOW = 16


def landlock_version() -> int:
    """Return the version of the Landlock interface; 0 if there is none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    except OSError:
        return 0


def confine_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process to these trees. Call `gain_no_privileges` first."""
    known = (1 << _KINDS_BY_VERSION.get(landlock_version(), _KINDS_NOW)) - 1
    handled = struct.pack("=Q", known)
    rules = syscall(_CREATE, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint32(0))
    try:
        for paths, rights in ((readable, _READING), (writable, known)):
            for path in paths:
                _allow(rules, path, rights & known)
        syscall(_RESTRICT, ctypes.c_int(rules), ctypes.c_uint32(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _OF_A_FILE
        rule = struct.pack("=Qi", rights, place)
        kind = ctypes.c_int(_RULE_PATH_BENEATH)
        syscall(_ADD_RULE, ctypes.c_int(rules), kind, rule, ctypes.c_uint32(0))
    finally:
        os.close(place)


# --- seccomp --------------------------------------------------------------------------------------
# A filter of system calls: no network, no other processes, no signals to others, no new mounts. It
# lists the refused calls. The namespaces, the limits and the missing capabilities bound all others;
# in return ordinary programs run with any C library.

# (audit architecture, column in the table below)
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# Numbers on x86_64 and aarch64; None if the call does not exist.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes and programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setsid": (112, 157), "setpgid": (109, 154),
    # other processes' memory and signals
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "kcmp": (312, 272), "process_madvise": (440, 440),
    # network (a socketpair stays inside the process, and event loops need one)
    "socket": (41, 198),
    # memory that the limits do not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "userfaultfd": (323, 282),
    # mounts, namespaces, handles around them
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "setns": (308, 268), "unshare": (272, 97), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "mknod": (133, None), "mknodat": (259, 33),
    # other risky parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "personality": (135, 92),
    "syslog": (103, 116), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
# Changes to files that Landlock does not know: modes, owners, times, attributes, and in its first
# versions the length.
_REFUSED_WITHOUT_OWN_FILES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "truncate": (76, 45),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL = (62, 129), (234, 131)
_PRCTL = (157, 167)

_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # x86_64's second table of numbers, which would bypass the first

# Classic BPF: load a word, jump if equal / if at least / if a bit is set, return.
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT0 = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def has_filters() -> bool:
    """Return whether the table of refused calls covers this machine."""
    return platform.machine() in _MACHINES


def filter_calls(*, own_files: bool) -> None:
    """Refuse the calls above in this process from now on. Call `gain_no_privileges` first.

    With `own_files`, the process has its own file system.
    """
    code = filter_program(platform.machine(), os.getpid(), own_files=own_files)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))

    whole = Program(len(code) // 8, code)
    rest = (ctypes.byref(whole), ctypes.c_ulong(0), ctypes.c_ulong(0))
    call("prctl", ctypes.c_int(_PR_SET_SECCOMP), ctypes.c_ulong(_MODE_FILTER), *rest)


def filter_program(machine: str, own_pid: int, *, own_files: bool) -> bytes:
    """Return the filter's instructions, 8 bytes each, for the process with id `own_pid`."""
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
    refused = _REFUSED if own_files else _REFUSED | _REFUSED_WITHOUT_OWN_FILES
    for numbers in refused.values():
        number = numbers[place]
        if number is not None:
            lines += [_line(_JEQ, number, 0, 1), _line(_RETURN, refuse)]
    # The C library tries clone3 first, whose flags a filter cannot read, and then clone.
    lines += [_line(_JEQ, _CLONE3[place], 0, 1), _line(_RETURN, missing)]
    lines += _unless(_CLONE[place], [_line(_JSET, _CLONE_THREAD, 1, 0)], refuse)
    for number in (_KILL[place], _TGKILL[place]):
        lines += _unless(number, [_line(_JEQ, own_pid, 1, 0)], refuse)
    # Otherwise the process could outlive its supervisor, or be inspected.
    unwanted = [_line(_JEQ, PR_SET_PDEATHSIG, 1, 0), _line(_JEQ, PR_SET_DUMPABLE, 0, 1)]
    lines += _unless(_PRCTL[place], unwanted, refuse)
    return b"".join([*lines, _line(_RETURN, _ALLOW)])


def _unless(number: int, tests: list[bytes], refuse: int) -> list[bytes]:
    """Refuse one call unless its first argument passes the tests."""
    body = [_line(_LOAD, _ARGUMENT0), *tests, _line(_RETURN, refuse), _line(_RETURN, _ALLOW)]
    return [_line(_JEQ, number, 0, len(body)), *body]


def _line(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
