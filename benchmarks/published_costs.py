"""Published results as scenarios: what the capacity model says beside what was published.

Every input has a source and nothing is fitted. Published figures that are inputs are no predictions; where an
input was never published there is a band instead of a claim, with the reason. Prices: machines that stay
at the on-demand median, machines that may be reclaimed at the spot median, of daily observations of about 30
providers from February to May 2026 (gpu-pricing-tracker by cherielilili, commit 04891eb3). Efficiencies are
those of `core/capacity/estimate.py`, whose bands give the bands here. The last line is one JSON object.

    .venv/bin/python benchmarks/published_costs.py
"""

from dataclasses import asdict, dataclass, field

import yaml

from antiphon.benchmarks.parts.results import PROJECT, benchmark_parser, execute, finish
from antiphon.core.capacity.estimate import GPUS, MODELS, RATE_BAND, TRAIN_BAND, sampling_rate, train_seconds

ON_DEMAND = {"H200": 3.50, "A100": 1.79}
SPOT = {"H200": 2.29, "RTX5090": 0.667}
"""US dollars per GPU-hour: medians of the source's rows of H200, A100_SXM_80GB and RTX_5090."""
QUARTILES = {"H200": (2.29, 6.16)}
"""Of the providers' spot medians."""
CONTEXT_TOKENS = 4096
"""Mean live context; the runs' own was not published."""
MOST_AT_ONCE = 4096
MOST_ERROR = 0.15
SAMPLE_USD, TRAIN_USD = 0.30, 0.36
"""Tinker's price list of January 2026 for this model, US dollars per million tokens."""
TOKENS = 1122 / (SAMPLE_USD + TRAIN_USD) * 1e6
"""Tokens sampled and trained, from Tinker's bill of $1,122; prompts are left out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure."""

    figure: str
    unit: str
    published: float
    predicted: float | None
    """None where an input is missing, or the figure is one."""
    band: tuple[float, float] | None
    inputs: dict[str, str] = field(default_factory=dict)
    counted: bool = True
    """Its inputs are complete, so its error counts."""
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1.0


def hosted() -> list[Row]:
    """Return the rows of Qwen3-30B-A3B on DAPO-17k."""
    model, h200 = MODELS["Qwen/Qwen3-30B-A3B"], GPUS["H200"]
    hours = train_seconds(model, h200, 4, TOKENS) / 3600.0
    rate = sampling_rate(model, h200, 1, CONTEXT_TOKENS, MOST_AT_ONCE).tokens_per_s
    gpu_hours = TOKENS / rate / 3600.0
    low_h, high_h = hours / (1 + TRAIN_BAND), hours * (1 + TRAIN_BAND)
    low, high = QUARTILES["H200"]

    def dollars(train_h: float, sampled_h: float, actor: float) -> float:
        return 4 * train_h * ON_DEMAND["H200"] + sampled_h * actor

    inputs = {
        "tokens": f"{TOKENS / 1e9:.2f}e9, from Tinker's published $1,122 and its price list",
        "learner": "4 H200, published",
        "training": "8 operations per active parameter and token at 30% of the data sheet's, an assumption",
    }
    inputs_usd = inputs | {
        "actors": f"{gpu_hours:.0f} H200-hours at {rate:,.0f} tokens/s, roofline",
        "prices": f"learner ${ON_DEMAND['H200']:.2f}, actors ${SPOT['H200']:.2f} per H200-hour",
    }
    return [
        Row("ECHO-2, Qwen3-30B-A3B", "h", 9.5, hours, (low_h, high_h), inputs),
        Row(
            "ECHO-2, Qwen3-30B-A3B",
            "USD",
            425.0,
            dollars(hours, gpu_hours, SPOT["H200"]),
            (
                dollars(low_h, gpu_hours / (1 + RATE_BAND), low),
                dollars(high_h, gpu_hours * (1 + RATE_BAND), high),
            ),
            inputs_usd,
            note="the band takes all inputs at their ends at once; most of it is the price of a spot H200",
        ),
    ]


def consumer_gpus() -> Row:
    """Return the row of an A100 learner with RTX 5090 actors, against A100 actors; Qwen3-8B."""
    model, a100, rtx = MODELS["Qwen/Qwen3-8B"], GPUS["A100"], GPUS["RTX5090"]
    demand = 1e6 / train_seconds(model, a100, 4, 1e6)
    costs = {}
    for weight_bytes in (2.0, 1.0):
        own = sampling_rate(model, a100, 1, CONTEXT_TOKENS, MOST_AT_ONCE).tokens_per_s
        other = sampling_rate(model, rtx, 1, CONTEXT_TOKENS, MOST_AT_ONCE, weight_bytes).tokens_per_s
        all_a100 = (4 + demand / own) * ON_DEMAND["A100"]
        mixed = 4 * ON_DEMAND["A100"] + demand / other * SPOT["RTX5090"]
        costs[weight_bytes] = 1.0 - mixed / all_a100
    return Row(
        "A100 learner with RTX 5090 actors, saving over all A100",
        "share",
        0.345,
        costs[2.0],
        (costs[2.0], costs[1.0]),
        {
            "learner": "4 A100, published",
            "actors": "bfloat16, and fp8 at the band's other end; roofline at 4,096 tokens of context",
            "prices": f"A100 ${ON_DEMAND['A100']:.2f} on demand, RTX 5090 ${SPOT['RTX5090']:.3f} spot",
        },
        counted=False,
        note="how the all-A100 runs were laid out, and how long they idled, is not published: here both "
        "sides are balanced and never wait, which leaves out whatever overlap saved",
    )


def others() -> list[Row]:
    """Return the rows whose inputs are missing."""
    listed = yaml.safe_load((PROJECT / "benchmarks" / "data" / "published.yaml").read_text(encoding="utf-8"))
    return [Row(**row, predicted=None, band=None, counted=False) for row in listed]


def main() -> int:
    """Predict and print."""
    arguments = benchmark_parser(__doc__).parse_args()
    rows = [*hosted(), consumer_gpus(), *others()]
    for row in rows:
        said = "not predicted" if row.predicted is None else f"predicted {row.predicted:,.4g}"
        error = "" if row.error is None else f", error {row.error:+.1%}"
        band = f", band {row.band[0]:,.4g} to {row.band[1]:,.4g}" if row.band else ""
        print(f"{row.figure}: published {row.published:,.4g} {row.unit}, {said}{error}{band}")
        if row.note:
            print(f"    {row.note}")
    errors = [abs(row.error) for row in rows if row.counted and row.error is not None]
    result = {
        "worst_error": round(max(errors), 4),
        "predicted": len(errors),
        "without_inputs": sum(not row.counted for row in rows),
        "rows": [{**asdict(row), "error": row.error} for row in rows],
    }
    violated = [
        f"{row.figure}: {row.error:+.1%} off, at most {MOST_ERROR:.0%}"
        for row in rows
        if row.counted and row.error is not None and abs(row.error) > MOST_ERROR
    ]
    return finish(result, record=arguments.record, violated=violated)


if __name__ == "__main__":
    execute(main)
