"""How the ops live with the rest of torch: streams, devices, graphs, threads, modes, transforms."""

from __future__ import annotations

import ast
import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from numerics import DEVICE, rand
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.verify.cases import OPS as REGISTRY

PACKAGE = Path(fk.__file__).parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="stands in for Triton's interpreter")


def _op(op, **options):
    """(function of the tensors of the smallest call that get a gradient, their shapes)"""
    shapes = op.shapes_of(op.tiny)
    names = [name for name in shapes if op.args[name].grad]
    options = {**op.settings_of(op.tiny), **options}

    def function(*tensors):
        result = op.function(**dict(zip(names, tensors, strict=True)), **options)
        return sum(result) if op.outputs > 1 else result

    return function, [shapes[name] for name in names]


OPS = {
    name: _op(op, **({"activation": "gelu"} if "activation" in op.options else {}))
    for name, op in REGISTRY.items()
}
DROPOUTS = {
    f"{name}_dropout": _op(op, dropout_p=0.5)
    for name, op in REGISTRY.items()
    if "dropout_p" in op.options
}
every_op = pytest.mark.parametrize("op", OPS)
every_launch = pytest.mark.parametrize("op", [*OPS, *DROPOUTS])


def op_and_inputs(op, seed=0, grad=True):
    function, shapes = (OPS | DROPOUTS)[op]
    return function, [rand(*shape, seed=seed + i, grad=grad) for i, shape in enumerate(shapes)]


def step(function, inputs):
    """Output and input gradients under a random upstream gradient."""
    out = function(*inputs)
    grads = torch.autograd.grad(out, inputs, rand(*out.shape, seed=99, grad=False))
    return [out.detach(), *grads]


def small_vit(**options):
    torch.manual_seed(0)
    options = dict(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2) | options
    return fk.create_vit("vit_mnist", **options).to(DEVICE)


def train_step_of(call, model, images):
    model.zero_grad(set_to_none=True)
    out = call(images)
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


def train_step(model, images):
    return train_step_of(model, model, images)


def assert_same_bits(actual, wanted):
    assert len(actual) == len(wanted)
    for i, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        assert torch.equal(a, w), f"tensor {i}: {(a != w).sum()} of {a.numel()} differ"


def package_trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


# Launches: on the tensor's device, never waiting for it.

GUARDS = {"device_guard", "device_of"}


def _name(node):
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_guard(node):
    return isinstance(node, ast.With) and any(_name(i.context_expr) in GUARDS for i in node.items)


def _is_launch(node, helpers, functions):
    """`kernel[grid](...)`, `launch(...)` of a plan, or a call of a helper that launches."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Subscript):
        return "kernel" in _name(node.func.value)
    if isinstance(node.func, ast.Call):  # _fwd_launch(M, N)(y, z, ...)
        return _name(node.func).endswith("_launch")
    name = _name(node)
    planned = name == "launch" or name.startswith("launch_")
    return name in helpers or (planned and name not in functions)


def unguarded_and_guarded(trees, helpers=()):
    """(unguarded, guarded) launches, each (file, line, name of the function around it).

    Every guard must hold a launch: one that is not recognised cannot escape the test.
    """
    functions = {
        n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.FunctionDef)
    }
    found, guards = {False: [], True: []}, []

    def walk(node, path, function, guarded):
        if isinstance(node, ast.FunctionDef):
            function, guarded = node.name, False
        if _is_guard(node):
            guarded = True
            guards.append((path.name, node.lineno, node.end_lineno))
        if _is_launch(node, helpers, functions):
            found[guarded].append((path.name, node.lineno, function))
        for child in ast.iter_child_nodes(node):
            walk(child, path, function, guarded)

    for path, tree in trees.items():
        walk(tree, path, "", False)
    launches = found[False] + found[True]
    for file, first, last in guards if helpers else ():
        held = any(name == file and first <= line <= last for name, line, _ in launches)
        assert held, f"{file}:{first} guards nothing that this test takes for a launch"
    return found[False], found[True]


def test_every_launch_in_the_source_stands_in_a_device_guard():
    """At once, or in a helper called *_launch, whose every call stands in one."""
    trees = dict(package_trees())
    unguarded, _ = unguarded_and_guarded(trees)
    helpers = {function for *_, function in unguarded if function.endswith("_launch")}
    unguarded, guarded = unguarded_and_guarded(trees, helpers)
    astray = [launch for launch in unguarded if launch[2] not in helpers]
    assert not astray, f"launched on whatever device is current: {astray}"
    assert len(guarded) >= 12, "the test no longer recognises launches"


class _Guard:
    """Stands in for a device guard and counts how deep we are."""

    depth = 0

    def __init__(self, x):
        assert isinstance(x, Tensor)

    def __enter__(self):
        _Guard.depth += 1

    def __exit__(self, *_):
        _Guard.depth -= 1


@pytest.fixture
def launches(monkeypatch):
    """Kernels are recorded instead of run: (kernel, whether inside a device guard)."""
    from triton.runtime.interpreter import InterpretedFunction

    calls = []

    def record(self, *_, **__):
        calls.append((self.fn.__name__, _Guard.depth > 0))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    for name, module in list(sys.modules.items()):
        if name.startswith("fastvit_kernels") and hasattr(module, "device_guard"):
            monkeypatch.setattr(module, "device_guard", _Guard)
    monkeypatch.setattr(torch.cuda, "device_of", _Guard)
    return calls


@interpreted
@every_launch
def test_kernels_are_launched_inside_a_device_guard(op, launches):
    step(*op_and_inputs(op))
    assert len(launches) >= 2
    assert all(inside for _, inside in launches), launches


HOST_READS = ["item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "__array__"]
HOST_READS += ["__bool__", "__int__", "__float__", "__index__"]


@interpreted
@every_launch
def test_no_launcher_reads_a_value_on_the_host(op, launches, monkeypatch):
    """A read waits for the device, and breaks the capture of a CUDA graph."""
    function, inputs = op_and_inputs(op)
    upstream = torch.ones_like(function(*inputs))

    def forbidden(self, *_, **__):
        raise AssertionError("a launcher reads the values of a tensor")

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(Tensor, name, forbidden)
        torch.autograd.grad(function(*inputs), inputs, upstream)


def test_no_host_read_in_the_source_of_ops():
    forbidden = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "unique"}
    for path, tree in package_trees():
        if "triton.jit" not in path.read_text():
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                assert name not in forbidden, f"{path.name}:{node.lineno} calls .{name}()"


class _Outputs(TorchDispatchMode):
    """Keeps what our operators return."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fastvit_kernels":
            self.outputs += out if isinstance(out, tuple) else (out,)
        return out


@pytest.mark.parametrize("op", DROPOUTS)
def test_dropout_draws_its_seed_from_torchs_generator(op):
    function, inputs = op_and_inputs(op)
    torch.manual_seed(5)
    first, second = function(*inputs), function(*inputs)
    torch.manual_seed(5)
    again = function(*inputs)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


# Modes of torch.


@every_op
def test_deterministic_algorithms(op):
    torch.use_deterministic_algorithms(True)  # and NaN in every torch.empty, see conftest.py
    assert torch.utils.deterministic.fill_uninitialized_memory
    first, second = step(*op_and_inputs(op)), step(*op_and_inputs(op))
    assert_same_bits(first, second)
    assert all(x.isfinite().all() for x in first)


@every_op
def test_anomaly_mode(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_same_bits(step(function, inputs), wanted)


def test_anomaly_mode_names_the_function_whose_gradient_is_nan():
    function, inputs = op_and_inputs("layer_norm")
    with torch.autograd.detect_anomaly(check_nan=True):
        out = function(*inputs)
        with pytest.raises(RuntimeError, match=r"LayerNorm\w*Backward.*nan"):
            out.backward(torch.full_like(out, float("nan")))


@every_op
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_saved(op, mode):
    function, inputs = op_and_inputs(op)
    wanted = function(*inputs)
    with mode(), _Outputs() as kept:
        out = function(*inputs)
    assert torch.equal(out, wanted)
    assert out.grad_fn is None and not out.requires_grad
    first = sum(x.numel() for x in kept.outputs)
    with _Outputs() as with_gradients:
        function(*inputs)
    second = sum(x.numel() for x in with_gradients.outputs)
    # linear's pre-activation and mlp's are not even computed; statistics and lse where they can be
    assert first < second if op in ("linear", "mlp", "layer_norm") else first <= second


@every_op
def test_frozen_inputs_save_nothing(op):
    function, inputs = op_and_inputs(op, grad=False)
    out = function(*inputs)
    assert out.grad_fn is None and not out.requires_grad


@every_op
def test_saved_tensors_hooks(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    packed = []

    def pack(x):
        packed.append(x)
        return x.detach().to("cpu", copy=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(DEVICE)):
        assert_same_bits(step(function, inputs), wanted)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(step(function, inputs), wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_model_redraws_the_same_dropout(use_reentrant):
    model = small_vit(attn_drop_rate=0.3, drop_path_rate=0.5, depth=2).train()
    images = rand(3, 1, 8, 8)

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=use_reentrant)

    results = []
    for call in (model, checkpointed):
        torch.manual_seed(3)
        images.grad = None
        results.append([*train_step_of(call, model, images), images.grad])
    assert_same_bits(results[1], results[0])


def test_models_are_copied_and_pickled_amid_training():
    model, images = small_vit(), rand(2, 1, 8, 8)
    wanted = train_step(model, images)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(train_step(twin, images), wanted)


def test_export_of_our_model():
    model, images = small_vit().eval(), rand(2, 1, 8, 8, grad=False)
    torch.use_deterministic_algorithms(False)
    with torch.no_grad():
        exported = torch.export.export(model, (images,))
        torch.testing.assert_close(exported.module()(images), model(images))


@every_op
def test_default_dtype_and_device_change_nothing(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    upstream = rand(*wanted[0].shape, seed=99, grad=False)
    former = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        out = function(*inputs)
        got = [out.detach(), *torch.autograd.grad(out, inputs, upstream)]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(former)
    assert_same_bits(got, wanted)
    assert [x.dtype for x in got] == [x.dtype for x in wanted]


# Transforms: the kernels have no rules for them, so that the specification runs, with a warning
# where the tensor is on a GPU.


def reference(function, *inputs):
    with fk.backend("torch"):
        return function(*inputs)


@every_op
def test_func_grad(op):
    function, inputs = op_and_inputs(op, grad=False)
    everything = tuple(range(len(inputs)))

    def loss(*tensors):
        return function(*tensors).square().sum()

    got = torch.func.grad(loss, everything)(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(list(got), list(wanted), rtol=1e-5, atol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_op
def test_func_vmap_and_gradients_of_each_sample(op):
    function, inputs = op_and_inputs(op, grad=False)
    batch = torch.stack([inputs[0], inputs[0] * 0.5])
    got = torch.func.vmap(lambda x: function(x, *inputs[1:]))(batch)
    torch.testing.assert_close(got, torch.stack([function(x, *inputs[1:]) for x in batch]))

    gradient = torch.func.grad(lambda x: function(x, *inputs[1:]).square().sum())
    got = torch.func.vmap(gradient)(batch)
    torch.testing.assert_close(got, torch.stack([gradient(x) for x in batch]))


@every_op
def test_func_jvp_and_forward_mode(op):
    """On a CPU torch has no forward mode for its flash attention; its "math" form has."""
    function, inputs = op_and_inputs(op, grad=False)
    tangent = rand(*inputs[0].shape, seed=7, grad=False)
    first, *others = inputs

    def partial(x):
        return function(x, *others)

    with sdpa_kernel(SDPBackend.MATH):
        wanted = torch.func.jvp(lambda x: reference(partial, x), (first,), (tangent,))[1]
        got = torch.func.jvp(partial, (first,), (tangent,))[1]
        torch.testing.assert_close(got, wanted)
        with forward_ad.dual_level():
            dual = partial(forward_ad.make_dual(first, tangent))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_sample_of_a_model():
    model, images = small_vit(), rand(3, 1, 8, 8, grad=False)
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(params, image):
        return functional_call(model, params, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, images)
    for i, image in enumerate(images):
        grads = torch.autograd.grad(loss(dict(model.named_parameters()), image), model.parameters())
        for (name, got), wanted in zip(each.items(), grads, strict=True):
            torch.testing.assert_close(got[i], wanted, msg=name, rtol=1e-4, atol=1e-5)


def test_functional_call_runs_the_kernels():
    model, images = small_vit(), rand(2, 1, 8, 8)
    wanted = train_step(model, images)
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    with fk.backend("triton"):
        out = functional_call(model, params, (images,))
    grads = torch.autograd.grad(out.square().mean(), list(params.values()))
    assert_same_bits([out.detach(), *grads], wanted)


def test_the_triton_backend_refuses_transforms():
    function, inputs = op_and_inputs("linear", grad=False)
    with fk.backend("triton"):
        with pytest.raises(RuntimeError, match=r"linear: .* but a torch\.func transform is active"):
            torch.func.vmap(lambda x: function(x, *inputs[1:]))(inputs[0][None])
        with (
            forward_ad.dual_level(),
            pytest.raises(RuntimeError, match="but forward-mode differentiation is active"),
        ):
            function(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:])


def test_a_kind_of_call_seen_before_a_transform_is_not_remembered_into_it():
    function, inputs = op_and_inputs("layer_norm", grad=False)
    function(*inputs)
    torch.func.vmap(lambda x: function(x, *inputs[1:]))(inputs[0])
    assert_same_bits(step(*op_and_inputs("layer_norm")), step(*op_and_inputs("layer_norm")))


# Threads.


@pytest.fixture
def one_launch_at_a_time(monkeypatch):
    """Triton's interpreter keeps its grid in a global: its launches alone take turns."""
    if INTERPRETED:
        from triton.runtime.interpreter import InterpretedFunction

        lock, run = threading.Lock(), InterpretedFunction.run

        def locked(self, *args, **kwargs):
            with lock:
                return run(self, *args, **kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", locked)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def forget_everything():
    from fastvit_kernels.runtime import configs as launch_configs

    launch_configs._forget()


def in_threads(function, count):
    """function(0), ..., function(count - 1), each in a thread of its own that starts at once."""
    barrier, cores = threading.Barrier(count), torch.get_num_threads()

    def work(index):
        torch.set_num_threads(cores)  # a new thread has torch's default, and bits depend on it
        barrier.wait()
        return function(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_threads_give_the_bits_of_one(one_launch_at_a_time):
    """Every op, forward and backward, in four threads whose caches are empty at first."""

    def all_ops(index):
        results = []
        if DEVICE.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
        else:
            stream = None
        with torch.cuda.stream(stream):
            for op in OPS:
                results += step(*op_and_inputs(op, seed=index))
        if stream is not None:
            stream.synchronize()
        return results

    wanted = [all_ops(index) for index in range(4)]
    forget_everything()
    for got, want in zip(in_threads(all_ops, 4), wanted, strict=True):
        assert_same_bits(got, want)


def test_threads_that_swap_the_same_class_get_one_class(monkeypatch):
    """Two classes of one name could not be pickled."""
    from fastvit_kernels.swap import hosts

    for cls in hosts._swapped.values():  # other tests' models keep their classes
        monkeypatch.setattr(sys.modules[cls.__module__], cls.__qualname__, cls)
    monkeypatch.setattr(hosts, "_swapped", {})
    make = hosts._make

    def slowly(*arguments):
        threading.Event().wait(0.05)
        return make(*arguments)

    monkeypatch.setattr(hosts, "_make", slowly)

    def swap(index):
        layers = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        fk.swap_in(layers)
        return layers

    layers = in_threads(swap, 4)
    assert len({type(layer) for layer in layers}) == 1
    assert type(layers[0]) is not nn.TransformerEncoderLayer
    pickle.loads(pickle.dumps(layers[0]))


# On the device alone.


@pytest.fixture
def vit_on_gpu():
    return small_vit(img_size=32, embed_dim=64, depth=2), rand(4, 1, 32, 32, grad=False)


@pytest.mark.gpu
def test_another_stream_gives_the_same_bits(vit_on_gpu):
    model, images = vit_on_gpu
    wanted = [x.clone() for x in train_step(model, images)]
    late = torch.full_like(images, float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a launch on another stream would read the NaN
        late.copy_(images)
        got = train_step(model, late)
    stream.synchronize()
    assert_same_bits(got, wanted)


@pytest.mark.gpu
@every_op
def test_each_op_on_another_stream(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    late = [torch.full_like(x, float("nan")).requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for x, value in zip(late, inputs, strict=True):
                x.copy_(value)
        got = step(function, late)
    stream.synchronize()
    assert_same_bits(got, wanted)


@pytest.mark.gpu
@every_op
def test_a_device_that_is_not_current(op):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    function, inputs = op_and_inputs(op)
    other = [x.detach().to("cuda:1").requires_grad_() for x in inputs]

    def step_on(current):
        with torch.cuda.device(current):
            out = function(*other)
            grads = torch.autograd.grad(out, other, torch.ones_like(out))
            assert torch.cuda.current_device() == current
        assert {x.device.index for x in (out, *grads)} == {1}
        return [out.detach(), *grads]

    assert_same_bits(step_on(0), step_on(1))


@pytest.mark.gpu
def test_a_training_step_never_waits_for_the_device():
    model = small_vit(img_size=32, attn_drop_rate=0.1, drop_path_rate=0.2, depth=2).train()
    images = rand(4, 1, 32, 32, grad=False)
    train_step(model, images)  # compiles, and asks once for the device's properties
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, images)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(model, images):
    """A CUDA graph of forward and backward, the output and the gradients that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(model, images)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(images)
        out.square().mean().backward()
    return graph, [out, *(p.grad for p in model.parameters())]


def replayed(graph, tensors):
    for x in tensors:
        x.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return [x.detach().clone() for x in tensors]


@pytest.mark.gpu
def test_replays_of_a_graph_give_the_bits_of_eager(vit_on_gpu):
    model, images = vit_on_gpu
    wanted = [x.clone() for x in train_step(model, images)]
    other = rand(*images.shape, seed=1, grad=False)
    wanted_other = [x.clone() for x in train_step(model, other)]
    static = images.clone()
    graph, tensors = captured(model, static)
    assert_same_bits(replayed(graph, tensors), wanted)
    static.copy_(other)
    assert_same_bits(replayed(graph, tensors), wanted_other)
    assert_same_bits(replayed(graph, tensors), wanted_other)


@pytest.mark.gpu
@pytest.mark.parametrize("rates", [dict(attn_drop_rate=0.3), dict(drop_path_rate=0.5)], ids=str)
def test_each_replay_of_a_graph_draws_fresh_masks(rates):
    model = small_vit(img_size=32, embed_dim=64, depth=2, **rates).train()
    graph, tensors = captured(model, rand(8, 1, 32, 32, grad=False))
    first, second = replayed(graph, tensors), replayed(graph, tensors)
    assert not torch.equal(first[0], second[0])
    assert all(x.isfinite().all() for x in (*first, *second))


@pytest.mark.gpu
def test_graphed_callables_train(vit_on_gpu):
    model, images = vit_on_gpu
    wanted = [x.clone() for x in train_step(model, images)]
    twin = copy.deepcopy(model)
    twin.zero_grad(set_to_none=True)
    graphed = torch.cuda.make_graphed_callables(twin, (images,))
    assert_same_bits(train_step(graphed, images), wanted)


@pytest.mark.gpu
def test_a_transform_on_a_gpu_warns_once():
    from fastvit_kernels.runtime import backend

    backend._say_once.cache_clear()
    function, inputs = op_and_inputs("layer_norm", grad=False)
    with pytest.warns(UserWarning, match=r"layer_norm takes the PyTorch path: a torch\.func"):
        torch.func.vmap(lambda x: function(x, *inputs[1:]))(inputs[0])
