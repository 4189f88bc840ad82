"""The antiphon command: one verb a file, errors in one sentence, exit codes that mean something.

0 done, 1 failed, 2 usage or configuration, 3 nothing can meet what was asked, 130 interrupted. Verbs import
what is heavy only when they run, so help and mistakes answer at once.
"""

import errno
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata

from cyclopts import App, CycloptsError, Group, Parameter

from antiphon.cli.help import GROUPS, epilogue, place_of, shown_default, words_of
from antiphon.core.errors import INTERRUPTED, AntiphonError
from antiphon.core.reporting.plain_text import plain
from antiphon.system.ports import spare_proxies
from antiphon.system.set_up import command, report_nothing

app = App(
    name="antiphon",
    help="Overlapped, replayable reinforcement-learning post-training of language models.",
    help_format="markdown",
    version_flags=["--version"],
    help_epilogue=epilogue(("demo", "run my.yaml loop.max_staleness=0", "VERB --help")),
    default_parameter=Parameter(negative="", show_default=shown_default),
    suppress_keyboard_interrupt=False,  # `execute` says what it means
    version=lambda: metadata.version("antiphon"),
)
_groups = {name: Group(name, sort_key=place) for place, name in enumerate((*GROUPS, "Options"))}
for _verb, _place, _help in (
    ("demo", "demo:demo", "Train the shipped small model and show what came of it."),
    ("run", "run:run", "Post-train a policy as a configuration says."),
    ("plan", "plan:plan", "Say how many workers a configuration needs, and what a run takes and costs."),
    ("tune", "tune:tune", "Find the fastest settings of the rollout engine on this machine."),
    ("config", "config:config", "Print the tree that a configuration resolves to."),
    ("status", "status:status", "Show a run as it is now."),
    ("events", "events:events", "Print what happened to a run."),
    ("void", "void:void", "Take a sealed batch back that the learner cannot train on."),
    ("runs", "runs:runs", "List all runs, newest first."),
    ("environments", "environments:environments", "List the tasks that can be trained on, or show one."),
    ("compare", "compare:compare", "Show runs side by side: what differs, figures, rewards on one page."),
    ("report", "report:report", "Write one self-contained HTML page about a run."),
    ("replay", "replay:replay", "Execute recorded steps again and compare every bit."),
    ("simulate", "simulate:simulate", "Simulate whole runs with faults and check every event."),
    ("samples", "samples:samples", "Show completions of a version: the best, the worst and random ones."),
    ("evaluate", "evaluate:evaluate", "Print or write the held-out scores of a run's versions."),
    ("lineage", "lineage:lineage", "Show what an artifact came from, or check that all are as recorded."),
    ("export", "export:export", "Write a version of a run as a Hugging Face folder."),
    ("record", "record:record", "Bring in what MLflow or the ledger missed of a run."),
    ("keep", "keep:keep", "Let git and DVC see a run's ledger, so that others can pull it."),
    ("up", "up:up", "Serve the pages of what was recorded and, with --s3, a bucket."),
    ("down", "up:down", "Stop what `antiphon up` serves."),
    ("deploy", "deploy:deploy", "Put the flows on a Prefect server, with forms and schedules."),
    ("push", "push:push", "Send what the remote store does not have yet."),
    ("gc", "gc:gc", "Remove artifacts that nothing needs any more."),
    ("worker", "worker:worker", "Join a run from this machine and sample for it."),
    ("serve", "serve:app", "Run one service in the foreground."),
    ("certs", "certs:certs", "Make certificates for the services and for workers elsewhere."),
    ("token", "token:app", "Let a worker into a run for a while, or take that back."),
):
    _group, _order = place_of(_verb)
    app.command(
        f"antiphon.cli.{_place}",
        name=_verb,
        help=_help,
        group=_groups[_group],
        sort_key=_order,
        **({} if _place.endswith(":app") else words_of(_verb)),
    )
app.register_install_completion_command(help="Install completion for your shell.", group=_groups["Options"])
for _flag in ("--help", "--version"):
    app[_flag].group = (_groups["Options"],)


_UNUSABLE = (
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
)
"""What the system says of a file that a person named and that cannot be used."""


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; what goes wrong is one line on stderr."""
    try:
        code = app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        verb = " ".join(("antiphon", *(error.command_chain or ())))
        said = " ".join(str(error).split())
        return _complain(f"{said} {_as_override(said)}See `{verb} --help`.", 2)
    except AntiphonError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, 130)
    except BrokenPipeError:
        # Whoever read our output has left; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" for {error.filename}" if error.filename else ""
            return _complain(
                f"no space is left on the disk{where}; free some and give the same command again", 1
            )
        if error.errno not in _UNUSABLE or not error.filename:
            raise
        return _complain(f"cannot use {error.filename}: {error.strerror}; give another file or folder", 2)
    return code if isinstance(code, int) else 0


def _as_override(said: str) -> str:
    """Say how a field of the configuration is set, where it was written as an option."""
    option = re.search(r'Unknown option: "?--([\w.-]+\w)', said)
    if option is None:
        return ""
    from antiphon.core.config import RunConfig
    from antiphon.core.config_errors import places_of

    name = option[1].replace("-", "_").rpartition(".")[2]
    places = places_of(name, RunConfig)
    return (
        f"A field of the configuration is set by {' or '.join(f'{place}=VALUE' for place in places)}. "
        if places
        else ""
    )


def _complain(sentence: str, code: int) -> int:
    sentence = plain(sentence, keep="\n").replace("`antiphon ", f"`{command()} ")  # to be pasted here
    print(f"antiphon: {sentence}", file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Run the command line of this process; what it and its children write is its owner's alone."""
    os.umask(0o077)
    report_nothing()
    spare_proxies()
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
