"""Hosts over HTTP: turns, chats, tokens, restarts; whatever is sent is answered, if badly in a sentence."""

import asyncio
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.parts import small_host
from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.core.records import FinishReason
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.environments.host import HostEnvironment
from antiphon.lineage.hosts import HOST_TOKEN, GatewayRecord, read_gateway, write_gateway
from antiphon.models.codec import TextCodec
from antiphon.net.security.access_tokens import make_token
from antiphon.net.security.guard import Guard
from antiphon.net.security.keys import signing_key
from antiphon.net.security.local_run import ensure_local_credentials, local_bundle
from antiphon.services.reward import gateway as gateway_module
from antiphon.services.reward.gateway import CHARACTERS, Gateway, HostBody, ReportBody
from antiphon.services.reward.sessions import SampledTurn, SeatReport, Sessions
from antiphon.system.clock import wall_clock
from tests.support.hosted_rows import Row
from tests.support.real_gateway import WAIT_S, Served, config_of, rows_that_say, served
from tests.support.turn_model import write_turn_model

RUN_ID = "run-1"


CHAT = {"messages": [{"role": "user", "content": "3 + 4"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_turn_model(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def codec(model: str) -> TextCodec:
    return TextCodec.load(model)


Rows = Callable[..., list[Row]]


@pytest.fixture(scope="module")
def rows_of(codec: TextCodec) -> Rows:
    """Return the rows of groups whose policy says how many tokens it saw."""

    def make(groups: int, text: str = "N") -> list[Row]:
        return rows_that_say(codec, lambda name, context: text.replace("N", str(len(context))), groups)

    return make


@pytest.fixture
def gateway(model: str, tmp_path: Path, rows_of: Rows) -> Iterator[Served]:
    with served(config_of(model), tmp_path, rows_of(2)) as found:
        yield found


def test_a_host_of_the_standard_library_plays_until_nothing_is_left(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.ask("GET", "/v1/models")[1]["data"][0] == {
        "id": "policy",
        "object": "model",
        "created": 0,
        "owned_by": "antiphon",
        "max_model_len": 3000,
    }
    monkeypatch.setenv("ANTIPHON_GATEWAY", gateway.url)
    monkeypatch.setenv("ANTIPHON_TOKEN", gateway.token)
    small_host.main(2)
    gateway.wait_over()
    for row in gateway.coordinator.rows.values():
        assert row.over is not None and row.over.finish_reason is FinishReason.ENVIRONMENT
        assert row.over.host == small_host.NAME and 0.0 <= row.over.reward <= 1.0
        assert len(row.observed) == small_host.TURNS and row.observed[0][0] == 0 and row.breaks == []


def test_an_answer_carries_ids_logprobs_under_both_names_and_versions(gateway: Served) -> None:
    taken = gateway.take()
    assert (taken["group"], taken["split"], taken["index"]) == ("g0", "train", 0)
    assert taken["sampling"] == {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
    names = [[one.partition("@")[0] for one in each["trajectories"]] for each in taken["episodes"]]
    assert names == [["g0/0", "g0/1"], ["g0/2", "g0/3"]]
    sampling = {"antiphon_trajectory": "g0/2", "seed": 2**64 - 1, "logprobs": 1, "skip_special_tokens": False}
    said = gateway.ok("/inference/v1/generate", {"token_ids": [4, 5, 6], "sampling_params": sampling})
    (choice,) = said["choices"]
    ids = choice["token_ids"]
    assert choice["finish_reason"] == "stop" and said["usage"]["completion_tokens"] == len(ids) > 1
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in ids]
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == ids
    assert {one["logprob"] for one in choice["logprobs"]["content"]} == {-0.5}
    assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": len(ids)}]
    again = gateway.ok(
        "/inference/v1/generate", {"token_ids": [4, 5, 6]} | {"model": "policy"}, X_Session_ID="g0/2"
    )
    assert again["choices"] == said["choices"]


def test_a_chat_goes_on_from_the_tokens_that_were_sampled(gateway: Served) -> None:
    gateway.take()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4"}]
    before: list[int] = []
    for turn in range(3):
        body = {"model": "policy", "messages": messages, "antiphon_trajectory": "g0/0", "max_tokens": 16}
        said = gateway.ok("/v1/chat/completions", body)
        assert gateway.ok("/v1/chat/completions", body)["choices"] == said["choices"]
        context, choice = said["prompt_token_ids"], said["choices"][0]
        assert context[: len(before)] == before and choice["message"]["content"] == str(len(context))
        before = [*context, *choice["token_ids"]]
        messages += [choice["message"], {"role": "user", "content": [{"type": "text", "text": f"+ {turn}"}]}]
    row = gateway.coordinator.rows["g0/0"]
    assert row.breaks == [] and row.tokens == before
    # What the agent changed was not sampled: it is rendered, and a branch begins.
    messages[1] = {"role": "assistant", "content": "1"}
    fresh = {"messages": messages[:3], "antiphon_trajectory": "g0/0"}
    said = gateway.ok("/v1/chat/completions", fresh)
    assert row.breaks == [len(before)]
    longer = [*messages[:3], said["choices"][0]["message"], {"role": "user", "content": "+ 1"}]
    more = gateway.ok("/v1/chat/completions", {"messages": longer}, X_Session_ID="g0/0")
    branch = [*said["prompt_token_ids"], *said["choices"][0]["token_ids"]]
    assert more["prompt_token_ids"][: len(branch)] == branch and row.breaks == [len(before)]


def test_a_text_that_is_too_long_ends_a_trajectory_at_its_limit_of_tokens(gateway: Served) -> None:
    gateway.take()
    names, rows, path = ("g0/0", "g0/1"), gateway.coordinator.rows, "/v1/chat/completions"
    for name in names:
        gateway.ok(path, CHAT | {"antiphon_trajectory": name})
    long = {"messages": [{"role": "user", "content": "a" * (CHARACTERS * 3000 + 1)}]}
    assert gateway.refused(path, long | {"antiphon_trajectory": names[0]}).endswith("; report it")
    seats = [{"trajectory": name, "reward": 1.0, "branches": [rows[name].tokens]} for name in names]
    report = {"host": "h1", "group": "g0", "episode": 0, "seats": seats}
    assert gateway.ok("/antiphon/v1/report", report)["accepted"]
    reasons = [over.finish_reason for name in names if (over := rows[name].over)]
    assert reasons == [FinishReason.TOKENS, FinishReason.ENVIRONMENT]


def test_tools_are_called_and_answered(model: str, tmp_path: Path, rows_of: Rows) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": N}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    with served(config_of(model), tmp_path, rows_of(1, call)) as gateway:
        gateway.take()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4"}]
        body = {"antiphon_trajectory": "g0/0", "tools": [tool]}
        said = gateway.ok("/v1/chat/completions", body | {"messages": messages})
        choice = said["choices"][0]
        (called,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and called["function"]["name"] == "add"
        assert json.loads(called["function"]["arguments"]) == {"a": len(said["prompt_token_ids"])}
        messages += [choice["message"], {"role": "tool", "content": "7", "tool_call_id": called["id"]}]
        more = gateway.ok("/v1/chat/completions", body | {"messages": messages})
        row = [*said["prompt_token_ids"], *choice["token_ids"]]
        assert more["prompt_token_ids"][: len(row)] == row
        assert gateway.coordinator.rows["g0/0"].breaks == []


def test_chats_without_a_name_are_matched_where_only_one_can_be_meant(
    model: str, tmp_path: Path, rows_of: Rows
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4"}]
    with served(config_of(model), tmp_path, rows_of(1)) as gateway:
        assert "may belong to 0 traj" in gateway.refused("/v1/chat/completions", {"messages": messages})
        name = gateway.take()["episodes"][0]["trajectories"][1]
        assert "may belong to 4 traj" in gateway.refused("/v1/chat/completions", {"messages": messages})
        named = {"messages": messages, "antiphon_trajectory": name}
        said = gateway.ok("/v1/chat/completions", named)
        messages += [said["choices"][0]["message"], {"role": "user", "content": "+ 1"}]
        more = gateway.ok("/v1/chat/completions", {"messages": messages}, X_Session_ID="0b61c7")
        assert more["id"] == "g0/1"


def test_text_and_messages_are_tokenized(gateway: Served, codec: TextCodec) -> None:
    said = gateway.ok("/tokenize", {"prompt": "3 + 4"})
    assert said == {"count": len(said["tokens"]), "max_model_len": 3000, "tokens": [*codec.encode("3 + 4")]}
    longer = gateway.ok("/tokenize", {"messages": [{"role": "user", "content": "3 + 4"}]})
    assert longer["count"] > said["count"]
    assert "either prompt or messages" in gateway.refused("/tokenize", {})


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.7}, "temperature=0.7 differs from the run's 1.0"),
        ({"top_p": 0.9}, "top_p=0.9 differs from the run's 1.0"),
        ({"top_k": 5}, "top_k=5 differs from the run's 0"),
        ({"n": 2}, "n=2 differs from the run's 1"),
        ({"stream": True}, "stream=True differs"),
        ({"presence_penalty": 0.5}, "presence_penalty=0.5 differs"),
        ({"max_tokens": 3}, "max_tokens=3 is less than the run's sampling.max_tokens=16"),
        ({"max_tokens": 3, "max_completion_tokens": None}, "max_tokens=3 is less than the run's"),
        ({"max_tokens": 16, "max_completion_tokens": 4}, "max_tokens=4 is less than the run's"),
        ({"stop": ["\n"]}, "is not in sampling.stop; leave it out"),
        ({"stop_token_ids": [4]}, "stop_token_ids has 4, which is no end token"),
        ({"temperature": "hot"}, "temperature=hot differs"),
        ({"antiphon_trajectory": "g0/9"}, "there is no trajectory 'g0/9'"),
        ({"antiphon_trajectory": "nobody"}, "name the trajectory in sampling_params.antiphon_trajectory"),
    ],
)
def test_what_no_worker_will_do_is_refused(gateway: Served, sampling: dict[str, Any], words: str) -> None:
    gateway.take()
    body = {"token_ids": [4], "sampling_params": {"antiphon_trajectory": "g0/0", **sampling}}
    assert words in gateway.refused("/inference/v1/generate", body)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/inference/v1/generate", b"{", "the body: Invalid JSON"),
        ("/inference/v1/generate", b"\xff\xfe", "the body: Invalid JSON"),
        ("/inference/v1/generate", [], "the body: "),
        ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids.0: "),
        ("/inference/v1/generate", {"token_ids": [1.5]}, "token_ids.0: "),
        ("/inference/v1/generate", {"token_ids": [True]}, "token_ids.0: "),
        ("/inference/v1/generate", {"token_ids": [2**31]}, "token_ids.0: "),
        ("/inference/v1/generate", {"token_ids": [4], "model": "gpt-4"}, "there is no model 'gpt-4' here"),
        ("/v1/chat/completions", {"messages": []}, "messages must end with one of the user or a tool"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"antiphon_trajectory": "g0/0", "max_tokens": 3, "max_completion_tokens": None},
            "max_tokens=3 is less than",
        ),
        ("/v1/chat/completions", CHAT | {"antiphon_trajectory": "g0/7"}, "there is no trajectory 'g0/7'"),
        ("/v1/chat/completions", CHAT | {"antiphon_trajectory": "g0/x"}, "there is no trajectory 'g0/x'"),
        ("/antiphon/v1/take", {"host": ""}, "host: "),
        (
            "/antiphon/v1/report",
            {"host": "h", "group": "g0", "episode": 0, "seats": [{}]},
            "seats.0.trajectory: ",
        ),
        ("/antiphon/v1/nothing", {}, "POST /antiphon/v1/nothing: Not Found"),
        ("/v1/models", {}, "POST /v1/models: Method Not Allowed"),
    ],
)
def test_a_body_that_cannot_be_is_refused_in_a_sentence(
    gateway: Served, path: str, body: Any, words: str
) -> None:
    gateway.take()
    assert words in gateway.refused(path, body, X_Session_ID="g0/0")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = {
    "/inference/v1/generate": ("model", "token_ids", "sampling_params"),
    "/v1/chat/completions": ("model", "messages", "tools", "antiphon_trajectory", "max_tokens", "stop"),
    "/tokenize": ("prompt", "messages", "tools"),
    "/antiphon/v1/alive": ("host", "groups"),
    "/antiphon/v1/report": ("host", "group", "episode", "seats"),
}
MEANT = st.sampled_from(
    [
        "policy",
        "g0",
        "g0/0",
        "g7/1",
        "g0/\u00b2",
        "h1",
        0,
        [4, 5],
        [{"role": "user", "content": "3"}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "["}}],
            }
        ],
        [{"type": "function", "function": {"name": "f", "parameters": {"$ref": []}}}],
        [{"trajectory": "g0/0", "reward": float("nan")}, {"trajectory": "g0/1", "reward": 1e999}],
        {"antiphon_trajectory": "g0/1"},
    ]
)


@pytest.fixture(scope="module")
def fuzzed(model: str, tmp_path_factory: pytest.TempPathFactory, rows_of: Rows) -> Iterator[Served]:
    run_dir = tmp_path_factory.mktemp("fuzzed")
    config = config_of(model).model_copy(
        update={"services": config_of(model).services.model_copy(update={"stall_timeout_s": 0.2})}
    )
    with served(config, run_dir, rows_of(1)) as found:
        found.take()
        yield found


@given(data=st.data())
def test_whatever_is_sent_is_answered_and_never_by_a_trace(fuzzed: Served, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(PATHS)))
    body: Any = data.draw(JSON)
    if data.draw(st.booleans()):
        body = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(PATHS[path], MEANT | JSON)))
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    if data.draw(st.booleans()) and data.draw(st.booleans()):
        raw = data.draw(st.binary(max_size=30))
    status, said = fuzzed.ask("POST", path, raw)
    assert status < 500 or status == 503, (path, body, said)
    if status >= 400:
        message = said["error"]["message"]
        assert message and "Traceback" not in message and "\n" not in message.strip()


def test_a_token_of_scope_sample_is_needed(model: str, tmp_path: Path, rows_of: Rows) -> None:
    key = signing_key(bytes(32))
    guard = Guard(key.public, RUN_ID, wall_clock, wall_clock)

    def token(
        *scopes: Scope,
        run: str = RUN_ID,
        expires: float = 3600.0,
        token_id: str = "0" * 32,
        name: str = "far",
    ) -> str:
        claims = TokenClaims(token_id, run, name, scopes, int(wall_clock() + expires), 1)
        return f"Bearer {make_token(claims, key)}"

    gone = "f" * 32
    barred = {gone: "it was lost", "excluded": "it lied"}
    with served(config_of(model), tmp_path, rows_of(2), guard, barred) as gateway:
        for shown, status, words in (
            (token(Scope.SAMPLE, token_id=gone), 401, "was revoked; ask for a new one"),
            (token(Scope.SAMPLE, name="excluded"), 403, "excluded was excluded from this run"),
            ("", 401, "carries no access token"),
            ("Bearer x", 401, "this is no access token"),
            ("Bearer \u00e9", 401, "host.token"),
            (token(Scope.SAMPLE, expires=-5.0), 401, "expired"),
            (token(Scope.LEASE, Scope.PULL), 403, "this call needs scope sample"),
            (token(Scope.SAMPLE, run="run-2"), 403, "is for run run-2"),
            (token(Scope.SAMPLE), 200, ""),
            (token(Scope.ADMIN), 200, ""),
            (f"Bearer {gateway.token}", 200, ""),
        ):
            found, said = gateway.ask("GET", "/v1/models", Authorization=shown)
            assert found == status, (shown, said)
            assert status == 200 or words in said["error"]["message"]
        # Two hosts of one name: a group is the one's whose token's name took it.
        far, near = token(Scope.SAMPLE), token(Scope.SAMPLE, name="near")
        taken = gateway.ok("/antiphon/v1/take", {"host": "h"}, Authorization=far)["group"]
        alive = {"host": "h", "groups": [taken]}
        assert gateway.ok("/antiphon/v1/alive", alive, Authorization=near)["lost"] == [taken]
        assert gateway.ok("/antiphon/v1/alive", alive, Authorization=far)["held"] == [taken]
        assert gateway.ok("/antiphon/v1/alive", alive)["lost"] == [taken]
        turn = {"token_ids": [4], "sampling_params": {"antiphon_trajectory": f"{taken}/0"}}
        refused, said = gateway.ask("POST", "/inference/v1/generate", turn, Authorization=near)
        assert refused == 403 and "a host with another token" in said["error"]["message"]
        assert "host: " in gateway.refused("/antiphon/v1/take", {"host": "far/h"})
    counts = {name: one.taken for name, one in read_gateway(tmp_path).hosts.items()}
    assert counts == {"far/h": 2, "near/h": 0, "h": 0}
    assert (tmp_path / HOST_TOKEN).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/antiphon/v1/take", {"host": "h"}),
        ("/inference/v1/generate", {"token_ids": [4], "sampling_params": {"antiphon_trajectory": "g9/0"}}),
    ],
)
def test_a_request_that_waits_ends_with_its_token(
    model: str, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    key, token_id = signing_key(bytes(32)), "0" * 32
    claims = TokenClaims(token_id, RUN_ID, "far", (Scope.SAMPLE,), int(wall_clock() + 3600.0), 1)
    guard, bearer = Guard(key.public, RUN_ID, wall_clock, wall_clock), f"Bearer {make_token(claims, key)}"
    with served(config_of(model), tmp_path, [], guard) as gateway, ThreadPoolExecutor(1) as asking:
        waiting = asking.submit(gateway.ask, "POST", path, body, Authorization=bearer)
        gateway.revoke_once_heard({token_id: "it was lost"})
        status, said = waiting.result(WAIT_S)
    assert status == 401 and "was revoked" in said["error"]["message"]


def test_a_gateway_that_starts_again_is_found_where_it_was_and_goes_on(
    model: str, tmp_path: Path, rows_of: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(1)
    with served(config_of(model), tmp_path, rows) as before:
        group = before.take()
        request = {"token_ids": [4, 5], "sampling_params": {"antiphon_trajectory": "g0/0"}}
        said = before.ok("/inference/v1/generate", request)
    monkeypatch.setenv("ANTIPHON_GATEWAY", before.url)
    monkeypatch.setenv("ANTIPHON_TOKEN", before.token)
    with served(config_of(model), tmp_path, rows) as after:
        assert (after.url, after.token) == (before.url, before.token)
        assert after.ok("/inference/v1/generate", request)["choices"] == said["choices"]
        alive = {"host": "h1", "groups": ["g0", "g1"]}
        assert after.ok("/antiphon/v1/alive", alive) == {"held": ["g0"], "lost": []}, "g1 may come yet"
        for episode in group["episodes"]:
            small_host.play_episode("h1", group, episode)
        after.wait_over()
    record = read_gateway(tmp_path)
    counts = record.hosts["h1"]
    assert (counts.taken, counts.reported, record.untaken) == (2, 2, 0)
    assert record.lines() == [
        "host h1: 2 episodes taken, 2 reported, 0 failed, 0 reports refused, 0 lost by silence"
    ]


def test_a_port_that_is_taken_is_named(gateway: Served, model: str, tmp_path: Path, rows_of: Rows) -> None:
    config = config_of(model, port=gateway.port)
    with (
        pytest.raises(
            ConfigError, match=rf"gateway\.port={gateway.port} on 127\.0\.0\.1 cannot be listened on"
        ),
        served(config, tmp_path / "other", rows_of(1)),
    ):
        pass


def test_a_model_without_a_renderer_for_turns_still_serves_tokens(
    model: str, tmp_path: Path, rows_of: Rows
) -> None:
    tree = json.loads(config_of(model).model_dump_json())
    tree["model"] |= {"renderer": "default", "template_arguments": {}}
    with served(build_config(tree), tmp_path, rows_of(1)) as gateway:
        gateway.take()
        said = gateway.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "3"}]})
        assert said.startswith("chat completions need a renderer: model.renderer=default")
        gateway.ok(
            "/inference/v1/generate", {"token_ids": [4], "sampling_params": {"antiphon_trajectory": "g0/0"}}
        )


def test_elsewhere_than_on_loopback_it_is_encrypted(model: str, tmp_path: Path, rows_of: Rows) -> None:
    ensure_local_credentials(tmp_path)
    bundle, tree = local_bundle(tmp_path), json.loads(config_of(model).model_dump_json())
    tree["gateway"] |= {"address": "0.0.0.0"}
    with (
        pytest.raises(ConfigError, match=r"gateway\.address=0\.0\.0\.0 would serve without encryption"),
        served(build_config(tree), tmp_path, rows_of(1)),
    ):
        pass
    tree["services"] |= {"credentials": str(bundle), "address": "localhost"}
    with served(build_config(tree), tmp_path, rows_of(1)) as gateway:
        assert gateway.url == f"https://localhost:{gateway.port}"
        trusting = ssl.create_default_context(cafile=bundle / "ca.pem")
        request = urllib.request.Request(
            f"{gateway.url}/v1/models", headers={"Authorization": f"Bearer {gateway.token}"}
        )
        with urllib.request.urlopen(request, timeout=WAIT_S, context=trusting) as reply:
            assert json.load(reply)["data"][0]["id"] == "policy"


def quiet_gateway(config: RunConfig, codec: TextCodec) -> Gateway:
    """Return a gateway without sockets; its time stands still."""
    environment, sizes = HostEnvironment(config.environment), {"train": 4, "heldout": 2}
    sessions = Sessions(
        environment,
        sizes,
        vocabulary=codec.vocabulary_size,
        max_tokens=config.sampling.max_tokens,
        host_timeout_s=60.0,
        forget_s=60.0,
        now=0.0,
    )
    return Gateway(config, sessions, codec, "there is none", lambda: 0.0)


def test_a_report_is_answered_once_the_coordinator_has_it(
    model: str, codec: TextCodec, rows_of: Rows
) -> None:
    async def story() -> None:
        gateway = quiet_gateway(config_of(model), codec)
        for row in rows_of(1)[:2]:
            gateway.asked(row.question())
        nothing = make_mocked_request("POST", "/")
        nothing[gateway_module.BEARER] = ""
        taken = await gateway._take(HostBody(host="h"), nothing)
        assert taken is not None
        names = taken["episodes"][0]["trajectories"]
        seats = [SeatReport(trajectory=name, error="no") for name in names]
        body = ReportBody(host="h", group="g0", episode=0, seats=seats)
        reporting = asyncio.create_task(gateway._report(body, nothing))
        answers = [await gateway.answered.get() for _ in range(2)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not reporting.done()
        gateway.sent(answers)
        assert (await reporting)["accepted"]

    asyncio.run(story())


def test_a_turn_that_a_stop_text_ended_is_not_said_to_be_cut(model: str, codec: TextCodec) -> None:
    tree = json.loads(config_of(model).model_dump_json())
    tree["sampling"] |= {"stop": ["4"]}
    gateway = quiet_gateway(build_config(tree), codec)

    def told(text: str) -> str:
        ids = np.array(codec.encode(text, add_special_tokens=False), dtype=np.int32)
        said = SampledTurn(ids, np.zeros(ids.size, dtype=np.float32), ())
        return str(gateway._told(1, said)["choices"][0]["finish_reason"])

    assert (told("3 + 4"), told("3 + 3")) == ("stop", "length")


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, failures = threading.Event(), [UnavailableError("no space is left")] * 2

    def write(run_dir: Path, record: GatewayRecord) -> None:
        if failures:
            raise failures.pop()
        if "late" in record.hosts:
            write_gateway(run_dir, record)
            written.set()

    monkeypatch.setattr(gateway_module, "write_gateway", write)
    gateway.ok("/antiphon/v1/alive", {"host": "late"})
    assert written.wait(WAIT_S) and "late" in read_gateway(gateway.run_dir).hosts


def test_what_is_too_large_or_too_slow_is_refused(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "a" * (CHARACTERS * 3000 + 1)}
    assert "maximum context length is 3000 tokens" in gateway.refused("/tokenize", long)
    messages = {"messages": [{"role": "user", "content": long["prompt"]}]}
    for path in ("/tokenize", "/v1/chat/completions"):
        assert "maximum context length is 3000" in gateway.refused(path, messages, X_Session_ID="g0/0")
    many = {"host": "h", "groups": ["g"] * 5000}
    assert gateway.refused("/antiphon/v1/alive", many).startswith("groups: ")
    assert "Too Large" in gateway.refused("/tokenize", b" " * ((8 << 20) + 1))
    monkeypatch.setattr(gateway_module, "BODY_S", 0.1)
    head = f"POST /tokenize HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {gateway.token}\r\n"
    with socket.create_connection((gateway.host, gateway.port), timeout=WAIT_S) as connection:
        connection.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
        assert b"408" in connection.recv(1 << 16).splitlines()[0]
