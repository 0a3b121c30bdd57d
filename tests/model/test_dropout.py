"""Dropout's draws are those of its hash, in arithmetic of unbounded integers, and look drawn."""

from __future__ import annotations

import hashlib

import pytest
import torch

from nemo_rl_like.model.dropout import channel_keys, dropped_product, kept, token_keys
from nemo_rl_like.tokens.batch import TokenBatch
from tests.model.tiny import make_batch

CPU = torch.device("cpu")


def mixed_64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def lowbias32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def places(batch: TokenBatch) -> list[int]:
    """Of each token, or of its like in the first row with the same prompt."""
    cuts, out = batch.cu_seqlens.tolist(), []
    for row in range(batch.rows):
        first = batch.prompt_id.tolist().index(int(batch.prompt_id[row]))
        for t in range(cuts[row + 1] - cuts[row]):
            out.append(cuts[first if t < int(batch.prompt_lens[row]) else row] + t)
    return out


def test_the_mask_is_that_of_the_hash() -> None:
    batch, share = make_batch(), 0.3
    tokens = token_keys(batch, seed=5, update=2, walk=1)
    assert len(set(tokens.tolist())) == len(set(places(batch))) < batch.tokens.numel()
    mask = kept(tokens, channel_keys(layer=3, projection=6, first=70, count=9, device=CPU), share)
    start = int.from_bytes(hashlib.sha256(b"5/2/1").digest()[:8], "big")
    for i, place in enumerate(places(batch)):
        token = mixed_64((place + start) % 2**64) % 2**32
        for c in range(9):
            channel = mixed_64(((3 * 256 + 6) << 32) + 70 + c) % 2**32
            drawn = (lowbias32(token ^ channel) + 2**31) % 2**32  # torch compares signed words
            assert bool(mask[i, c]) == (drawn >= share * 2**32)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_what_is_kept_looks_drawn(share: float) -> None:
    """The share of zeros, of rows, channels, updates and projections alike, and that no two of them go together: within 5 deviations."""
    batch = make_batch()
    first, *others = [
        kept(token_keys(batch, 1, update, 1), channel_keys(layer, projection, 0, 4096, CPU), share).double()
        for update, layer, projection in ((0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1))
    ]
    own = torch.tensor([i == place for i, place in enumerate(places(batch))])
    first, others = first[own], [other[own] for other in others]
    deviation = (share * (1 - share)) ** 0.5
    z = (first - (1 - share)) / deviation
    assert abs(float(z.mean())) * z.numel() ** 0.5 < 5
    assert float(z.mean(1).abs().max()) * z.shape[1] ** 0.5 < 5 and float(z.mean(0).abs().max()) * len(z) ** 0.5 < 5
    beside = [(other - (1 - share)) / deviation for other in others]
    for a, b in [(z, other) for other in beside] + [(z[:-1], z[1:]), (z[:, :-1], z[:, 1:])]:
        assert abs(float((a * b).mean())) * a.numel() ** 0.5 < 5


def test_the_product_has_the_gradient_of_the_masked_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, up = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 2, 8), (3, 8), (5, 2, 3))
    )
    tokens = torch.randint(-(2**31), 2**31, (5, 2), generator=generator, dtype=torch.int32)
    channels = channel_keys(1, 0, 0, 8, CPU)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    got = dropped_product(*leaves, tokens, channels, 0.25)
    want = (plain[0] * kept(tokens, channels, 0.25) / 0.75) @ plain[1].t()
    for out in (got, want):
        (out * up).sum().backward()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for mine, reference in zip(leaves, plain, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=1e-12)
