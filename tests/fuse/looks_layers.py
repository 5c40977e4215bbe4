"""Hosts that look like norms, MLPs, what follows a branch, or patches; and keyword calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.hosts import Host, table
from tests.fuse.kit import C, D, H, Kit, images, join, packed, sdpa, seeded, square, tokens

ROWS: dict[str, Any] = dict(dim=-1, keepdim=True)


def rms(
    x: Tensor, eps: float = 1e-6, power: Any = 2, again: Tensor | None = None, **mean: Any
) -> Tensor:
    """x over its root mean square, spelled out."""
    return (x if again is None else again) * torch.rsqrt(x.pow(power).mean(**(ROWS | mean)) + eps)


def marked(x: Tensor) -> Tensor:
    """A copy whose first column another view has written to."""
    copy = x.clone()
    copy[..., 0] = 0.5
    return copy


def rms_of_marked_copy(kit: Kit, x: Tensor) -> Tensor:
    copy = x.clone()
    scale = torch.rsqrt(x.pow(2).mean(**ROWS) + 1e-6)
    copy.view(-1)[::3] = 2.0
    return kit.o(copy * scale * kit.rms.weight)


def by_rsqrt(how: Callable[..., Any]) -> Callable[..., Any]:
    """What `how` makes of x and one over its root mean square."""
    return lambda kit, x: how(x, torch.rsqrt(x.pow(2).mean(**ROWS) + 1e-6))


NORMS = {
    "rms by default eps": lambda kit, x: F.rms_norm(1e-9 * x, (C,), kit.rms.weight),
    "over two axes": lambda kit, x: F.layer_norm(x, x.shape[1:]),
    "over three axes": lambda kit, x: F.layer_norm(x, x.shape),
    "over one of the last two": lambda kit, x: F.layer_norm(x.transpose(1, 2), (x.shape[1],)),
    "weight alone": lambda kit, x: F.layer_norm(x, (C,), kit.n.weight),
    "bias alone": lambda kit, x: F.layer_norm(x, (C,), None, kit.n.bias),
    "weight computed": lambda kit, x: F.layer_norm(x, (C,), 1 + kit.n.weight, kit.n.bias),
    "weight expanded": lambda kit, x: F.layer_norm(x, (C,), kit.ls[:1].expand(C), kit.n.bias),
    "weight strided": lambda kit, x: F.layer_norm(x, (C,), kit.both.bias[::4], kit.n.bias),
    "negative eps": lambda kit, x: F.layer_norm(x, (C,), kit.n.weight, kit.n.bias, -0.1),
    "eps of 0, constant rows": lambda kit, x: F.layer_norm(x * 0 + 1, (C,), None, None, 0.0),
    "eps of inf": lambda kit, x: F.layer_norm(x, (C,), kit.n.weight, kit.n.bias, math.inf),
    "of one token": lambda kit, x: F.layer_norm(x[0, 0], (C,), kit.n.weight),
    "of a strided x": lambda kit, x: F.layer_norm(x.transpose(0, 1), (C,), kit.n.weight),
    "of an expanded x": lambda kit, x: F.layer_norm(x[:1].expand_as(x), (C,), kit.n.weight),
    "of columns": lambda kit, x: F.layer_norm(kit.both(x)[..., ::4], (C,), kit.n.weight),
    "of channels": lambda kit, x: kit.n(x.view(-1, 4, 4, 2).permute(0, 2, 3, 1).reshape(-1, C)),
    "of nothing": lambda kit, x: kit.o(kit.n(x[:0])).sum() + x.mean(),
    "of no tokens": lambda kit, x: kit.o(kit.n(x[:, :0])),
    "batch_norm": lambda kit, x: F.batch_norm(
        x.transpose(1, 2), kit.cos.new_zeros(C), kit.cos.new_ones(C), kit.n.weight, None, True
    ),
    "running statistics": lambda kit, x: F.batch_norm(
        x.transpose(1, 2), kit.cos.view(-1)[:C], kit.sin.view(-1)[:C], kit.n.weight, None, True
    ),
    "group_norm": lambda kit, x: F.group_norm(x.transpose(1, 2), 4, kit.n.weight),
    "native, statistics": lambda kit, x: torch.native_layer_norm(x, (C,), kit.n.weight, None, 1e-5),
    "written layer_norm": lambda kit, x: (
        lambda u: kit.o(u * torch.rsqrt(u.var(**ROWS, correction=0) + 1e-5))
    )(x - x.mean(**ROWS)),
    "written, corrected": lambda kit, x: (x - x.mean(**ROWS)) / (x.std(**ROWS) + 1e-5),
    "rms, eps of None": lambda kit, x: F.rms_norm(x, (C,), kit.rms.weight),
    "rms, negative eps": lambda kit, x: F.rms_norm(x, (C,), kit.rms.weight, -1e-3),
    "rms over two axes": lambda kit, x: F.rms_norm(x, x.shape[1:]),
    "rms, weight and bias": lambda kit, x: rms(x) * kit.rms.weight + kit.n.bias,
    "rms, a scalar weight": lambda kit, x: rms(x) * kit.rms.weight[0],
    "rms, weight of (1, 1, C)": lambda kit, x: rms(x) * kit.cls,
    "rms, weight of tokens": lambda kit, x: rms(x) * kit.cos[: x.shape[1], :1],
    "rms of another": lambda kit, x: rms(x, again=kit.q(x)),
    "rms of another's copy": lambda kit, x: rms(x, again=kit.q(x).clone()),
    "rms, a copy written to": lambda kit, x: rms(x, again=marked(x)),
    "rms, a copy written to in between": rms_of_marked_copy,
    "rms of the detached": lambda kit, x: rms(x.detach(), again=x),
    "rms, detached product": lambda kit, x: rms(x, again=x.detach()),
    "rms, rsqrt detached": by_rsqrt(lambda x, r: x * r.detach()),
    "rms, other axis": lambda kit, x: rms(x, dim=1),
    "rms, two axes": lambda kit, x: rms(x, dim=(1, 2)),
    "rms, cubes": lambda kit, x: rms(x.abs(), power=3),
    "rms, power of a tensor": lambda kit, x: rms(x.abs() + 1, power=kit.per_head[0, 0]),
    "rms, x y": lambda kit, x: x * torch.rsqrt((x * kit.q(x)).mean(**ROWS).abs() + 1e-6),
    "rms, **": lambda kit, x: x * ((x**2).mean(**ROWS) + 1e-6).rsqrt(),
    "rms, ** -0.5": lambda kit, x: x * (x.pow(2).mean(**ROWS) + 1e-6) ** -0.5,
    "rms, over sqrt": lambda kit, x: x / (x.pow(2).mean(**ROWS) + 1e-6).sqrt(),
    "rms, over norm": lambda kit, x: x / (x.norm(**ROWS) / C**0.5 + 1e-6),
    "rms, sum": lambda kit, x: x * torch.rsqrt(x.pow(2).sum(**ROWS) + 1e-6),
    "rms, eps before the mean": lambda kit, x: x * torch.rsqrt((x.pow(2) + 1e-3).mean(**ROWS)),
    "rms, eps a tensor": lambda kit, x: x * torch.rsqrt(x.pow(2).mean(**ROWS) + kit.per_head[0, 0]),
    "rms, eps times": lambda kit, x: x * torch.rsqrt(torch.add(x.pow(2).mean(**ROWS), 1, alpha=2)),
    "rms, negative eps written": lambda kit, x: rms(x, -1e-3),
    "rms, rsqrt seen": by_rsqrt(lambda x, r: x * r + r),
    "rms, own product": by_rsqrt(lambda x, r: r * r),
    "rms, mean seen": lambda kit, x: (lambda m: (x * torch.rsqrt(m + 1e-6), m))(
        x.pow(2).mean(**ROWS)
    ),
    "rms in float32, weight after": lambda kit, x: rms(x.float()).to(x.dtype) * kit.rms.weight,
    "rms, mean in float32": lambda kit, x: rms(x, dtype=torch.float32),
    "rms of nothing": lambda kit, x: rms(x[:, :0]) * kit.rms.weight,
    "rms of no columns": lambda kit, x: rms(x[..., :0]),
    "rms, then in place": lambda kit, x: rms(x).mul_(kit.rms.weight),
    "rms, x in place": by_rsqrt(lambda x, r: x.mul_(2) * r),
    "rms, rsqrt in place": lambda kit, x: x * x.pow(2).mean(**ROWS).add_(1e-6).rsqrt_(),
    "rms by heads": lambda kit, x: rms(x.view(*x.shape[:2], H, D)).flatten(2),
}


def act(name: str, **how: Any) -> Callable[..., Tensor]:
    return lambda kit, x: kit.fc2(getattr(F, name)(kit.fc1(x), **how))


def by_hidden(how: Callable[..., Any]) -> Callable[..., Any]:
    return lambda kit, x: how(kit, kit.fc1(x), x)


def by_halves(how: Callable[..., Any]) -> Callable[..., Any]:
    return lambda kit, x: kit.fc2(how(*kit.both(x).chunk(2, -1)))


def bias_written(kit: Kit, x: Tensor) -> Tensor:
    y = x @ kit.q.weight.t()
    kit.q.bias.data.mul_(2)
    return y + kit.q.bias


def weight_of_a_product_written(kit: Kit, x: Tensor) -> Tensor:
    y = x.detach() @ kit.q.weight.detach().t()
    kit.q.weight.data.mul_(2)
    return y + kit.q.bias


def weight_seen_without_gradient(kit: Kit, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = kit.q.weight.t()
    return x @ weight + kit.q.bias


MLPS = {
    "a bias of integers": lambda kit, x: x @ kit.fc1.weight.t() + torch.arange(64),
    "a bias of another dtype": lambda kit, x: x @ kit.fc1.weight.t() + kit.fc1.bias.half(),
    **{
        name: act(name)
        for name in "gelu silu relu tanh sigmoid relu6 hardswish hardsigmoid elu mish leaky_relu "
        "softplus selu celu logsigmoid softsign tanhshrink rrelu".split()
    },
    "silu in place": act("silu", inplace=True),
    "leaky of 0": act("leaky_relu", negative_slope=0.0),
    "softmax": act("softmax", dim=-1),
    "almost quick": by_hidden(lambda kit, z, x: kit.fc2(z * torch.sigmoid(1.7 * z))),
    "quick gelu, sigmoid first": by_hidden(lambda kit, z, x: kit.fc2((1.702 * z).sigmoid() * z)),
    "quick of a double": by_hidden(lambda kit, z, x: kit.fc2(2 * z * torch.sigmoid(1.702 * z))),
    "swish": by_hidden(lambda kit, z, x: kit.fc2(z * torch.sigmoid(z))),
    "swish of another": by_hidden(
        lambda kit, z, x: kit.fc2(z * torch.sigmoid(1.702 * kit.gate(x)))
    ),
    "swish of a learnt": by_hidden(lambda kit, z, x: kit.fc2(z * torch.sigmoid(kit.ls[0] * z))),
    "gelu by erf": by_hidden(lambda kit, z, x: kit.fc2(0.5 * z * (1 + torch.erf(z / 2**0.5)))),
    "gelu by tanh": by_hidden(
        lambda kit, z, x: kit.fc2(
            0.5 * z * (1 + torch.tanh((2 / math.pi) ** 0.5 * (z + 0.044715 * z**3)))
        )
    ),
    "relu squared": by_hidden(lambda kit, z, x: kit.fc2(F.relu(z).square())),
    "hidden seen": by_hidden(lambda kit, z, x: kit.fc2(F.gelu(z)) + z.mean()),
    "hidden returned": by_hidden(lambda kit, z, x: (kit.fc2(F.gelu(z)), z)),
    "activated seen": by_hidden(lambda kit, z, x: (lambda a: (kit.fc2(a), a))(F.gelu(z))),
    "view between": by_hidden(lambda kit, z, x: kit.fc2(F.gelu(z.view(-1, 64)))),
    "turned between": by_hidden(lambda kit, z, x: kit.fc2(F.gelu(z.transpose(0, 1)))),
    "folded": by_hidden(
        lambda kit, z, x: F.linear(F.gelu(z).view(*x.shape[:2], 2, 32), kit.o.weight)
    ),
    "columns": by_hidden(lambda kit, z, x: F.linear(F.gelu(z)[..., :32], kit.o.weight)),
    "dropout between": by_hidden(
        lambda kit, z, x: kit.fc2(F.dropout(F.gelu(z), 0.3, kit.training))
    ),
    "dropout of all": by_hidden(lambda kit, z, x: F.dropout(kit.fc2(F.gelu(z)), 1.0)),
    "scaled between": by_hidden(lambda kit, z, x: kit.fc2(F.gelu(z) * 2)),
    "bias of (1, N)": lambda kit, x: kit.fc2(
        F.gelu(F.linear(x, kit.fc1.weight) + kit.fc1.bias[None])
    ),
    "linear's bias of (1, N)": lambda kit, x: F.linear(x, kit.fc1.weight, kit.fc1.bias[None]),
    "linear's bias of (T, N)": lambda kit, x: F.linear(x[0], kit.q.weight, x[1]),
    "linear's bias a scalar": lambda kit, x: F.linear(x, kit.q.weight, kit.ls[:1]),
    "linear of 1 axis": lambda kit, x: F.linear(x[0, 0], kit.q.weight, kit.q.bias),
    "linear to a vector": lambda kit, x: F.linear(x, kit.ls),
    "linear of no rows": lambda kit, x: F.linear(x[:, :0], kit.q.weight, kit.q.bias),
    "linear of no columns": lambda kit, x: F.linear(x[..., :0], kit.q.weight[:, :0], kit.q.bias),
    "linear to no columns": lambda kit, x: F.linear(x, kit.q.weight[:0]),
    "addmm of beta 2": lambda kit, x: torch.addmm(
        kit.q.bias, x[0], kit.q.weight.t(), beta=2, alpha=0.5
    ),
    "addmm of rows": lambda kit, x: torch.addmm(x[1], x[0], kit.q.weight.t()),
    "product by image": lambda kit, x: x @ kit.both.weight[:64].view(2, C, C),
    "products turned": lambda kit, x: torch.einsum("btk,nk->bnt", x, kit.q.weight[:9]),
    "products summed": lambda kit, x: torch.einsum("btk,nk->bt", x, kit.q.weight),
    "products of a diagonal": lambda kit, x: torch.einsum("btk,kk->btk", x, kit.q.weight),
    "products of tokens": lambda kit, x: torch.einsum("btk,tn->bkn", x, kit.both.weight[:9]),
    "bias written after": bias_written,
    "weight written after": weight_of_a_product_written,
    "weight seen under no_grad": weight_seen_without_gradient,
    "weight turned": lambda kit, x: F.linear(x, kit.q.weight.t(), kit.q.bias),
    "weight of x": lambda kit, x: F.linear(x, x[0].T @ x[0], kit.q.bias),
    "weight dropped": lambda kit, x: F.linear(x, F.dropout(kit.q.weight, 0.3), kit.q.bias),
    "weight in float32": lambda kit, x: F.linear(x, kit.q.weight.float().to(x.dtype), kit.q.bias),
    "one weight in both": lambda kit, x: F.linear(
        F.gelu(F.linear(x, kit.q.weight)), kit.q.weight.t()
    ),
    "one mlp twice": lambda kit, x: kit.fc2(F.gelu(kit.fc1(kit.fc2(F.gelu(kit.fc1(x)))))),
    "frozen first": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x).detach())),
    "written before": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x).mul_(2))),
    "x written between": lambda kit, x: (lambda z: (x.add_(1), kit.fc2(F.gelu(z)))[1])(kit.fc1(x)),
    "swiglu of b": by_halves(lambda a, b: a * F.silu(b)),
    "geglu tanh": by_halves(lambda a, b: F.gelu(a, approximate="tanh") * b),
    "reglu": by_halves(lambda a, b: F.relu(a) * b),
    "glu": lambda kit, x: kit.fc2(F.glu(kit.both(x), -1)),
    "glu of tokens": lambda kit, x: F.glu(kit.both(x[:, :4]), 1),
    "one half": by_halves(lambda a, b: F.silu(a) * a),
    "gate clamped": by_halves(lambda a, b: F.silu(a.clamp(max=0.1)) * b.clamp(-0.1, 0.1)),
    "gpt-oss": by_halves(lambda a, b: (b + 1) * a * torch.sigmoid(a * 1.702)),
    "gate normed": by_halves(lambda a, b: F.layer_norm(F.silu(a) * b, (64,))),
    "halves seen": by_halves(lambda a, b: F.silu(a) * b + a.mean()),
    "interleaved": lambda kit, x: (lambda z: kit.fc2(F.silu(z[..., ::2]) * z[..., 1::2]))(
        kit.both(x)
    ),
    "halves of tokens": lambda kit, x: (lambda a, b: F.silu(a) * b)(
        *kit.both(x[:, :4]).chunk(2, 1)
    ),
    "gate of one token": lambda kit, x: kit.fc2(F.silu(kit.gate(x[:, :1])) * kit.fc1(x)),
    "gate is fc1": lambda kit, x: (lambda z: kit.fc2(F.silu(z) * z))(kit.fc1(x)),
    "gate detached": lambda kit, x: kit.fc2(F.silu(kit.gate(x)).detach() * kit.fc1(x)),
    "four parts": lambda kit, x: (
        lambda a, b, c, d: F.linear(F.silu(a) * b + F.silu(c) * d, kit.o.weight)
    )(*kit.both(x).chunk(4, -1)),
    "fast path": lambda kit, x: torch.relu(kit.fc1(x)) @ kit.fc2.weight.t(),
}


def branch(kit: Kit, x: Tensor) -> Tensor:
    return kit.fc2(F.gelu(kit.fc1(x)))


def keep(x: Tensor, p: float = 0.7, shape: Any = None) -> Tensor:
    return x.new_empty(shape or (x.shape[0], 1, 1)).bernoulli_(p)


EPILOGUES = {
    "divided, under a float32 mask": lambda kit, x: x + branch(kit, x).div(0.7) * keep(x).float(),
    "sum": lambda kit, x: x + branch(kit, x),
    "scaled": lambda kit, x: x + kit.ls * branch(kit, x),
    "scale of x": lambda kit, x: kit.ls * x + branch(kit, x),
    "scale of the sum": lambda kit, x: kit.ls * (x + branch(kit, x)),
    "scale a scalar": lambda kit, x: x + kit.ls[0] * branch(kit, x),
    "scale a number": lambda kit, x: x + 0.3 * branch(kit, x),
    "scale of tokens": lambda kit, x: x + kit.cos[: x.shape[1], :1] * branch(kit, x),
    "scale of rows, learnt": lambda kit, x: x + kit.per_head[: x.shape[0]] * branch(kit, x),
    "scale of rows": lambda kit, x: x + kit.per_head[: x.shape[0]].detach() * branch(kit, x),
    "scale of rows by x, detached": lambda kit, x: (
        x + x.detach().mean((1, 2), keepdim=True) * branch(kit, x)
    ),
    "scale detached": lambda kit, x: x + kit.ls.detach() * branch(kit, x),
    "scale strided": lambda kit, x: x + kit.both.bias[::4] * branch(kit, x),
    "scale expanded": lambda kit, x: x + kit.ls[:1].expand(C) * branch(kit, x),
    "scale twice": lambda kit, x: x + kit.ls * (kit.rms.weight * branch(kit, x)),
    "scale in float32": lambda kit, x: x + kit.ls.float() * branch(kit, x),
    "scale nan": lambda kit, x: x + kit.ls * math.nan * branch(kit, x),
    "scale of a column turned": lambda kit, x: (
        x + (kit.ls[:, None] * branch(kit, x).transpose(1, 2)).transpose(1, 2)
    ),
    "over": lambda kit, x: x + branch(kit, x) / 3,
    "minus": lambda kit, x: x - branch(kit, x),
    "alpha": lambda kit, x: torch.add(x, branch(kit, x), alpha=2),
    "addcmul": lambda kit, x: torch.addcmul(x, kit.ls, branch(kit, x)),
    "add_": lambda kit, x: x.clone().add_(branch(kit, x)),
    "+=": lambda kit, x: x.__iadd__(branch(kit, x)),
    "branch +=": lambda kit, x: branch(kit, x).__iadd__(x),
    "broadcast x": lambda kit, x: x[:1] + branch(kit, x),
    "broadcast branch": lambda kit, x: x + branch(kit, x[:1]),
    "a parameter added": lambda kit, x: kit.cls + branch(kit, x),
    "turned x": lambda kit, x: x.flip(1) + branch(kit, x),
    "strided x": lambda kit, x: kit.both(x)[..., :C] + branch(kit, x),
    "integer x": lambda kit, x: x.int() + branch(kit, x),
    "detached branch": lambda kit, x: x + branch(kit, x).detach(),
    "itself": lambda kit, x: (lambda y: y + y)(branch(kit, x)),
    "branch seen": lambda kit, x: (lambda y: (x + y, y))(branch(kit, x)),
    "scaled seen": lambda kit, x: (lambda y: (x + y, y))(kit.ls * branch(kit, x)),
    "branch in its scale": lambda kit, x: (lambda y: x + y * y)(branch(kit, x)),
    "two branches": lambda kit, x: branch(kit, x) + kit.o(x),
    "two branches of one": lambda kit, x: x + (kit.o(x) + branch(kit, x)),
    "sum later": lambda kit, x: (lambda y: (x.sin() + x) + y)(branch(kit, x)),
    "x made later": lambda kit, x: (lambda y: kit.o(y.detach()) + y)(branch(kit, x)),
    "x of the branch": lambda kit, x: (lambda y: y.sin() + y)(branch(kit, x)),
    "x written later": lambda kit, x: (lambda y: x.mul_(2) + y)(branch(kit, x)),
    "x written after": lambda kit, x: (lambda y: (y, x.detach().zero_())[0])(x + branch(kit, x)),
    "view between": lambda kit, x: x.flatten(0, 1) + branch(kit, x).flatten(0, 1),
    "view back": lambda kit, x: x + branch(kit, x.flatten(0, 1)).view(x.shape),
    "windows": lambda kit, x: x + branch(kit, x.flip(1)).flip(1),
    "tokens alone": lambda kit, x: torch.cat((x[:, :1], x[:, 1:] + branch(kit, x)[:, 1:]), 1),
    "drop": lambda kit, x: x + branch(kit, x) * keep(x),
    "drop, then scaled": lambda kit, x: x + kit.ls * (branch(kit, x) * keep(x).div_(0.7)),
    "drop first": lambda kit, x: (lambda m: x + branch(kit, x) * m)(keep(x)),
    "drop of all": lambda kit, x: x + branch(kit, x) * keep(x, 0.0),
    "drop of tokens": lambda kit, x: x + branch(kit, x) * keep(x, shape=(1, x.shape[1], 1)),
    "drop of columns, a vector": lambda kit, x: x + branch(kit, x) * keep(x, shape=(C,)),
    "drop of the batch": lambda kit, x: x + branch(kit, x) * keep(x, shape=(1, 1, 1)),
    "drop of everything": lambda kit, x: x + branch(kit, x) * keep(x, shape=x.shape),
    "drop as (B, 1)": lambda kit, x: (
        x[:, 0] + branch(kit, x[:, 0]) * keep(x, shape=(x.shape[0], 1))
    ),
    "drop as (T, 1)": lambda kit, x: x + branch(kit, x) * keep(x, shape=(x.shape[1], 1)),
    "drop floor": lambda kit, x: (
        x + (branch(kit, x) / 0.7) * (0.7 + torch.rand(x.shape[0], 1, 1, dtype=x.dtype)).floor()
    ),
    "drop with a draw between": lambda kit, x: (lambda y, m, r: x + y * m + r.mean())(
        branch(kit, x), keep(x), torch.rand(3, dtype=x.dtype)
    ),
    "drop seen": lambda kit, x: (lambda m: (x + branch(kit, x) * m, m))(keep(x)),
    "drop of half": lambda kit, x: x + branch(kit, x) * keep(x.half()),
    "drop by where": lambda kit, x: x + torch.where(keep(x) > 0, branch(kit, x), 0.0),
    "drop by indexing": lambda kit, x: x.index_add(
        0, torch.randperm(x.shape[0])[:1], branch(kit, x[:1]), alpha=2
    ),
    "dropout": lambda kit, x: x + F.dropout(branch(kit, x), 0.3),
    "attention's": lambda kit, x: x + kit.ls * kit.o(join(sdpa(*packed(kit, x)))),
    "attention's without a product": lambda kit, x: x + join(sdpa(*packed(kit, x))),
    "a norm's": lambda kit, x: x + kit.n(x),
    "norm behind": lambda kit, x: kit.n(x + branch(kit, x)),
    "norm of the branch": lambda kit, x: x + kit.n(branch(kit, x)),
    "sum seen": lambda kit, x: (lambda s: (kit.n(s), s))(x + branch(kit, x)),
    "four blocks": lambda kit, x: four(kit, x),
}


def four(kit: Kit, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + kit.ls * kit.o(join(sdpa(*packed(kit, kit.n(x)))))
        x = x + kit.ls * branch(kit, kit.n(x))
    return x


def flat(y: Tensor) -> Tensor:
    return y.flatten(2).transpose(1, 2)


def conv(kit: Kit, x: Tensor, **how: Any) -> Tensor:
    return F.conv2d(x, kit.conv.weight, kit.conv.bias, **({"stride": 4} | how))


def cls(kit: Kit, y: Tensor) -> Tensor:
    return kit.cls.expand(y.shape[0], -1, -1)


def with_cls(kit: Kit, y: Tensor) -> Tensor:
    return torch.cat((cls(kit, y), y), 1)


def positions(kit: Kit, n: int) -> Tensor:
    return kit.both.weight[:n][None]


def patches(kit: Kit, x: Tensor) -> Tensor:
    return flat(kit.conv(x))


def behind(how: Callable[..., Any]) -> Callable[..., Any]:
    """What (kit, tokens) becomes."""
    return lambda kit, x: how(kit, patches(kit, x))


def beside(prefix: Callable[..., Tensor], dim: int = 1) -> Callable[..., Any]:
    """Tokens behind what `prefix` makes of (kit, tokens)."""
    return behind(lambda kit, y: torch.cat((prefix(kit, y), y), dim))


def folded(*order: int) -> Callable[..., Any]:
    """Pixels of a patch as columns, in some order."""
    return lambda kit, x: F.linear(
        x.view(2, 3, 2, 4, 3, 4).permute(*order).reshape(2, 6, 48), kit.conv.weight.flatten(1)
    )


def frozen_patches(kit: Kit, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = patches(kit, x)
    return with_cls(kit, y)


def weight_written(kit: Kit, x: Tensor) -> Tensor:
    y = kit.conv(x)
    kit.conv.weight.data.mul_(2)
    return flat(y)


def grid_written(kit: Kit, x: Tensor) -> Tensor:
    return flat(kit.conv(x).mul_(2)) + positions(kit, 6)


def prefix_written(kit: Kit, x: Tensor) -> Tensor:
    y = with_cls(kit, patches(kit, x))
    kit.cls.data.mul_(2)
    return y + positions(kit, 7)


def positions_written(kit: Kit, x: Tensor) -> Tensor:
    y = patches(kit, x) + positions(kit, 6)
    kit.both.weight.data.mul_(2)
    return with_cls(kit, y)


def of_turned_table(how: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As many tokens as columns: a table (T, C) that is read as (C, T)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        y = flat(kit.conv(x.repeat(1, 1, 2, 3)[..., :32]))
        return how(y, kit.q.weight.expand(len(x), -1, -1).mT)

    return forward


PATCHES = {
    "positions of a turned table": of_turned_table(lambda y, table: y + table),
    "a prefix of a turned table": of_turned_table(lambda y, table: torch.cat((table, y), 1)),
    "not turned": lambda kit, x: kit.conv(x).flatten(2),
    "a grid": lambda kit, x: kit.conv(x),
    "channels last": lambda kit, x: kit.conv(x).permute(0, 2, 3, 1),
    "columns first": lambda kit, x: flat(kit.conv(x).transpose(2, 3)),
    "other elements": lambda kit, x: kit.conv(x).view(x.shape[0], 6, C),
    "of a turned image": lambda kit, x: patches(kit, x.transpose(2, 3)),
    "overlap": lambda kit, x: flat(conv(kit, x, stride=2)),
    "gaps": lambda kit, x: flat(conv(kit, x, stride=5)),
    "strides of two": lambda kit, x: flat(conv(kit, x, stride=(4, 2))),
    "padded": lambda kit, x: flat(conv(kit, x, padding=2)),
    "padded, as many": lambda kit, x: flat(conv(kit, x, padding=1)),
    "padded same": lambda kit, x: flat(conv(kit, x, padding="same", stride=1)),
    "dilated": lambda kit, x: flat(conv(kit, x, dilation=2)),
    "groups": lambda kit, x: flat(
        F.conv2d(x, kit.conv.weight[:30, :1], kit.conv.bias[:30], 4, groups=3)
    ),
    "ragged": lambda kit, x: patches(kit, F.pad(x, (0, 1))),
    "ragged rows": lambda kit, x: patches(kit, x[:, :, :7]),
    "a computed weight": lambda kit, x: flat(F.conv2d(x, kit.conv.weight * 2, kit.conv.bias, 4)),
    "unbatched": lambda kit, x: kit.conv(x[0]).flatten(1).t(),
    "no images": lambda kit, x: patches(kit, x[:0]),
    "seen": lambda kit, x: (lambda y: (flat(y), y))(kit.conv(x)),
    "transposed": lambda kit, x: flat(
        F.conv_transpose2d(x, kit.conv.weight[:3, :, :2, :2], None, 2)
    ),
    "by unfold": lambda kit, x: (
        kit.conv.bias + F.unfold(x, 4, stride=4).transpose(1, 2) @ kit.conv.weight.flatten(1).t()
    ),
    "by view": folded(0, 2, 4, 1, 3, 5),
    "by view, channels last": folded(0, 2, 4, 3, 5, 1),
    "frozen": frozen_patches,
    "weight written": weight_written,
    "grid written": grid_written,
    "prefix written": prefix_written,
    "positions written": positions_written,
    "positions of a batch": behind(lambda kit, y: y + kit.both.weight[:12].view(2, 6, C)),
    "positions of a grid": lambda kit, x: flat(
        kit.conv(x) + kit.both.weight[:6].T.reshape(1, C, 2, 3)
    ),
    "positions of one token": behind(lambda kit, y: y + positions(kit, 1)),
    "positions of one column": behind(lambda kit, y: y + positions(kit, 6)[..., :1]),
    "positions a vector": behind(lambda kit, y: y + kit.ls),
    "positions a number": behind(lambda kit, y: y + 1),
    "positions integers": behind(lambda kit, y: y + torch.arange(6 * C).view(1, 6, C)),
    "positions twice": behind(lambda kit, y: y + positions(kit, 6) + positions(kit, 6)),
    "positions in float32": behind(lambda kit, y: y + positions(kit, 6).float()),
    "positions, alpha": behind(lambda kit, y: torch.add(y, positions(kit, 6), alpha=2)),
    "positions subtracted": behind(lambda kit, y: y - positions(kit, 6)),
    "positions detached": behind(lambda kit, y: y + positions(kit, 6).detach()),
    "positions of x": behind(lambda kit, y: y + y.detach()),
    "positions +=": behind(lambda kit, y: y.add_(positions(kit, 6))),
    "detached, positions": behind(lambda kit, y: y.detach() + positions(kit, 6)),
    "cls last": behind(lambda kit, y: torch.cat((y, cls(kit, y)), 1) + positions(kit, 7)),
    "cls of each image": beside(lambda kit, y: y[:, :1]),
    "cls by columns": beside(lambda kit, y: y, -1),
    "cls in the batch": beside(lambda kit, y: kit.cls.expand(1, 6, -1), 0),
    "cls scaled": beside(lambda kit, y: cls(kit, y) * 2),
    "cls in float32": beside(lambda kit, y: cls(kit, y).float()),
    "registers between": behind(
        lambda kit, y: torch.cat((y[:, :2], kit.reg.expand(2, -1, -1), y[:, 2:]), 1)
    ),
    "cls and its position": behind(
        lambda kit, y: torch.cat(
            ((kit.cls + positions(kit, 1)).expand(2, -1, -1), y + positions(kit, 6)), 1
        )
    ),
    "cls written in": behind(lambda kit, y: (y[:, :1].copy_(cls(kit, y)), y)[1]),
    "masked patches": behind(
        lambda kit, y: (
            torch.where((torch.arange(6) % 2 == 0)[:, None], kit.cls, y) + positions(kit, 6)
        )
    ),
    "patches left out": behind(lambda kit, y: (y + positions(kit, 6))[:, [0, 3, 5]]),
    "dropped": behind(lambda kit, y: F.dropout(y + positions(kit, 6), 0.2)),
}


# Calls by keyword, of each interface that reaches ATen.
KEYWORDS: dict[str, Callable[..., Any]] = {
    "F.linear": lambda kit, x: F.linear(bias=kit.q.bias, weight=kit.q.weight, input=x),
    "torch._C._nn.linear": lambda kit, x: torch._C._nn.linear(input=x, weight=kit.q.weight),
    "aten.linear": lambda kit, x: torch.ops.aten.linear(x, kit.q.weight, bias=kit.q.bias),
    "aten.linear.default": lambda kit, x: torch.ops.aten.linear.default(x, weight=kit.q.weight),
    "F.layer_norm": lambda kit, x: F.layer_norm(
        eps=1e-3, bias=kit.n.bias, weight=kit.n.weight, normalized_shape=[C], input=x
    ),
    "torch.layer_norm": lambda kit, x: torch.layer_norm(
        x, [C], kit.n.weight, kit.n.bias, eps=1e-3, cudnn_enable=False
    ),
    "F.rms_norm": lambda kit, x: F.rms_norm(x, normalized_shape=(C,), eps=1e-3),
    "torch.rms_norm": lambda kit, x: torch.rms_norm(x, [C], eps=1e-3, weight=kit.ls),
    "rsqrt, mean, pow": lambda kit, x: (
        x
        * torch.rsqrt(
            input=torch.mean(input=torch.pow(input=x, exponent=2), dim=[-1], keepdim=True) + 1e-6
        )
    ),
    "add by keyword": lambda kit, x: torch.add(input=x, other=kit.o(x), alpha=1),
    "mul by keyword": lambda kit, x: x + torch.mul(input=kit.o(x), other=kit.ls),
    "method add": lambda kit, x: x.add(other=kit.o(x)),
    "method mul": lambda kit, x: x.add(kit.o(x).mul(other=kit.ls)),
    "F.gelu": lambda kit, x: kit.fc2(F.gelu(input=kit.fc1(x), approximate="tanh")),
    "F.silu": lambda kit, x: kit.fc2(F.silu(inplace=False, input=kit.fc1(x))),
    "aten.gelu_": lambda kit, x: kit.fc2(torch.ops.aten.gelu_(kit.fc1(x))),
    "aten.silu_": lambda kit, x: kit.fc2(torch.ops.aten.silu_(kit.fc1(x))),
    "aten.mul_": lambda kit, x: torch.ops.aten.mul_(kit.fc1(x), 2.0),
    "F.dropout": lambda kit, x: F.dropout(p=0.3, input=kit.o(x), training=True, inplace=False),
    "torch.dropout": lambda kit, x: torch.dropout(input=kit.o(x), p=0.3, train=True),
    "torch.dropout_": lambda kit, x: torch.dropout_(kit.o(x), p=0.3, train=True),
    "native_dropout": lambda kit, x: torch.native_dropout(kit.o(x), p=0.3, train=True)[0],
    "F.softmax": lambda kit, x: F.softmax(input=x @ x.mT, dim=-1, dtype=None) @ x,
    "torch.softmax": lambda kit, x: torch.matmul(
        input=torch.softmax(input=torch.matmul(input=x, other=x.mT), dim=-1), other=x
    ),
    "aten._softmax": lambda kit, x: torch.ops.aten._softmax(x @ x.mT, -1, False) @ x,
    "bmm": lambda kit, x: torch.bmm(input=x.bmm(mat2=x.mT).softmax(dim=-1), mat2=x),
    "einsum": lambda kit, x: torch.einsum("bts,bsd->btd", [(x @ x.mT).softmax(-1), x]),
    "sdpa": lambda kit, x: (
        lambda h: sdpa(is_causal=False, dropout_p=0.0, value=h, key=h * 2, query=h, scale=0.1)
    )(x[:, None]),
    "aten.sdpa": lambda kit, x: torch.ops.aten.scaled_dot_product_attention(
        x[:, None], x[:, None], value=x[:, None], scale=0.1
    ),
    "sdpa of ATen's math": lambda kit, x: torch.ops.aten._scaled_dot_product_attention_math(
        x[:, None], x[:, None], x[:, None], scale=0.1
    ),
    "masked_fill": lambda kit, x: (
        (x @ x.mT).masked_fill(mask=(x @ x.mT) > 1, value=-1e4).softmax(-1) @ x
    ),
    "where": lambda kit, x: torch.where(condition=x > 0, input=x, other=kit.o(x)),
    "clamp": lambda kit, x: kit.fc2(torch.clamp(input=F.gelu(kit.fc1(x)), max=0.1, min=-0.1)),
    "transpose": lambda kit, x: kit.o(torch.transpose(input=x, dim0=0, dim1=1)).transpose(
        dim1=0, dim0=1
    ),
    "permute": lambda kit, x: kit.o(x.permute(dims=(1, 0, 2))),
    "reshape": lambda kit, x: kit.fc2(F.gelu(kit.fc1(torch.reshape(input=x, shape=(-1, C))))),
    "view by dtype": lambda kit, x: kit.o(x.view(dtype=torch.int64).view(dtype=x.dtype)),
    "to": lambda kit, x: kit.o(x.to(other=kit.ls)).to(dtype=torch.float32, copy=True),
    "cat": lambda kit, x: kit.n(torch.cat(tensors=[kit.cls.expand(x.shape[0], -1, -1), x], dim=1)),
    "concat": lambda kit, x: kit.n(torch.concat((x, kit.cls.expand(x.shape[0], -1, -1)), axis=1)),
    "chunk": lambda kit, x: kit.fc2(
        (lambda a, b: F.silu(a) * b)(*torch.chunk(input=kit.both(x), chunks=2, dim=-1))
    ),
    "unbind": lambda kit, x: sdpa(*torch.unbind(input=kit.qkv(x).view(*x.shape[:2], 3, C), dim=2)),
    "expand": lambda kit, x: x + kit.cls.expand(size=(x.shape[0], 1, C)) * kit.o(x),
    "out": lambda kit, x: torch.mul(x.detach(), 2, out=torch.empty_like(x.detach())) + kit.o(x),
    "embedding, max_norm": lambda kit, x: (
        F.embedding(torch.tensor([0, 1]), kit.cos, max_norm=0.1).sum() * kit.o(x)
    ),
    "index_put_": lambda kit, x: kit.o(x).index_put_((torch.tensor([0]),), kit.ls),
    "setitem": lambda kit, x: (lambda y: (y.__setitem__((slice(None), 0), 0.0), y)[1])(kit.o(x)),
    "lerp_": lambda kit, x: kit.o(x).lerp_(x, weight=0.3),
    "addcmul_": lambda kit, x: kit.o(x).addcmul_(x, kit.ls, value=0.5),
    "baddbmm_": lambda kit, x: (x @ x.mT).baddbmm_(x, x.mT, beta=0.5).softmax(-1) @ x,
    "__ipow__": lambda kit, x: kit.fc2(kit.fc1(x).__ipow__(2)),
    "__imul__": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x).__imul__(2))),
    "swapaxes_": lambda kit, x: kit.o(x).swapaxes_(0, 1),
    "t_ of rows": lambda kit, x: kit.o(x)[0].t_(),
    "squeeze_": lambda kit, x: kit.o(x[:, :1]).squeeze_(1),
    "relu_ of a view": lambda kit, x: (lambda y: (y[:, 1:].relu_(), y)[1])(kit.o(x)),
    "conv2d": lambda kit, x: F.conv2d(
        stride=4, weight=kit.conv.weight, input=x[:, :3, :16].reshape(-1, 3, 4, 4)
    ),
}


def in_float32(name: str) -> Callable[[Kit], None]:
    def prepare(kit: Kit) -> None:
        for path, p in kit.named_parameters():
            if f"{path}.".startswith(f"{name}."):
                p.data = p.data.float()

    return prepare


def mixed(kit: Kit, x: Tensor) -> Tensor:
    """A block whose parts may be of two dtypes; a norm casts as torch's users do."""
    h = F.layer_norm(x.to(kit.n.weight.dtype), (C,), kit.n.weight, kit.n.bias).to(x.dtype)
    q, k, v = packed(kit, h)
    scores = q @ k.transpose(-2, -1) * D**-0.5 + kit.table[:, : x.shape[1], : x.shape[1]]
    x = x + kit.ls * kit.o(join(scores.softmax(-1).to(v.dtype) @ v)).to(x.dtype)
    y = (rms(x.to(kit.rms.weight.dtype)) * kit.rms.weight).to(kit.fc1.weight.dtype)
    z = F.gelu(kit.fc1(y)).to(kit.fc2.weight.dtype)
    return x + kit.ls * (F.linear(z, kit.fc2.weight) + kit.fc2.bias)


def in_half(kit: Kit, x: Tensor) -> Tensor:
    return rms(x.half()).to(x.dtype) * kit.rms.weight


def beyond_half(kit: Kit, x: Tensor) -> Tensor:
    """Squares that are infinite in float16."""
    return rms(x.half() * 500).to(x.dtype) * kit.rms.weight


def small_rms(kit: Kit, x: Tensor) -> Tensor:
    """Where eps decides: it is that of float32."""
    return F.rms_norm(x * 0.02, (C,), kit.rms.weight)


def promotions() -> list[Host]:
    found = [Host("norm - rms in half", in_half, precision=torch.float16)]
    found.append(Host("norm - rms beyond half", beyond_half, precision=torch.float16))
    for dtype in (torch.bfloat16, torch.float16):
        found.append(Host(f"norm - default eps in {dtype}", small_rms, dtype=dtype))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        for part in ("ls", "n", "rms", "fc2.bias", "table", "qn", "fc1"):
            how = dict(dtype=dtype, prepare=in_float32(part))
            found.append(Host(f"promotion - float32 {part} in {dtype}", mixed, square, **how))
    return found


def layer_hosts() -> list[Host]:
    kinds = dict(norm=NORMS, mlp=MLPS, epilogue=EPILOGUES, keyword=KEYWORDS)
    found = [h for kind, hosts in kinds.items() for h in table(kind, hosts, inputs=tokens)]
    found += table("epilogue of a square", EPILOGUES, inputs=square)
    found += table("patch", PATCHES, inputs=images)
    return found + promotions()


def empty_batches() -> list[Host]:
    """No images at all."""
    names = ("sum", "scaled", "drop", "attention's", "four blocks", "norm behind")
    some = {name: EPILOGUES[name] for name in names}
    return table("empty", some, inputs=lambda: (seeded(0, 9, C),))
