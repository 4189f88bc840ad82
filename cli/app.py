"""The antiphon command: its verbs, errors in one sentence, exit codes that mean something.

0 done, 1 failed, 2 usage or configuration, 3 nothing can meet what was asked, 130 interrupted. Verbs import
what is heavy only when they run, so help and mistakes answer at once.
"""

import os
import re
import sys
from collections.abc import Sequence
from errno import EACCES, EDQUOT, EEXIST, EISDIR, ENAMETOOLONG, ENOSPC, ENOTDIR, EPERM, EROFS
from importlib import metadata

from cyclopts import App, CycloptsError, Group, Parameter

from antiphon.cli.verbs import GROUPS, REPLACED, VERBS, epilogue, place_of, shown_default, words_of
from antiphon.core.errors import COMPLAINT, INTERRUPTED, AntiphonError
from antiphon.core.reporting.plain_text import plain
from antiphon.system.ports import spare_proxies
from antiphon.system.set_up import command, report_nothing

app = App(
    name="antiphon",
    help="Overlapped, replayable reinforcement-learning post-training of language models.",
    help_format="markdown",
    version_flags=["--version"],
    help_epilogue=epilogue(("demo", "run my.yaml loop.max_staleness=0", "VERB --help"))
    + f" A verb that went says what took its place: {', '.join(v for v in REPLACED if ' ' not in v)}.",
    default_parameter=Parameter(negative="", show_default=shown_default),
    suppress_keyboard_interrupt=False,  # `execute` says what it means
    version=lambda: metadata.version("antiphon"),
)
_groups = {name: Group(name, sort_key=place) for place, name in enumerate((*GROUPS, "Options"))}
for _group, _verbs in GROUPS.items():
    for _name in _verbs:
        app.command(
            f"antiphon.cli.{':'.join(place_of(_name))}",
            name=_name,
            group=_groups[_group],
            sort_key=list(VERBS).index(_name),
            **words_of(_name),
        )
app.register_install_completion_command(help="Install completion for your shell.", group=_groups["Options"])
for _flag in ("--help", "--version"):
    app[_flag].group = (_groups["Options"],)


_UNUSABLE = (EROFS, EACCES, EPERM, ENOTDIR, EISDIR, EEXIST, ENAMETOOLONG)
"""What the system says of a file that a person named and that cannot be used."""


def execute(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; what goes wrong is one line on stderr."""
    for words in (" ".join(arguments[:2]), " ".join(arguments[:1])):
        if words in REPLACED:
            return _complain(f"`antiphon {words}` is now `antiphon {REPLACED[words]}`", 2)
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
        # The reader of our output has left; without this the interpreter complains at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
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
    print(f"{COMPLAINT}{sentence}", file=sys.stderr, flush=True)
    return code


def main() -> None:
    """Run the command line of this process; what it and its children write is its owner's alone."""
    os.umask(0o077)
    report_nothing()
    spare_proxies()
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
