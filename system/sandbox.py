"""Sandbox: the command that starts a program which reads only what it is shown and writes nothing at all.

bubblewrap builds it from the kernel's namespaces: an empty root that cannot be written to, with the named
folders in it to read; no network, no /proc, no other process to see, none of this process's variables. The
program is process 1 of its own process namespace, so when it ends, the kernel ends all that it started.
Libraries that want a folder to write to while they load have one until `close_scratch`. A process of
`fork_apart` is process 1 of a further namespace: what it runs has no number by which to name the process it
came from, so it can neither signal it nor change its limits or its share of the processor. It is another user
where this one is root, and the kernel refuses it all system calls but those listed in `system_calls`.
`limit_this_process` sets what the kernel counts. `own_scratch` and `own_user` are for programs that a model
chose: they write to a folder of their own, and the kernel counts their processes apart from all others.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.system.system_calls import filter_program, refuse_other_calls

PROGRAM = "bwrap"
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
SCRATCH, SCRATCH_BYTES, SCRATCH_FILES = "/scratch", 64 << 20, 4096
"""Folder that can be written to until rights are given up, and what it or one of `own_scratch` holds."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Variables for libraries that would wait for threads that they may not start."""
NOBODY = 65_534
"""User and group of what answers run in where this process is root."""
TRIAL_S = 20.0
"""Longest time that an empty sandbox may take."""

_OTHERWISE = (
    "or set reward.sandbox=process, which scores in a child process with limits of time and memory but "
    "without a sandbox: only for a model and for workers that you trust"
)
_PR_SET_DUMPABLE = 4
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_READ_ONLY, _MS_REMOUNT, _MS_BIND = 0x1, 0x20, 0x1000
_MS_NO_SETUID, _MS_NO_DEVICES, _MS_RECURSIVE, _MS_PRIVATE = 0x2, 0x4, 0x4000, 1 << 18
_NO_RIGHTS = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
"""Arguments of capset: version 3 of its structures, this process, nothing."""
_TRIAL = f"""
import ctypes, os, sys
from antiphon.system.system_calls import refuse_other_calls
call = ctypes.CDLL(None, use_errno=True)
if call.unshare({_CLONE_NEWPID}) or call.setns(os.pidfd_open(1), {_CLONE_NEWPID}):
    raise OSError(ctypes.get_errno(), "no further process namespace, which takes Linux 5.8")
refuse_other_calls(bytes.fromhex(sys.argv[1]))
try:
    os.fork()
except PermissionError:
    sys.exit()
raise OSError("the kernel does not refuse the system calls that it should (seccomp)")
"""
_OURS = ("antiphon", "antiphon.core", "antiphon.system")
"""What this module needs of ours."""
_libc = ctypes.CDLL(None, use_errno=True)


def sandboxed(arguments: Sequence[str], readable: Iterable[Path]) -> list[str]:
    """Return the command that runs a program in the sandbox.

    Args:
        arguments: the program, as an absolute path, and its arguments.
        readable: folders and files that it may read, at the paths that they have here; the system's
            libraries are always among them.

    Raises:
        ConfigError: when bubblewrap is not installed.
    """
    # What they bring along, no program of a policy needs; with `threading` each fork would take longer.
    import shutil

    from antiphon.system.processes import SAME_ORDER

    program = shutil.which(PROGRAM)
    if program is None:
        raise ConfigError(
            "text of a model is scored in a sandbox, and bubblewrap, which builds it, is not installed; "
            f"install the system's package bubblewrap (apt-get install bubblewrap), {_OTHERWISE}"
        )
    paths = _without_nested(readable)
    # bubblewrap makes the folders above them for their owner alone.
    above = sorted({parent for path in (*paths, Path(DEVICES[0])) for parent in path.parents} - {Path("/")})
    folders = [option for folder in above for option in ("--perms", "0755", "--dir", str(folder))]
    shown = [option for path in paths for option in ("--ro-bind", str(path), str(path))]
    devices = [option for device in DEVICES for option in ("--dev-bind", device, device)]
    order = [option for pair in SAME_ORDER.items() for option in ("--setenv", *pair)]
    scratch = ["--size", str(SCRATCH_BYTES), "--tmpfs", SCRATCH]
    scratch += [option for name in ("HOME", "TMPDIR") for option in ("--setenv", name, SCRATCH)]
    private = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    if os.geteuid() == 0:
        rights += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        private.append("--unshare-user")
    return [
        *(program, "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"),
        *(*private, *rights, *_system_libraries(), *folders, *devices, *shown),
        *(*order, *scratch, "--remount-ro", "/", "--chdir", "/", "--", *arguments),
    ]


def interpreter_paths() -> list[Path]:
    """Return what this interpreter and its installed packages need to be read."""
    import sysconfig

    named = {sys.prefix, sys.base_prefix, *(sysconfig.get_path(name) for name in ("stdlib", "purelib"))}
    return [Path(name).resolve() for name in named]


def check_sandbox() -> None:
    """Start a sandbox, see that a system call is refused in it, and end it.

    Raises:
        ConfigError: when bubblewrap is not installed or cannot build a sandbox on this machine, or the kernel
            allows what is not listed.
    """
    import subprocess

    ours = (Path(sys.modules[name].__file__ or "").resolve().parent for name in _OURS)
    trial = [sys.executable, "-I", "-c", _TRIAL, filter_program().hex()]
    trial = sandboxed(trial, [*interpreter_paths(), *ours])
    try:
        done = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"bubblewrap started no sandbox within {TRIAL_S:g} s; try again, {_OTHERWISE}"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(
            f"bubblewrap cannot start a sandbox on this machine ({said[-1] if said else 'it said nothing'}); "
            "it takes seccomp and user namespaces (sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
            f"kernel.apparmor_restrict_unprivileged_userns=0), {_OTHERWISE}"
        )


def close_scratch() -> None:
    """Make the scratch folder read-only, once what runs in the sandbox is loaded.

    Processes that this one starts can neither trace nor read it, even with its user.

    Raises:
        OSError: when the kernel refuses, as it does outside of the sandbox.
    """
    flags = _MS_REMOUNT | _MS_BIND | _MS_READ_ONLY
    _mount(None, SCRATCH, None, flags)
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def fork_apart() -> int:
    """Fork as `os.fork` does; the new process sees no process but its own and has no rights, for good.

    Raises:
        OSError: when the kernel refuses, as it does outside of the sandbox.
    """
    program = filter_program()
    child = fork_within()
    if child == 0:
        give_up_rights()
        refuse_other_calls(program)
    return child


def fork_within() -> int:
    """Fork as `os.fork` does; the new process sees no process but its own, and keeps its rights.

    Raises:
        OSError: when the kernel refuses, as it does outside of the sandbox.
    """
    _check(_libc.unshare(_CLONE_NEWPID))
    child = os.fork()
    if child:
        # The next one begins beside it and not within. It must not have this handle, by which it could kill.
        this_process = os.pidfd_open(os.getpid())
        _check(_libc.setns(this_process, _CLONE_NEWPID))
        os.close(this_process)
        return child
    os.setsid()
    return 0


def give_up_rights() -> None:
    """Take all rights of root from this process, for good."""
    _become_nobody()
    _check(_libc.capset(*_NO_RIGHTS))


def own_scratch(hidden: Iterable[str]) -> None:
    """Give this process, and those that it starts, an empty scratch folder, which is gone with them.

    Args:
        hidden: files and folders that they see empty from now on.

    Raises:
        OSError: when the kernel refuses, as it does outside of the sandbox.
    """
    _check(_libc.unshare(_CLONE_NEWNS))
    _mount(None, "/", None, _MS_RECURSIVE | _MS_PRIVATE)
    owner = os.geteuid() or NOBODY
    options = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=0700,uid={owner},gid={owner}"
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NO_SETUID | _MS_NO_DEVICES, options)
    for path in hidden:
        if Path(path).is_dir():
            _mount("tmpfs", path, "tmpfs", _MS_READ_ONLY, "size=4k,nr_inodes=2")
        else:
            _mount("/dev/null", path, None, _MS_BIND)


def own_user() -> None:
    """Take all rights from this process, for good; its processes are counted apart from all others.

    Raises:
        OSError: when the kernel makes no further user namespace.
    """
    _become_nobody()
    _check(_libc.unshare(_CLONE_NEWUSER))
    _check(_libc.capset(*_NO_RIGHTS))


def limit_this_process(
    *, cpu_s: int, memory_bytes: int, open_files: int, processes: int = 0, file_bytes: int = 0
) -> None:
    """Limit this process and those that it starts for good.

    Args:
        cpu_s: seconds of processor time after which the kernel kills it.
        memory_bytes: address space.
        open_files: file descriptors open at once.
        processes: processes and threads of its user; 0 lets it start none.
        file_bytes: how large a file may become that it writes to; 0 lets it write to none.
    """
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def _mount(what: str | None, where: str, kind: str | None, flags: int, options: str = "") -> None:
    texts = (None if text is None else text.encode() for text in (what, where, kind))
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), options.encode()))


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _system_libraries() -> list[str]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("/lib", "/lib64", "/bin"):  # links into /usr on a merged system, folders on others
        path = Path(name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            options += ["--ro-bind", name, name]
    return options


def _without_nested(paths: Iterable[Path]) -> list[Path]:
    ordered = sorted({path for path in paths if path.exists() and not path.is_relative_to("/usr")})
    kept: list[Path] = []
    for path in ordered:
        if not any(path.is_relative_to(outer) for outer in kept):
            kept.append(path)
    return kept
