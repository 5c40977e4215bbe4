"""A swapped model without names that compat.py looks up.

    python without_names.py <<< NAME[,NAME ...]

For each line the package is imported as if torch had none of its names, and a swapped model does
what it does with them. Each is a process of its own, forked once torch is imported: most of its
time. Its exit status is the line of the answer.
"""

from __future__ import annotations

import copy
import os
import pkgutil
import sys
import traceback

import private
import torch
from fast_interpreter import make_fast
from interpreter import mend_interpreter
from private import FakeTensorMode, TorchDispatchMode
from torch import fx, nn
from torch.autograd import forward_ad


class Layer(nn.Module):
    """An MLP behind a norm, which torch.fx can trace."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


Count.__module__ = "a_package_of_others"


def step(model, x, call=None):
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    y = (model if call is None else call)(x)
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def same(got, wanted, tolerance=1e-4):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def check(fk):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(
        16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True, bias=True
    )
    host = nn.Sequential(encoder, Layer(), nn.LayerNorm(16))
    x = torch.randn(2, 5, 16)
    wanted = step(host, x)
    swapped = copy.deepcopy(host)
    report = fk.swap_in(swapped)
    if not fk.compat.FUSED_IS_OFF:
        assert report.level == "block"
    same(step(swapped, x), wanted)
    low = copy.deepcopy(host)
    fk.swap_in(low, memory="low")
    same(step(low, x), wanted)
    # somebody watches: a part, every module, operators, autograd
    calls = []
    handle = swapped[1].norm.register_forward_hook(lambda *_: calls.append(1))
    same(step(swapped, x), wanted)
    assert calls == [1], "a hook missed its call"
    handle.remove()
    everywhere = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: everywhere.append(m))
    same(step(host, x), wanted)
    in_host = len(everywhere)
    same(step(swapped, x), wanted)
    assert len(everywhere) == 2 * in_host, "a global hook missed a call"
    handle.remove()
    counts = []
    for model in (host, swapped):
        with Count() as count:
            same(step(model, x), wanted)
        counts.append(count.seen)
    assert counts[0] == counts[1], "a mode of another package saw other operators"
    with torch.autograd.graph.save_on_cpu():
        same(step(low, x), wanted)
    # other ways to run it
    same(step(swapped[1], x, fx.symbolic_trace(swapped[1])), step(host[1], x))
    with torch.autocast("cpu", torch.bfloat16):
        same(step(swapped[1:], x), step(host[1:], x), 0.1)
    same(step(swapped, x, torch.jit.trace(swapped, x, check_trace=False)), wanted)
    each = torch.func.vmap(torch.func.grad(lambda x: swapped(x[None]).square().sum()))(x)
    same(each, wanted[1])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(model(dual)).tangent for model in (swapped[1], host[1])]
    same(*tangents)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        weight = torch.empty(16)
        assert fk.layer_norm(fake, weight, weight).shape == x.shape
    with torch.profiler.profile():
        same(swapped(x), wanted[0])
    # what a tensor holds is read again once it changed
    read_once = sys.modules["fastvit_kernels.swap.hosts.read_once"].read_once
    table = torch.zeros(2)
    assert read_once(table, torch.sum).item() == 0
    assert read_once(table.add_(1), torch.sum).item() == 2
    compiled = torch.compile(swapped[1], backend="aot_eager")
    same(step(swapped[1], x, compiled), step(host[1], x))


def run(hidden):
    """Ends this process: 0 where all is as with the names."""
    resolve = pkgutil.resolve_name

    def without(name):
        if name in hidden:
            raise AttributeError(name)
        return resolve(name)

    pkgutil.resolve_name = without
    import fastvit_kernels as fk

    check(fk)


def main():
    mend_interpreter()
    make_fast()
    private.pattern_matcher  # noqa: B018, these import for seconds
    with torch.no_grad():  # once autograd's engine has threads, it refuses to run in a fork
        torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1))
    for line in sys.stdin:
        process = os.fork()
        if not process:
            os.dup2(2, 1)
            try:
                run(line.strip().split(","))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
