"""Supervised fine-tuning: rows of files train the model by the learner's own engine, step by step.

Which rows a step learns follows from the seed alone, so an interrupted training continues from its newest
checkpoint to the same weights. Its folder, `sft/NAME-sSEED-DIGEST` in the home, is named by all that decides
them; at the end a Hugging Face folder stands in it, which `model.path` of a run may name.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from antiphon.api.policy_file import copy_policy
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.learning_rate import rate_by_size
from antiphon.core.records import BatchRow
from antiphon.core.seeds import generator
from antiphon.core.sft_config import SCORING, SftConfig
from antiphon.lineage.export import WEIGHTS, whole_folder
from antiphon.lineage.names import MODEL_FILES
from antiphon.lineage.rollout_table import encode_batch
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.lineage.tracking.mlflow_client import explained
from antiphon.lineage.tracking.tracked_run import TrackedRun, open_run
from antiphon.models.chat_template import ChatTemplate, chat_templates
from antiphon.models.codec import TextCodec, local_model_directory
from antiphon.models.directory import count_parameters, end_tokens, model_digest, most_positions
from antiphon.models.supervised import SupervisedReader, SupervisedRows
from antiphon.runs.directory import lock
from antiphon.runs.finding import RECORD
from antiphon.services.learner.training import TrainedStep
from antiphon.system.clock import wall_clock
from antiphon.system.files import PREFIX, append, write_atomically
from antiphon.system.rows import Rows, named_files
from antiphon.weights.payload_store import PayloadStore

if TYPE_CHECKING:
    from antiphon.runs.heldout_task import HeldoutTask
    from antiphon.services.learner.step import Trainer

LOG, MODEL = "steps.jsonl", "model"
_log = structlog.get_logger(__name__)
AWAY_S = 60.0
"""Pause after MLflow did not answer until it is asked again, seconds; at the end it is asked in any case."""
SFT_TIMES = 10.0
"""A learning rate that nobody set is this often that of a run, whose updates are noisier."""

Line = dict[str, float]
"""A step's figures: step, loss (nats per learned token), gradient_norm, learning_rate, tokens; at some of
them heldout_loss and heldout_score, the mean reward on a task."""
StepOf = Callable[[int], tuple[TrainedStep, Line]]


@dataclass(frozen=True, slots=True)
class SftPlan:
    """What a training will do, checked before anything is loaded."""

    config: SftConfig
    model: Path
    rows: SupervisedRows
    heldout: SupervisedRows
    learning_rate: float
    folder: Path
    task: "HeldoutTask | None" = None

    @property
    def steps(self) -> int:
        return self.config.steps(len(self.rows))

    @property
    def tokens(self) -> int:
        """Return the learned tokens of all epochs."""
        return self.config.data.epochs * self.rows.learned_tokens

    def batch(self, step: int) -> list[BatchRow]:
        """Return the rows of a step, in an order that each epoch draws again."""
        size, count = self.config.data.rows_per_step, len(self.rows)
        places = range(step * size, min((step + 1) * size, count * self.config.data.epochs))
        orders = {epoch: self.order(epoch) for epoch in {place // count for place in places}}
        # The same row twice in a step is two: the last one of an epoch, and the first of the next.
        return [self.rows[int(orders[at // count][at % count])].batch_row(at, step) for at in places]

    def due(self, step: int, interval: int) -> bool:
        """Return whether what happens every `interval` steps, and after the last, happens after this one."""
        return step + 1 == self.steps or (interval > 0 and (step + 1) % interval == 0)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the rows in an epoch's order."""
        return generator("sft", self.config.run.seed, epoch).permutation(len(self.rows))


def plan_sft(config: SftConfig, home: Path) -> SftPlan:
    """Read and check everything that a training takes.

    Raises:
        ConfigError: for a missing model or file, a row that cannot be learned from, or a template that cannot
            mask turns; the first one is named.
    """
    model = local_model_directory(config.model.path)
    codec, (texts, specials) = TextCodec.load(str(model)), chat_templates(str(model))
    template = None
    if texts:
        template = ChatTemplate(codec, str(model), texts, specials, config.model.template_arguments)
    data, most = config.data, most_positions(model)
    if most is not None and data.max_tokens > most:
        data = data.model_copy(update={"max_tokens": most})
    reader = SupervisedReader(codec, template, end_tokens(model), data.turns, data.max_tokens)
    read = {
        field: SupervisedRows(
            reader.read(Rows(named_files(files, f"data.{field}", field), ()), f"data.{field}")
            if files
            else ()
        )
        for field, files in (("train", data.train), ("heldout", data.heldout))
    }
    rate = config.learner.learning_rate
    if rate is None:
        adapters = bool(config.learner.lora.rank)
        rate = rate_by_size(count_parameters(model), adapters=adapters) * (1.0 if adapters else SFT_TIMES)
    for sentence in config.as_run(config.steps(len(read["train"])), rate).idle_keys():
        _log.warning("config.idle", reason=sentence)
    task = None
    if config.environment is not None:
        from antiphon.runs.heldout_task import HeldoutTask  # its judges are slow to import

        task = HeldoutTask(config.as_evaluation(), model)
    measured = {name: True for name in SCORING}
    told = config.model_dump_json(exclude={"data": {"train", "heldout", "heldout_interval"}, **measured})
    facts = [told, model_digest(model), f"{rate!r}", read["train"].digest()]
    name = f"{config.run.name}-s{config.run.seed}-{digest_bytes('|'.join(facts).encode())[:8]}"
    return SftPlan(config, model, read["train"], read["heldout"], rate, home / "sft" / name, task)


def train(plan: SftPlan, home: Path, told: Callable[[Line], None]) -> list[Line]:
    """Train, or go on where an earlier call stopped, and return the figures of all steps.

    Args:
        plan: what to do.
        home: MLflow's records are kept there.
        told: gets the figures of each step that is trained now.

    Raises:
        ConfigError: when the model cannot be trained, another process trains it, or it was measured on
            other held-out rows.
        UnavailableError: when the disk is full, or a rank ends.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock(plan.folder):
        log, learner, lines = plan.folder / LOG, plan.config.learner, read_lines(plan.folder)
        record = plan.folder / RECORD
        if lines and json.loads(record.read_bytes())["rows"]["heldout"] != plan.heldout.digest():
            raise ConfigError(
                f"data.heldout holds other rows than {plan.folder.name} has measured its loss on; put them "
                "back, or take another run.name"
            )
        if len(lines) == plan.steps and (plan.folder / MODEL).is_dir():
            return lines
        for left in plan.folder.glob(f"{PREFIX}*"):  # of a process that was killed, a model's size each
            shutil.rmtree(left, ignore_errors=True)
        with learning(plan, plan.steps) as (trainer, held, step_of):
            lines = lines[: held.version]
            write_atomically(log, _text_of(lines))
            written = len(lines)
            curves = _Curves(plan, home, lines)
            write_record(plan)
            for step in range(held.version, plan.steps):
                held, line = step_of(step)
                if plan.task is not None and plan.due(step, plan.config.evaluation.interval):
                    with TemporaryDirectory(prefix=PREFIX, dir=plan.folder) as model:
                        _fill(Path(model), plan, held)
                        line["heldout_score"] = plan.task.score(Path(model))
                lines.append(line)
                if plan.due(step, learner.checkpoint_interval):
                    append(log, _text_of(lines[written:]))
                    written = len(lines)
                    trainer.save()
                curves.draw([line])
                told(line)
            write_record(plan, held.weights.digest())
            whole_folder(plan.folder / MODEL, lambda begun: _fill(begun, plan, held))
        curves.draw(ended=True)
    return lines


def read_lines(folder: Path) -> list[Line]:
    """Return the figures of the steps that a training's folder records, up to its newest checkpoint."""
    log = folder / LOG
    if not log.is_file():
        return []
    whole = log.read_text().rpartition("\n")[0]  # a process that was killed may have left half a line
    return [json.loads(line) for line in whole.splitlines()]


def _text_of(lines: Sequence[Line]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def write_record(plan: SftPlan, weights: str = "") -> None:
    """Write what a replay needs besides the figures; `weights`: digest of the last version, "" before it."""
    record = {
        "config": plan.config.model_dump(mode="json"),
        "steps": plan.steps,
        "rows": {"train": plan.rows.digest(), "heldout": plan.heldout.digest()},
        "weights": weights,
    }
    write_atomically(plan.folder / RECORD, json.dumps(record, indent=2).encode())


@contextmanager
def learning(plan: SftPlan, at_most: int) -> "Iterator[tuple[Trainer, TrainedStep, StepOf]]":
    """Start the ranks of a training, this process the first, and end them.

    Gives the trainer, the newest version up to `at_most` that there is, and what makes the next step with its
    figures.

    Raises:
        ConfigError: when the model cannot be trained.
        UnavailableError: when a rank does not come.
    """
    from antiphon.services.learner.checkpoints import CheckpointStore
    from antiphon.services.learner.ranks.followers import Followers
    from antiphon.services.learner.step import Trainer

    run = plan.config.as_run(plan.steps, plan.learning_rate)
    checkpoints = CheckpointStore(plan.folder / "checkpoints", run.learner.checkpoints_kept)
    trainer, heldout = Trainer(run, checkpoints), b""
    with ExitStack() as stack:
        store = ArtifactStore(Path(stack.enter_context(TemporaryDirectory(prefix="antiphon-sft-"))))
        if run.learner.ranks > 1:
            stack.callback(Followers(run, checkpoints.root, store.root).close)
        if plan.heldout:
            heldout = encode_batch([row.batch_row(number, 0) for number, row in enumerate(plan.heldout)])
            store.put(heldout)
        stack.callback(trainer.stop)
        held = trainer.start(at_most)

        def step_of(step: int) -> tuple[TrainedStep, Line]:
            payload = encode_batch(plan.batch(step))
            digest = store.put(payload)  # where the other ranks look for it
            held = trainer.train(step, payload)
            store.discard(digest)
            named = ("loss", "gradient_norm", "learning_rate")
            line = {"step": float(step + 1), "tokens": held.metrics["completion_tokens"]}
            line |= {name: held.metrics[name] for name in named}
            if heldout and plan.due(step, plan.config.data.heldout_interval):
                line["heldout_loss"] = -trainer.mean_logprob(heldout)
            return held, line

        yield trainer, held, step_of


class _Curves:
    """Draws each step once in MLflow; while it does not answer, or refuses, they wait and nothing stops."""

    def __init__(self, plan: SftPlan, home: Path, lines: list[Line]) -> None:
        """Begin with the steps that earlier calls trained; what MLflow has of them stays."""
        self._plan, self._home = plan, home
        self._tracked: TrackedRun | None = None
        self._waiting = [(line, wall_clock()) for line in lines]
        self._not_before = 0.0

    def draw(self, lines: Sequence[Line] = (), ended: bool = False) -> None:
        self._waiting += [(line, wall_clock()) for line in lines]
        if wall_clock() < self._not_before and not ended:
            return
        try:
            tracked = self._tracked = self._tracked or self._open()
            with explained(tracked.uri):
                while self._waiting:
                    line, at = self._waiting[0]
                    metrics = {f"sft/{name}": value for name, value in line.items()}
                    tracked.log_summary(int(line["step"]), metrics, at)
                    del self._waiting[0]
                if ended:
                    tracked.client.set_terminated(tracked.run_id)
        except AntiphonError as error:
            self._not_before = wall_clock() + AWAY_S  # a server that hangs holds up few steps
            _log.warning("curves.wait", steps=len(self._waiting), reason=str(error))

    def _open(self) -> TrackedRun:
        config, folder = self._plan.config, self._plan.folder
        told_of = {"kind": "sft", "rows": str(len(self._plan.rows)), "model.path": config.model.path}
        tracked = open_run(self._home, folder / "mlflow.json", config.run.name, folder.name, told_of, {})
        with explained(tracked.uri):
            drawn = {one.step for one in tracked.client.get_metric_history(tracked.run_id, "sft/loss")}
        self._waiting = [one for one in self._waiting if int(one[0]["step"]) not in drawn]
        return tracked


def _fill(folder: Path, plan: SftPlan, held: TrainedStep) -> None:
    """Write the version that is held as a Hugging Face model."""
    from antiphon.weights.snapshot import write_snapshot

    store = PayloadStore(folder / "payloads")
    manifest = write_snapshot(store, plan.folder.name, held.version, held.weights)
    with (folder / WEIGHTS).open("wb") as target:
        copy_policy(store.path(manifest.payloads[0].digest), target.write)
    shutil.rmtree(folder / "payloads")
    for name in MODEL_FILES:
        if (plan.model / name).is_file():
            shutil.copy(plan.model / name, folder / name)
