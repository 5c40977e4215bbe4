"""A machine that runs the PTX of our kernels, in numpy, on CPU tensors.

    with ptx_machine("sm_80"):
        y = fk.linear(x, weight)  # compiled for sm_80, and run

Read program.py (text to instructions, in blocks), values.py (a register of all threads is an
array), registry.py, execution.py (launch, chunk of blocks, group of warps), memory.py, races.py,
then the instructions by kind. proxies.py, wgmma.py, mbarriers.py and tensor_copies.py have what
sm_90 adds: units that work next to the warps, and who may touch what then. driver.py makes Triton
launch here.

To add an instruction, register its full name in a file that driver.py imports:

    @instruction("redux.sync.{add,max}.s32")   # {a,b}: one of them; [.x]: with or without
    def reduce_warp(op: Op) -> Run:            # once for each place in a program
        a, slot = op.read(1), op.destination()
        def run(group):                        # each time that it runs there
            mask = group.whole_warps(op)       # who runs it; None: all. `active` allows part
            value = group.by_warp(a(group.registers))     # (blocks or 1, warps, 32 lanes)
            ...
            group.write(slot, result, mask)    # (blocks or 1, threads or 1)
        return run

`op.pure(compute)` does all of that where each thread works for itself. One that waits sets
`group.ready` and `group.waits_at`, and returns WAIT: execution.py.
"""

from .driver import Machine, ptx_machine

__all__ = ["Machine", "ptx_machine"]
