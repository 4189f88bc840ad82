"""A transfer is continued by the one that had begun it, at whatever moment the process was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

NOBODY = 65534
RECEIVE = """
import os, signal, sys
from pathlib import Path
from antiphon.core.digests import digest_bytes
from antiphon.core.records import Payload
from antiphon.api.manifest import payload_digest
from antiphon.weights.payload_store import PayloadStore

if os.geteuid() == 0:
    os.setuid(int(sys.argv[2]))  # root may open any file, so it would show nothing

if sys.argv[1] == "killed":
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
data = [b"a" * 8, b"b" * 8]
digests = tuple(map(digest_bytes, data))
payload = Payload("full", None, "raw", payload_digest(16, 8, digests), 16, 8, digests)
store = PayloadStore(Path())
incoming = store.receive(payload)
print(incoming.missing(), flush=True)
for index, chunk in enumerate(data):
    incoming.write(index, chunk)
incoming.finish()
assert store.path(payload.digest).read_bytes() == b"".join(data)
"""


def receive(folder: Path, how: str) -> "subprocess.CompletedProcess[str]":
    """Receive a payload of two chunks in a process that is not root's, and may die before the name."""
    command = [sys.executable, "-c", RECEIVE, how, str(NOBODY)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_transfer_killed_before_its_file_got_its_name_is_continued(tmp_path: Path) -> None:
    folder = tmp_path / "payloads"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    assert receive(folder, "killed").returncode == -signal.SIGKILL
    again = receive(folder, "whole")
    assert (again.returncode, again.stdout) == (0, "[]\n"), again.stderr
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o444
