"""The worker kit: packed from a model folder, signed, fetched part by part, and read strictly."""

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.api.coordinator import KitPart
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.models.directory import TENSOR_TABLE, expected_tensors, lacks_weights
from antiphon.net import worker_kit
from antiphon.net.security.keys import signing_key
from antiphon.net.worker_kit import (
    KIT_BYTES,
    KIT_FILE,
    KIT_FILES,
    KIT_PART_BYTES,
    fetch_kit,
    kit_part,
    pack_kit,
    read_kit,
    write_kit,
)
from antiphon.protos.coordinator_pb2 import Kit
from antiphon.protos.coordinator_pb2 import KitFile as KitFileMessage

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "chain-sum"
RUN, KEY, OTHER = "run-1", signing_key(b"k" * 32), signing_key(b"o" * 32)
FILES = {"config.json": b'{"a": 1}', TENSOR_TABLE: b"[]", "tokenizer.json": b"t" * 700}
Ask = Callable[[int], Awaitable[KitPart | None]]


def test_a_kit_says_of_the_model_what_its_folder_says(tmp_path: Path) -> None:
    archive = pack_kit(MODEL)
    assert archive == pack_kit(MODEL) and len(archive) < 1 << 20
    files = read_kit(archive)
    assert not [name for name in files if name.endswith(".safetensors")]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert name == TENSOR_TABLE or (MODEL / name).read_bytes() == content
    assert list(expected_tensors(tmp_path).items()) == list(expected_tensors(MODEL).items())
    assert lacks_weights(tmp_path) and not lacks_weights(MODEL)
    assert pack_kit(tmp_path) == archive


def test_a_tokenizer_that_is_too_large_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_kit, "KIT_BYTES", 100)
    with pytest.raises(
        ConfigError, match=r"model\.path=.* has .*tokenizer\.json .*too large for a worker kit"
    ):
        pack_kit(MODEL)
    write_kit(MODEL, RUN, tmp_path, None)
    assert not (tmp_path / KIT_FILE).exists()


@given(st.dictionaries(st.sampled_from(KIT_FILES), st.binary(max_size=1200)))
def test_what_was_packed_is_read(files: dict[str, bytes]) -> None:
    files |= {"config.json": b"{}", TENSOR_TABLE: b"[]"}
    assert read_kit(worker_kit._packed(files)) == files


@settings(max_examples=300)
@given(st.data())
def test_altered_archives_are_refused_or_are_other_kits(data: st.DataObject) -> None:
    plain = bytearray(zlib.decompress(worker_kit._packed(FILES)))
    for _ in range(data.draw(st.integers(1, 4))):
        place, length = data.draw(st.integers(0, len(plain) - 1)), data.draw(st.integers(0, 40))
        plain[place : place + length] = data.draw(st.binary(max_size=40))
    try:
        files = read_kit(zlib.compress(bytes(plain)))
    except IntegrityError as error:
        assert "nothing of it was unpacked" in str(error)
        return
    assert set(files) <= set(KIT_FILES)


@given(st.binary(max_size=2000))
def test_no_bytes_do_anything_but_be_refused(junk: bytes) -> None:
    for archive in (
        junk,
        zlib.compress(junk),
        worker_kit._packed(FILES)[:-1],
        worker_kit._packed(FILES) + b"x",
    ):
        with pytest.raises(IntegrityError, match="nothing of it was unpacked"):
            read_kit(archive)


@pytest.mark.parametrize(
    "extra",
    ["../config.json", "/etc/passwd", "folder/config.json", "model.safetensors", "a.py", "", "config.json"],
)
def test_hostile_names_are_refused(extra: str) -> None:
    files = [KitFileMessage(name=name, content=FILES[name]) for name in sorted(FILES)]
    files.append(KitFileMessage(name=extra, content=b"abc"))
    with pytest.raises(IntegrityError, match="no kit holds, or one twice; nothing of it was unpacked"):
        read_kit(zlib.compress(Kit(files=files).SerializeToString()))


def test_a_kit_of_an_older_form_is_refused() -> None:
    with pytest.raises(IntegrityError, match="nothing of it was unpacked"):
        read_kit(zlib.compress(b"config.json".ljust(512, b"\0") + b"{}".ljust(512, b"\0")))


def test_no_more_than_a_kit_may_hold_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_kit, "UNPACKED_BYTES", 1000)
    content = KitFileMessage(name="config.json", content=bytes(1 << 20))
    with pytest.raises(IntegrityError, match="nothing of it was unpacked"):
        read_kit(zlib.compress(Kit(files=[content]).SerializeToString()))


def offered(folder: Path, signer: object = KEY) -> Path:
    write_kit(MODEL, RUN, folder, signer)  # type: ignore[arg-type]
    return folder / KIT_FILE


def fetched(ask: Ask, root: Path, arrived: list[int], stall_s: float = 0.0, run: str = RUN) -> Path:
    return asyncio.run(fetch_kit(ask, run, KEY.public, root, stall_s, arrived.append))


def asking(kit: Path, change: Callable[[KitPart], KitPart | None] = lambda part: part) -> Ask:
    async def ask(offset: int) -> KitPart | None:
        part = kit_part(kit, offset)
        return None if part is None else change(part)

    return ask


def test_a_kit_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_kit, "KIT_PART_BYTES", 100)
    kit, arrived = offered(tmp_path), list[int]()
    folder = fetched(asking(kit), tmp_path / "kits", arrived)
    archive = (tmp_path / KIT_FILE).read_bytes()[96:]
    assert sum(arrived) == len(archive) and max(arrived) == 100
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == read_kit(archive)
    assert list(expected_tensors(folder)) == list(expected_tensors(MODEL))
    assert fetched(asking(kit), tmp_path / "kits", arrived) == folder and sum(arrived) == len(archive)
    assert [path.name for path in (tmp_path / "kits").iterdir()] == [folder.name]
    assert KIT_PART_BYTES >= 100


def refusals() -> dict[str, tuple[Callable[[KitPart], KitPart | None], str]]:
    from dataclasses import replace

    return {
        "another signature": (lambda p: replace(p, signature=OTHER.sign(b"x")), "not signed by the learner"),
        "no signature": (lambda p: replace(p, signature=b""), "not signed by the learner"),
        "another digest": (lambda p: replace(p, digest="0" * 64), "not signed by the learner"),
        "no digest": (lambda p: replace(p, digest="../x"), "digest"),
        "too large": (lambda p: replace(p, total_bytes=KIT_BYTES + 1), "claims"),
        "empty": (lambda p: replace(p, total_bytes=0), "claims"),
        "more than it said": (lambda p: replace(p, data=p.data * 2), "bytes came at 0 of"),
        "nothing more": (lambda p: replace(p, data=b""), "0 bytes came"),
        "altered": (lambda p: replace(p, data=p.data[:50] + b"\0" + p.data[51:]), "its digest is"),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_kit_that_is_not_the_learners_is_refused_and_nothing_is_unpacked(name: str, tmp_path: Path) -> None:
    change, words = refusals()[name]
    with pytest.raises(IntegrityError, match=words) as refused:
        fetched(asking(offered(tmp_path), change), tmp_path / "kits", [])
    assert "\n" not in str(refused.value) and "unpacked" in str(refused.value)
    assert not (tmp_path / "kits").exists()


def test_the_kit_of_another_run_or_learner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="kit of run-2 is not signed by the learner"):
        fetched(asking(offered(tmp_path)), tmp_path / "kits", [], run="run-2")
    with pytest.raises(IntegrityError, match="not signed by the learner"):
        fetched(asking(offered(tmp_path, OTHER)), tmp_path / "kits", [])


def test_a_coordinator_without_a_kit_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_kit, "MOST_PAUSE_S", 0.0)
    kit, asked = tmp_path / KIT_FILE, list[int]()

    async def ask(offset: int) -> KitPart | None:
        asked.append(offset)
        if len(asked) == 4:
            write_kit(MODEL, RUN, tmp_path, KEY)
        return kit_part(kit, offset)

    assert fetched(ask, tmp_path / "kits", [], stall_s=60.0).is_dir()
    with pytest.raises(UnavailableError, match="no worker kit"):
        fetched(asking(tmp_path / "none"), tmp_path / "kits", [])


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / TENSOR_TABLE).write_text(json.dumps([["a", "F32"]]))
    with pytest.raises(ConfigError, match="no table of tensors"):
        expected_tensors(tmp_path)


def test_an_offset_beyond_the_end_brings_nothing(tmp_path: Path) -> None:
    part = kit_part(offered(tmp_path), 2**62)
    assert (
        part is not None and not part.data and part.total_bytes == (tmp_path / KIT_FILE).stat().st_size - 96
    )
