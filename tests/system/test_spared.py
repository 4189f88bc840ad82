"""What is spared is not found meanwhile, and again afterwards."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

from antiphon.system.spared import without


def test_a_library_is_missing_only_meanwhile() -> None:
    sys.modules.pop("this", None)
    with without("this"), pytest.raises(ImportError):
        import this  # noqa: F401
    with without("sys"):
        import sys as found  # one that is imported already stays
    assert found is sys


def test_another_thread_finds_it_meanwhile() -> None:
    sys.modules.pop("this", None)
    with without("this"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(import_module, "this").result(60).__name__ == "this"


def test_batches_need_no_pandas_and_leave_it_to_whoever_does() -> None:
    words = (
        "import sys\n"
        "import pyarrow as pa\n"
        "from antiphon.lineage.rollout_table import decode_batch, encode_batch\n"
        "decode_batch(encode_batch([]))\n"
        "assert 'pandas' not in sys.modules\n"
        "assert len(pa.table({'x': [1]}).to_pandas()) == 1\n"
    )
    subprocess.run([sys.executable, "-P", "-c", words], check=True, timeout=120)
