"""Muon in float32: momentum whose matrix updates are made orthogonal (Jordan and others, 2024).

torch's own Muon iterates in bfloat16, which processors without bfloat16 units emulate so slowly
that it would dominate a small model's step; this one keeps the parameters' precision and
iterates all matrices of one shape together.

Legend: N matrices of one shape.
"""

from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that drives singular values towards 1 in a few rounds."""
ROUNDS = 5
RMS_OF_ADAMW = 0.2
"""Updates are scaled to the root mean square that AdamW's have, so learning rates carry over."""


class Muon:
    """Optimizer for matrices: Nesterov momentum, orthogonal updates, decoupled weight decay."""

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.01
    ):
        """Take over `matrices`, all of two dimensions."""
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            self._by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        self._velocities = {
            shape: torch.zeros((len(group), *shape)) for shape, group in self._by_shape.items()
        }

    def step(self, learning_rate: float) -> None:
        """Update every matrix along its gradient, which must be there."""
        with torch.no_grad():
            for shape, matrices in self._by_shape.items():
                gradients = torch.stack([matrix.grad for matrix in matrices])
                velocities = self._velocities[shape].lerp_(gradients, 1 - self._momentum)
                updates = orthogonalise(gradients.lerp(velocities, self._momentum))
                scale = RMS_OF_ADAMW * max(shape) ** 0.5
                for matrix, update in zip(matrices, updates, strict=True):
                    matrix.mul_(1 - learning_rate * self._weight_decay)
                    matrix.add_(update, alpha=-learning_rate * scale)


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Push the singular values of each matrix in [N, rows, columns] close to 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    wide = wide / (wide.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if tall else wide
