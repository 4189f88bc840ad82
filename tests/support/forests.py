"""What a forest of drafts holds, by its own tables."""

from antiphon.core.drafting import kernels
from antiphon.core.drafting.forest import DraftForest


def stored_tokens(forest: DraftForest) -> int:
    """Count the tokens of all documents and live texts, with the prompts and the prefixes of texts."""
    documents = sum(length for group in forest._groups.values() for _, length in group.documents)
    return documents + sum(int(forest._requests[slot, kernels.LENGTH]) for slot in forest._blocks)
