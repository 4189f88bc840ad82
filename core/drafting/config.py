"""Drafting config: how drafts are made from a prompt's earlier completions."""

from pydantic import Field

from antiphon.core.config_sections import MOST_MIB, MOST_STEPS, Section


class DraftingSection(Section):
    """HistoSpec: drafts from a prompt's earlier completions, verified in one pass. Never changes a token
    of the keyed sampler; see docs/concepts/history-drafts.md."""

    enabled: bool = True
    """Draft where the engine's startup check shows that drafts change nothing."""
    max_window: int = Field(default=32, ge=1, le=64)
    """Most tokens of one draft; the engine reserves room for as many."""
    min_match: int = Field(default=2, ge=1, le=8)
    """Shortest context, in tokens, that must recur before anything is drafted from it."""
    epochs: int = Field(default=2, ge=0, le=16)
    """Epochs whose completions are kept for each prompt; 0 keeps no history."""
    responses: int = Field(default=16, ge=1, le=256)
    """Most past completions sent along with a prompt, newest epoch first."""
    recency: float = Field(default=0.7, gt=0.0, le=1.0)
    """Weight of a completion one epoch older than another, relative to it."""
    reward_weight: float = Field(default=0.3, ge=0.0, le=1.0)
    """How far a completion's reward decides its weight; 0 ignores rewards."""
    store_mib: int = Field(default=256, ge=1, le=MOST_MIB)
    """Memory of the coordinator's history; beyond it the oldest epochs go first."""
    lease_kib: int = Field(default=512, ge=1, le=4096)
    """Most compressed history one lease carries; completions that do not fit stay behind."""
    probe_steps: int = Field(default=256, ge=16, le=MOST_STEPS)
    """Engine steps between two comparisons with the undrafted engine."""
