"""door: serve loops that users write themselves, by Tinker's wire."""

import asyncio
from pathlib import Path

from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory, make_home


def door(path: Path, /, *overrides: str, port: int | None = None) -> int:
    """Serve clients of Tinker's wire: they sample, train and save, in loops of their own, until Ctrl-C.

    Each model that a client creates is a run of this home, with services of its own. Given again, the command
    goes on where it stopped, and clients with it.

    Args:
        path: the configuration, with environment.name=client.
        overrides: values to use in place of the file's, such as door.models=2.
        port: port to listen on, 0 for a free one; by default door.port.
    """
    from antiphon.core.config import load_config
    from antiphon.lineage.door_keys import KEY
    from antiphon.net.security.credentials import KEYS, find_credentials, needed_token_key
    from antiphon.net.security.guard import Guard
    from antiphon.net.security.keys import TOKEN_KEY, ensure_key
    from antiphon.runs.client_runs import open_client_runs
    from antiphon.services.door.server import serve_door
    from antiphon.system.clock import wall_clock
    from antiphon.system.processes import StopRequest, run_service

    resolved, home = load_config(path, list(overrides)), home_directory()
    if port is not None:
        if not 0 <= port < 65536:
            raise ConfigError(f"--port {port} is no port; give one from 0 to 65535")
        resolved = resolved.model_copy(update={"door": resolved.door.model_copy(update={"port": port})})
    make_home(home)
    credentials = find_credentials(resolved.services.credentials)
    # Made here where nobody was invited yet: keys that are made while the door serves are then let in.
    signed_by = needed_token_key(credentials) if credentials else ensure_key(home / KEYS, TOKEN_KEY).public

    async def serve(stop: StopRequest) -> None:
        clock, stopped = asyncio.get_running_loop().time, asyncio.Event()
        stop.tell(stopped.set)
        guard = Guard(signed_by, "*", wall_clock, clock)
        with open_client_runs(resolved, home) as runs:
            try:
                async with serve_door(resolved, path.stem, runs, home, guard) as url:
                    print(f"serving {resolved.model.path} at {url}; a client on this machine:")
                    print(f"export TINKER_BASE_URL={url} TINKER_API_KEY=$(cat {home / KEY})", flush=True)
                    await stopped.wait()
            finally:
                await runs.close_all()

    return run_service(serve, tied=False)
