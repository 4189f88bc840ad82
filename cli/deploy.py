"""deploy: put the flows on a Prefect server, as forms that start runs and as schedules."""

import os
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from antiphon.cli.arguments import home_directory
from antiphon.core.errors import UnavailableError


def deploy(
    *,
    pool: Annotated[str, Parameter(name="--pool")] = "antiphon",
    limit: Annotated[int, Parameter(name="--limit")] = 1,
    project: Annotated[Path | None, Parameter(name="--project")] = None,
    schedules: Annotated[bool | None, Parameter(name="--schedules", negative="--no-schedules")] = None,
) -> int:
    """Create or update the deployments on the server of PREFECT_API_URL, else on the one of `antiphon up`.

    Args:
        pool: work pool of type process; made when it is missing.
        limit: runs that fill a machine at once, over all workers of the pool.
        project: folder that runs work in; by default the working directory.
        schedules: switch the nightly benchmark and the weekly replay on, or off with --no-schedules;
            by default they stay as they are, off at first.
    """
    home = home_directory()
    url = server_url(home)
    os.environ["PREFECT_API_URL"] = url  # before Prefect is imported: it reads its variables once
    os.environ.setdefault("DO_NOT_TRACK", "1")
    from antiphon.flows.deployments import DeployOptions
    from antiphon.flows.deployments import deploy as put

    folder = (project or Path.cwd()).absolute()
    found = put(DeployOptions(project=folder, home=home, pool=pool, limit=limit, schedules=schedules))
    for one in found:
        print(
            f"{one.name}: {'created' if one.created else 'updated'}{', ' * bool(one.schedule)}{one.schedule}"
        )
    print(f"pages: {url.removesuffix('/api')}/deployments")
    print("start a worker, one on each machine:")
    print(f"  export PREFECT_API_URL={shlex.quote(url)}")
    print(f"  prefect worker start --pool {shlex.quote(pool)}")
    print("start a run, there or from the page's form:")
    print('  prefect deployment run post_train/post-train --param \'config={"run": {"steps": 20}}\'')
    return 0


def server_url(home: Path) -> str:
    """Return the API address of the server that PREFECT_API_URL or `antiphon up` names.

    Raises:
        UnavailableError: when neither names one.
    """
    from antiphon.cli.up import running_prefect

    url = os.environ.get("PREFECT_API_URL") or running_prefect(home)
    if not url:
        raise UnavailableError(
            "no Prefect server is known: start one with `antiphon up`, or let PREFECT_API_URL name one"
        )
    return url.rstrip("/")
