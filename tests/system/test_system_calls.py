"""A process may make the system calls that are listed and no others."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError
from antiphon.system import system_calls

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
NUMBERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
KINDS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
TRIED = """
import ctypes, os, resource
from antiphon.system import system_calls
system_calls.refuse_other_calls(system_calls.filter_program())
for work in (
    lambda: os.fork(),
    lambda: os.kill(os.getpid(), 0),
    lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE),
    lambda: len(open("/usr/bin/env", "rb").read(4)),
    lambda: os.memfd_create("x"),
    lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0,
):
    try:
        print(work())
    except OSError as error:
        print(error.errno)
"""


def answer(program: bytes, kind: int, number: int, *arguments: int) -> int:
    """Return what the kernel would answer, as its interpreter of such programs does."""
    data = struct.pack("<IIQ6Q", number, kind, 0, *arguments, *[0] * (6 - len(arguments)))
    held = at = 0
    while True:
        operation, jump_if, jump_else, value = struct.unpack_from("HBBI", program, 8 * at)
        at += 1
        if operation == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif operation == 0x06:
            return int(value)
        else:
            assert operation in (0x15, 0x35)
            at += jump_if if (held == value if operation == 0x15 else held >= value) else jump_else


@pytest.mark.parametrize("machine", sorted(KINDS))
def test_what_is_listed_is_allowed_and_nothing_else(machine: str) -> None:
    program, kind = system_calls.filter_program(machine), KINDS[machine]
    column = 1 + sorted(KINDS, reverse=True).index(machine)
    listed = {entry.split()[column] for entry in system_calls._LISTED.split(",")}
    for number in range(600):
        refused = ENOSYS if number >= 424 else EPERM
        arguments = (7, 7)
        assert answer(program, kind, number, *arguments) == (ALLOW if str(number) in listed else refused)
    fcntl, prlimit = {"x86_64": (72, 302), "aarch64": (25, 261)}[machine]
    assert [answer(program, kind, fcntl, 3, command) for command in (3, 6, 1024)] == [ALLOW, EPERM, EPERM]
    assert [answer(program, kind, prlimit, process) for process in (0, 1)] == [ALLOW, EPERM]
    assert answer(program, kind, 0x40000000) == ENOSYS
    assert answer(program, 0x40000003, 3) == KILL


@pytest.mark.parametrize("machine", sorted(KINDS))
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    if not NUMBERS[machine].exists():
        pytest.skip(f"needs the kernel's headers ({NUMBERS[machine]})")
    known = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", NUMBERS[machine].read_text())
    numbers = {{"fstatat": "newfstatat"}.get(name, name): number for name, number in known}
    listed = [*system_calls._LISTED.split(","), *(entry for entry, _, _ in system_calls._LISTED_FOR)]
    column = 1 + sorted(KINDS, reverse=True).index(machine)
    for entry in listed:
        assert entry.split()[column] in (numbers.get(entry.split()[0], "-"), "-"), entry


def test_a_process_is_held_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", TRIED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "None", "1", "4", "1", "True"]


def test_another_machine_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="system calls on a riscv64 are not known"):
        system_calls.filter_program("riscv64")
