"""The first schema: events, snapshots of their fold, payloads, history, who may write, what trained."""

import sqlalchemy as sa
from alembic import op

revision = "r1"
down_revision = None

_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "meta",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("seq", _number, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "payloads",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "history",
        sa.Column("seq", _number, primary_key=True),
        sa.Column("prompt_key", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("evaluated", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("prompt_key", "epoch"),
    )
    op.create_table(
        "fence",
        sa.Column("one", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", _number, nullable=False),
    )
    op.create_table(
        "steps",
        sa.Column("step", _number, primary_key=True, autoincrement=False),
        sa.Column("version", _number, nullable=False, unique=True),
        sa.Column("weights_digest", sa.Text, nullable=False),
        sa.Column("batch_digest", sa.Text, nullable=False),
    )
    op.create_table(
        "trained",
        sa.Column("group_id", sa.Text, primary_key=True),
        sa.Column("step", _number, sa.ForeignKey("steps.step"), nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
    )
    op.create_table(
        "state_snapshots",
        sa.Column("seq", _number, primary_key=True, autoincrement=False),
        sa.Column("form", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "state_entries",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("place", _number, primary_key=True, autoincrement=False),
        sa.Column("body", sa.Text, nullable=False),
    )
