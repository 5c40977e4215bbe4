"""Softmax attention within sequences that lie one after the other: packed images, windows.

    out[t,h] = sum_s softmax_s(scale * q[t,h] . k[s,h]) v[s,h],  s in the sequence of t

Sequence b is the tokens cu_seqlens[b] ... cu_seqlens[b + 1] - 1. Gradient and precision: those of
`attention` for each sequence alone. The kernels are those of `attention` too: a program reads
where its sequence lies, and leaves at once where its tile is past the end, so that nothing is
padded and the host never waits for a length.
Saved: qkv, out, lse (H, about total) fp32 in log2 units, cu_seqlens.
Source: arXiv:2307.08691. Specification: `varlen_attention_ref`. Derivation: docs/varlen.md.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ...runtime import values
from ...runtime.arguments import (
    autocast_dtype,
    check_device,
    check_int,
    check_tensor,
    empty,
    needs_gradient,
)
from ...runtime.compat import FakeTensor
from ...runtime.dispatch import (
    backward_route,
    cached_dispatch,
    choose_route,
    first_order,
    grad_enabled,
)
from ...runtime.operator import differentiable, operator
from .functions import AttentionSpec, attention_ref, check_scores, draw_seed, unsupported_scale
from .launch import Packing, Softmax, empty_dqkv, empty_rows, launch_bwd, launch_fwd, readable

MAX_TOTAL = 2**31 - 1  # cu_seqlens counts tokens in 32 bits


def varlen_attention_ref(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The specification of `varlen_attention`: `attention_ref` of each sequence alone; those in a
    row that have one length are its batch."""
    lengths = lengths_of("varlen_attention", cu_seqlens, qkv.shape[0], max_seqlen)
    sizes = [(len([*same]), length) for length, same in itertools.groupby(lengths)]
    parts = zip(qkv.split([B * T for B, T in sizes]), sizes, strict=True)
    batches = (part.unflatten(0, size) for part, size in parts)
    outs = [attention_ref(x, scale, dropout_p).flatten(0, 1) for x in batches]
    return torch.cat(outs) if outs else qkv[:, 0]


def lengths_of(op: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> list[int]:
    """The lengths of the sequences, of which the host reads the values.

    Raises: ValueError where they are not those of `total` tokens, each at most max_seqlen long.
    """
    starts = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    if any(length < 0 for length in lengths):
        raise ValueError(f"{op}: cu_seqlens must ascend, got {_shown(starts)}")
    if starts[0] != 0 or starts[-1] != total:
        raise ValueError(
            f"{op}: cu_seqlens must go from 0 to {total}, the number of tokens, got "
            f"{_shown(starts)}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"{op}: max_seqlen must be at least the longest sequence, {max(lengths)}, got "
            f"{max_seqlen}"
        )
    return lengths


def _shown(starts: list[int]) -> str:
    return str(starts) if len(starts) <= 8 else f"[{', '.join(map(str, starts[:8]))}, ...]"


def check_packing(
    op: str, cu_seqlens: object, max_seqlen: object, total: int, like: Tensor
) -> None:
    """Raise unless cu_seqlens and max_seqlen may be those of `total` tokens; reads no value."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{op}: cu_seqlens must be a Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype is not torch.int32 or cu_seqlens.layout is not torch.strided:
        kind = f"{cu_seqlens.dtype} in layout {cu_seqlens.layout}"
        raise TypeError(f"{op}: cu_seqlens must be a dense tensor of torch.int32, got {kind}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"{op}: cu_seqlens must have shape (B + 1,), got {tuple(cu_seqlens.shape)}"
        )
    check_device(op, "cu_seqlens", cu_seqlens, like)
    check_int(op, "max_seqlen", max_seqlen)
    if total > MAX_TOTAL:
        raise ValueError(f"{op}: there must be at most {MAX_TOTAL} tokens, got {total}")


def check_lengths(op: str, cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """As `lengths_of`, inside `checked_values` alone: the host waits for the device."""
    if values.values_are_checked() and not isinstance(cu_seqlens, FakeTensor):
        lengths_of(op, cu_seqlens, total, max_seqlen)


def empty_fwd(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> tuple[Tensor, Tensor]:
    total, _, H, D = qkv.shape
    out = empty((total, H, D), qkv.dtype, qkv.device)
    return out, empty_rows(out.unsqueeze(0), Packing(cu_seqlens, max_seqlen))


def _flops_fwd(qkv, max_seqlen):
    total, _, H, D = qkv  # as if all were of the longest: what the sum of squares is, no shape says
    return 4 * H * total * max_seqlen * D


@operator(fake=empty_fwd, flops=_flops_fwd)
def varlen_attention_fwd(
    qkv: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Packed (total, 3, H, D) -> out (total, H, D), lse as `empty_rows` lays it out."""
    packing = Packing(cu_seqlens.contiguous(), max_seqlen)
    heads = readable(qkv, token_axis=0).unbind(1)
    return launch_fwd(heads, Softmax(scale, dropout_p, seed, packing=packing))


def _flops_bwd(dout, max_seqlen):
    total, H, D = dout
    return 10 * H * total * max_seqlen * D


@operator(fake=empty_dqkv, flops=_flops_bwd)
def varlen_attention_bwd(
    dout: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """dqkv (total, 3, H, D), contiguous."""
    dqkv = empty_dqkv(qkv)
    if out.numel() and cu_seqlens.shape[0] > 1:
        dout, qkv = readable(dout, token_axis=0), readable(qkv, token_axis=0)
        packing = Packing(cu_seqlens.contiguous(), max_seqlen)
        heads, softmax = qkv.unbind(1), Softmax(scale, dropout_p, seed, packing=packing)
        launch_bwd(dqkv.unbind(1), dout, heads, out, lse, softmax)
    return dqkv


class VarlenAttentionFunction(torch.autograd.Function):
    """qkv -> out. Saves qkv, cu_seqlens, out, lse and the dropout seed."""

    @staticmethod
    def forward(ctx, qkv, cu_seqlens, seed, spec):
        out, lse = varlen_attention_fwd[spec.route](
            qkv, cu_seqlens, seed, spec.max_seqlen, spec.scale, spec.dropout_p
        )
        ctx.save_for_backward(qkv, cu_seqlens, out, lse, seed)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx, dout):
        if grad_enabled():
            return first_order("varlen_attention", VarlenAttentionFunction.backward, ctx, dout)
        spec = ctx.spec
        dqkv = varlen_attention_bwd[backward_route(spec.route, dout)](
            dout, *ctx.saved_tensors, spec.max_seqlen, spec.scale, spec.dropout_p
        )
        return dqkv, None, None, None


apply_varlen_attention = differentiable(VarlenAttentionFunction)


@cached_dispatch
def _decide(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float | None,
    dropout_p: float,
) -> AttentionSpec:
    """Check the arguments; what runs, and how."""
    op = "varlen_attention"
    check_tensor(op, "qkv", qkv, ndim=4)
    if qkv.shape[1] != 3:
        raise ValueError(f"{op}: qkv must be (total, 3, H, D), got {tuple(qkv.shape)}")
    check_packing(op, cu_seqlens, max_seqlen, qkv.shape[0], like=qkv)
    scale = check_scores(op, qkv.shape[3], scale, dropout_p)
    dtype = autocast_dtype(qkv) or qkv.dtype
    return AttentionSpec(
        route=choose_route(op, unsupported_scale(scale), qkv, cu_seqlens),
        needs_gradient=needs_gradient(qkv),
        dtype=dtype,
        casts=qkv.dtype != dtype,
        scale=scale,
        dropout_p=dropout_p,
        max_seqlen=max_seqlen,
    )


def varlen_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Bidirectional softmax attention within each of several packed sequences.

    out[t,h] = sum_s softmax_s(scale * q[t,h].k[s,h]) v[s,h], s in the sequence of t

    Args:
        qkv: (total, 3, H, D), fp16, bf16 or fp32, read by its strides: the tokens of all sequences,
            one after the other. D a multiple of 8 up to 256. Under autocast, autocast's dtype.
        cu_seqlens: (B + 1,) int32 on qkv's device, from 0 to total, ascending: sequence b is the
            tokens cu_seqlens[b] ... cu_seqlens[b + 1] - 1. Sequences may be empty.
        max_seqlen: at least the longest sequence, a Python int, as a launch does not sync to read
            cu_seqlens. The tighter, the fewer programs start only to exit.
        scale: multiplies the scores, dimensionless. Default D**-0.5.
        dropout_p: as for `attention`.
    Returns:
        (total, H, D), contiguous, dtype of qkv. Each sequence as `attention` gives it alone.
    Precision: as `attention`.
    Saved: qkv, cu_seqlens, out, lse (H, total + at most 4 B) fp32, log2 units.
    Raises: ValueError, TypeError, such as "varlen_attention: cu_seqlens must be a dense tensor of
        torch.int32, ..."; on its values in PyTorch's path, and inside
        `runtime.values.checked_values()`, where the host waits for the device at each call. Outside
        no kernel touches foreign memory, whatever the values; rows of no sequence are not written.
    Source: arXiv:2307.08691. Specification: varlen_attention_ref. Derivation: docs/varlen.md.
    """
    spec = _decide(qkv, cu_seqlens, max_seqlen, scale, dropout_p)
    if spec.route is None:
        return varlen_attention_ref(qkv, cu_seqlens, max_seqlen, scale, dropout_p)
    if values.checked:
        check_lengths("varlen_attention", cu_seqlens, qkv.shape[0], max_seqlen)
    if spec.casts:
        qkv = qkv.to(spec.dtype)
    seed = draw_seed(qkv.device) if dropout_p > 0 else None
    if spec.needs_gradient:
        return apply_varlen_attention[spec.route](qkv, cu_seqlens, seed, spec)
    fwd = varlen_attention_fwd[spec.route]
    return fwd(qkv, cu_seqlens, seed, max_seqlen, spec.scale, dropout_p)[0]
