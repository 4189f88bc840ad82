"""Places that break off in the middle or raise what nobody expects: a reason is given, and work goes on."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from antiphon.api.manifest import full_payload
from antiphon.core.errors import UnavailableError
from antiphon.lineage.store.remote_place import RemotePlace
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.transports import object_store
from antiphon.weights.transports.object_store import ObjectStoreMirror, ObjectStoreTransport, object_place
from tests.support.snapshots import publish

LIMIT_S = 120.0


@contextmanager
def cutting_server(size: int) -> Iterator[str]:
    """Serve objects of `size` bytes over S3, and hang up after 10 of them; gives the address."""

    class Cutting(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.send_header("ETag", '"0"')
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(b"0" * 10)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Cutting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_answer_that_is_cut_off_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    manifest = publish(PayloadStore(tmp_path / "origin"), {"a": torch.zeros(100)})
    payload = full_payload(manifest)
    with cutting_server(payload.payload_bytes) as address:
        place = object_place("s3://bucket/x", address)

        async def body() -> None:
            transport = ObjectStoreTransport(PayloadStore(tmp_path / "here"), place, LIMIT_S)
            try:
                await transport.fetch(manifest, payload, lambda length: None)
            finally:
                await transport.close()

        with pytest.raises(UnavailableError, match=r"broadcast\.object_store=s3://bucket/x does not answer"):
            asyncio.run(asyncio.wait_for(body(), LIMIT_S))
        with pytest.raises(UnavailableError, match=r"does not answer"):
            place.fetch("object", tmp_path)


def test_copying_goes_on_after_an_error_that_nobody_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "LOOK_S", 0.001)
    (tmp_path / "shared").mkdir()
    copied = threading.Event()

    class Odd(RemotePlace):
        asked = 0

        def sizes(self, folder: str) -> dict[str, int]:
            self.asked += 1
            if self.asked == 1:
                raise ValueError("an answer without sense")
            return super().sizes(folder)

        def put(self, *args: object, **kwargs: object) -> None:
            super().put(*args, **kwargs)  # type: ignore[arg-type]
            copied.set()

    store = PayloadStore(tmp_path / "store")
    publish(store, {"a": torch.zeros(100)})
    mirror = ObjectStoreMirror(store, Odd(str(tmp_path / "shared"), None, "a", "b"), "run")
    mirror.start()
    try:
        assert copied.wait(LIMIT_S)
    finally:
        mirror.stop()
