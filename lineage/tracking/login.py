"""Login: MLflow's own server, behind the home's password; by itself it asks for none.

Who can write to MLflow can name a folder for artifacts and have files written there as the user that runs the
server. So every request needs the password, and one that a page makes in the owner's browser has to
come from MLflow's own pages. Only the word that the server is there is for all.

    python -m uvicorn --factory antiphon.lineage.tracking.login:application
"""

import base64
import binascii
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

PASSWORD = "ANTIPHON_MLFLOW_LOGIN"
"""Variable with USER:SECRET, for the server alone."""
DATABASE = "ANTIPHON_MLFLOW_DATABASE"
"""Variable with the address of the server's database."""
ARTIFACTS = "ANTIPHON_MLFLOW_ARTIFACTS"
"""Variable with the folder of artifacts that were given no other place."""

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
Application = Callable[[_Message, _Receive, _Send], Awaitable[None]]
"""What an ASGI server calls for each request."""


def application() -> Application:
    """Return MLflow's server behind the password, as the variables of this process say."""
    password = os.environ.pop(PASSWORD)
    from mlflow import server

    os.environ[server.BACKEND_STORE_URI_ENV_VAR] = os.environ[DATABASE]
    os.environ[server.ARTIFACT_ROOT_ENV_VAR] = os.environ[ARTIFACTS]
    from mlflow.server.fastapi_app import app

    return behind_password(app, password)


def behind_password(app: Application, password: str) -> Application:
    """Return `app` for those alone who send `password`, USER:SECRET, as HTTP's Basic scheme has it."""

    async def guarded(scope: _Message, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == "/health":
            await app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if not hmac.compare_digest(_given(headers), password.encode()):
            await _refuse(scope, send, 401)
        elif b"origin" in headers and urlsplit(headers[b"origin"]).netloc != headers.get(b"host"):
            await _refuse(scope, send, 403)
        else:
            await app(scope, receive, send)

    return guarded


def _given(headers: MutableMapping[bytes, bytes]) -> bytes:
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    try:
        return base64.b64decode(value, validate=True) if scheme.lower() == b"basic" else b""
    except binascii.Error:
        return b""


async def _refuse(scope: _Message, send: _Send, status: int) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-length", b"0")]
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="antiphon", charset="UTF-8"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
