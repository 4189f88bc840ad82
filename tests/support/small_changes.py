"""Versions of bfloat16 weights that differ in few elements, as after steps at a small learning rate."""

import torch

from antiphon.core.broadcast.patches import MOST_SHARE
from antiphon.services.learner.publish import SnapshotPublisher
from antiphon.weights.patch_payloads import PayloadChoice
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import weights_of

COUNT = 40_000
LADDER = PayloadChoice(ladder=(1, 2, 4), most_share=MOST_SHARE, compress_full=False, threads=1)


def weights(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Return a version; each changes 200 elements of the one before."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(COUNT, generator=generator) * 0.02
    for step in range(version):
        places = torch.randint(COUNT, (200,), generator=torch.Generator().manual_seed(step + 1))
        matrix[places] *= 1.02
    return {"bias": torch.full((3,), 0.5, dtype=dtype), "matrix": matrix.to(dtype)}


def publisher(store: PayloadStore, choice: PayloadChoice | None = LADDER) -> SnapshotPublisher:
    """Return one whose manifests nobody signs."""
    return SnapshotPublisher("run", store, None, 8, choice=choice)


def write(made: SnapshotPublisher, version: int, dtype: torch.dtype = torch.bfloat16) -> str:
    """Write a version and return the digest of its weights."""
    return made.write(version, weights_of(weights(version, dtype)), lambda length: None)
