"""What the Gluon kernels share about the barriers that their groups of warps wait at."""

from __future__ import annotations

from ...runtime.gluon import gl, gluon, mbarrier


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many, each passed by so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def parity(phase):
    """What a wait names of the phase that it waits for. That before the first, -1, is over."""
    return phase & 1
