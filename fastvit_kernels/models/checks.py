"""What arguments of modules must be: annotations say it, `checked` looks.

    @checked
    def __init__(self, dim: Count, bias: Flag = True, attn_head_dim: Count | None = None): ...

None passes where it is the default. Arguments that timm alone has are refused with what to do
instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, ParamSpec, get_args, get_origin, get_type_hints

from ..ops.common.activation import ACTIVATIONS
from ..runtime.arguments import (
    check_dropout,
    check_eps,
    check_flags,
    check_int,
    check_number,
    check_probability,
)

Arguments = ParamSpec("Arguments")


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless it is one of the choices: TypeError where it is no string."""
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{op}: {name} must be one of {choices}, got {value!r}")


def one_of(choices: Sequence[str]) -> Callable[..., None]:
    return functools.partial(check_choice, choices=choices)


Count = Annotated[int, check_int]
Number = Annotated[int, functools.partial(check_int, least=0)]
Flag = Annotated[bool, lambda op, name, x: check_flags(op, **{name: x})]
Rate = Annotated[float, check_probability]
Dropout = Annotated[float, lambda op, name, x: check_dropout(op, x, name)]
Eps = Annotated[float, lambda op, name, x: check_eps(op, x, name)]
Scale = Annotated[float, check_number]
Ratio = Annotated[
    float, functools.partial(check_number, least=sys.float_info.min, wanted="finite and above 0")
]
Activation = Annotated[str, one_of(sorted(ACTIVATIONS))]


@functools.cache
def _checks(annotated: Callable[..., Any]) -> list[tuple[str, bool, Callable[..., None]]]:
    """(argument, whether None passes, check) by annotations; of a Literal one of its choices."""
    found = []
    parameters = inspect.signature(annotated).parameters
    for name, hint in get_type_hints(annotated, include_extras=True).items():
        if name in parameters:
            checks = [
                m for part in (hint, *get_args(hint)) for m in getattr(part, "__metadata__", ())
            ]
            if get_origin(hint) is Literal:
                checks = [one_of(get_args(hint))]
            found += [(name, parameters[name].default is None, check) for check in checks]
    return found


def check_arguments(op: str, annotated: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for the first value that is not as its annotation says."""
    for name, optional, check in _checks(annotated):
        if name in values and not (optional and values[name] is None):
            check(op, name, values[name])


def checked(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """For an __init__: its arguments are checked before anything is made or drawn."""
    signature, op = inspect.signature(init), init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def __init__(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            values = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python's own says more
            values = {}
        check_arguments(op, init, values)
        init(*args, **kwargs)

    return __init__


_SWAP = "build the model with timm and call swap_in(model)"
_LOAD = "build the model, then call load_weights(model, path)"

# Name -> the value that asks for nothing, which is taken as None is; what to do instead.
REFUSED: dict[str, tuple[Any, str]] = {
    "pretrained": (
        False,
        "nothing is downloaded: call load_weights(model, source) with a file or with the "
        "state_dict of timm's pretrained model",
    ),
    "pretrained_cfg": (None, _LOAD),
    "pretrained_cfg_overlay": (None, _LOAD),
    "checkpoint_path": ("", _LOAD),
    "cache_dir": (None, _LOAD),
    "features_only": (
        False,
        f"forward_features(images) gives the last tokens; for tokens of other blocks {_SWAP}",
    ),
    "out_indices": (None, _SWAP),
    "scriptable": (False, "torch.export and torch.compile take the model as it is"),
    "dynamic_img_pad": (
        False,
        "pad the images to whole patches; dynamic_img_size=True takes any number of them",
    ),
    "strict_img_size": (True, "dynamic_img_size=True takes images of any size"),
    "scale_attn_norm": (False, _SWAP),
    "scale_mlp_norm": (False, _SWAP),
    "norm_layer": (None, _SWAP),
    "embed_norm_layer": (None, _SWAP),
    "final_norm": (True, _SWAP),
    "proj_bias": (True, _SWAP),
    "embed_layer": (None, _SWAP),
    "block_fn": (None, _SWAP),
    "attn_layer": (None, f"qk_norm, attn_head_dim and rope_type vary the attention; else {_SWAP}"),
}
_HOLDS = ("exportable", "no_jit")  # of every model of ours


def refuse(op: str, arguments: dict[str, Any], known: Iterable[str]) -> None:
    """Raise TypeError for what asks for something that our models do not have; `known` is what they
    take."""
    for name, value in arguments.items():
        if name in _HOLDS:
            continue
        if name not in REFUSED:
            near = difflib.get_close_matches(name, known)
            hint = f"; near names: {', '.join(near)}" if near else ""
            raise TypeError(f"{op}.__init__() got an unexpected keyword argument {name!r}{hint}")
        usual, instead = REFUSED[name]
        if value not in (None, usual):
            raise TypeError(f"{op}: {name} is timm's alone, got {value!r}; {instead}")
