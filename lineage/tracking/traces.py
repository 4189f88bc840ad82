"""Traces: a few trajectories of a policy version, readable in MLflow beside its score.

A trace's id follows from the run and the trajectory, so telling it twice leaves one.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from antiphon.core.digests import digest_bytes
from antiphon.core.records import BatchRow
from antiphon.lineage.rollout_table import decode_batch, decode_timings

PREVIEW_CHARACTERS = 1000
"""What MLflow's table of traces shows of prompt and completion."""


@dataclass(frozen=True, slots=True)
class SampledTrajectory:
    """One trajectory as people read it."""

    key: str
    """Group and sample; unique within a run."""
    version: int
    """Policy version that sampled it."""
    step: int
    """Learner step that trained on it."""
    prompt: str
    completion: str
    prompt_tokens: int
    completion_tokens: int
    reward: float
    advantage: float
    finish_reason: str
    worker: str
    seconds: float
    """Seconds its group took to sample; 0 when not known."""


def pick_rows(rows: Sequence[BatchRow], version: int, count: int) -> list[int]:
    """Choose up to `count` trajectories sampled by `version` alone, from the worst reward to the best.

    The choice depends on the rows alone. Returns their places in `rows`.
    """
    found = [i for i, row in enumerate(rows) if row.spans and {s.version for s in row.spans} == {version}]
    found.sort(key=lambda i: (rows[i].reward, rows[i].group_id, rows[i].sample_index))
    if count <= 1 or len(found) <= count:
        return found[-count:] if count else []
    return [found[round(place * (len(found) - 1) / (count - 1))] for place in range(count)]


def read_trajectories(
    batch: bytes,
    timings: bytes,
    version: int,
    step: int,
    count: int,
    decode: Callable[[Iterable[int]], str],
) -> list[SampledTrajectory]:
    """Read up to `count` trajectories that `version` sampled from the two files of a batch.

    Raises:
        IntegrityError: when the bytes are no batch or no timings.
    """
    rows, notes = decode_batch(batch), decode_timings(timings)
    return [
        SampledTrajectory(
            key=f"{row.group_id}.{row.sample_index}",
            version=version,
            step=step,
            prompt=decode(row.prompt_token_ids),
            completion=decode(row.token_ids),
            prompt_tokens=int(row.prompt_token_ids.size),
            completion_tokens=int(row.token_ids.size),
            reward=row.reward,
            advantage=row.advantage,
            finish_reason=row.finish_reason.value,
            worker=note.worker_id,
            seconds=note.generation_s,
        )
        for row, note in ((rows[i], notes[i]) for i in pick_rows(rows, version, count))
    ]


def log_trace(
    uri: str, experiment_id: str, run_id: str, model_id: str | None, trajectory: SampledTrajectory, at: float
) -> str:
    """Write one trajectory as a trace of an MLflow run and return the trace's id.

    Args:
        uri: MLflow's tracking URI.
        experiment_id: the run's experiment.
        run_id: MLflow run that the trace is shown under.
        model_id: logged model of the version that sampled it.
        trajectory: what to show.
        at: Unix seconds of its end.
    """
    from mlflow.entities.span import Span
    from mlflow.tracing.client import TracingClient

    digits = digest_bytes(f"{run_id}/{trajectory.step}/{trajectory.key}".encode())
    trace_id = f"tr-{digits[:32]}"
    began_ns = int((at - trajectory.seconds) * 1e9)
    client = TracingClient(uri)
    client.start_trace(_info(trace_id, experiment_id, run_id, model_id, trajectory, began_ns // 1_000_000))
    span = Span.from_dict(_span(trace_id, digits[32:48], trajectory, began_ns, int(at * 1e9)))
    client.log_spans(experiment_id, [span])
    return trace_id


def _info(
    trace_id: str,
    experiment_id: str,
    run_id: str,
    model_id: str | None,
    trajectory: SampledTrajectory,
    began_ms: int,
) -> Any:
    from mlflow.entities import AssessmentSource, Feedback
    from mlflow.entities.trace_info import TraceInfo
    from mlflow.entities.trace_location import TraceLocation
    from mlflow.entities.trace_state import TraceState

    reward = Feedback(
        name="reward",
        value=trajectory.reward,
        source=AssessmentSource(source_type="CODE", source_id="environment"),
        trace_id=trace_id,
        create_time_ms=began_ms,
        last_update_time_ms=began_ms,
    )
    reward.assessment_id = f"a-{trace_id[3:]}"  # or a second telling would add a second one
    metadata = {"mlflow.sourceRun": run_id, "mlflow.trace.tokenUsage": json.dumps(_usage(trajectory))}
    if model_id is not None:
        metadata["mlflow.modelId"] = model_id
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=began_ms,
        state=TraceState.OK,
        request_preview=trajectory.prompt[:PREVIEW_CHARACTERS],
        response_preview=trajectory.completion[:PREVIEW_CHARACTERS],
        execution_duration=int(trajectory.seconds * 1e3),
        trace_metadata=metadata,
        tags={
            "mlflow.traceName": f"v{trajectory.version} {trajectory.key}",
            "antiphon.version": str(trajectory.version),
            "antiphon.step": str(trajectory.step),
            "antiphon.reward": f"{trajectory.reward:g}",
            "antiphon.worker": trajectory.worker,
        },
        assessments=[reward],
    )


def _span(
    trace_id: str, span_id: str, trajectory: SampledTrajectory, began_ns: int, ended_ns: int
) -> dict[str, Any]:
    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "LLM",
        "mlflow.spanInputs": {"prompt": trajectory.prompt},
        "mlflow.spanOutputs": {"completion": trajectory.completion},
        "mlflow.chat.tokenUsage": _usage(trajectory),
        "version": trajectory.version,
        "step": trajectory.step,
        "staleness": trajectory.step - trajectory.version,
        "reward": trajectory.reward,
        "advantage": trajectory.advantage,
        "finish_reason": trajectory.finish_reason,
        "worker": trajectory.worker,
    }
    return {
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_span_id": None,
        "name": "rollout",
        "start_time_unix_nano": began_ns,
        "end_time_unix_nano": ended_ns,
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {name: json.dumps(value) for name, value in attributes.items()},
    }


def _usage(trajectory: SampledTrajectory) -> dict[str, int]:
    return {
        "input_tokens": trajectory.prompt_tokens,
        "output_tokens": trajectory.completion_tokens,
        "total_tokens": trajectory.prompt_tokens + trajectory.completion_tokens,
    }
