"""Browse: a run's trajectories in a browser of this machine, token by token, from its record alone.

Only the user who started it is answered, and only by the machine's own name: no page of others can ask
through a browser. What models wrote travels as JSON, and the page shows it as text.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.reporting.plain_text import plain
from antiphon.core.reporting.rollouts import ROLLOUT, differing, group_of, over_versions, read_query
from antiphon.lineage.rollout_index import RolloutIndex
from antiphon.lineage.samples import Explain, reason_of, texts_of
from antiphon.report.render import render
from antiphon.system.ports import LOOPBACK, owner_of_connection

ROWS = 100
"""Trajectories of one answer."""
BESIDE = 32
"""Most trajectories beside each other."""
DRAFTS = ("drafted", "accepted", "passes")
OWN_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_log = structlog.get_logger("antiphon.report")
_shown = partial(plain, keep="\n\t")
_Answer = Callable[[], dict[str, Any]]
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RolloutPages:
    """What is answered about the trajectories of one run."""

    def __init__(
        self, index: RolloutIndex, figures: RunFigures | None, explain: Explain | None = None
    ) -> None:
        """Answer from an index, with the report's figures and reasons; None where no one knows them."""
        self._index, self._table, self._figures = index, index.table, figures
        self._explain = explain

    def application(self) -> web.Application:
        """Return what is served."""

        async def asked(request: web.Request) -> web.Response:
            part, _, name = request.match_info["what"].partition("/")
            shown: _Answer = partial(self.trajectories, name, part)
            run, run_id = request.query.get("run"), self._index.files.run_id
            if run not in (None, "", run_id):
                raise ConfigError(f"this is run {run_id}; start `antiphon browse {run}` to see that one")
            answers: dict[str, _Answer] = {"run": self.run, "rows": partial(self.rows, request.query)}
            return web.json_response(await asyncio.to_thread(answers.get(part, shown)))

        app = web.Application(middlewares=[_guarded])
        app.router.add_get("/api/{what:run|rows|(one|group|versions)/[tfv0-9.]+}", asked)
        app.router.add_get("/{file:|browse\\.js|browse\\.css}", _page)
        return app

    def run(self) -> dict[str, Any]:
        """Return what stands above the list."""
        lacks = ["which tokens were drafted: drafts are counted by group", *self._index.lacks]
        if self._figures is None:
            lacks.append("the run's log, so that there are no figures")
        figures = [] if self._figures is None else self._figures.rows()
        return {"run": self._index.files.run_id, "figures": figures, "lacks": lacks}

    def rows(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the trajectories that an address asks for, `ROWS` of them from its offset on.

        Raises:
            ConfigError: when a parameter means nothing.
        """
        query = read_query(parameters)
        places = self._index.select(query)
        rows = [self._row(place) for place in places[query.offset : query.offset + ROWS].tolist()]
        return {
            "found": places.size,
            "total": self._table.size,
            "searched": self._index.searched,
            "rows": rows,
        }

    def _row(self, place: int) -> dict[str, Any]:
        row = dict(zip(ROLLOUT.names or (), self._table[place].item(), strict=True))
        row["reward"] = f"{row['reward']:g}"
        return {name: _shown(value) if isinstance(value, str) else value for name, value in row.items()}

    def trajectories(self, name: str, view: str = "one") -> dict[str, Any]:
        """Return a trajectory, with view=group its group, with versions one of its prompt for each version.

        Of more than `BESIDE` it is the nearest ones.

        Raises:
            ConfigError: when there is none of that name.
            IntegrityError: when its file was altered.
            UnavailableError: when it is gone.
        """
        place, before = self._index.place(name), None
        others = {"group": group_of, "versions": over_versions}.get(view)
        places = [place] if others is None else others(self._table, place)
        first = max(0, places.index(place) - BESIDE // 2)
        shown = [self._whole(one) for one in places[first : first + BESIDE]]
        for one in shown if view == "versions" else ():
            one["marked"] = [] if before is None else differing(before, one["ids"])
            before = one["ids"]
        return {"shown": shown, "of": len(places)}

    def _whole(self, place: int) -> dict[str, Any]:
        (row, timing), codec = self._index.trajectory(place), self._index.codec

        def pieces(ids: list[int]) -> list[str]:
            return [f"{i} " for i in ids] if codec is None else [_shown(text) for text in codec.pieces(ids)]

        answer, explain = ("", None) if codec is None else (texts_of(row, codec.decode)[1], self._explain)
        return {
            **self._row(place),
            "advantage": f"{row.advantage:.4g}",
            "reason": _shown(
                "; ".join(filter(None, (row.finish_reason.value, reason_of(row, answer, explain))))
            ),
            "drafts": None if timing is None else [getattr(timing, name) for name in DRAFTS],
            "context": pieces(row.prompt_token_ids.tolist()),
            "pieces": pieces(row.token_ids.tolist()),
            "ids": row.token_ids.tolist(),
            "logprobs": [round(x, 4) if isfinite(x) else None for x in row.logprobs.tolist()],
            "spans": [(span.version, span.start, span.stop) for span in row.spans],
            "observed": row.observed,
            "breaks": row.breaks,
            "marked": [],
        }


async def _page(request: web.Request) -> web.Response:
    name = request.match_info["file"] or "browse.html"
    text = (Path(__file__).with_name("templates") / name).read_text(encoding="utf-8")
    kind = {"html": "text/html", "css": "text/css"}.get(name.partition(".")[2], "text/javascript")
    return web.Response(text=render("style.css") + text if kind == "text/css" else text, content_type=kind)


@web.middleware
async def _guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Let this user's own browser in, and say every refusal in a sentence."""
    peer = request.transport and request.transport.get_extra_info("peername")
    foreign = request.headers.get("Sec-Fetch-Site") == "cross-site" and request.path != "/"
    if foreign or not OWN_NAME.fullmatch(request.headers.get("Host", "")):
        answer = _refused(
            403, "only this machine's own pages are answered; open http://127.0.0.1 with the port"
        )
    elif not peer or owner_of_connection(peer[1]) != os.getuid():
        answer = _refused(403, "another user of this machine started this; start `antiphon browse` yourself")
    else:
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = _refused(error.status, f"{request.method} {request.path[:100]}: {error.reason}")
        except AntiphonError as error:
            answer = _refused(400 if isinstance(error, ConfigError) else 500, str(error))
        except Exception:  # noqa: BLE001 (a page that gets no JSON cannot say why)
            _log.exception("rollouts.failed", path=request.path[:100])
            answer = _refused(500, "this cannot be shown; what failed stands where `antiphon browse` runs")
    answer.headers.update(HEADERS)
    return answer


def _refused(status: int, sentence: str) -> web.StreamResponse:
    return web.json_response({"error": sentence}, status=status)


async def serve(pages: RolloutPages, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled; `ready` hears the address, with a free port where `port` is 0.

    Raises:
        ConfigError: when the port is taken or may not be used.
    """
    runner = web.AppRunner(pages.application(), access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, LOOPBACK, port).start()
        except OSError as error:
            raise ConfigError(
                f"port {port} of {LOOPBACK} cannot be used ({os.strerror(error.errno or 0)}); give --port "
                "another, or 0 for a free one"
            ) from error
        ready(f"http://{LOOPBACK}:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
