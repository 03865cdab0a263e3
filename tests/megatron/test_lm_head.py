"""Log-probs and entropies from vocabulary-parallel logits, against a dense softmax in float64."""

from __future__ import annotations

import pytest
import torch

TOKENS, WIDTH, VOCAB, PADDED, TEMPERATURE = 37, 16, 131, 256, 0.7


def inputs():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(PADDED, WIDTH, generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(2, TOKENS, generator=generator)


def dense():
    """(log-probs, entropies, gradient of hidden, gradient of weight) with padded entries left out of everything."""
    hidden, weight, targets, upstream = inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(hidden @ weight[:VOCAB].T / TEMPERATURE, -1)
    logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (logprobs * upstream[0] + entropy * upstream[1]).sum().backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def parallel(mesh, chunk: int):
    from torch.utils._python_dispatch import TorchDispatchMode

    from fivefold.backend import log_probs

    log_probs.CHUNK_ELEMENTS = chunk
    hidden, weight, targets, upstream = inputs()
    rows = PADDED // mesh.layout.tp
    start = mesh.tp.rank() * rows
    hidden = hidden.requires_grad_()
    own_weight = weight[start : start + rows].clone().requires_grad_()
    valid = max(0, min(VOCAB - start, rows))
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            # (the transposed weight is [width, vocabulary])
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[-1] == valid and out.shape[0] != WIDTH:
                largest = max(largest, out.shape[0])
            return out

    with Watch():
        logp, entropy = log_probs.log_probs(hidden, own_weight, targets, start, valid, 1 / TEMPERATURE, mesh.tp)
        (logp * upstream[0] + entropy * upstream[1]).sum().backward()
    grad = hidden.grad
    torch.distributed.all_reduce(grad, group=mesh.tp)
    return logp.detach(), entropy.detach(), grad, own_weight.grad, largest


@pytest.mark.parametrize("layout", ["megatron:d1", "megatron:t2", "megatron:t4"])
@pytest.mark.parametrize("chunk", [1 << 26, 700])
def test_values_and_gradients_equal_a_dense_softmax(cluster, layout, chunk):
    logp, entropy, grad_hidden, grad_weight = dense()
    results = cluster.run(parallel, layout, chunk)
    for logprobs, own_entropy, own_grad, _, _ in results:
        assert torch.allclose(logprobs.double(), logp, atol=1e-5)
        assert torch.allclose(own_entropy.double(), entropy, atol=1e-5)
        assert torch.allclose(own_grad.double(), grad_hidden, atol=2e-5)
    together = torch.cat([result[3] for result in results])
    assert torch.allclose(together.double(), grad_weight, atol=2e-5)
    assert together[VOCAB:].abs().max() == 0, "padding takes no part"


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists(cluster):
    """With chunks of 700 logits the first rank's 128 rows allow 5 tokens at once, of 37."""
    first, _ = cluster.run(parallel, "megatron:t2", 700)
    assert first[4] == 5
    whole, _ = cluster.run(parallel, "megatron:t2", 1 << 26)
    assert whole[4] == TOKENS, "the watch sees a tensor of all tokens where there is one"


def no_tokens(mesh):
    from fivefold.backend import log_probs

    weight = torch.randn(8, 4, requires_grad=True)
    hidden = torch.zeros(0, 4, requires_grad=True)
    logp, _ = log_probs.log_probs(hidden, weight, torch.zeros(0, dtype=torch.long), 0, 8, 1.0, mesh.tp)
    logp.sum().backward()
    return logp.shape, float(weight.grad.abs().sum()), hidden.grad.shape


def test_a_rank_without_tokens_takes_part_with_a_gradient_of_zero(cluster):
    assert cluster.run(no_tokens, "megatron:d1") == [((0,), 0.0, (0, 4))]


def chunks_held(mesh):
    """How many chunks of logits there are when the next one is computed, in the forward and in the backward pass."""
    import weakref

    from fivefold.backend import log_probs

    made, held, compute = [], [], log_probs._logits

    def watched(*arguments):
        held.append(sum(chunk() is not None for chunk in made))
        logits = compute(*arguments)
        made.append(weakref.ref(logits))
        return logits

    log_probs._logits, log_probs.CHUNK_ELEMENTS = watched, 10 * VOCAB
    hidden, weight, targets, upstream = inputs()
    results = log_probs.log_probs(hidden.requires_grad_(), weight.requires_grad_(), targets, 0, VOCAB, 1 / TEMPERATURE)
    torch.stack(results).backward(upstream)
    return held


def test_one_chunk_of_logits_is_there_at_a_time(cluster):
    """2 GiB on a GPU: the estimate of memory counts one."""
    (held,) = cluster.run(chunks_held, "megatron:d1")
    assert held == [0] * 8
