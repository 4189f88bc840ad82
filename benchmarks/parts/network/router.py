"""Router: joins the TUN devices of far hosts; every packet is delayed, and some are lost.

    python -m antiphon.benchmarks.parts.network.router DELAY_S LOSS SEED NAMESPACE=ADDRESS ...

It prints one line once it forwards, and ends with its standard input.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from random import Random

DEVICE = "link0"
MTU = 1500
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_DESTINATION = slice(16, 20)
"""Of an IPv4 header."""


def main() -> int:
    """Forward until standard input ends."""
    delay_s, loss, seed = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    devices: dict[bytes, int] = {}
    for word in sys.argv[4:]:
        namespace, _, address = word.partition("=")
        devices[socket.inet_aton(address)] = _open_tun(namespace)
    print("ready", flush=True)
    _forward(devices, delay_s, loss, Random(seed))
    return 0


def _forward(devices: dict[bytes, int], delay_s: float, loss: float, random: Random) -> None:
    queue: deque[tuple[float, int, bytes]] = deque()
    poll = select.epoll()
    for descriptor in (0, *devices.values()):
        poll.register(descriptor, select.EPOLLIN)
    clock, read, write, drawn = time.monotonic, os.read, os.write, random.random
    while True:
        timeout_s = max(0.0, queue[0][0] - clock()) if queue else 1.0
        for descriptor, _ in poll.poll(timeout_s):
            if descriptor == 0:
                if not read(0, 1):
                    return
                continue
            due_s = clock() + delay_s
            for _ in range(64):
                try:
                    packet = read(descriptor, MTU + 100)
                except BlockingIOError:
                    break
                target = devices.get(packet[_DESTINATION])
                if target is not None and drawn() >= loss:
                    queue.append((due_s, target, packet))
        now = clock()
        while queue and queue[0][0] <= now:
            _, target, packet = queue.popleft()
            with contextlib.suppress(OSError):  # its host is gone, or takes no more: lost, as on any network
                write(target, packet)


def _open_tun(namespace: str) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


if __name__ == "__main__":
    sys.exit(main())
