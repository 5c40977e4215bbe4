"""What looks like a part of a ViT gives its own numbers, whatever rules fire."""

import gc

import pytest

from fastvit_kernels.fuse.rules import attention
from tests.fuse import changes, looks_attention
from tests.fuse.hosts import Host, check, run
from tests.fuse.lookalikes import of_the_suite, products, written_out


@pytest.mark.sampled(every=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("host", of_the_suite(), ids=lambda host: host.id)
def test_a_lookalike_is_the_host(host):
    check(host)


def test_ids_are_unique_and_many():
    ids = [host.id for host in written_out() + products()]
    assert len(set(ids)) == len(ids)
    assert len(of_the_suite()) >= 600


@pytest.mark.parametrize("change", ["dropout", "noted", "mul_"])
def test_the_garbage_collector_changes_nothing(change):
    """Cycles of one compile are collected inside of the next."""
    former = gc.get_threshold()
    gc.set_threshold(500, 1, 1)
    try:
        for place in ("queries", "heads"):
            check(changes.changed("packed", place, change))
            gc.collect()
    finally:
        gc.set_threshold(*former)


def test_a_wrong_rewriting_is_seen(monkeypatch):
    """The comparison can fail: attention without its scale."""
    finish = attention.finish

    def unscaled(g, call, path, op, args, options, rule):
        return finish(g, call, path, op, args, options | {"scale": 1.0}, rule)

    monkeypatch.setattr(attention, "finish", unscaled)
    host = Host("packed", looks_attention.OPERANDS["as it is"])
    assert "call 0: output 0" in run(host).wrong
