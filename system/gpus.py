"""GPUs: those that the processes of this machine may use, without loading CUDA."""

import os
import subprocess

from antiphon.core.errors import UnavailableError

_ANSWER_S = 30.0


def gpu_names() -> list[str]:
    """Return the GPUs that this process sees, each as CUDA_VISIBLE_DEVICES names it; none without a driver.

    Raises:
        UnavailableError: when the driver's program fails.
    """
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for part in given.split(",") if (name := part.strip()) and name != "-1"]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{command[0]} does not say which GPUs there are: {error}") from error
    return done.stdout.split()
