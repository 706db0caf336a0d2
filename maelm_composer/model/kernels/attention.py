"""Softmax(Q K^T / sqrt(d_h) + bias) V, as two matrix products (eager or compiled) or torch's SDPA."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from maelm_composer.config import AttentionBackend


def choose_backend(requested: AttentionBackend, device_type: str) -> AttentionBackend:
    """The kernel that is ``requested``; ``auto`` stands for ``dense`` on a CPU and ``sdpa`` elsewhere.

    On a CPU SDPA is slow once its bias needs a gradient; on a GPU ``dense`` has not been measured.
    """
    if requested is not AttentionBackend.auto:
        return requested
    return AttentionBackend.dense if device_type == 'cpu' else AttentionBackend.sdpa


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float, backend: AttentionBackend
) -> Tensor:
    """(B, H, Q, Dh) queries, (B, H, K, Dh) keys and values -> (B, H, Q, Dh).

    Args:
        bias: (B, 1 or H, Q, K), -inf where a query must not look.
        dropout: of the attention probabilities, 0 outside training.
        backend: the kernel, as :func:`choose_backend` chooses it.
    """
    bias = bias.to(query.dtype)
    if choose_backend(backend, query.device.type) is AttentionBackend.sdpa:
        return functional.scaled_dot_product_attention(query, key, value, bias, dropout)
    return attend_dense(query, key, value, bias, dropout)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """As :func:`plain_attend`."""
    heads = query.shape[:2]
    query, key, value, bias = (part.flatten(0, 1) for part in (query, key, value, bias.expand(*heads, -1, -1)))
    if torch.compiler.is_compiling() and not dropout:
        return _CompiledAttention.apply(query, key, value, bias).unflatten(0, heads)
    # The matrix product accumulates onto the bias: no extra pass over the scores, and in bf16 one rounding, not two.
    probabilities = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=query.shape[-1] ** -0.5).softmax(-1)
    if dropout:
        probabilities = functional.dropout(probabilities, dropout)
    return torch.bmm(probabilities, value).unflatten(0, heads)


def plain_attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Sec. 2.1; (B, H, Q, Dh), (B, H, K, Dh), (B, H, K, Dh) and (B, 1 or H, Q, K) -> (B, H, Q, Dh)."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    return functional.dropout(scores.softmax(-1), dropout) @ value


class _CompiledAttention(torch.autograd.Function):
    """Dense attention that the compiler turns into one pass over the scores between two matrix products.

    The forward pass divides the (Q, Dh) output, not the larger (Q, K) weights, by the softmax's total. The backward
    pass needs each query's mean gradient under its K probabilities, and takes this mean as a sum over Dh, as
    FlashAttention's rowsum(dO * O) (arXiv:2205.14135). Autograd's backward pass needs more passes over the scores.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        scores = torch.bmm(query, key.transpose(1, 2)).float() * query.shape[-1] ** -0.5 + bias.float()
        weights = (scores - scores.amax(-1, keepdim=True)).exp().to(value.dtype)  # probabilities times their total
        total = weights.float().sum(-1, keepdim=True)
        attended = (torch.bmm(weights, value).float() / total).to(value.dtype)
        ctx.save_for_backward(query, key, value, weights, total, attended)
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, weights, total, attended = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        grad_output = (gradients[0].float() / total).to(value.dtype)  # ``weights`` are probabilities times ``total``
        grad_weights = torch.bmm(grad_output, value.transpose(1, 2)).float()
        mean = (grad_output.float() * attended.float()).sum(-1, keepdim=True)  # of a row of ``grad_weights``
        grad_scores = (weights.float() * (grad_weights - mean)).to(value.dtype)
        grad_query = torch.bmm(grad_scores, key) * scale
        grad_key = torch.bmm(grad_scores.transpose(1, 2), query) * scale
        return grad_query, grad_key, torch.bmm(weights.transpose(1, 2), grad_output), grad_scores


def materialize(values: Tensor) -> Tensor:
    """The same tensor; a compiled model computes it once, not anew in every layer that reads it."""
    return _Materialize.apply(values) if torch.compiler.is_compiling() else values


class _Materialize(torch.autograd.Function):
    """The compiler does not fuse across ``as_strided``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.as_strided(values.shape, values.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
