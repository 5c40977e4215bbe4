"""`tests.machine compile`. Kernels compile in a subprocess: here they are interpreted."""

import json

import pytest

from fastvit_kernels.runtime.backend import INTERPRETED
from tests.machine.__main__ import main
from tests.machine.processes import python

STEP = """
import json, torch
from dataclasses import asdict
from tests.machine.aot import TARGETS, Share, compile_step
from fastvit_kernels.ops.norm.functions import layer_norm
from fastvit_kernels.runtime.compat import active_driver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

def in_force():
    return active_driver(driver), JITFunction.run

before = in_force()

def step(offset=0, C=64, N=16):
    x = torch.empty(N * C + offset, dtype=torch.bfloat16)[offset:].view(N, C).requires_grad_()
    weight = torch.empty(C, requires_grad=True)
    layer_norm(x, weight).backward(torch.empty(N, C, dtype=torch.bfloat16))

steps = {
    "plain": step, "again": lambda: step(offset=8), "misaligned": lambda: step(offset=1),
    "narrow": lambda: step(C=63),
}
kernels = {name: compile_step(f, TARGETS["sm_90"]) for name, f in steps.items()}
kernels["elsewhere"] = compile_step(step, TARGETS["sm_80"])  # in the same process
found = {name: [asdict(k) for k in listed] for name, listed in kernels.items()}

def several():
    for C in (64, 64, 128):
        step(C=C)

shares = [Share(0, 1), Share(0, 2), Share(1, 2)]
traced = [[k.key for k in compile_step(several, TARGETS["sm_90"], s)] for s in shares]
assert in_force() == before, "what compiles no longer launches"
print(json.dumps({**found, "shares": traced}))
"""


@pytest.fixture(scope="module")
def steps():
    return json.loads(python("-c", STEP))


def test_aot_compiles_what_a_step_launches(steps):
    assert [k["kernel"] for k in steps["plain"]] == ["norm_fwd", "norm_bwd", "column_sum"]
    for kernel in steps["plain"]:
        assert kernel["arch"] == "sm_90" and 0 < kernel["shared"] <= kernel["shared_limit"]
    assert [k["kernel"] for k in steps["elsewhere"]] == [k["kernel"] for k in steps["plain"]]
    assert {k["arch"] for k in steps["elsewhere"]} == {"sm_80"}
    assert not {k["key"] for k in steps["elsewhere"]} & {k["key"] for k in steps["plain"]}
    names = ("plain", "again", "misaligned", "narrow")
    keys = {name: [k["key"] for k in steps[name]] for name in names}
    assert keys["again"] == keys["plain"]
    # Triton specialises on 16-byte alignment and on divisibility by 16, so these are other kernels.
    assert not {*keys["misaligned"][:2]} & {*keys["plain"]}
    assert not {*keys["narrow"]} & {*keys["plain"], *keys["misaligned"]}


# Triton's own launch path, unpatched, on real tensors, up to the launch itself.
LAUNCHES = """
import sys
import types
import torch
import torch.nn.functional as F
from triton import knobs
from triton.runtime.driver import driver
from tests.machine.aot import TARGETS, compile_step
from fastvit_kernels.runtime.backend import Gpu, backend, on_absent_gpu
from tests.machine.compile import model_step
from fastvit_kernels.commands.models import fused_model, input_shape, logits_of
from fastvit_kernels.models.presets import create_vit
from fastvit_kernels.runtime.compat import define_torchvision_operators

define_torchvision_operators()
target = TARGETS["sm_90"]

def ours():
    return create_vit("vit_mnist", depth=1)

class Driver:
    launcher_cls = staticmethod(lambda source, metadata: lambda *arguments: None)
    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": target.shared_limit},
        load_binary=lambda *arguments: (1, 1, 0, 0, 1024),
    )
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(target.triton_target)

with torch.device("meta"):
    step = model_step(fused_model(sys.argv[1]), 2, "bf16", train=True)
kernels = compile_step(step, target)
ahead = {kernel.key for kernel in kernels}
stems = {kernel.kernel.partition("_")[0] for kernel in kernels}
assert stems >= {"patch", "norm", "linear", "attention", "mlp", "column"}, stems
launched = set()
knobs.runtime.kernel_load_start_hook = lambda *arguments: launched.add(arguments[-1])
driver.set_active(Driver())
gpu = Gpu(target.name, target.num_sms, target.shared_limit)
with on_absent_gpu(gpu), backend("triton"):
    vit = fused_model(sys.argv[1]).train()
    with torch.autocast("cpu", torch.bfloat16):
        logits = logits_of(vit(torch.rand(2, *input_shape(vit))))
        loss = F.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    loss.backward()
assert len(launched) > 8, launched
assert launched == ahead, (len(launched), len(ahead), len(launched & ahead))
"""


@pytest.mark.minutes
def test_aot_cache_keys_equal_launches():
    python("-c", LAUNCHES, "__main__:ours")


def test_compile_command_lists_kernels():
    words = ("--model", "vit_mnist", "--batch", "2", "--infer", "--json")
    kernels = json.loads(python("-m", "tests.machine", "compile", *words))
    names = {k["kernel"] for k in kernels}
    assert "norm_fwd" in names and not any("bwd" in name for name in names)


def test_processes_share_kernels(steps):
    whole, first, second = steps["shares"]
    assert first and second and not {*first} & {*second}
    assert {*first, *second} == {*whole}


# What would be compiled, in words, and what of it a batch may not decide. Nothing is compiled.
BATCHES = """
import json, torch
from tests.machine.compile import model_step
from fastvit_kernels.models.presets import create_vit
from fastvit_kernels.runtime.triton import ANY_BATCH
from tests.machine.aot import TARGETS, Trace, specialisation, tracing

class Words(Trace):
    def wants(self, function, given, options):
        (counts,) = ANY_BATCH.values()
        rest = [given[p.name] for p in function.params if p.name not in counts]
        rest = [getattr(x, "block_shape", x) for x in rest if type(x) is not float]  # of a map
        rest = [str(getattr(x, "dtype", x)) for x in rest]
        words = specialisation(function, given) + str(options)
        self.launches.append((words, f"{function.__name__} {rest} {options}"))
        return False

found = {}
for settings in ({}, dict(drop_path_rate=0.5, drop_path="skip")):
    with torch.device("meta"):
        model = create_vit("vit_base_patch16_224", depth=2, **settings)
    for batch in (256, 250, 199, 1):
        with tracing(TARGETS["sm_90"], trace := Words()):
            model_step(model, batch, "bf16", train=True)()
        found[f"{batch}{'skip' * bool(settings)}"] = trace.launches
print(json.dumps(found))
"""


def test_last_batch_compiles_nothing():
    traced = json.loads(python("-c", BATCHES))
    found = {name: {tuple(each) for each in some} for name, some in traced.items()}
    for kind in ("", "skip"):
        whole = found[f"256{kind}"]
        assert found[f"250{kind}"] == found[f"199{kind}"] == whole
        # One image takes other tiles and routes; what else is new is compiled for a count of one.
        known = {rest for _, rest in whole}
        new = [words for words, rest in found[f"1{kind}"] - whole if rest in known]
        assert all("|True False False" in words for words in new), new


@pytest.mark.skipif(not INTERPRETED, reason="what is rejected is the interpreter")
@pytest.mark.parametrize(
    ("words", "message"),
    [(("--model", "vit_giant"), "unknown model 'vit_giant'"), ((), "TRITON_INTERPRET is set")],
    ids=["model", "interpreter"],
)
def test_compile_command_rejects(capsys, words, message):
    assert main(["compile", *words]) == 2
    assert message in capsys.readouterr().err
