"""Files out of reach without namespaces, which containers often forbid: Landlock (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from moemerge.verification.sandbox.system import syscall

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on every architecture
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
# How many kinds of access each version of the interface knows; an unknown one is an error.
_KINDS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15}
_KINDS_NOW = 16


def version() -> int:
    """Of the interface; 0 where there is none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_ASK_VERSION))
    except OSError:
        return 0


def confine_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Leave this process nothing but these trees. Needs `gain_no_privileges` first."""
    known = (1 << _KINDS_BY_VERSION.get(version(), _KINDS_NOW)) - 1
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
