"""Events, payloads and history: what journals had before they knew migrations.

Tables that are there already are left alone, so journals of that time come in here.
"""

import sqlalchemy as sa
from alembic import op

revision = "r0001"
down_revision = None

_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create what is missing."""
    op.create_table(
        "meta",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "events",
        sa.Column("seq", _number, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "payloads",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "history",
        sa.Column("seq", _number, primary_key=True),
        sa.Column("prompt_key", sa.Text, nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("evaluated", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.UniqueConstraint("prompt_key", "epoch"),
        if_not_exists=True,
    )
