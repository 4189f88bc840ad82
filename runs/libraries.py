"""Libraries of records: loaded while a run starts, so that neither its steps nor its end wait for them."""

import threading

from antiphon.core.config_sections import RecordSection
from antiphon.lineage.tracking.mlflow_sink import load_mlflow


def load_libraries(record: RecordSection) -> threading.Thread:
    """Begin to import what the writers of a run's records and its report need; return the thread that does.

    Nothing is written. The writer that needs a library that cannot be loaded says so.
    """
    thread = threading.Thread(target=_load, args=(record,), name="antiphon-libraries", daemon=True)
    thread.start()
    return thread


def _load(record: RecordSection) -> None:
    if record.mlflow:
        load_mlflow()
    if record.dvc:
        import antiphon.lineage.ledger.pins  # it loads DVC
    import antiphon.report.page  # noqa: F401 - it loads matplotlib
