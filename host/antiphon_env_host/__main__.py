"""The command line of `antiphon-env-host`."""

import argparse
import asyncio
import importlib.metadata
import json
import logging
import math
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from antiphon_env_host.games import OpenEnv, TextArena
from antiphon_env_host.gateway import Gateway, HostError
from antiphon_env_host.hosting import Host, Program

WINDOWS = ("0.4", "0.1")
"""Versions of verifiers that this program knows; it is tested with those in host/verifiers-*.txt."""
RENDERER = '{"name": "qwen3", "thinking_retention": "all"}'
COMMON: dict[str, tuple[Any, Any, str]] = {
    "gateway": (os.environ.get("ANTIPHON_GATEWAY"), str, "its URL (ANTIPHON_GATEWAY)"),
    "token-file": (None, Path, "file with the access token (or ANTIPHON_TOKEN)"),
    "name": (f"{socket.gethostname()}-{os.getpid()}", str, "of this host in the run"),
    "concurrency": (32, lambda text: math.ceil(_positive(text)), "groups at a time (32)"),
    "episode-s": (1800.0, lambda text: _positive(text), "longest episode, in seconds (1800)"),
    "patience-s": (300.0, lambda text: _positive(text), "longest outage of the gateway, in seconds (300)"),
    "args": ({}, lambda text: _object(text), "JSON object that the environment is given"),
}
"""Option -> default, type, help."""


def main() -> NoReturn:
    """Run the program; what is wrong is one sentence, and status 1."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("antiphon_env_host").setLevel(logging.INFO)
    status = 0
    try:
        with suppress(asyncio.CancelledError):  # by a signal
            asyncio.run(_run(options))
    except* HostError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        print("antiphon-env-host:", *str(error).split(), file=sys.stderr)  # on one line
        status = 1
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    """Return what can be typed; common options may stand before the kind of environment and behind it."""
    parser = argparse.ArgumentParser(
        prog="antiphon-env-host", description="Runs a published environment for an Antiphon run."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    verifiers = kinds.add_parser("verifiers", help="an environment of verifiers, installed here")
    verifiers.add_argument("target", metavar="NAME", help="its module or taskset")
    verifiers.add_argument("--tokenizer", help="the model's folder (0.4)")
    verifiers.add_argument("--renderer", type=_object, default=_object(RENDERER), help=f"(0.4; {RENDERER})")
    openenv = kinds.add_parser("openenv", help="an openenv server")
    openenv.add_argument("target", metavar="URL", help="such as http://127.0.0.1:8000")
    openenv.add_argument("--action-key", default="message", help="action's field for the reply (message)")
    openenv.add_argument("--observation-key", help="observation's field for the model (all, as JSON)")
    textarena = kinds.add_parser("textarena", help="a game of textarena, installed here")
    textarena.add_argument("target", metavar="GAME", help="such as KuhnPoker-v0")
    for chat in (openenv, textarena):
        chat.add_argument("--system", help="system prompt")
    for one in (parser, *kinds.choices.values()):
        for name, (default, kind, about) in COMMON.items():
            shown = default if one is parser else argparse.SUPPRESS
            one.add_argument(f"--{name}", default=shown, type=kind, help=about)
    return parser


async def _run(options: argparse.Namespace) -> None:
    """Play until a signal ends it."""
    if not options.gateway:
        raise HostError("there is no gateway; name its URL with --gateway or ANTIPHON_GATEWAY")
    gateway = Gateway(options.gateway, _token(options.token_file), options.patience_s)
    host = Host(gateway, _program(gateway, options), options.name, options.concurrency, options.episode_s)
    running = asyncio.current_task()
    assert running is not None, "this is a task"
    for number in (signal.SIGTERM, signal.SIGINT):  # after the environment, which may have set its own
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    try:
        await host.run()
    finally:
        print(json.dumps(dict(host.counts)), flush=True)


def _program(gateway: Gateway, options: argparse.Namespace) -> Program:
    """Return the environment."""
    if options.kind == "openenv":
        return OpenEnv(
            gateway,
            options.target.rstrip("/"),
            options.action_key,
            options.observation_key,
            options.args,
            options.system,
        )
    if options.kind == "textarena":
        return TextArena(gateway, options.target, options.args, options.system)
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise HostError(
            "verifiers is not installed beside this program; install the environment's package with it"
        ) from None
    minor = ".".join(version.split(".")[:2])
    if minor not in WINDOWS:
        known = " and ".join(f"{window}.x" for window in WINDOWS)
        raise HostError(f"verifiers {version} is none of those known here, {known}; install one of these")
    if minor == "0.1":
        from antiphon_env_host.verifiers_v0 import VerifiersV0

        return VerifiersV0(gateway, options.target, options.args)
    from antiphon_env_host.verifiers_v1 import VerifiersV1

    return VerifiersV1(gateway, options.target, options.args, options.renderer, options.tokenizer)


def _positive(text: str) -> float:
    """Read a number that is not too large for a clock."""
    if not 1e-3 <= (found := float(text)) <= 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.001 and 1e9")
    return found


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return found


def _token(path: Path | None) -> str:
    """Return the access token."""
    try:
        token = path.read_text(encoding="utf-8") if path else os.environ.get("ANTIPHON_TOKEN", "")
    except OSError as error:
        raise HostError(f"--token-file={path} cannot be read: {error.strerror}") from None
    return token.strip()


if __name__ == "__main__":
    main()
