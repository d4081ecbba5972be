"""Programs that try to do harm, each in its own way. `OUTSIDE` and `PID` are filled in.

OUTSIDE is a folder of the test's with a file `kept` in it; PID is the test's own process.
"""

from __future__ import annotations

HOSTILE = {
    "endless loop": "while True: pass",
    "endless loop in C": "10 ** 10 ** 10",
    "sleeps": "import time\nwhile True: time.sleep(60)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that hides its errors": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ),
    "16 GB": "x = bytearray(16 * 2**30)",
    "16 GB in small pieces": "x = []\nwhile True: x.append(bytearray(2**20))",
    "2 GB of output": (
        "import os\nfor _ in range(2048): os.write(1, b'x' * 2**20)\nwhile True: pass"
    ),
    "output on every descriptor": (
        "import os\n"
        "while True:\n"
        "    for number in range(64):\n"
        "        try: os.write(number, b'x' * 2**20)\n"
        "        except OSError: pass"
    ),
    "2 GB file": (
        "with open('big', 'wb') as file:\n"
        "    for _ in range(2048): file.write(b'x' * 2**20)\n"
        "raise SystemExit"
    ),
    "a million files": "for n in range(10**6): open(str(n), 'w').close()\nraise SystemExit",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "unix socket": (
        "import socket\nsocket.socket(socket.AF_UNIX).connect('OUTSIDE/socket')"
    ),
    "name lookup": "import socket\nsocket.gethostbyname('localhost.localdomain')\nraise SystemExit",
    "reads the home folder": "import os\nopen('OUTSIDE/kept').read()",
    "lists the outside": "import os\nos.listdir('OUTSIDE')",
    "writes outside": "open('OUTSIDE/kept', 'w').write('x')\nraise SystemExit",
    "makes files outside": "open('OUTSIDE/new', 'w').write('x')\nraise SystemExit",
    "deletes outside": "import shutil\nshutil.rmtree('OUTSIDE')",
    "symlink to the outside": (
        "import os\nos.symlink('OUTSIDE/kept', 'link')\nopen('link').read()"
    ),
    "climbs up": "open('../' * 30 + 'OUTSIDE/kept'[1:]).read()",
    "kills the parent": "import os, signal\nos.kill(PID, signal.SIGKILL)\nraise SystemExit",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)\nraise SystemExit",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)\nraise SystemExit",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nraise SystemExit",
    "ignores signals": (
        "import signal\n"
        "for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "while True: pass"
    ),
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
    "a session of its own": (
        "import os, time\nos.setsid()\nos.system('sleep 60')\nwhile True: time.sleep(1)"
    ),
    "signals by a file": (
        "import fcntl, os\n"
        "reading, writing = os.pipe()\n"
        "fcntl.fcntl(reading, fcntl.F_SETOWN, PID)\n"
        "fcntl.fcntl(reading, 10, 9)\n"  # F_SETSIG: SIGKILL
        "fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)\n"
        "os.write(writing, b'x')\n"
    ),
    "limits of others": (
        "import ctypes, struct\n"
        "limit = struct.pack('QQ', 77, 77)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.prlimit(PID, 7, limit, None): raise OSError(ctypes.get_errno())\n"
        "raise SystemExit"
    ),
    "shared memory": (
        "import ctypes\n"
        "if ctypes.CDLL(None).shmget(0, 2**30, 0o1600) < 0: raise OSError\n"
    ),
    "other users": (
        "import ctypes\n"
        "if ctypes.CDLL(None).unshare(0x10000000): raise OSError\n"
    ),
    "ptrace": (
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, PID, 0, 0) == 0\nraise SystemExit"
    ),
    "looks at other processes": "open('/proc/PID/environ', 'rb').read()",
    "memory of others": "open('/proc/PID/mem', 'rb').read(1)",
    "other programs": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "becomes another program": "import os\nos.execv('/bin/sh', ['/bin/sh', '-c', 'sleep 60'])",
    "threads that never end": (
        "import threading\n"
        "def forever():\n"
        "    while True: pass\n"
        "for _ in range(50): threading.Thread(target=forever).start()\n"
        "forever()"
    ),
    "unprintable error": (
        "class Monster(Exception):\n"
        "    def __str__(self):\n"
        "        raise Monster\n"
        "    __reduce__ = __repr__ = __str__\n"
        "raise Monster"
    ),
    "error that takes for ever": (
        "class Monster(Exception):\n"
        "    def __str__(self):\n"
        "        while True: pass\n"
        "raise Monster"
    ),
    "endless recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()"
    ),
    "crash": "import ctypes\nctypes.string_at(0)",
    "leaves early": "import sys\nsys.exit(0)",
    "leaves at once": "import os\nos._exit(0)",
    "pretends": "print('passed', flush=True)\nimport os\nos._exit(0)",
    "mounts": (
        "import ctypes\n"
        "libc = ctypes.CDLL(None)\n"
        "assert libc.unshare(0x10000000) == 0 or libc.mount(b'/', b'/tmp', b'', 4096, None) == 0\n"
        "raise SystemExit"
    ),
    "closes everything": "import os\nos.closerange(0, 1000)\nwhile True: pass",
    "compiles a monster": "eval('(' * 10**6)",
    "deep source": "x = " + "-" * 200_000 + "1",
}  # fmt: skip
