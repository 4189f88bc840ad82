"""Fence, steps and trained groups: who may write, and that a group is trained once.

The steps and groups of an older journal are read from its events.
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "r0002"
down_revision = "r0001"

_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables and fill them from the events."""
    op.create_table(
        "fence",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", _number, nullable=False),
    )
    steps = op.create_table(
        "steps",
        sa.Column("step", _number, primary_key=True, autoincrement=False),
        sa.Column("version", _number, nullable=False, unique=True),
        sa.Column("weights_digest", sa.Text, nullable=False),
        sa.Column("batch_digest", sa.Text, nullable=False),
    )
    trained = op.create_table(
        "trained",
        sa.Column("group_id", sa.Text, primary_key=True),
        sa.Column("step", _number, sa.ForeignKey("steps.step"), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
    )
    op.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
    connection = op.get_bind()
    committed = _bodies(connection, "step.committed")
    if committed:
        names = ("step", "version", "weights_digest", "batch_digest")
        connection.execute(steps.insert(), [{name: body[name] for name in names} for body in committed])
    done = {body["step"] for body in committed}
    rows = [
        {"group_id": group, "step": body["step"], "place": place}
        for body in _bodies(connection, "batch.sealed")
        if body["step"] in done
        for place, group in enumerate(body["group_ids"])
    ]
    if rows:
        connection.execute(trained.insert(), rows)


def _bodies(connection: sa.Connection, kind: str) -> list[dict[str, Any]]:
    query = sa.text("SELECT body FROM events WHERE kind = :kind ORDER BY seq")
    return [json.loads(body) for (body,) in connection.execute(query, {"kind": kind})]
