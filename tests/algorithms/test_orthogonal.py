"""Newton-Schulz keeps singular vectors and makes singular values nearly equal."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_like.algorithms.orthogonal import newton_schulz


@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8), (1, 7)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    values = u.T @ newton_schulz(matrix, 5) @ v.T
    diagonal = values.diagonal()
    assert (values - torch.diag(diagonal)).abs().max() <= 1e-10
    assert diagonal.min() > 0.6 and diagonal.max() < 1.25


def test_the_scale_of_the_matrix_does_not_matter_and_zeros_stay() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(newton_schulz(matrix, 5), newton_schulz(matrix * 1e-3, 5), atol=1e-12)
    assert not newton_schulz(torch.zeros(4, 5), 5).any()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_in_bfloat16_it_is_what_pytorchs_muon_does(shape: tuple[int, int]) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    want = newton_schulz(gradient.bfloat16(), 5).float() * (0.2 * max(shape) ** 0.5)
    assert torch.equal(-weight.detach(), want)
