"""Each check of soundness is needed: without it a look-alike comes out wrong, and is seen."""

import pytest

from fastvit_kernels.fuse import graph, views
from fastvit_kernels.fuse.rules import attention, written_attention
from tests.fuse.hosts import run
from tests.fuse.lookalikes import written_out

HOSTS = {host.id: host for host in written_out()}


def yes(*args):
    return True


def no(*args):
    return False


def without_hidden_rows(g, n, mask):
    return mask


OUTPUT, GRADIENT = "call 0: output 0", "call 0: gradient of input 0"
# where a check lives, what takes its place, a host that it guards, and what is then wrong with it
FAULTS = {
    "writes": (
        *(graph.Graph, "is_written", no),
        *("structure - a norm written between by a view", OUTPUT),
    ),
    "regions": (views, "in_one_region", yes, "structure - k of x seen under no_grad", GRADIENT),
    "one place": (attention, "same_place", yes, "structure - k of x detached", GRADIENT),
    "draws": (graph, "draws", no, "written - draw between", OUTPUT),
    "hidden rows": (
        *(written_attention, "with_hidden_rows", without_hidden_rows),
        *("mask - of inputs, all", OUTPUT),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", FAULTS)
def test_without_a_check_a_lookalike_is_wrong(fault, monkeypatch):
    where, name, replaced, host, fact = FAULTS[fault]
    monkeypatch.setattr(where, name, replaced)
    assert fact in run(HOSTS[host]).wrong
