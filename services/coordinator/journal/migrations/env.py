"""Environment: migrations run on the connection and in the transaction they are given."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
context.run_migrations()
