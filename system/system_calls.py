"""System calls that the process of an answer may make: the kernel refuses all others (seccomp).

The list has what Python and its libraries need to compute, to read files and to write to what is open. It
leaves out what starts processes, threads and programs, opens sockets, makes namespaces, reaches other
processes or their limits, and memory that no limit of a process counts (System V and POSIX shared memory,
message queues, files in memory, keys, locks of files).
"""

import ctypes
import errno
import functools
import os
import platform
import struct
from collections.abc import Sequence

from antiphon.core.errors import ConfigError

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of `_LISTED`, and the kernel's name of the machine (AUDIT_ARCH)."""
_LISTED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62,
mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, ioctl 16 29, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, access 21 -,
pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, msync 26 227, mincore 27 232, madvise 28 233,
dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103,
getpid 39 172, sendto 44 206, recvfrom 45 207, recvmsg 47 212, shutdown 48 210, socketpair 53 199,
getsockname 51 204, getpeername 52 205, getsockopt 55 209, exit 60 93, kill 62 129, uname 63 160,
fsync 74 82, fdatasync 75 83, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, readlink 89 -,
umask 95 166, gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153,
getuid 102 174, getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -,
getgroups 115 158, getresuid 118 148, getresgid 120 150, getpgid 121 155, getsid 124 156, capget 125 90,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43,
fstatfs 138 44, sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, gettid 186 178, tkill 200 130, tgkill 234 131, time 201 -, futex 202 98,
sched_getaffinity 204 123, epoll_create 213 -, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
epoll_create1 291 20, getdents64 217 61, restart_syscall 219 128, fadvise64 221 223, clock_gettime 228 113,
clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, openat 257 56, newfstatat 262 79,
readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
get_robust_list 274 100, set_tid_address 218 96, eventfd 284 -, eventfd2 290 19, dup3 292 24, pipe2 293 59,
preadv 295 69, pwritev 296 70, getcpu 309 168, getrandom 318 278, membarrier 324 283, statx 332 291,
rseq 334 293, preadv2 327 286, pwritev2 328 287, close_range 436 436, faccessat2 439 439,
epoll_pwait2 441 441, wait4 61 260, waitid 247 95
"""
"""Name, and number on each machine; `-` where it has none."""
_LISTED_FOR_TOOLS = """
fork 57 -, vfork 58 -, execve 59 221, arch_prctl 158 -, setpgid 109 154, setsid 112 157, setrlimit 160 164,
truncate 76 45, ftruncate 77 46, fallocate 285 47, creat 85 -, rename 82 -, renameat 264 38,
renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, link 86 -,
linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52, fchmodat 268 53, utime 132 -,
utimes 235 -, futimesat 261 -, utimensat 280 88, flock 73 32, sendfile 40 71, splice 275 76,
copy_file_range 326 285, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13
"""
"""What commands of a shell need besides, to start programs and to change files."""
_CLONE = "clone 56 220"
_NAMESPACES = 0x7E020080
"""Flags with which the call `clone` would make namespaces; without them it makes processes and threads."""
_LISTED_FOR = (
    ("fcntl 72 25", 1, (0, 1, 2, 3, 4, 1030)),  # copies and flags of descriptors; no locks, leases, owners
    ("prlimit64 302 261", 0, (0,)),  # limits of this process
)
"""The same, an argument's place, and the values that it may have."""
_FIRST_SHARED = 424
"""From here on numbers are the same on all machines, and libraries know what to do without these calls."""

_LOAD, _IF_EQUAL, _IF_LEAST, _IF_ANY, _ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_libc = ctypes.CDLL(None, use_errno=True)  # once: loading it costs a fork more than what is called
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38


@functools.cache
def filter_program(machine: str = platform.machine(), *, tools: bool = False) -> bytes:
    """Return the kernel's program (classic BPF) that allows what is listed and nothing else.

    `tools` allows besides what a shell needs to start programs and to change files.

    Raises:
        ConfigError: for a machine whose numbers are not known.
    """
    if machine not in _MACHINES:
        raise ConfigError(
            f"the numbers of system calls on a {machine} are not known, so no sandbox can be built; run the "
            "reward service on x86_64 or aarch64"
        )
    column, kind = _MACHINES[machine]
    listed = f"{_LISTED},{_LISTED_FOR_TOOLS}" if tools else _LISTED
    named = [entry.split()[1 + column] for entry in listed.split(",")]
    allowed = {int(number) for number in named if number != "-"}
    answers = [
        _ALLOW if number in allowed else _REFUSE | (errno.EPERM if number < _FIRST_SHARED else errno.ENOSYS)
        for number in range(max(*allowed, _FIRST_SHARED) + 2)
    ]
    bounds = [number for number in range(1, len(answers)) if answers[number] != answers[number - 1]]
    program = _code(_LOAD, 4) + _code(_IF_EQUAL, kind, 1, 0) + _code(_ANSWER, _KILL_PROCESS) + _code(_LOAD, 0)
    for entry, place, values in _LISTED_FOR:
        found = _code(_LOAD, 16 + 8 * place)
        found += b"".join(_code(_IF_EQUAL, value, 0, 1) + _code(_ANSWER, _ALLOW) for value in values)
        found += _code(_ANSWER, _REFUSE | errno.EPERM)
        program += _code(_IF_EQUAL, int(entry.split()[1 + column]), 0, _length(found)) + found
    if tools:
        found = _code(_LOAD, 16) + _code(_IF_ANY, _NAMESPACES, 1, 0) + _code(_ANSWER, _ALLOW)
        found += _code(_ANSWER, _REFUSE | errno.EPERM)
        program += _code(_IF_EQUAL, int(_CLONE.split()[1 + column]), 0, _length(found)) + found
    return program + _search(bounds, [answers[0], *(answers[number] for number in bounds)])


def refuse_other_calls(program: bytes) -> None:
    """Have the kernel apply a program of `filter_program` to this process, for good.

    Raises:
        OSError: when the kernel refuses.
    """
    held = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", _length(program), ctypes.addressof(held))
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0))) or _libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), described, ctypes.c_ulong(0), ctypes.c_ulong(0)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _search(bounds: Sequence[int], answers: Sequence[int]) -> bytes:
    """Return a binary search: when it loads a program, the kernel runs it for every call that there is."""
    if not bounds:
        return _code(_ANSWER, answers[0])
    middle = len(bounds) // 2
    below = _search(bounds[:middle], answers[: middle + 1])
    above = _search(bounds[middle + 1 :], answers[middle + 1 :])
    return _code(_IF_LEAST, bounds[middle], _length(below), 0) + below + above


def _length(program: bytes) -> int:
    return len(program) // struct.calcsize("HBBI")


def _code(operation: int, value: int, jump_if: int = 0, jump_else: int = 0) -> bytes:
    return struct.pack("HBBI", operation, jump_if, jump_else, value)
