"""deploy: put the flows on a Prefect server, as forms that start runs and as schedules."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from antiphon.core.errors import UnavailableError
from antiphon.runs.directory import home_directory


def deploy(
    *,
    pool: str = "antiphon",
    limit: int = 1,
    project: Path | None = None,
    schedules: Annotated[bool | None, Parameter(negative="--no-schedules")] = None,
) -> None:
    """Put the flows on a Prefect server, with forms and schedules.

    Deployments are created or updated on the server of PREFECT_API_URL, else on that of `antiphon up`.

    Args:
        pool: work pool of type process; made when it is missing.
        limit: runs that fill a machine at once, over all workers of the pool.
        project: folder that runs work in; by default the working directory.
        schedules: switch the nightly benchmark and the weekly replay on, or off with --no-schedules;
            by default they stay as they are, off at first.
    """
    from antiphon.cli.up import running_prefect, use_prefect
    from antiphon.runs.servers.prefect_server import write_shell_file

    home = home_directory()
    url = use_prefect(home)  # before Prefect is imported
    if not url:
        raise UnavailableError(
            "no Prefect server is known: start one with `antiphon up`, or let PREFECT_API_URL name one"
        )
    from antiphon.flows.deployments import deploy as put

    folder = (project or Path.cwd()).absolute()
    for one in put(folder, home, pool, limit, schedules):
        made = "created" if one.created else "updated"
        print(f"{one.name}: {made}{', ' * bool(one.schedule)}{one.schedule}")
    print(f"pages: {url.removesuffix('/api')}/deployments")
    prefect = shlex.quote(_prefect_program())
    print("start a worker, one on each machine:")
    if url == running_prefect(home):
        print(f"  . {shlex.quote(str(write_shell_file(home, url)))}")
    else:
        print(f"  export PREFECT_API_URL={shlex.quote(url)}")
    print(f"  {prefect} worker start --pool {shlex.quote(pool)}")
    print("start a run, there or from the page's form:")
    print(f'  {prefect} deployment run post_train/post-train --param \'config={{"run": {{"steps": 20}}}}\'')


def _prefect_program() -> str:
    """Return the program of this very environment, relative to the working directory where it lies below."""
    program = Path(sys.prefix).absolute() / "bin" / "prefect"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
