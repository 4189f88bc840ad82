"""Invitations: bundles with tokens that work; a token that lets its worker do nothing is not made."""

from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.cli.invite import _scopes
from antiphon.cli.worker import name_in
from antiphon.core.errors import ConfigError
from antiphon.core.trust.access_tokens import ANY_RUN, Scope
from antiphon.lineage.door_keys import BARRED, PREFIX
from antiphon.net.security.access_tokens import load_claims
from antiphon.net.security.certificates import hosts_of
from antiphon.net.security.credentials import KEYS, load_credentials
from antiphon.net.security.keys import TOKEN_KEY, load_public


def test_scopes_without_leases_are_refused() -> None:
    assert _scopes("lease, submit,pull") == (Scope.LEASE, Scope.SUBMIT, Scope.PULL)
    assert _scopes("admin") == (Scope.ADMIN,)
    assert _scopes("sample") == (Scope.SAMPLE,)
    for text in ("submit", "submit,pull", ""):
        with pytest.raises(ConfigError, match=f"--scopes {text} lets a worker do nothing.*add lease"):
            _scopes(text)


def test_one_command_makes_a_bundle_that_lets_a_worker_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    assert execute(["invite", "--host", "a.example"]) == 0
    assert "a.example" in capsys.readouterr().out
    assert (
        execute(["invite", "gpu-7", "--run", "demo-1", "--relay-host", "gpu-7.example", "--hours", "2"]) == 0
    )
    assert "for run demo-1, 2 h" in capsys.readouterr().out
    bundle = tmp_path / "keys" / "workers" / "gpu-7"
    names = {"ca.pem", "cert.pem", "key.pem", "learner.pub", "token", "tokens.pub"}
    assert {path.name for path in bundle.iterdir()} == names
    assert execute(["invite", "--show", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert "worker gpu-7\nrun demo-1\n" in said and "signature right" in said
    token = (bundle / "token").read_text()
    assert execute(["invite", "gpu-7", "--run", "demo-1"]) == 0
    assert (bundle / "token").read_text() != token
    assert hosts_of((bundle / "cert.pem").read_bytes()) == ["gpu-7", "gpu-7.example"]
    services = hosts_of((tmp_path / "keys" / "services" / "cert.pem").read_bytes())
    assert "a.example" in services, "a later invitation leaves the services' addresses"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--run", "demo-1"], "--run lets workers into a run; name one with it"),
        (["--revoke"], "--revoke needs the name of a worker"),
        (["w", "--revoke", "--pardon"], "are three things; give one of them"),
        (["w", "--run", "demo-1", "--hours", "0"], "--hours 0 is not within a year"),
        (["services"], "worker services is not possible"),
        (["--show", "nowhere"], "there is no access token in nowhere"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    assert execute(["invite", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_pool_has_a_bundle_for_each_ordinal_and_more_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    assert execute(["invite", "--pool", "spot", "--count", "2", "--run", "*"]) == 0
    bundles = tmp_path / "keys" / "workers"
    assert {path.name for path in bundles.iterdir()} == {"spot-0", "spot-1"}
    assert len({(path / "key.pem").read_bytes() for path in bundles.iterdir()}) == 2
    for path in bundles.iterdir():
        assert name_in(load_credentials(path), "") == path.name
        with pytest.raises(ConfigError, match=f"those of worker {path.name}"):
            name_in(load_credentials(path), "spot-7")
    assert name_in(load_credentials(tmp_path / "keys" / "services"), "any-name") == "any-name"
    assert execute(["invite", "--pool", "spot", "--count", "3", "--run", "*"]) == 0
    assert len([*bundles.iterdir()]) == 3
    capsys.readouterr()
    for words in (["--pool", "spot"], ["--count", "2"], ["--pool", "spot", "--count", "2000"]):
        assert execute(["invite", *words]) == 2
        assert "--count" in capsys.readouterr().err


def test_keys_of_the_front_door_are_printed_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    door = ["--scopes", "door"]
    assert execute(["invite", "ada", "bob", *door, "--hours", "2"]) == 0
    _, ada, said, bob = capsys.readouterr().out.splitlines()
    public = load_public(tmp_path / KEYS, TOKEN_KEY)
    claims = load_claims(bob.removeprefix(PREFIX), public)
    assert ada.startswith(PREFIX) and claims.token_id in said
    assert (claims.worker_name, claims.run_id, claims.scopes) == ("bob", ANY_RUN, (Scope.DOOR,))
    assert execute(["invite", "bob", claims.token_id, *door, "--revoke"]) == 0
    assert (tmp_path / BARRED).read_text().split() == ["bob", claims.token_id]
    assert execute(["invite", "bob", *door, "--pardon"]) == 0
    assert (tmp_path / BARRED).read_text().split() == [claims.token_id]
    for words in ([], ["a b"], ["ada", "--hours", "0"]):
        assert execute(["invite", *words, *door]) == 2
    capsys.readouterr()
    assert execute(["invite", "ada", "--scopes", "door,lease"]) == 2
    assert "--scopes door,lease has door among others" in capsys.readouterr().err
