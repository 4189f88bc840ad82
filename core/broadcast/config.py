"""Broadcast config: how weights come to the workers."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from antiphon.core.config_sections import MOST_KEPT, YEAR_S, Section, check_place

MOST_RUNGS = 16
"""A manifest lists each patch, and is sent to every worker."""

Rung = Annotated[int, Field(ge=1, le=MOST_KEPT)]


class BroadcastSection(Section):
    """Weights on their way to the workers."""

    chunk_bytes: int | None = Field(default=None, ge=1024, le=16 << 20)
    """Bytes of one chunk; null: a power of two from 32 KiB to 16 MiB, 128 or more of a large snapshot."""
    origin_port: int = Field(default=0, ge=0, le=65535)
    """Port that the learner's payloads are served on; 0 picks a free one."""
    uplink_bytes_per_s: float | None = Field(default=None, gt=0.0)
    """Cap on what the origin sends, bytes per second; none by default."""
    links: bool = True
    """Workers on the origin's machine take its files by links, and nothing is sent. false: they fetch as from
    elsewhere, which tries out a slow network with broadcast.uplink_bytes_per_s."""
    relay: Literal["auto", "off"] = "auto"
    """auto: workers that others can reach (`antiphon worker --relay-address`) hand payloads on, as the
    measured links suggest; off: every worker fetches from the origin."""
    relay_bytes_per_s: float | None = Field(default=None, gt=0.0)
    """Cap on what each worker hands on, bytes per second."""
    streams: int = Field(default=2, ge=1, le=4)
    """Connections beside each other to each source: more of them fill long and lossy links."""
    snapshots_kept: int = Field(default=8, ge=2, le=MOST_KEPT)
    """Newest announced snapshots that the learner and each worker keep."""
    transfer_timeout_s: float = Field(default=600.0, gt=0.0, le=YEAR_S)
    """Seconds without an arriving chunk after which a transfer is given up and tried again."""
    patches: Literal["auto", "on", "off"] = "auto"
    """Snapshots also as changes of earlier ones. auto: where workers may sit on other machines
    (services.credentials) and a patch takes less than half of a snapshot; on: wherever it is smaller; off:
    never."""
    patch_ladder: tuple[Rung, ...] = (1, 2, 4, 8)
    """How many published versions back patches begin, among those that broadcast.snapshots_kept keeps; late
    workers need the longer ones."""
    compress_full: bool = False
    """Publish each snapshot compressed too, for workers that hold no earlier version, where patches are made.
    Costs two thirds of a bfloat16 snapshot's disk."""
    object_store: str | None = None
    """Where the origin keeps copies of its payloads for workers that do not reach it: `s3://bucket/prefix`,
    or a shared folder's absolute path. Keys come from each machine's environment."""
    object_endpoint: str | None = None
    """Address of the S3 server of broadcast.object_store; null takes each machine's AWS_ENDPOINT_URL_S3, else
    Amazon's."""
    object_store_first: bool = False
    """Workers take payloads from broadcast.object_store even where they reach the origin, which spares its
    uplink."""
    lattica_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the origin is a peer of a Lattica network, where workers take payloads from it and from
    each other. Needs the package lattica on every machine; null uses gRPC."""
    quorum: float = Field(default=0.0, ge=0.0, le=1.0)
    """Elastic mode: share of the fleet's tokens per second whose workers must hold a version before it counts
    as broadcast; 0: one worker is enough."""

    @field_validator("patch_ladder")
    @classmethod
    def _check_ladder(cls, value: tuple[Rung, ...]) -> tuple[Rung, ...]:
        if len(value) > MOST_RUNGS or list(value) != sorted(set(value)):
            raise ValueError(
                f"broadcast.patch_ladder={list(value)} is no ladder: give at most {MOST_RUNGS} different "
                "numbers, the smallest first, or broadcast.patches=off for none"
            )
        return value

    @model_validator(mode="after")
    def _check_object_store(self) -> Self:
        check_place(
            "broadcast.object_store", self.object_store, "broadcast.object_endpoint", self.object_endpoint
        )
        if self.object_store_first and self.object_store is None:
            raise ValueError(
                "broadcast.object_store_first is set, but broadcast.object_store names none; set that, or "
                "leave broadcast.object_store_first out"
            )
        return self
