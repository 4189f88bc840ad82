"""The gateway of a run in this process, before rows at workers whose model says what a function says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from antiphon.benchmarks.parts.scripted_gateway import MODEL, Say
from antiphon.core.config import build_config
from antiphon.environments.host import HostEnvironment
from antiphon.lineage.hosts import HOST_TOKEN, read_gateway
from antiphon.models.codec import TextCodec
from antiphon.services.reward.gateway import open_gateway
from antiphon.services.reward.turns import answer_turns
from tests.support.hosted_rows import AskingCoordinator, Row

SAMPLES = 4


@asynccontextmanager
async def real_gateway(
    run_dir: Path, say: Say, groups: int, seats: int = 2
) -> AsyncIterator[tuple[str, str, AskingCoordinator]]:
    """Serve groups of four samples; give URL, token and the coordinator that asks about them."""
    config = build_config(
        {
            "model": {
                "path": str(MODEL),
                "renderer": "qwen3",
                "template_arguments": {"thinking_retention": "all"},
            },
            "environment": {"name": "host", "seats": seats, "train_size": 32, "reward_range": [-3.0, 4.0]},
            "loop": {"group_size": SAMPLES},
            "evaluation": {"samples": seats},
            "sampling": {"max_tokens": 16},
            "rollout": {"max_model_tokens": 1024},
        }
    )
    codec = TextCodec.load(config.model.path)

    def sample(name: str, context: Sequence[int]) -> list[int]:
        said = say(name, 0, codec.tokenizer.decode(context, skip_special_tokens=False)) or ""
        return [*codec.encode(said, add_special_tokens=False), codec.end_token_id]

    coordinator = AskingCoordinator([Row(f"g{g}/{i}", sample) for g in range(groups) for i in range(SAMPLES)])
    async with open_gateway(config, HostEnvironment(config.environment), codec, run_dir, None) as gateway:
        answering = asyncio.create_task(
            answer_turns(coordinator, gateway.answer, "g", 10.0, 0.02, gateway.sent)
        )
        looking = asyncio.create_task(gateway.look())
        record = read_gateway(run_dir)
        try:
            yield record.url, (run_dir / HOST_TOKEN).read_text().strip(), coordinator
        finally:
            answering.cancel()
            looking.cancel()
