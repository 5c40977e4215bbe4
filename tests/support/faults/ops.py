"""Faults in ops that only an unusual call shows: another order, stride, seed, or address."""

from .fault import Fault

_BF16 = (
    "runtime/test_backend.py::test_no_kernel_computes_bf16_in_an_interpreter_that_cannot",
    "runtime/test_backend.py::test_the_tests_interpreter_computes_bf16",
)
_COMMANDS = (
    "commands/test_options.py::test_bf16_in_an_interpreter_that_computes_it_wrongly_is_refused",
)
_EXPORT = "swap/test_swap_exports.py::test_an_exported_batch_is_dynamic"
FAULTS: list[Fault] = [
    Fault(
        "op-bf16-believed", "runtime/backend.py", "bf16_reason",
        "bf16 kernels run in an interpreter that multiplies raw bits",
        "torch.bfloat16 not in dtypes", "True", only=_BF16,
    ),
    Fault(
        "op-bf16-refused", "runtime/backend.py", "_interprets_bf16",
        "bf16 kernels never run in an interpreter, mended or not",
        "0x3F81", "0x3F80", only=_BF16,
    ),
    Fault(
        "op-bf16-autocast", "runtime/backend.py", "reason_for_torch",
        "a product under bf16 autocast runs in an interpreter that multiplies raw bits",
        "bf16_reason(x.dtype, autocast_dtype(x))", "bf16_reason(x.dtype)", only=_BF16,
    ),
    Fault(
        "op-bf16-second-tensor", "runtime/dispatch.py", "route",
        "a bf16 residual beside fp32 numbers is read by an interpreter that cannot",
        "bf16_reason(*(x.dtype for x in tensors if x is not None))", "None", only=_BF16,
    ),
    Fault(
        "op-bf16-out-dtype", "ops/norm/functions.py", "_decide",
        "a norm rounds to bf16 in an interpreter that truncates",
        "unsupported or bf16_reason(out_dtype)", "unsupported", only=_BF16,
    ),
    Fault(
        "op-bf16-trained", "commands/train.py", "_checked",
        "the check batch blames the kernels for the interpreter's bf16",
        "options.kernels_reason(run.device, precision)", "options.kernels_reason(run.device)",
        only=_COMMANDS,
    ),
    Fault(
        "op-bf16-checked", "commands/check.py", "run",
        "`check --dtype bf16` runs in an interpreter that multiplies raw bits",
        "options.require_kernels(device, arguments.dtype)", "options.require_kernels(device)",
        only=_COMMANDS,
    ),
    Fault(
        "op-export-gated", "ops/gated_mlp/functions.py", "_decide",
        "a gated MLP cannot be exported for any batch",
        "math.prod(x.shape[:-1])", "x.shape[:-1].numel()", only=(_EXPORT,),
    ),
    Fault(
        "op-export-mask", "ops/attention/functions.py", "attention_ref",
        "an export with a mask is fixed to its example's batch",
        "mask.shape[0] in (1, q.shape[0])", "len(mask) in (1, len(q))", only=(_EXPORT,),
    ),
    Fault(
        "op-export-rope", "ops/rope.py", "check_rotation",
        "an export with rotary positions wants a largest batch",
        "isinstance(rows, int) and ", "", only=(_EXPORT,),
    ),
    Fault(
        "op-rope-rows", "ops/common/rotation.py", "_count_rows",
        "rows past 2^31, of a program for any batch, overflow in silence",
        "num_rows >= MAX_ROWS", "False",
        only=("ops/test_rope.py::test_rope_counts_rows_in_32_bits",),
    ),
]
