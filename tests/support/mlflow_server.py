"""A real MLflow server for tests, that can be stopped and started again."""

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from antiphon.runs.servers.prefect_server import HOST, answers
from antiphon.system.collecting import LOADING
from antiphon.system.ports import free_port

START_S = 180.0
STOP_S = 30.0


class MlflowServer:
    """One server on one port and one database."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._arguments, self._environment = folder, arguments, dict(environment or {})
        self._port = free_port()
        self.url = f"http://{HOST}:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [*LOADING, "mlflow", "server", "--host", HOST, "--port", str(self._port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder / 'server.db'}"]
        command += ["--artifacts-destination", str(self._folder / "artifacts"), *self._arguments]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")},
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            **self._environment,
        }
        with (self._folder / "server.log").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for attempt in Retrying(
            retry=retry_if_exception_type(ConnectionError),
            stop=stop_after_delay(START_S),
            wait=wait_fixed(0.3),
        ):
            with attempt:
                if self._process.poll() is not None:
                    log = (self._folder / "server.log").read_text(errors="replace")
                    raise AssertionError(f"the MLflow server ended: {log[-2000:]}")
                if not answers(f"{self.url}/health"):
                    raise ConnectionError("not yet")

    def stop(self) -> None:
        """Stop the server and everything it started, as a crash would."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
            self._process = None
