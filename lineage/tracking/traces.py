"""Traces: a few trajectories of a policy version, readable in MLflow beside its score.

A trace's id follows from the run and the trajectory, so telling it twice leaves one.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from antiphon.core.digests import digest_bytes
from antiphon.core.records import BatchRow, RowTiming

PREVIEW_CHARACTERS = 1000
"""What MLflow's table of traces shows of prompt and completion."""


def pick_rows(rows: Sequence[BatchRow], version: int, count: int) -> list[int]:
    """Choose up to `count` trajectories sampled by `version` alone, from the worst reward to the best.

    The choice depends on the rows alone. Returns their places in `rows`.
    """
    found = [i for i, row in enumerate(rows) if row.spans and {s.version for s in row.spans} == {version}]
    found.sort(key=lambda i: (rows[i].reward, rows[i].group_id, rows[i].sample_index))
    if count <= 1 or len(found) <= count:
        return found[-count:] if count else []
    return [found[round(place * (len(found) - 1) / (count - 1))] for place in range(count)]


def log_trace(
    uri: str,
    experiment_id: str,
    run_id: str,
    model_id: str | None,
    version: int,
    step: int,
    row: BatchRow,
    note: RowTiming,
    decode: Callable[[Iterable[int]], str],
    at: float,
) -> None:
    """Write one trajectory of a version, on which a step trained, as a trace of an MLflow run.

    `model_id` is the version's logged model, `note` says who sampled it and in how many seconds, `decode`
    turns token ids into text, and `at` is the Unix second of its end.
    """
    from mlflow.entities import AssessmentSource, Feedback
    from mlflow.entities.span import Span
    from mlflow.entities.trace_info import TraceInfo
    from mlflow.entities.trace_location import TraceLocation
    from mlflow.entities.trace_state import TraceState
    from mlflow.tracing.client import TracingClient

    key = f"{row.group_id}.{row.sample_index}"
    digits = digest_bytes(f"{run_id}/{step}/{key}".encode())
    trace_id, seconds = f"tr-{digits[:32]}", note.generation_s
    began_ns = int((at - seconds) * 1e9)
    began_ms = began_ns // 1_000_000
    prompt, completion = decode(row.prompt_token_ids), decode(row.token_ids)
    sizes = int(row.prompt_token_ids.size), int(row.token_ids.size)
    usage = {"input_tokens": sizes[0], "output_tokens": sizes[1], "total_tokens": sum(sizes)}
    reward = Feedback(
        name="reward",
        value=row.reward,
        source=AssessmentSource(source_type="CODE", source_id="environment"),
        trace_id=trace_id,
        create_time_ms=began_ms,
        last_update_time_ms=began_ms,
    )
    reward.assessment_id = f"a-{trace_id[3:]}"  # or a second telling would add a second one
    metadata = {"mlflow.sourceRun": run_id, "mlflow.trace.tokenUsage": json.dumps(usage)}
    if model_id is not None:
        metadata["mlflow.modelId"] = model_id
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=began_ms,
        state=TraceState.OK,
        request_preview=prompt[:PREVIEW_CHARACTERS],
        response_preview=completion[:PREVIEW_CHARACTERS],
        execution_duration=int(seconds * 1e3),
        trace_metadata=metadata,
        tags={
            "mlflow.traceName": f"v{version} {key}",
            "antiphon.version": str(version),
            "antiphon.step": str(step),
            "antiphon.reward": f"{row.reward:g}",
            "antiphon.worker": note.worker_id,
        },
        assessments=[reward],
    )
    attributes = {
        "mlflow.traceRequestId": trace_id,
        "mlflow.spanType": "LLM",
        "mlflow.spanInputs": {"prompt": prompt},
        "mlflow.spanOutputs": {"completion": completion},
        "mlflow.chat.tokenUsage": usage,
        "version": version,
        "step": step,
        "staleness": step - version,
        "reward": row.reward,
        "advantage": row.advantage,
        "finish_reason": row.finish_reason.value,
        "worker": note.worker_id,
        **({"said": note.said} if note.said else {}),
    }
    span: dict[str, Any] = {
        "trace_id": trace_id,
        "span_id": digits[32:48],
        "parent_span_id": None,
        "name": "rollout",
        "start_time_unix_nano": began_ns,
        "end_time_unix_nano": int(at * 1e9),
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {name: json.dumps(value) for name, value in attributes.items()},
    }
    client = TracingClient(uri)
    client.start_trace(info)
    client.log_spans(experiment_id, [Span.from_dict(span)])
