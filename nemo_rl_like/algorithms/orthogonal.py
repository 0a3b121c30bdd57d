"""Orthogonalisation of a matrix by products alone."""

from __future__ import annotations

from torch import Tensor, addmm

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Jordan's coefficients: the steepest slope at 0 that still keeps singular values near 1."""
_LEAST_NORM = 1e-7


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """The matrix with its singular values moved to about 1 (0.7 to 1.2 after 5 steps), its singular vectors as they are.

    X <- a X + (b G + c G^2) X with G = X X^T, from X = matrix / its Frobenius norm; [M, N] of any float type, computed in it. A matrix of
    zeros stays. Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if tall else matrix
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(steps):
        gram = x @ x.t()
        x = addmm(x, addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.t() if tall else x
