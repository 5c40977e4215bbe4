"""What the registry of ops asks: the calls of `check` and of `--all-configs`, and the fuzz test's.

A judge that asks less still says yes, so cases.txt lists what is asked. After a wanted change of an
entry `python tests/accuracy/test_entries.py` writes it anew, and its diff says what is asked now.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from op_facts import FACTS

from fastvit_kernels.accuracy import cases, op as registry
from fastvit_kernels.accuracy.cases import OPS, check_cases
from fastvit_kernels.accuracy.entries import norms
from fastvit_kernels.accuracy.op import (
    LARGE,
    SMALL,
    Arg,
    Draw,
    Example,
    SampleShape,
    Whole,
    in_precision,
)
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.configs import TABLES
from tests.check import config_cases as configs, worker
from tests.check.all_configs import choices_of

LIST = Path(__file__).with_name("cases.txt")
CPU = torch.device("cpu")


class _Shapes(Draw):
    """Draws nothing: shapes, strides and dtypes alone, on the meta device."""

    def __init__(self):
        super().__init__(torch.device("meta"), torch.float16)

    def __call__(self, *shape, scale=1.0, grad=True):
        x = torch.empty(shape, device="meta", dtype=self.dtype)
        return x.requires_grad_(grad)


def _tensor(name, x):
    """`name (shape)`; a dtype that is not the case's; "!" wants no gradient, "~" lies elsewhere."""
    if x is None:
        return f"no {name}"
    dtype = "" if x.dtype is torch.float16 else f" {str(x.dtype).removeprefix('torch.')}"
    gradient = "!" if x.is_floating_point() and not x.requires_grad else ""
    return f"{gradient}{name}{'' if x.is_contiguous() else '~'} {tuple(x.shape)}{dtype}"


def _value(x):
    return x.tolist() if isinstance(x, torch.Tensor) else x


def _calls(which):
    """A line for each example of each op."""
    for op in OPS.values():
        for example in which(op):
            tensors = op.inputs(example, _Shapes())
            case = op.case(example, CPU, torch.float16)
            words = [_tensor(name, x) for name, x in tensors.items()]
            words += [f"{n}={_value(x)}" for n, x in sorted(case.function.keywords.items())]
            yield f"{op.name}: {example.label}{' (slow)' * example.slow}: {'; '.join(words)}"


class _Pick:
    """Choices of the fuzz test, the same everywhere; hypothesis draws otherwise."""

    def __init__(self, low):
        self.low, self._state = low, 1 + low

    def integer(self, low, high):
        assert low <= high
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return low + (self._state >> 33) % (high - low + 1)

    def __call__(self, *options):
        return options[self.integer(0, len(options) - 1)]

    def up_to(self, most):
        assert most >= 1
        return self(self.integer(1, min(most, 24)), self.integer(1, most), most)

    def rows(self, most, *, none=False):
        assert most >= 1
        most = self.up_to(most)
        return self((most,), (1, most), (2, max(1, most // 2)), (0, 3), *([()] if none else []))


def _summary(found):
    """The values, or where these are many how small and how large numbers and shapes are."""
    if len(found) <= 12:
        return ", ".join(sorted(map(str, found)))
    numbers = [x for x in found if type(x) is int]
    shapes = [x for x in found if type(x) is tuple]
    words = [f"{min(numbers)} ... {max(numbers)}"] if numbers else []
    if shapes:
        axes, sizes = list(map(len, shapes)), list(map(math.prod, shapes))
        words += [f"{min(axes)} ... {max(axes)} axes of {min(sizes)} ... {max(sizes)}"]
    return ", ".join([*words, *sorted({str(x) for x in found if type(x) not in (int, tuple)})])


def _drawn(op):
    """A line for each size that the fuzz test draws, and how large its tensors get."""
    facts = FACTS[op.name]
    picks, values, largest = (_Pick(False), _Pick(True)), {}, {}
    for i in range(400):
        sizes = dict(facts.fuzz(picks[i % 2]))
        for name, shape in op.shapes_of(sizes).items():
            largest[name] = max(largest.get(name, 0), math.prod(shape))
        for name, value in sizes.items():
            values.setdefault(name, set()).add(value)
    yield from (f"{op.name}: {name}: {_summary(found)}" for name, found in sorted(values.items()))
    yield f"{op.name}: numbers: " + ", ".join(f"{name} {n}" for name, n in largest.items())
    options = {name: option.draws for name, option in facts.options.items() if option.draws}
    yield f"{op.name}: {options}, autocast {facts.autocast}, a share of {facts.share}"


def _arguments(op):
    """Each tensor with the facts that are not as usual."""
    usual, accepts = Arg(), FACTS[op.name].accepts
    for name, arg in op.args.items():
        facts = [f"{k}={v!r}" for k, v in vars(arg).items() if v != getattr(usual, k)]
        facts += [f"accepts={accepts[name]!r}"] if name in accepts else []
        yield f"{name} ({', '.join(facts)})" if facts else name


def _of(op, large):
    return configs.EXAMPLES.get(op.name, lambda large: [])(large)


def sections():
    model = check_cases(SMALL, CPU, torch.float16)[-1]
    return {
        "arguments": [f"{op.name}: {'; '.join(_arguments(op))}" for op in OPS.values()],
        "smallest": [f"{op.name}: {dict(FACTS[op.name].tiny)}" for op in OPS.values()],
        "in a ViT": [f"{v}" for v in (SMALL, LARGE)]
        + [f"{op.name}: {dict(op.at(LARGE))}" for op in OPS.values()],
        "check": [
            *_calls(lambda op: op.check(SMALL)),
            f"{model.name}: " + "; ".join(_tensor(n, x) for n, x in model.make().items()),
        ],
        "check --all-configs": list(_calls(lambda op: _of(op, False))),
        "check --all-configs on a GPU": list(_calls(lambda op: _of(op, True))),
        "the fuzz test": [line for op in OPS.values() for line in _drawn(op)],
    }


def test_every_call_is_asked():
    found = {}
    for line in LIST.read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        elif line:
            found[list(found)[-1]].append(line)
    assert sections() == found


def test_the_model_of_check_is_as_its_sizes_say(monkeypatch):
    made = []
    whole = SimpleNamespace(make=dict)
    monkeypatch.setattr(cases, "model_case", lambda *of: made.append(of) or whole)
    case = check_cases(SMALL, CPU, torch.float16)[-1]
    assert not made and case.make() == case.make() == {}  # built once, when it is asked for
    ((model, images),) = made
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float16}
    assert [block.attn.num_heads for block in model.blocks] == [SMALL.H] * SMALL.depth
    assert images.shape == (SMALL.B, 3, *SMALL.img_size) and images.dtype is torch.float16


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's defaults take other routes")
def test_check_reaches_every_table():
    found = {c.table for case in check_cases(SMALL, CPU, torch.float16) for c in choices_of(case)}
    assert found == set(TABLES)


def test_usual_tensors_go_through_eager_as_through_the_specification():
    """What models call instead: `bench` compares with it."""
    for op in OPS.values():
        if op.eager is None:
            continue
        sizes = op.at(replace(SMALL, T=5))
        drawn = op.inputs(Example(sizes), Draw(CPU, torch.float64))
        inputs = {n: x for n, x in drawn.items() if op.args[n].usual}
        options = op.settings_of(sizes, CPU)
        wanted = op.specification(**inputs, **options)
        torch.testing.assert_close(op.eager(**inputs, **options), wanted, msg=op.name)


# --- the numbers


def test_factors_of_drop_path_drop_a_sample_and_scale_the_others():
    draw = Draw(CPU, torch.float32)
    assert draw.kind(Arg("keep"), (4,)).tolist() == [0, 1.25, 1.25, 1.25]
    assert draw.kind(Arg("keep"), (1,)).tolist() == [1.25]


def test_numbers_are_normal_and_products_keep_their_scale():
    draw = Draw(CPU, torch.float32)
    x, weight = draw.kind(Arg(), (40, 60)), draw.kind(Arg("matrix"), (40, 5, 4, 4))
    assert x.requires_grad and abs(x.mean()) < 0.1 and 0.9 < x.std() < 1.1
    assert weight.requires_grad and 0.9 < weight.std() * 80**0.5 < 1.1
    assert not draw.kind(Arg(grad=False), (2,)).requires_grad
    assert torch.equal(Draw(CPU, torch.float32).kind(Arg(), (40, 60)), x)  # at every run


def test_a_mask_of_booleans_shows_each_query_some_keys():
    mask = Draw(CPU, torch.float16).kind(Arg("mask"), (2, 3, 50, 60), boolean=True)
    assert mask.dtype is torch.bool and mask[..., 0].all() and 0.4 < mask.float().mean() < 0.6


def test_samples_are_as_keep_samples_gives_them():
    """Those that are kept, then the place of each sample."""
    drawn = SampleShape(3, 8).draw(torch.Generator().manual_seed(0))
    kept, places = drawn[:3], drawn[3:]
    assert drawn.shape == (11,) and sorted(places.tolist()) == [*range(8)]
    assert places[kept].tolist() == [0, 1, 2] and kept.tolist() != [0, 1, 2]


def test_the_oracle_of_a_norm_rounds_nothing():
    x, weight = torch.randn(2, 3, 8, dtype=torch.float64).unbind()
    for norm in (norms._layer_norm, norms._rms_norm):
        y = norm(x, weight[0], out_dtype=torch.bfloat16)
        assert y.dtype is torch.float64 and not torch.equal(y, y.bfloat16().double())


def test_whole_numbers_span_their_range():
    generator = torch.Generator().manual_seed(0)
    pixels = Whole(torch.uint8, 256).make((4000,), generator)
    assert pixels.dtype is torch.uint8 and (pixels.min(), pixels.max()) == (0, 255)
    keep = Whole(torch.int32, 9, distinct=True).make((20, 4), generator)
    assert keep.dtype is torch.int32 and keep.is_contiguous()
    assert all(len({*row}) == 4 for row in keep.tolist())
    assert {*keep.flatten().tolist()} == {*range(9)} and keep.diff().min() < 0


@pytest.mark.parametrize(
    ("op", "sizes", "options"),
    [
        ("scaled_dot_product_attention", dict(is_causal=True), dict(is_causal=True)),
        ("gated_mlp", dict(gate_last=True), dict(gate_last=True)),
        ("rope", dict(prefix=2, norm="rms_norm"), dict(prefix_tokens=2, norm="rms_norm")),
    ],
)
def test_what_sizes_decide_reaches_the_call(op, sizes, options):
    assert OPS[op].settings_of(sizes, CPU) == options


def test_rows_lie_where_their_example_says():
    draw = Draw(CPU, torch.float32)
    x = configs.padded(8)(draw, (3, 5))
    y = configs.in_memory(0, 2, 3, 1, 4)(draw, (2, 5, 3, 4, 6))
    assert x.shape == (3, 5) and x.stride() == (13, 1) and x.requires_grad
    assert y.shape == (2, 5, 3, 4, 6) and y.requires_grad
    assert y.permute(0, 2, 3, 1, 4).is_contiguous()


def test_inputs_have_the_dtype_of_the_case():
    (example, *_) = OPS["linear"].check(SMALL)
    made = OPS["linear"].case(example, CPU, torch.float16).make()
    assert {x.dtype for x in made.values() if x is not None} == {torch.float16}


# --- how they run


@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
def test_in_precision_runs_under_autocast_but_for_the_oracle(autocast):
    def seen(x, y):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), x

    run, x = in_precision(seen, autocast), torch.ones(2)
    enabled, dtype, _ = run(x=x, y=None)
    assert enabled == (autocast is not None) and (not enabled or dtype is autocast)
    for inputs in (dict(x=x.double(), y=None), dict(x=x, y=x.double())):
        assert not run(**inputs)[0]


def test_run_backward_gives_each_output_its_gradient():
    x, y, z = (torch.ones(2, requires_grad=want) for want in (True, True, False))
    seen = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * 2, y * 3

        @staticmethod
        def backward(ctx, *upstream):
            seen.append([g.tolist() for g in upstream])
            return upstream

    upstreams = iter((torch.full((2,), 5.0), torch.full((2,), 7.0)))
    registry.run_backward(Two.apply(x, y), [x, None, y, z], lambda out: next(upstreams))
    assert seen == [[[5, 5], [7, 7]]] and x.grad is None and y.grad is None
    registry.run_backward(z, [z, None], torch.ones_like)  # nothing wants one


def test_a_gpu_gets_real_sizes(monkeypatch):
    monkeypatch.setattr(cases, "check_cases", lambda v, device, dtype: (v, dtype))
    monkeypatch.setattr(worker, "config_cases", lambda large, device, dtype: (large, dtype))
    for kind, sizes in (("cpu", SMALL), ("cuda", LARGE)):
        device = torch.device(kind)
        assert worker.cases_of(device, "bf16", False) == (sizes, torch.bfloat16)
        assert worker.cases_of(device, "fp16", True) == (sizes is LARGE, torch.float16)


def test_slow_cases_come_last_and_none_is_lost():
    """A test takes the first."""
    names = [case.name for case in configs.config_cases(False, CPU, torch.float32)]
    examples = [(op, example) for op in OPS.values() for example in _of(op, False)]
    slow = [f"{op.name}, {example.label}" for op, example in examples if example.slow]
    assert slow and names[-len(slow) :] == slow and len(names) == len(examples)


if __name__ == "__main__":
    parts = ("\n".join([f"# {title}", "", *lines, ""]) for title, lines in sections().items())
    LIST.write_text("\n".join(parts))
