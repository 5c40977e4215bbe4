"""A batch: one check for every call, and a note on what the model itself raises."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from swapped import images, vit

import fastvit_kernels as fk

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CALLS = {
    "swap_in: example": lambda model, x: fk.swap_in(model, example=x),
    "swap_in: measure": lambda model, x: fk.swap_in(model, measure=x),
    "verify: batch": fk.verify,
    "compare: batch": lambda model, x: fk.compare(model, x, steps=1, seconds=0.01),
}
by_call = pytest.mark.parametrize("call", CALLS)
WRONG = [
    (np.zeros((2, 3, 32, 32), np.float32), r"got numpy.ndarray: torch.from_numpy\({}\)$"),
    ([images()], r"got list; if forward takes one as it is: \({},\)$"),
    ((2, 3, 64, 64), r"got 4 numbers; of a shape: torch.randn\(2, 3, 64, 64\)$"),
    (images().shape, r"of a shape: torch.randn\("),
    ("images", r"got str; "),
]


@by_call
def test_what_is_no_batch_is_refused_in_one_line(call):
    model = vit()
    wanted = f"^{call} must be a tensor, a tuple of forward's arguments or a dict of keyword "
    for batch, text in WRONG:
        with pytest.raises(TypeError, match=wanted + ".*" + text.format(call.split()[1])):
            CALLS[call](model, batch)
    assert "forward" not in vars(model)


FAILS = {
    "labels": (images(), torch.zeros(2).long()),
    "size": (images(size=40),),
    "keyword": dict(pixels=images()),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no notes")
@by_call
@pytest.mark.parametrize("case", FAILS)
def test_the_models_own_error_stays_and_has_a_note(call, case):
    batch, model = FAILS[case], vit()
    with pytest.raises(Exception) as host:
        model(**batch) if isinstance(batch, dict) else model(*batch)
    with pytest.raises(type(host.value)) as found:
        CALLS[call](model, batch)
    assert str(found.value) == str(host.value) or call == "verify: batch"  # which is in float64
    (note,) = found.value.__notes__
    assert note.startswith(call.replace(": ", ": the model itself raised on ") + " ")
    assert ("give the images alone, labels are not needed" in note) == isinstance(batch, tuple)
    assert ("[2, 3, 32, 32]" in note) == (case != "size")
    assert "forward" not in vars(model)


class WithoutNotes(Exception):
    """As in Python 3.10."""

    def __getattribute__(self, name):
        if name == "add_note":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_without_notes_the_error_is_the_models_alone():
    def fails(module, args):
        raise WithoutNotes("mine")

    model = vit()
    model.register_forward_pre_hook(fails)
    with pytest.raises(WithoutNotes, match=r"^mine$"):
        fk.swap_in(model, example=images())


@by_call
def test_an_error_of_the_swapped_model_alone_is_not_called_the_models(call, monkeypatch):
    """Planted: the rewriting of a graph breaks what the model can run."""

    def broken(*args, **kwargs):
        raise RuntimeError("ours")

    monkeypatch.setattr("fastvit_kernels.fuse.swapped.Swapped.first_call", broken)
    if call == "compare: batch":  # its row says so
        assert fk.compare(vit(), images(), steps=1, seconds=0.01).rows[1].note.endswith("ours")
        return
    with pytest.raises(RuntimeError, match=r"^ours$") as found:
        CALLS[call](vit(), images())
    assert not getattr(found.value, "__notes__", [])
