"""Launcher of ssh: workers as processes of machines that the system's `ssh` reaches.

One script goes to a machine's `sh` on standard input for each call. A worker's folder there holds a lock, the
process's number with the time of its birth, so that a number that was used again is not mistaken for it, its
log, and its bundle, which travels as an archive on standard input and is removed when the worker is stopped.
Where the user's own systemd answers, the worker is a scope of it and outlives the session by its leave.
"""

import asyncio
import shlex
from pathlib import Path

from antiphon.core.capacity.launcher_config import SshLauncherSection
from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.core.errors import AntiphonError, ConfigError, UnavailableError
from antiphon.runs.fleet.command import run_command
from antiphon.runs.fleet.launcher import LaunchSite, Order, packed_bundle

CALL_S = 30.0
"""Longest time of a call that starts nothing large."""
INSTALL_S = 600.0
"""The same of one that installs the package."""
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")

_COMMON = r"""
set -eu
umask 077
cd "$HOME"
born() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20 || true; }
alive() {
    [ -s "$1/pid" ] && read -r pid birth < "$1/pid" && [ -n "$birth" ] && [ "$(born "$pid")" = "$birth" ]
}
age() {
    awk -v born="$birth" -v ticks="$(getconf CLK_TCK)" '{ printf "%.2f\n", $1 - born / ticks }' /proc/uptime
}
"""
_START = r"""
mkdir -p "$root/$name"
exec 9>"$root/$name/lock"
flock -w 20 9
if ! alive "$root/$name"; then
    printf '%s\n' "$lines" > "$root/$name/run.sh"
    own=
    if systemctl --user show-environment >/dev/null 2>&1; then
        own='systemd-run --user --scope --quiet --collect'
    fi
    setsid nohup $own sh "$root/$name/run.sh" >> "$root/$name/log" 2>&1 < /dev/null 9>&- &
    echo "$! $(born $!)" > "$root/$name/pid"
    alive "$root/$name"
fi
echo "$pid $(age)"
"""
_LIST = r"""
for folder in "$root"/"$of_class"-*/; do
    if alive "${folder%/}"; then
        name=${folder%/}
        echo "${name##*/} $pid $(age)"
    fi
done
"""
_STOP = r"""
[ -d "$root/$name" ] || exit 0
exec 9>"$root/$name/lock"
flock -w 20 9
if alive "$root/$name"; then
    kill -s TERM "$pid" || true
    end=$(($(date +%s) + grace))
    while alive "$root/$name" && [ "$(date +%s)" -lt "$end" ]; do sleep 0.2; done
    kill -s KILL -- "-$pid" 2>/dev/null || true  # itself, or what it left of its children
fi
rm -rf "$root/$name/bundle" "$root/$name/pid"
"""
_BUNDLE = r"""
mkdir -p "$root/$name/bundle"
tar -x -C "$root/$name/bundle"
"""
_MISSING = r"""
for tool in flock setsid tar; do
    command -v $tool >/dev/null || echo "$tool is missing; install util-linux and tar"
done
mkdir -p "$root" && [ -w "$root" ] || echo "$HOME/$root cannot be written"
"""
_WHEEL = r"""
mkdir -p "$root"
exec 9>"$root/lock"
flock -w 600 9
if [ "$(cat "$root/wheel" 2>/dev/null)" != "$digest" ]; then
    cat > "$root/$file"
    python3 -m venv "$root/venv"
    "$root/venv/bin/pip" install --quiet --force-reinstall "$root/$file[$extra]"
    echo "$digest" > "$root/wheel"
fi
"""


class SshLauncher:
    """Workers of one class; worker N runs on host N modulo their number."""

    def __init__(self, one: PoolClass, section: SshLauncherSection, site: LaunchSite) -> None:
        """Prepare to call; nothing is sent yet."""
        self._class, self._section, self._site = one, section, site
        self._root = f"{section.work_dir}/{site.label}"

    async def start(self, order: Order) -> Instance:
        host = self._host(order.worker)
        await self._bring_wheel(host)
        files = await asyncio.to_thread(packed_bundle, order.bundle)
        await self._call(host, _BUNDLE, CALL_S, files, name=order.worker)
        said = await self._call(host, _START, CALL_S, name=order.worker, lines=self._script(order))
        pid, age_s = said.split()[-2:]
        return self._instance(order.worker, pid, age_s)

    async def running(self) -> tuple[Instance, ...]:
        """Return what runs; workers of hosts that do not answer are `unknown`."""
        hosts = dict.fromkeys(map(self._host, self._class.workers))
        asked = [self._call(host, _LIST, CALL_S, of_class=self._class.name) for host in hosts]
        answers = dict(zip(hosts, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        found: list[Instance] = []
        for worker in self._class.workers:
            answer = answers[self._host(worker)]
            if isinstance(answer, AntiphonError):
                found.append(Instance(worker, self._host(worker), InstanceState.UNKNOWN, str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                lines = (line.split() for line in answer.splitlines())
                found += [self._instance(name, pid, age) for name, pid, age in lines if name == worker]
        return tuple(found)

    async def stop(self, worker: str, grace_s: float) -> None:
        grace = max(1, round(grace_s))
        await self._call(self._host(worker), _STOP, grace + CALL_S, name=worker, grace=str(grace))

    async def missing(self) -> list[str]:
        found = []
        for host in dict.fromkeys(map(self._host, self._class.workers)):
            try:
                said = await self._call(host, _MISSING, CALL_S)
            except UnavailableError as error:
                said = str(error)
            found += [f"{host}: {line}" for line in said.splitlines() if line.strip()]
        return found

    def render(self, order: Order) -> dict[str, str]:
        name = f"{order.worker}-on-{self._host(order.worker).replace(':', '-')}.sh"
        return {name: self._text(_START, name=order.worker, lines=self._script(order))}

    def _host(self, worker: str) -> str:
        hosts = self._section.hosts
        return hosts[int(worker.rpartition("-")[2]) % len(hosts)]

    def _instance(self, worker: str, pid: str, age_s: str) -> Instance:
        name = f"process {pid} of {self._host(worker)}"
        return Instance(worker, name, InstanceState.UP, up_s=max(0.0, float(age_s)))

    def _script(self, order: Order) -> str:
        folder = f"{self._root}/{order.worker}"
        command = f"{self._root}/venv/bin/antiphon" if self._section.wheel else self._section.command
        line = order.line(command, shlex.quote(f"{folder}/bundle"), shlex.quote(f"{folder}/work"))
        return "\n".join(filter(None, (self._section.setup, line)))

    def _text(self, script: str, **values: str) -> str:
        named = {"root": self._root, **values}
        return "\n".join(f"{name}={shlex.quote(value)}" for name, value in named.items()) + _COMMON + script

    async def _call(self, host: str, script: str, limit_s: float, data: bytes = b"", **values: str) -> str:
        """Run a script on a host; without `data` it is read from standard input, else that holds `data`."""
        address, _, port = host.partition(":")
        ports = ("-p", port) if port else ()
        words = ["ssh", *_OPTIONS, *map(_expanded, self._section.options), *ports, address]
        text = self._text(script, **values)
        if data:
            return await run_command([*words, f"sh -c {shlex.quote(text)}"], limit_s, data)
        return await run_command([*words, "sh", "-s"], limit_s, text.encode())

    async def _bring_wheel(self, host: str) -> None:
        if not self._section.wheel:
            return
        path = Path(self._section.wheel).expanduser()
        try:
            data = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise ConfigError(
                f"the wheel {path} of class {self._class.name} cannot be read: {error.strerror}; build it by "
                "`scripts/wheel`, or leave launcher.wheel out where the package is installed"
            ) from None
        from antiphon.core.digests import digest_bytes

        extra = "cuda" if self._class.device == "gpu" else "cpu"
        values = {"digest": digest_bytes(data), "file": path.name, "extra": extra}
        await self._call(host, _WHEEL, INSTALL_S, data, **values)


def _expanded(option: str) -> str:
    return str(Path(option).expanduser()) if option.startswith("~/") else option
