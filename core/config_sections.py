"""Config sections: the parts of a run's configuration, each a frozen tree with a doc string per field."""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_STORE = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._=-]+)*/?|/.*")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+/?")
_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"

URL = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+(/[A-Za-z0-9._~-]+)*/?")
"""Address of a server; a key has no place in it."""
VARIABLE = re.compile(r"(?!PYTHON|LD_|ANTIPHON_|PATH$|HOME$|TMPDIR$)[A-Z][A-Z0-9_]{0,63}")
"""Names of variables that may hold a secret."""

# Every number has a bound: beyond it a message, a clock or a shape would overflow in some service, later.
MOST_STEPS = 10_000_000
MOST_PROMPTS = 10_000_000
MOST_TOKENS = 1 << 22
MOST_TURNS = 128
MOST_MIB = 1 << 24
MOST_THREADS = 1024
MOST_RANKS = 1024
MOST_ADAPTER_RANK = 1024
MOST_KEPT = 10_000
YEAR_S = 365 * 86_400.0
FILE = "file"
"""`environment.name` of prompts from files."""
HOST = "host"
"""`environment.name` of environments that programs beside the run hold."""
JUDGE = "judge"
"""What `environment.parameters.score` of `file` says where the model of `judge` gives the rewards."""
_WORDS = {True: "on", False: "off"}


class Section(BaseModel):
    """What all sections share: they cannot change, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _words_of_yaml(cls, tree: Any) -> Any:
        """YAML reads the words on and off as true and false; where a field has such words they are meant."""
        if not isinstance(tree, dict):
            return tree
        words = {name: get_args(field.annotation) for name, field in cls.model_fields.items()}
        return {
            name: word
            if isinstance(value, bool) and (word := _WORDS[value]) in words.get(name, ())
            else value
            for name, value in tree.items()
        }


def check_place(url_key: str, url: str | None, endpoint_key: str, endpoint: str | None) -> None:
    """Check where a folder or a bucket is said to be.

    Raises:
        ValueError: naming the key. Values are not repeated: people who put keys into an address would find
            them in a log.
    """
    keys = "keys belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if url is not None and not _STORE.fullmatch(url):
        raise ValueError(f"{url_key} is neither s3://bucket/prefix nor the absolute path of a folder; {keys}")
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise ValueError(f"{endpoint_key} is no address such as http://127.0.0.1:8333; {keys}")
    if endpoint is not None and not (url or "").startswith("s3://"):
        raise ValueError(
            f"{endpoint_key}={endpoint} is for a {url_key} that begins with s3://, but that is {url}; "
            "correct either"
        )


class RunSection(Section):
    """Who the run is and how long it lasts."""

    name: str = Field(default="demo", pattern=_NAME)
    """Experiment name; also the MLflow experiment and the start of the run's id."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random stream of the run."""
    steps: int = Field(default=60, ge=1, le=MOST_STEPS)
    """Learner steps to train."""

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, value: object) -> object:
        if isinstance(value, str) and not re.fullmatch(_NAME, value):
            raise ValueError(
                f"run.name={value!r} is not possible: use 1 to 64 of the letters a to z, digits, dots, "
                "dashes and underscores, with a letter or a digit first"
            )
        return value


Device = Annotated[int, Field(ge=0, le=1023)]
"""A GPU, counted from 0 among those that the command sees."""


class ModelSection(Section):
    """The policy that is trained."""

    path: str = "examples/models/chain-sum"
    """Hugging Face model directory (with its tokenizer), or a model name where a hub is reachable."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the rollout engine's weights and of published snapshots."""
    head: Literal["model", "float32"] = "model"
    """Precision in which states meet the output embedding, in engine and learner: the model's, or float32,
    which brings the two a little closer in bfloat16."""
    renderer: str = Field(default="auto", max_length=64)
    """What makes tokens of messages. auto: the model's own chat template for prompts of one turn, and for a
    task with turns the renderer that writes as that template does; default: the template; or a name such as
    qwen3."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """What the chat template or the renderer is given besides messages, such as `enable_thinking: false`;
    `thinking_retention: all` lets renderers add turns that would otherwise drop earlier thinking."""


class EnvironmentSection(Section):
    """Where prompts come from and what rewards the answers."""

    name: str = "reasoning/chain_sum"
    """`reasoning/<task>` is any task of reasoning-gym, `file` reads files, `package.module:Class` is a class
    of your own, a plain name what an installed package calls so; see docs/guides/own-environment.md."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the task, such as its difficulty; they are recorded, so no secrets."""
    secrets: tuple[str, ...] = ()
    """Names of variables such as JUDGE_KEY whose values the environment's class reads from `os.environ`;
    scoring processes get them, and no record does."""
    system_prompt: str | None = Field(default=None, max_length=1 << 16)
    """What the model is told before each conversation, in front of an environment's own system message."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the problems; splits never share one."""
    train_size: int = Field(default=256, ge=1, le=MOST_PROMPTS)
    """Number of training prompts; once all were used, the next epoch begins. Of `file`, null and the default
    are all rows."""
    heldout_size: int = Field(default=192, ge=1, le=MOST_PROMPTS)
    """Number of held-out prompts; of `file`, as above."""
    max_lost_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Largest share of the prompts' characters, spaces left out, for which the model's tokenizer may have no
    token; a run that loses more is refused. 1 accepts everything."""

    @model_validator(mode="before")
    @classmethod
    def _take_all_rows(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or tree.get("name") != FILE:
            return tree
        sizes = ("train_size", "heldout_size")
        return tree | {name: MOST_PROMPTS for name in sizes if tree.get(name) is None}

    @field_validator("secrets", mode="after")
    @classmethod
    def _check_secrets(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(VARIABLE.fullmatch(name) for name in names):  # what stands there may be a secret itself
            raise ValueError(
                "environment.secrets has something else than names of variables for secrets; name one, as "
                "JUDGE_KEY, and export its value where the run is started"
            )
        return names

    max_turns: int = Field(default=8, ge=1, le=MOST_TURNS)
    """Most turns of the policy in one trajectory, of an environment that answers."""
    max_trajectory_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Most tokens of such a trajectory after its prompt, the environment's answers included; null: as many as
    rollout.max_model_tokens leaves. One turn has at most sampling.max_tokens."""
    max_constant_share: float = Field(default=0.85, ge=0.0, le=1.0)
    """Largest mean reward that one answer may earn whatever is asked; a task that pays a constant more is
    refused. 1 accepts everything."""
    seats: int = Field(default=1, ge=1, le=64)
    """Of `host`: trajectories of one episode; a group of G samples is G / seats episodes."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Of `host`: the least and the largest reward."""
    rebuildable: bool = True
    """Of `host`: whether an episode begun again with its seed repeats itself. False: it fails when its host
    is lost."""
    host_command: tuple[str, ...] = ()
    """Of `host`: a program that the run starts and keeps alive, such as `[antiphon-env-host, verifiers,
    my_env]`; it finds URL and token in ANTIPHON_GATEWAY and ANTIPHON_TOKEN."""

    @model_validator(mode="after")
    def _check_hosted(self) -> Self:
        for name in ("seats", "reward_range", "rebuildable", "host_command"):
            value = getattr(self, name)
            if self.name != HOST and value != type(self).model_fields[name].default:
                raise ValueError(
                    f"environment.{name}={value} has no effect with environment.name={self.name}; leave it "
                    f"out, or use environment.name={HOST}"
                )
        return self


class GatewaySection(Section):
    """Where hosts of others' environments ask for tokens, with `environment.name: host`."""

    address: str = "127.0.0.1"
    """Address to listen on; anything but loopback is encrypted and needs `services.credentials`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 picks a free one, which gateway.json in the run's folder names."""
    host_timeout_s: float = Field(default=120.0, gt=0.0, le=YEAR_S)
    """Seconds of silence after which a host loses its groups."""


class RewardSection(Section):
    """Where answers are scored, and what scoring one may take."""

    sandbox: Literal["auto", "always", "process"] = "auto"
    """auto: scorers that only compare texts run in the reward service, all others in a sandbox (bubblewrap)
    without network, files and rights; always: all in the sandbox; process: the others in a child process with
    limits of time and memory only: for models and workers that you trust."""
    answer_timeout_s: float = Field(default=5.0, gt=0.0, le=3600.0)
    """Seconds that scoring one answer may take; then the answer has failed."""
    memory_mib: int = Field(default=2048, ge=256, le=MOST_MIB)
    """Address space that scoring one answer may use, in MiB."""
    processes: int = Field(default=2, ge=1, le=256)
    """Scoring processes of a reward service that does not score itself; each scores a group at a time."""
    attempts: int = Field(default=3, ge=1, le=100)
    """How often answers of one group may take too long or end their scoring process; then those not yet
    scored have failed, too."""
    max_failed_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Largest share of the newest answers (32 groups' worth, 256 at least) that may fail; beyond it the run
    is paused, or the one worker whose answers fail is struck."""


class LoopSection(Section):
    """How far the stages may run ahead of each other."""

    mode: Literal["elastic", "fixed"] = "elastic"
    """elastic: sample with the newest snapshot held; fixed: with the one the step number dictates,
    which makes a run independent of timing."""
    max_staleness: int = Field(default=2, ge=0, le=64)
    """Staleness bound S, in policy versions: nothing older trains. 0 is the synchronous loop."""
    accept_uneven: bool = False
    """Fixed mode: sample also on an engine whose log-probabilities depend on the batch. Two runs of one
    configuration may then differ."""
    publish_interval: int = Field(default=1, ge=1, le=64)
    """Learner steps between snapshots."""
    run_ahead: Literal["measured", "bound"] = "measured"
    """Groups that elastic mode keeps in flight. measured: what covers rollout, reward and broadcast; bound:
    all that max_staleness allows."""
    order: Literal["by_length", "arrival"] = "by_length"
    """Order of leases. by_length: by remembered lengths while these predict, the longest first at S = 0 and
    alternating at S >= 1; arrival: as groups come."""
    prompts_per_step: int = Field(default=32, ge=1, le=65_536)
    """Groups one learner step consumes."""
    group_size: int = Field(default=8, ge=2, le=1024)
    """Trajectories sampled from each prompt."""
    filter: Literal["none", "drop", "refill"] = "drop"
    """Groups whose rewards are all equal: none keeps them, drop leaves them out of the batch,
    refill replaces them with further prompts (DAPO's dynamic sampling)."""
    refill_limit: float = Field(default=2.0, ge=1.0, le=16.0)
    """Most groups a step may open when refilling, as a multiple of prompts_per_step."""

    @property
    def unpublished_limit(self) -> int:
        """Return the most versions whose weights may wait to be published at the same time."""
        return self.max_staleness // self.publish_interval + 2


class LoraSection(Section):
    """Low-rank adapters that train in place of all weights: W + alpha / rank * B A (arXiv 2106.09685)."""

    rank: int = Field(default=0, ge=0, le=MOST_ADAPTER_RANK)
    """Rows of A and columns of B; 0 trains all weights."""
    alpha: float | None = Field(default=None, gt=0.0)
    """Weight of the adapters, divided by the rank; null: twice the rank."""
    targets: tuple[str, ...] = ()
    """Linear modules that get one, by the last part of their names, such as `q_proj`; none named: all of the
    layers."""
    start: str | None = None
    """Folder of a peft adapter of the same rank for the model of model.path. It becomes part of the base,
    and a new one is trained on top."""

    @property
    def scale(self) -> float:
        """Return what B A counts, alpha / rank; 0 without adapters."""
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank if self.rank else 0.0


class LearnerSection(Section):
    """The learner and its DeepSpeed engine."""

    learning_rate: float | None = Field(default=None, gt=0.0)
    """AdamW learning rate after warm-up. null: by the model's size, 2e-4 below 10 million parameters, 2e-5
    below 100 million, 1e-6 above; ten times as much for adapters (learner.lora)."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW first-moment decay."""
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0)
    """AdamW second-moment decay."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW decoupled weight decay."""
    warmup_steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Steps of linear learning-rate warm-up; null: 5, or half of a run of fewer than 10."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: it stays, or it falls to final_rate_share at step run.steps."""
    final_rate_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of learning_rate that is left at the last step of schedule=linear and schedule=cosine."""
    gradient_clip: float = Field(default=1.0, gt=0.0)
    """Largest norm of the gradient."""
    ranks: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Processes that train together, each with its part of every batch; part of the numerics. Each takes
    learner.threads."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage; several ranks train at stage 1 at least."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the learner's forward and backward; masters stay float32."""
    threads: int = Field(default=1, ge=1, le=MOST_THREADS)
    """CPU threads of the learner; part of the numerics, so it is recorded."""
    devices: tuple[Device, ...] = ()
    """GPUs of this machine, one for each rank; none named: the first ones that workers are not given."""
    micro_batch_tokens: int = Field(default=2048, ge=64, le=MOST_TOKENS)
    """Positions of one micro-batch; what its trajectories have in common at their beginning counts once."""
    checkpoint_interval: int = Field(default=5, ge=1, le=MOST_STEPS)
    """Steps between checkpoints; a restarted learner repeats the recorded steps after the last."""
    checkpoints_kept: int = Field(default=2, ge=1, le=MOST_KEPT)
    """Newest checkpoints kept on disk."""
    gradient_checkpointing: bool = False
    """Trade compute for memory in the backward pass."""
    compiled: bool = False
    """Compile the dense block of each layer (torch.compile), which on a CPU takes seconds and a C++ compiler;
    part of the numerics."""
    freeze: tuple[Literal["experts", "routers"], ...] = ()
    """Parts of a mixture of experts that keep the weights they have; none named: all weights train. Adapters
    leave both as they are."""
    lora: LoraSection = LoraSection()
    """Adapters in place of all weights: `rank`, which is 0 for none, `alpha`, `targets` and `start`; see the
    guide on adapters."""

    @property
    def stage(self) -> int:
        """Return DeepSpeed's stage in effect: its stage 0 sums bfloat16 gradients in bfloat16.

        Stage 1 does not, and on one rank it is the same arithmetic, since one partition is the whole. On
        several it sums the gradients at a known time, and takes less memory.
        """
        return max(self.zero_stage, 1 if self.dtype == "bfloat16" or self.ranks > 1 else 0)

    def idle_keys(self) -> list[str]:
        """Return a sentence for every choice that cannot act with the others."""
        found = []
        if self.schedule == "constant" and self.final_rate_share:
            found.append(
                f"learner.final_rate_share={self.final_rate_share:g} cannot act with "
                "learner.schedule=constant; use linear or cosine, or leave it out"
            )
        if not self.lora.rank and self.lora != LoraSection():
            found.append(
                "learner.lora.alpha, learner.lora.targets and learner.lora.start cannot act with "
                "learner.lora.rank=0; set the rank, such as 16, or leave them out"
            )
        if self.lora.rank and self.freeze:
            found.append(
                "learner.freeze cannot act with learner.lora.rank above 0, where no other weight trains; "
                "leave it out"
            )
        return found


class RolloutSection(Section):
    """Rollout workers started by the main job; others may join from anywhere."""

    workers: int = Field(default=1, ge=0, le=64)
    """Workers started on this machine."""
    engine: Literal["vllm", "http", "parallax"] = "vllm"
    """vllm: the engine in each worker's process; http: a vLLM server that somebody else started; parallax: a
    Parallax network that somebody else started, untested on the real thing. See docs/concepts/engines.md."""
    engine_url: str = Field(default="", max_length=2000)
    """Where that server, or Parallax's scheduler, answers, as the worker reaches it: `http://HOST:PORT`."""
    engine_peer: str = Field(default="", max_length=2000)
    """Where Parallax's scheduler is a peer of the Lattica network through which weights go into the nodes:
    `/ip4/ADDRESS/tcp/PORT/p2p/ID`. Needs the package lattica."""
    engine_folder: str | None = Field(default=None, max_length=4096)
    """Folder through which weights go into the server, named alike for worker and server unless it is
    Parallax's; null: a temporary one of the worker's machine."""
    logprobs: Literal["engine", "learner"] = "engine"
    """Who says how probable a sampled token was. learner: for engines that do not; it computes that before
    each step, under the version that sampled the token, and batches say `recomputed`. With loop.max_staleness
    above 0 it holds a second model for that."""
    threads: int = Field(default=1, ge=1, le=MOST_THREADS)
    """CPU threads of one engine; part of the numerics, so it is recorded."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Devices of one host that each worker spreads its engine over: as many processes, each with a part of
    every layer. `threads` and `kv_cache_mib` are those of each. Part of the numerics, so it is recorded."""
    devices: tuple[tuple[Device, ...], ...] = ()
    """GPUs of each worker on this machine, `tensor_parallel` for one; none named: those that nobody has."""
    concurrent_groups: int = Field(default=12, ge=1, le=4096)
    """Groups one worker samples at the same time."""
    kv_cache_mib: int = Field(default=512, ge=16, le=MOST_MIB)
    """Memory of the engine's key-value cache, MiB."""
    memory_share: float | None = Field(default=None, gt=0.0, le=0.95)
    """Share of a GPU that an engine may fill; then its cache has what weights leave of it, in place of
    `kv_cache_mib`."""
    max_model_tokens: int = Field(default=512, ge=16, le=MOST_TOKENS)
    """Longest prompt plus completion the engine accepts, tokens."""
    block_size: Literal[16, 32, 64, 128] = 32
    """Tokens of one block of the key-value cache, 32 or more on CPUs; `antiphon tune` finds the best."""
    prefix_caching: bool = False
    """Share the cache of equal prompt beginnings, as within a group; pays once prompts exceed a block. Always
    on for a task with turns, where each turn begins with all that stood before it."""
    compiled: bool = False
    """Compile the model at the start of an engine: half a minute or more and, on a CPU, a C++ compiler;
    `antiphon tune` says whether a run is long enough."""
    graphs: Literal["none", "piecewise", "full"] = "none"
    """CUDA graphs that an engine replays: of the parts between attention, which needs `compiled`, or of whole
    passes."""
    swap_cache: Literal["recompute", "keep"] = "recompute"
    """Caches of running requests when weights are swapped. recompute: they are computed again; keep (elastic
    mode alone): they stay, which costs nothing, is noted in version spans, and takes later tokens out of
    audits and `antiphon replay --rollouts`."""
    grace_s: float = Field(default=20.0, ge=0.0, le=YEAR_S)
    """Seconds between SIGTERM and the worker's exit: what surely ends in half of them is finished, the rest
    is handed over. Stay below your provider's notice."""
    hung_step_s: float = Field(default=60.0, gt=0.0, le=YEAR_S)
    """Seconds after which an engine step counts as hung, or twenty times the longest of its last steps, if
    that is more: the worker gives its leases back and ends its process. Taking in weights has
    services.stall_timeout_s."""


class CoordinatorSection(Section):
    """Leases and liveness."""

    lease_s: float = Field(default=30.0, gt=0.0, le=YEAR_S)
    """Seconds a lease lasts unless a heartbeat extends it."""
    heartbeat_s: float = Field(default=2.0, gt=0.0, le=YEAR_S)
    """Seconds between a worker's heartbeats; after five missed ones it counts as lost."""
    hung_factor: float = Field(default=5.0, ge=2.0, le=1e6)
    """A worker whose engine brings no token for this many usual pauses (99% of pauses are shorter;
    heartbeat_s at least) loses its leases, although its heartbeats come. While too few pauses are known,
    lease_s counts instead."""
    speculation: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of a batch whose last groups an idle worker may sample too, once their leases are older than 95%
    of leases get; the first submission wins. 0 switches it off. Needs sampling.sampler=keyed and engines of
    equal numerics."""
    partials_mib: int = Field(default=256, ge=0, le=MOST_MIB)
    """Memory of unfinished groups, kept so that another worker can continue them; 0 keeps none."""
    payload_retention_steps: int = Field(default=16, ge=1, le=MOST_KEPT)
    """Committed steps whose group payloads the journal keeps."""
    journal_url: str | None = None
    """Where the journal lies: null keeps it in the run's folder (SQLite), `postgresql://HOST/DATABASE` in a
    database, with user and password from PGUSER, PGPASSWORD, PGPASSFILE or PGSERVICE."""

    @field_validator("journal_url")
    @classmethod
    def _check_store(cls, value: str | None) -> str | None:
        if value is None:
            return value
        scheme, separator, rest = value.partition("://")
        if scheme not in ("postgresql", "postgres") or not separator:
            raise ValueError(
                f"coordinator.journal_url={value!r} is no database Antiphon knows; write "
                "postgresql://HOST/DATABASE, or null for a file in the run's folder"
            )
        if ":" in rest.partition("/")[0].rpartition("@")[0] or "password=" in rest:
            raise ValueError(
                "coordinator.journal_url must not hold a password, since configurations are copied and "
                "logged; put it into PGPASSWORD or the file that PGPASSFILE names"
            )
        return value


class RecordSection(Section):
    """What is kept of a run."""

    mlflow: bool = True
    """Log the run, its versions and batches to MLflow."""
    dvc: bool = True
    """Pin versions and batches in the DVC-tracked ledger, in a DVC project. Without, a run keeps the weights
    of its base, best and newest versions in its own folder."""
    ledger: str = "ledger"
    """Folder of the DVC-tracked ledger, relative to the project."""
    keep_ledger: bool = False
    """Write the ledger's .dvc file, which git and DVC's commands see, from the start; otherwise `antiphon
    keep RUN` does that."""
    weights: Literal["all", "anchors", "last"] = "all"
    """Published versions that keep their weights in the ledger: all; or the base, the last, the best and the
    newest, with `anchors` also one each `record.anchor_every`."""
    anchor_every: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Versions from one anchor to the next; null makes those anchors whose checkpoint is pinned."""
    free_mib: int | None = Field(default=None, ge=0, le=MOST_MIB)
    """Free space on the run's disk below which no version is published, MiB; null: two snapshots and a
    checkpoint."""
    checkpoint_stride: int = Field(default=4, ge=0, le=MOST_KEPT)
    """Every how many-th of the learner's checkpoints enters the ledger, where replays start; 0 pins none, and
    they start from the base model."""
    artifact_url: str | None = None
    """Where artifacts go besides the local store: `s3://bucket/prefix`, or a shared folder's absolute path.
    Keys come from the environment alone."""
    artifact_endpoint: str | None = None
    """Address of the S3 server, such as `http://127.0.0.1:8333`; null: AWS_ENDPOINT_URL_S3, else Amazon's."""
    sinks: tuple[str, ...] = ()
    """What else follows the run's log: `tensorboard`, `wandb`, or one's own as `package.module:Class`."""
    samples: int = Field(default=2, ge=0, le=16)
    """0 keeps only what trained; otherwise each step's filtered groups and each evaluation's answers are kept
    beside the batches (`antiphon evaluate --samples`)."""
    traces: int = Field(default=3, ge=0, le=32)
    """Trajectories of each evaluated version that MLflow shows as traces; 0 shows none."""
    system_metrics_s: float = Field(default=10.0, ge=0.0, le=YEAR_S)
    """Seconds between two samples of CPU and memory in MLflow; 0 takes none."""
    worker_usd_per_hour: float = Field(default=0.0, ge=0.0)
    """Price of one rollout worker, US dollars per hour; runs are compared by what they cost."""
    learner_usd_per_hour: float = Field(default=0.0, ge=0.0)
    """Price of the machine of the learner and the other services, US dollars per hour."""

    @property
    def free_bytes(self) -> int | None:
        """Return the floor of free space, bytes."""
        return None if self.free_mib is None else self.free_mib << 20

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        check_place(
            "record.artifact_url", self.artifact_url, "record.artifact_endpoint", self.artifact_endpoint
        )
        return self


class TrustSection(Section):
    """Workers that no one vouches for: what of their work is looked at again."""

    audits: Literal["off", "remote", "all"] = "remote"
    """Which runs have groups scored again by the learner: none, those with services.credentials, or all. It
    costs a copy of the model."""
    trusted: tuple[str, ...] = ()
    """Names of workers you run yourself: what honest rounding looks like is measured on them."""


class ServicesSection(Section):
    """Where the services listen and how long anyone waits for them."""

    host: str = "127.0.0.1"
    """Address the services listen on; anything but loopback needs `services.credentials`."""
    address: str | None = None
    """Name or address by which other machines reach the services, if not the host; the certificate must name
    it."""
    credentials: str | None = None
    """Folder with the services' certificate and token, made by `antiphon invite`; null serves the run's owner
    alone, on loopback."""
    coordinator_port: int = Field(default=0, ge=0, le=65535)
    """Port of the coordinator; 0 picks a free one."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on loopback for Prometheus, 0 for a free one, which the coordinator's log names."""
    start_timeout_s: float = Field(default=180.0, gt=0.0, le=YEAR_S)
    """Seconds a service may take to start; a learner that restores may take longer while it moves."""
    stall_timeout_s: float = Field(default=300.0, gt=0.0, le=YEAR_S)
    """Seconds a stage may go without progress (a token, group, micro-batch or byte) before the run stops and
    names it."""
    orphan_s: float = Field(default=600.0, ge=1.0, le=YEAR_S)
    """Seconds after which a worker that took part leaves in order, since its coordinator is gone."""
    empty_fleet_timeout_s: float = Field(default=86400.0, gt=0.0, le=YEAR_S)
    """Seconds a stage waits while no worker is active, before the run stops; a day by default."""
    outage_timeout_s: float = Field(default=3600.0, gt=0.0, le=86_400.0)
    """Seconds a run waits while journal or store can take nothing: a full disk, or a database that is
    away."""
    restart_limit: int = Field(default=5, ge=0, le=MOST_KEPT)
    """Times a crashed service is started again within services.restart_window_s, with growing pauses."""
    restart_window_s: float = Field(default=3600.0, gt=0.0, le=YEAR_S)
    """Seconds after which a restart of a service no longer counts against services.restart_limit."""

    @property
    def reached_at(self) -> str:
        """Return the name or address by which the services are dialled."""
        return self.address or self.host
