"""keep: let git and DVC's commands see a run's ledger, so that it can be committed, pushed and pulled."""

import os
import shlex

from antiphon.core.errors import ConfigError


def keep(run: str | None = None, /) -> int:
    """Write the .dvc file of a run's ledger, which git and `dvc push` see; say what to do with it.

    Args:
        run: the run's id; by default the newest. `benchmarks` is the ledger of scheduled benchmarks.
    """
    from antiphon.lineage import layout
    from antiphon.runs.directory import home_directory
    from antiphon.runs.finding import find_run
    from antiphon.runs.pulled import ledger_folders
    from antiphon.system.set_up import beside

    home = home_directory()
    name = run or find_run(home, None).name
    folders = ledger_folders(home)
    kept = [path for folder in folders for path in layout.keep(folder, name)]
    if not kept:
        known = sorted({known for folder in folders for known in layout.ledger_names(folder)})
        if name in known:
            raise ConfigError(
                f"the ledger of {name} has no list of its files yet; `antiphon record {name}` writes it"
            )
        raise ConfigError(
            f"there is no ledger {name} in {' or '.join(map(str, folders)) or 'any DVC project'}; "
            f"there are: {', '.join(known) or 'none'}"
        )
    files, dvc = shlex.join(os.path.relpath(path) for path in kept), beside("dvc")
    print(f"git and DVC see {files} now; others get the run with:")
    print(f"  git add {files} && git commit -m 'Keep {name}' && git push && {dvc} push {files}")
    print(f"  git pull && .venv/bin/dvc pull {files}     # in another clone; then ./antiphon report {name}")
    return 0
