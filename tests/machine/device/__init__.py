"""A machine that runs the PTX of our kernels, in numpy, on CPU tensors.

    with ptx_machine("sm_80"):
        y = fk.linear(x, weight)  # compiled for sm_80, and run

What Triton's interpreter runs is what a kernel means; this runs what ships: layouts, ldmatrix,
asynchronous copies with their wait counts, barriers, vector loads that trust an alignment.

Read in this order:

program.py         text -> instructions in blocks; where threads that part meet again
values.py          a register of all threads, as an array
registry.py        how an instruction gets its meaning
execution.py       launch, chunk of blocks, group of warps; branches under a mask
memory.py          the launch's tensors, and shared memory full of poison
races.py           what no barrier orders
arithmetic.py global_memory.py shared_memory.py async_copies.py warps.py mma.py control.py
                   the instructions by kind
proxies.py wgmma.py stmatrix.py mbarriers.py tensor_copies.py roles.py
                   what sm_90 adds: units that work next to the warps, and who may touch what then
driver.py          how Triton is made to launch here

To add an instruction, register its full name:

    @instruction("redux.sync.{add,min,max}.{u32,s32}")   # {a,b}: one of them; [.x]: with or without
    def reduce_warp(op: Op) -> Run:
        a, slot = op.read(1), op.destination()    # once for each place in a program
        def run(group):                           # each time that it runs there
            mask = group.whole_warps(op)          # who runs it; None: all. `active` allows part
            value = group.by_warp(a(group.registers))     # (blocks or 1, warps, 32 lanes)
            ...
            group.write(slot, result, mask)       # (blocks or 1, threads or 1)
        return run

`op.pure(compute)` does all of that where each thread works for itself. A file of instructions joins
the imports of driver.py. What such a function can reach:

op         .operands (texts) .items(i) (the parts of braces) .slot(text) .destinations(i)
           .read(i, type) .reader(text, type) .address(i, type) -> functions of `registers`
           .width: bytes it takes of shared memory at once, for the race detector's grain
           .line .where: for messages; raise a Fault of faults.py with it
group      .registers[slot] .mask .warps (numbers) .warp_of_thread .threads .shape
           .active(op) .whole_warps(op) .whole_blocks(op) .write(slot, value, mask)
           .pending (async_copies.py) .extra: a dict for what else goes with a group's threads, such
           as wgmma in flight; a group that splits copies it
chunk      group.chunk: .blocks .warps .shared .races .groups .extra (a dict: mbarriers, say)
shared     group.shared: .load .store (checked, raced) .offset .peek .poke (not) .units[width]
memory     group.memory: .load .store, addresses of 64 bits; .find checks alone
races      .loaded .stored .meet(warps, blocks); .clock[row, w, v]: what warp w knows of warp v

Instructions that may branch or wait are registered with `ends_block=True`. To wait, set
`group.ready` to a function that says when it may go on and `group.waits_at` to `op.where`, and
return WAIT: the group goes on behind the instruction. To try again instead, return the number of a
block. Where `Program.parts_for_good` (roles by warp), a chunk is one block of the grid, whole warps
that part become groups of their own, and `Launch.order` says which goes first.
"""

from .driver import Machine, ptx_machine

__all__ = ["Machine", "ptx_machine"]
