"""Triton's kernels and cuDNN's attention against the same written out in float64: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.types import Sampling
from tests.support.draws import RARE, SAMPLINGS, VOCAB, chi_squared, expected, pairs
from tests.support.philox import Key, philox, scores_of

pytestmark = pytest.mark.kernels
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # Read when Triton is imported: by torch, where something else runs first. The Makefile sets it before all of them.
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if ON_GPU else "cpu"


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(DEVICE)


def difference(computed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest, in units of the largest number that was wanted."""
    return float(((computed.double() - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("width", [1, 150, 2048, 5000])
@pytest.mark.parametrize("scale", [1.0, 1 / 0.7])
def test_one_pass_over_logits_gives_their_sums(width, scale):
    from fivefold.backend.kernels.logits import row_sums

    logits = random(5, width, scale=5.0)
    targets = torch.tensor([0, width - 1, -1, width, width // 2], device=DEVICE)
    largest, total, weighted, picked = row_sums(logits.float(), targets, scale)
    scaled = logits.float().double() * scale
    top = scaled.amax(1)
    weights = (scaled - top[:, None]).exp()
    assert difference(largest, top) < 1e-6
    assert difference(total, weights.sum(1)) < 1e-5
    # Terms of both signs: measured by their size.
    assert ((weighted - (weights * scaled).sum(1)).abs() <= 1e-5 * (weights * scaled).abs().sum(1)).all()
    inside = (targets >= 0) & (targets < width)
    wanted = torch.where(inside, scaled.gather(1, targets.clamp(0, width - 1)[:, None])[:, 0], 0.0)
    assert (picked - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
    assert picked[2] == picked[3] == 0.0, "another rank's target"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [150, 2048, 5000])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_the_gradient_of_logits_takes_their_place(dtype, width, with_entropy):
    from fivefold.backend.kernels.logits import row_gradient

    logits, scale = random(4, width, scale=3.0).float(), 1 / 0.7
    targets = torch.tensor([0, width - 1, -1, width // 2], device=DEVICE)
    of_logprob, of_entropy = random(4, seed=1), random(4, seed=2) * with_entropy
    leaf = logits.double().requires_grad_()
    log_p = torch.log_softmax(leaf * scale, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    picked = log_p.gather(1, targets.clamp(0)[:, None])[:, 0]
    # Where the target is another rank's, only the sum below the fraction depends on these logits.
    other = -torch.logsumexp(leaf * scale, -1)
    logprobs = torch.where(targets >= 0, picked, other)
    (logprobs * of_logprob + entropy * of_entropy).sum().backward()
    log_sum = torch.logsumexp(leaf * scale, -1).detach()
    given = (log_sum, entropy.detach(), of_logprob, of_entropy)
    held = logits.clone()
    gradient = row_gradient(held, targets, tuple(tensor.float() for tensor in given), scale, dtype)
    assert gradient.dtype == dtype and gradient.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    # A GPU rounds to the nearest, the interpreter cuts off.
    assert difference(gradient, leaf.grad) < (2e-6 if dtype == torch.float32 else 2**-8 if ON_GPU else 2**-7)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize(("width", "rotated"), [(16, 16), (24, 24), (32, 16)])
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normed_and_rotated_values_are_left(groups, heads, width, rotated, normed, monkeypatch):
    from fivefold.backend.kernels import rotary

    monkeypatch.setattr(rotary, "PROGRAMS", 3)
    tokens, mscale = 7, 1.3
    mixed = random(tokens, 1, groups, (heads + 2) * width).requires_grad_()
    weights = [random(width, seed=seed).requires_grad_() for seed in (1, 2)]
    angles = random(tokens, 1, rotated // 2, seed=3, scale=50.0).repeat(1, 1, 2)

    def norm(x, weight):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight if normed else x

    def rotate(x):
        turned, rest = x[..., :rotated], x[..., rotated:]
        first, second = turned.chunk(2, -1)
        cos, sin = mscale * angles.float().double().cos(), mscale * angles.float().double().sin()
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    query, key, value = mixed[:, 0].split([heads * width, width, width], -1)
    query = query.reshape(tokens, groups * heads, width)
    wanted = (rotate(norm(query, weights[0])), rotate(norm(key, weights[1])), value)
    upstream = [random(*tensor.shape, seed=4) for tensor in wanted]
    leaves = [mixed, *weights] if normed else [mixed]
    gradients = torch.autograd.grad(wanted, leaves, upstream)
    inputs = [tensor.detach().float().requires_grad_() for tensor in leaves]
    norms = (inputs[1], inputs[2]) if normed else None
    turns = (mscale * angles[:, 0].float().cos(), mscale * angles[:, 0].float().sin())
    outputs = rotary.norm_rotate(inputs[0], *turns, norms, heads, width, 1e-6)
    for got, want in zip(outputs, wanted, strict=True):
        assert difference(got, want) < 5e-6
    for got, want in zip(torch.autograd.grad(outputs, inputs, [g.float() for g in upstream]), gradients, strict=True):
        assert difference(got, want) < 5e-6


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [1, 96, 1500])
def test_swiglu_and_its_gradients(weighted, width):
    from fivefold.backend.kernels.swiglu import swiglu

    product, weights, upstream = (
        random(6, 2 * width).requires_grad_(),
        random(6, seed=1).requires_grad_(),
        random(6, width, seed=2),
    )
    gate, up = product.chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up * (weights[:, None] if weighted else 1.0)
    leaves = [product, weights][: 1 + weighted]
    gradients = torch.autograd.grad(wanted, leaves, upstream)
    inputs = [tensor.detach().float().requires_grad_() for tensor in leaves]
    output = swiglu(*inputs)
    assert difference(output, wanted) < 1e-6
    for got, want in zip(torch.autograd.grad(output, inputs, upstream.float()), gradients, strict=True):
        assert difference(got, want) < 2e-6


def test_swiglu_of_no_tokens_is_empty():
    """An expert's rank may get none."""
    from fivefold.backend.kernels.swiglu import swiglu

    product = torch.zeros(0, 32, device=DEVICE, requires_grad=True)
    weights = torch.zeros(0, device=DEVICE, requires_grad=True)
    swiglu(product, weights).sum().backward()
    assert product.grad.shape == (0, 32)


@pytest.mark.parametrize("halves", [True, False])
def test_rows_are_found_where_the_stride_of_a_single_batch_says_nothing(halves):
    """[S, 1, F], as Megatron-Core has it, of [1, S, F]: contiguous, and the stride of its batch is that of all of it."""
    from fivefold.backend.kernels.swiglu import gated, swiglu

    one, other = (random(1, 6, 64, seed=seed).float().transpose(0, 1) for seed in (0, 1))
    assert one.is_contiguous() and one.stride(1) == 6 * 64
    leaf, exact = one.detach().requires_grad_(), one.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1) if halves else (exact, other.double())
    output, wanted = swiglu(leaf) if halves else gated(leaf, other), torch.nn.functional.silu(gate) * up
    output.sum().backward()
    wanted.sum().backward()
    assert difference(output, wanted) < 1e-6
    assert difference(leaf.grad, exact.grad) < 1e-6


@pytest.mark.parametrize("shape", [(3, 5), (1, 4, 1500), (0, 8)])
def test_a_gate_times_a_projection_and_its_gradients(shape):
    from fivefold.backend.kernels.swiglu import gated

    gate, up = (random(*shape, seed=seed, scale=2.0).float().requires_grad_() for seed in (0, 1))
    of_output = random(*shape, seed=2).float()
    output = gated(gate, up)
    output.backward(of_output)
    assert output.shape == shape
    if not output.numel():
        return
    exact = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    wanted = torch.nn.functional.silu(exact[0]) * exact[1]
    wanted.backward(of_output.double())
    assert difference(output, wanted) < 1e-6
    for computed, leaf in zip((gate, up), exact, strict=True):
        assert difference(computed.grad, leaf.grad) < 1e-6


@pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 3, 8), (7, 1, 128), (3, 2, 96), (0, 2, 8)])
def test_heads_are_rotated_and_their_gradients_the_other_way(tokens, heads, width):
    from fivefold.backend.kernels.rotate import rotate

    states = random(tokens, heads, width).float().requires_grad_()
    # The halves of a head have sines of their own here: with equal ones a gradient that takes the wrong one goes unseen.
    cosines, sines = (random(tokens, width, seed=seed).float() for seed in (1, 2))
    of_output = random(tokens, heads, width, seed=3).float()
    output = rotate(states, cosines, sines)
    output.backward(of_output)
    assert output.shape == states.shape
    if not tokens:
        return
    exact, half = states.detach().double().requires_grad_(), width // 2
    turned = torch.cat([-exact[..., half:], exact[..., :half]], -1)
    wanted = exact * cosines.double()[:, None] + turned * sines.double()[:, None]
    wanted.backward(of_output.double())
    assert difference(output, wanted) < 1e-6
    assert difference(states.grad, exact.grad) < 1e-6


@pytest.mark.skipif(not ON_GPU or not importlib.util.find_spec("flash_attn"), reason="needs a GPU and flash-attn-4")
@pytest.mark.parametrize("lengths", [[64], [100, 300, 1, 777, 512], [1] * 9])
@pytest.mark.parametrize("before", [0, 130])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "groups", "width"), [(16, 8, 128), (4, 4, 64), (8, 2, 96)])
def test_flash_attention_attends_within_each_piece_and_nowhere_else(lengths, before, window, heads, groups, width):
    """Against float64, no further from it than plain PyTorch in bfloat16; what follows a piece, or another, is not seen."""
    from fivefold.backend.kernels import flash

    of_keys = [length + before for length in lengths]
    shapes = ((sum(lengths), heads, width), (sum(of_keys), groups, width), (sum(of_keys), groups, width))
    given = [random(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes)]
    upstream = random(sum(lengths), heads, width, seed=5).bfloat16()

    def plain(tensors):
        q, k, v = tensors
        outputs, at, keys_at = [], 0, 0
        for length, count in zip(lengths, of_keys, strict=True):
            mine = [
                t.transpose(0, 1) for t in (q[at : at + length], k[keys_at : keys_at + count], v[keys_at : keys_at + count])
            ]
            mine[1], mine[2] = (t.repeat_interleave(heads // groups, 0) for t in mine[1:])
            scores = mine[0] @ mine[1].transpose(1, 2) * width**-0.5
            distance = torch.arange(count - length, count, device=q.device)[:, None] - torch.arange(count, device=q.device)
            seen = (distance >= 0) & (distance <= (count if window is None else window))
            outputs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ mine[2]).transpose(0, 1))
            at, keys_at = at + length, keys_at + count
        return torch.cat(outputs)

    def gradients(function, tensors):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = function(leaves)
        return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]

    assert flash.takes(given[0], given[2])
    ends = tuple(torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).cuda() for sizes in (lengths, of_keys))
    most = (max(lengths), max(of_keys))
    exact = gradients(plain, [tensor.double() for tensor in given])
    rounded = gradients(plain, given)
    results = gradients(lambda tensors: flash.attention(*tensors, ends, most, window, width**-0.5), given)
    for got, half, want in zip(results, rounded, exact, strict=True):
        assert torch.isfinite(got).all()
        # Of one key alone queries and keys have no gradient: measured against what came in.
        rounding = max(1.5 * float((half.double() - want).norm()), 4e-3 * float(want.norm()), 4e-3 * float(upstream.norm()))
        assert (got.double() - want).norm() <= rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "most"), [(1, 1), (150, 3), (2048, 8), (5000, 2)])
def test_rows_at_places_are_summed_in_one_pass(dtype, width, most):
    from fivefold.backend.kernels.rows import sum_rows

    rows = random(7, width).to(dtype)
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(-1, 7, (4, most), generator=generator).to(DEVICE)
    places[0] = -1
    padded = torch.cat([rows.double(), torch.zeros(1, width, dtype=torch.float64, device=DEVICE)])
    wanted = padded[places].sum(1)
    summed = sum_rows(rows, places)
    assert summed.dtype == dtype and not summed[0].any()
    # Rounded once; the interpreter cuts the rest off.
    assert difference(summed, wanted) < (1e-6 if dtype == torch.float32 else 2**-8 if ON_GPU else 2**-7)
    assert sum_rows(rows, places[:0]).shape == (0, width)


def noise_of(bits: np.ndarray) -> torch.Tensor:
    """What the kernel makes of random bits."""
    from tests.support.noise_kernel import store_noise

    given = np.zeros(-(-bits.size // 1024) * 1024, np.uint32)
    given[: bits.size] = bits.ravel()
    noise = torch.empty(len(given), device=DEVICE)
    store_noise[(len(given) // 1024,)](torch.from_numpy(given.view(np.int32)).to(DEVICE), noise, block=1024)
    return noise[: bits.size].double().cpu().view(bits.shape)


def drawn_of(logits: torch.Tensor, seeds: list[int], offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs on a CPU."""
    from fivefold.backend.kernels.noise import draw_tokens

    drawn = draw_tokens(logits.to(DEVICE), np.array(seeds, np.uint64), np.array(offsets, np.int64)).cpu()
    return drawn[0].long(), drawn[1].view(torch.float32)


@pytest.mark.parametrize("width", [1, 3, 150, 4096, 5001])
def test_a_draw_is_of_its_seed_its_offset_and_its_column_by_philox(width):
    """Against the definition in float64, where the two best scores are not equal."""
    seeds, offsets = [0, 12345, (1 << 63) - 25, (1 << 64) - 1], [0, 4, 8, 4000000]
    logits = torch.randn(4, width, generator=torch.Generator().manual_seed(width))
    logits[:, 5::9] = -torch.inf
    scores = scores_of(logits, seeds, offsets)
    if width > 1:
        best = scores.topk(2).values
        assert (best[:, 0] - best[:, 1] > 1e-4).all(), "the test needs other logits"
    tokens, logprobs = drawn_of(logits, seeds, offsets)
    assert torch.equal(tokens, scores.argmax(-1))
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=2e-6, atol=2e-6)


def test_a_million_numbers_of_noise_are_exponential_and_independent():
    shape = (16, 16, 4000)
    bits = np.stack([philox(seed, shape[2], 4 * draw) for seed in range(shape[0]) for draw in range(shape[1])])
    noise = noise_of(bits.astype(np.uint32)).reshape(shape)
    # A GPU's logarithm is exact to 2^-22, and the smallest noise that is one is 1/64.
    exact = -np.log1p(-(bits.reshape(shape) + 0.5) / 2**32)
    np.testing.assert_allclose(noise, exact, rtol=3e-5)
    edges = -torch.log1p(-torch.tensor([1e-5, 1e-4, 1e-3, 1e-2, *(n / 50 for n in range(1, 50)), 0.99, 0.999]).double())
    shares = torch.diff(1 - torch.exp(-edges), prepend=torch.zeros(1), append=torch.ones(1))
    counts = torch.bincount(torch.bucketize(noise.flatten(), edges), minlength=len(shares))
    assert chi_squared(counts, shares) > RARE
    eighths = torch.bucketize(noise, -torch.log1p(-torch.arange(1, 8).double() / 8))
    for axis in range(3):
        first, second = (eighths.unflatten(axis, (-1, 2)).select(axis + 1, side) for side in (0, 1))
        assert chi_squared(torch.bincount((8 * first + second).flatten(), minlength=64), torch.full((64,), 1 / 64)) > RARE


def keys(seeds: range) -> dict[int, Any]:
    made = (torch.Generator("cuda").manual_seed(seed) if ON_GPU else Key().manual_seed(seed) for seed in seeds)
    return dict(enumerate(made))


@pytest.fixture
def at_once(monkeypatch):
    """Draws of probabilities, each call a step of the batch; vLLM's own sampler must not be called."""
    from fivefold.engines.vllm import draws

    monkeypatch.setattr(draws, "serve", lambda logits: True)
    draw = draws.KeyedSampler(lambda *given: pytest.fail("by vLLM's own loop"), lambda logits, k, p: logits, seed=0)

    def drawn(probs: torch.Tensor, generators: dict[int, Any]) -> torch.Tensor:
        logits = probs.log().to(DEVICE)
        tokens, others = draw(logits, generators, None, None)
        same, bits = draw.take()
        assert others is None and draw.take() is None and torch.equal(same, tokens.cpu())
        wanted = logits.log_softmax(-1).gather(1, tokens[:, None].long())[:, 0].cpu()
        torch.testing.assert_close(bits.view(torch.float32), wanted, rtol=2e-6, atol=2e-6)
        return same.long()

    return drawn


@pytest.mark.parametrize("name", SAMPLINGS if ON_GPU else ["all"])
def test_draws_with_keys_have_their_probabilities(at_once, name):
    p = expected(Sampling(1, **SAMPLINGS[name]))
    rows, steps = (4000, 250) if ON_GPU else (300, 4)  # interpreted, a draw takes 10 ms
    probs, generators = p.float().expand(rows, -1), keys(range(rows))
    drawn = torch.stack([at_once(probs, generators) for _ in range(steps)])
    assert chi_squared(torch.bincount(drawn.flatten(), minlength=VOCAB), p) > RARE
    for axis in range(2):
        assert chi_squared(pairs(drawn, axis), p[:, None] * p) > RARE


def test_a_draw_depends_on_its_key_and_its_place_in_the_response_alone(at_once):
    p = expected(Sampling(1)).float().expand(12, -1)
    generators = keys(range(12))
    wanted = torch.stack([at_once(p, generators) for _ in range(6)])
    assert len(wanted.T.unique(dim=0)) == 12, "responses that are the same"

    # Alone; in another order; next to requests without a key; after a token that vLLM discards.
    alone = keys(range(7, 8))
    assert torch.equal(torch.cat([at_once(p[:1], alone) for _ in range(6)]), wanted[:, 7])
    turned = {11 - row: generator for row, generator in keys(range(12)).items()}
    assert torch.equal(torch.stack([at_once(p, turned) for _ in range(6)]).flip(1), wanted)
    some = {3 * row + 1: generator for row, generator in keys(range(4)).items()}
    mixed = torch.stack([at_once(p, some) for _ in range(6)])
    assert torch.equal(mixed[:, 1::3], wanted[:, :4])
    assert len(mixed[:, ::3].T.unique(dim=0)) == 4, "requests without a key draw as well"
    again = keys(range(12))
    for step in range(6):
        if step == 3:
            at_once(p, again)
            for generator in again.values():
                generator.set_offset(generator.get_offset() - 4)
        assert torch.equal(at_once(p, again), wanted[step])


def test_log_probs_of_all_tokens_are_there_if_vllm_returns_some(monkeypatch):
    """Of the truncated distribution, as vLLM's own are."""
    from fivefold.engines.vllm import draws

    monkeypatch.setattr(draws, "serve", lambda logits: True)
    cut = torch.tensor([0.0, 0.0, -torch.inf, 0.0], device=DEVICE)
    draw = draws.KeyedSampler(
        lambda *given: pytest.fail("by vLLM's own loop"), lambda logits, k, p: logits + cut * k, seed=0
    )
    logits = torch.randn(8, 4).to(DEVICE)
    draw.needs_all = True
    tokens, logprobs = draw(logits, keys(range(6)), 1, None)
    torch.testing.assert_close(logprobs, (logits + cut).log_softmax(-1))
    assert (tokens != 2).all()
    wanted = logprobs.gather(1, tokens[:, None].long())[:, 0].cpu()
    torch.testing.assert_close(draw.take()[1].view(torch.float32), wanted, rtol=2e-6, atol=2e-6)


def test_an_interrupted_request_draws_on_where_it_was(at_once, monkeypatch):
    """Its generator is forgotten meanwhile, after a draw that vLLM has taken back."""
    from fivefold.engines.vllm import draws

    p = expected(Sampling(1)).float().expand(12, -1)
    generators = keys(range(12))
    wanted = torch.stack([at_once(p, generators) for _ in range(6)])
    monkeypatch.setattr(draws, "_FEWEST", 4)
    again, alone = keys(range(12)), keys(range(20, 21))
    for step in range(6):
        if step in (2, 4):
            at_once(p, again)
            for generator in again.values():
                generator.set_offset(generator.get_offset() - 4)
            at_once(p[:1], alone)
            assert [generator.get_offset() for generator in again.values()] == [4 * step] * 12
        assert torch.equal(at_once(p, again), wanted[step])


def test_a_token_without_probability_is_never_drawn(at_once):
    probs = torch.zeros(20, 5000)
    places = torch.arange(20) * 240 + 7
    probs[torch.arange(20), places] = 1.0
    generators = keys(range(20))
    for _ in range(100 if ON_GPU else 2):
        assert torch.equal(at_once(probs, generators), places)
