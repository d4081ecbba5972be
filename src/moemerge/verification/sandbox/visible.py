"""What a confined process sees of the file system: Python, its packages and system libraries."""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import Final

from moemerge.verification.sandbox.limits import Limits
from moemerge.verification.sandbox.namespaces import DEVICES, HOME

SYSTEM: Final = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache")


def readable() -> list[str]:
    """Trees that Python needs, without those that lie inside of others."""
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    wanted += [sysconfig.get_paths()["stdlib"], *packages()]
    trees = list(dict.fromkeys(os.path.abspath(path) for path in wanted))
    trees += [os.path.realpath(tree) for tree in trees if os.path.realpath(tree) != tree]
    trees = [*SYSTEM, *dict.fromkeys(trees)]
    return [
        tree
        for tree in trees
        if os.path.exists(tree)
        and not any(tree != other and Path(tree).is_relative_to(other) for other in trees)
    ]


def packages() -> list[str]:
    """Folders with installed packages, such as numpy for tests."""
    paths = sysconfig.get_paths()
    known = [paths["purelib"], paths["platlib"], *site.getsitepackages()]
    return [path for path in dict.fromkeys(known) if os.path.isdir(path)]


def bubblewrap(readable: list[str], limits: Limits) -> list[str]:
    program = shutil.which("bwrap")
    assert program is not None
    command = [program, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    command += ["--size", str(limits.file_bytes), "--tmpfs", "/"]
    for path in readable:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in DEVICES:
        command += ["--dev-bind-try", path, path]
    return [*command, "--dir", HOME, "--chdir", HOME]
