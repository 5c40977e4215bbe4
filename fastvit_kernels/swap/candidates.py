"""From what a forward was seen to do, to the roles of its parts: the candidates of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.common.activation import ACTIVATIONS
from .facts import PRIVATE, leaves
from .hosts.attention import AttentionRoles
from .hosts.fused import part
from .hosts.mlp import MlpRoles
from .observe import Event, NotACandidate, Observation, Unsupported

SUMS = ("add", "__add__", "__radd__", "__iadd__", "add_")
PRODUCTS = ("mul", "__mul__", "__rmul__", "__imul__", "mul_")
MATMULS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm")
SDPA = "scaled_dot_product_attention"
SOFTMAX = ("softmax", "Softmax", "_softmax")
MASKS = ("masked_fill", "masked_fill_", "tril", "triu", "where")


def _linears(module: nn.Module, seen: Observation) -> list[Event]:
    parts = [e for e in seen.events if e.part]
    return [e for e in parts if isinstance(part(module, e.part), (nn.Linear, Tensor))]


def origins(seen: Observation, number: int, stop: set[int]) -> list[int]:
    """The values of `stop` that a value was made from, the nearest ones."""
    found, todo, known = [], [number], set()
    while todo:
        n = todo.pop()
        if n in known:
            continue
        known.add(n)
        if n in stop:
            found.append(n)
        elif n in seen.made:
            todo += seen.made[n].inputs
    return sorted(found)


def _all_known(module: nn.Module, roles: Any) -> None:
    """Refuses a module with parameters that no role has."""
    unknown = _unknown(module, roles)
    if unknown:
        raise Unsupported(f"it has parameters that we do not know: {', '.join(unknown[:3])}")


def _unknown(module: nn.Module, roles: Any) -> list[str]:
    """The parameters that no role has, nor a part that has a role."""
    known = list(leaves(roles, str))
    parts = tuple(f"{n}." for n in known if n)
    return [n for n, _ in module.named_parameters() if n not in known and not n.startswith(parts)]


# Attention.


def attention_roles(
    module: Any, seen: Observation, whole: bool = True
) -> Iterator[AttentionRoles] | None:
    """Candidates, most likely first; None where the forward has no softmax. `module` is the `whole`
    attention, or has other parts. Raises: Unsupported where the softmax is of something else."""
    cores = [e for e in seen.events if e.function in (SDPA, *SOFTMAX)]
    if not cores:
        return None
    core = next((e for e in cores if e.function == SDPA), cores[0])
    is_sdpa, place = core.function == SDPA, seen.events.index(core)
    linears = _linears(module, seen)
    before = [e for e in linears if seen.events.index(e) < place]
    behind = [e for e in linears if seen.events.index(e) > place]
    if len(behind) > 1 or len(before) not in (1, 3):
        counts = f"{len(before)} Linears before its softmax and {len(behind)} behind"
        raise Unsupported(f"an attention with {counts}")
    if any(isinstance(part(module, e.part), Tensor) for e in behind):
        raise Unsupported("it multiplies by a weight of its own behind its softmax")
    shape = seen.shape(seen.first)
    T = math.prod(shape[1:-1])
    heads = _heads(seen, core, shape[0], T)
    named = {e.output: e.part for e in before}
    order = _query_key_value(seen, core, set(named)) or list(named)
    projections = tuple(named[n] for n in order)
    around = _around(module, seen, core, before, behind)
    upcast = not is_sdpa and _argument(core, 2, "dtype", None) == torch.float32
    roles = AttentionRoles(
        projections,
        heads,
        behind[0].part if behind else "",
        grid=len(shape) == 4,
        result=seen.place,
        rounded=upcast or any(e.function == "float" for e in seen.events),
        **around,
        **_raw(seen, projections),
    )
    if roles.raw and not whole:
        raise Unsupported("it reads the weights of Linears without calling them")
    if roles.turn:
        turned = next(e for e in seen.events if e.part == roles.turn)
        roles = roles._replace(prefix=T - seen.shape(turned.inputs[0])[-2], tokens=T)
    if seen.others:
        scores = seen.shape(core.output)
        if is_sdpa or any(seen.shape(n) != scores for n in seen.others):
            raise Unsupported("its result has a tensor besides: a hidden state")
        roles = roles._replace(weights=True)
    if roles.q_norm:
        norm = next(e for e in seen.events if e.part == roles.q_norm)
        roles = roles._replace(wide_norms=len(seen.shape(norm.inputs[0])) == len(shape))
    if whole:
        roles = roles._replace(**_bias(module, seen, roles))
        _all_known(module, roles)
    settings = _floats(module, [*roles.projections, roles.out])
    scales: list[Any] = [*sorted(settings, key=lambda n: "scal" not in n), None, 1.0]
    drops = [roles.dropout]
    if is_sdpa:
        roles = roles._replace(causal=bool(_argument(core, 5, "is_causal", False)))
        asked = _argument(core, 6, "scale", None)
        usual = asked is None or abs(asked * seen.shape(core.inputs[0])[-1] ** 0.5 - 1) < 1e-12
        scales = [n for n, v in settings.items() if v == asked]
        scales += [None] * usual + [asked] * (asked is not None)
        if _argument(core, 4, "dropout_p", 0.0):
            drops = _rates(module) or drops
    masked = any(e.function in MASKS for e in seen.events)
    return (
        roles._replace(layout=layout, scale=scale, causal=causal, dropout=drop)
        for causal in ((roles.causal, True) if masked and not roles.causal else (roles.causal,))
        for layout in (("3HD", "H3D", "HD3") if len(before) == 1 else ("3HD",))
        for scale in scales
        for drop in drops
    )


def drops(seen: Observation) -> bool:
    """Whether torch's attention drops probabilities."""
    calls = (e for e in seen.events if e.function == SDPA)
    return any(_argument(e, 4, "dropout_p", 0.0) for e in calls)


def _raw(seen: Observation, projections: tuple[str, ...]) -> dict[str, Any]:
    """The parameters that stand for the biases of projections whose weights are read."""
    calls = {e.part: e for e in seen.events if e.part in projections and e.function == "linear"}
    if not calls:
        return {}
    if len(calls) != len(projections):
        raise Unsupported("it reads the weights of Linears without calling them")
    found = []
    for name in projections:
        bias = _argument(calls[name], 2, "bias", None)
        ends: tuple[Any, ...] = () if bias is None else (bias,)
        source = None if bias is None else seen.made.get(bias.number)
        if source is not None and source.function == "cat":
            ends = source.args[0]
        found.append(tuple(seen.parameters.get(v.number, "") for v in ends))
    return {"raw": True, "biases": tuple(found)}


def _bias(module: Any, seen: Observation, roles: AttentionRoles) -> dict[str, Any]:
    """What parameters that are in none of its parts may be for the scores, by their shapes."""
    unknown = _unknown(module, roles)
    shapes = {n: seen.shape(i) for i, n in seen.parameters.items() if n in unknown}
    shape = seen.shape(seen.first)
    T = shape[1] if len(shape) == 3 else 0
    if len(shapes) == 1 and [s[1:] for s in shapes.values()] == [(roles.heads,)]:
        indices = [
            n
            for n, b in module.named_buffers()
            if tuple(b.shape) == (T, T) and not b.is_floating_point()
        ]
        if indices:
            return {"table": next(iter(shapes)), "index": indices[0]}
    if len(shapes) == 2 and [s[0] for s in shapes.values()] == [2 * n - 1 for n in shape[1:-1]]:
        return {"along": tuple(shapes)}
    return {}


def _argument(event: Event, place: int, name: str, default: Any) -> Any:
    if name in event.kwargs:
        return event.kwargs[name]
    return event.args[place] if len(event.args) > place else default


def _floats(module: Any, parts: list[str]) -> dict[str, float]:
    """Settings that may be a scale: of the module, and of those that hold its Linears."""
    owners = dict.fromkeys(p.rpartition(".")[0] for p in parts)
    homes = {"": module} | {n: module.get_submodule(n) for n in owners}
    return {
        f"{home}.{n}".lstrip("."): v
        for home, m in homes.items()
        for n, v in vars(m).items()
        if isinstance(v, float) and n not in PRIVATE and "drop" not in n and "eps" not in n
    }


def _rates(module: Any) -> list[str]:
    """Settings and parts that may be the dropout of attention."""
    rates = [
        f"{home}.{n}".lstrip(".")
        for home, m in module.named_modules()
        for n, v in vars(m).items()
        if isinstance(v, float) and 0 < v < 1 and "drop" in n
    ]
    parts = [n for n, m in module.named_modules() if n and type(m) is nn.Dropout]
    return sorted([*rates, *parts], key=lambda n: "att" not in n.rpartition(".")[2])


def _heads(seen: Observation, core: Event, B: int, T: int) -> int:
    if core.function == SDPA:
        q = seen.shape(core.inputs[0])
        if len(q) == 4 and q[0] == B and q[2] == T:
            return q[1]
        raise Unsupported(f"its attention reads queries of the shape {q} for {T} tokens")
    scores = seen.shape(core.inputs[0])
    dim = _argument(core, 1, "dim", None)
    if scores[-2:] != (T, T):
        raise Unsupported(f"its softmax is over scores of the shape {scores} for {T} tokens")
    if isinstance(dim, int) and dim not in (-1, len(scores) - 1):
        raise Unsupported(f"its softmax is over axis {dim}, not over the keys")
    if len(scores) == 4 and scores[0] == B:
        return scores[1]
    if len(scores) == 3 and scores[0] % B == 0:
        return scores[0] // B
    raise Unsupported(f"its softmax is over scores of the shape {scores}")


def _query_key_value(seen: Observation, core: Event, stop: set[int]) -> list[int] | None:
    """The outputs of the projections in the order q, k, v; None where the run does not tell."""
    if len(stop) != 3:
        return None
    if core.function == SDPA:
        ends = list(core.inputs[:3])
    else:
        scores = seen.made.get(core.inputs[0])
        while scores is not None and scores.function not in MATMULS:
            scores = seen.made.get(scores.inputs[0]) if scores.inputs else None
        behind = seen.events[seen.events.index(core) + 1 :]
        last = next((e for e in behind if e.function in MATMULS), None)
        if scores is None or last is None or len(scores.inputs) < 2:
            return None
        values = [n for n in last.inputs if core.output not in origins(seen, n, {core.output})]
        ends = [*scores.inputs[-2:], *values[:1]]
    found = [origins(seen, n, stop) for n in ends]
    if any(len(f) != 1 for f in found) or len({f[0] for f in found}) != 3:
        return None
    return [f[0] for f in found]


def _parts(
    module: Any, seen: Observation, linears: list[Event], marks: list[Event]
) -> Iterator[tuple[int, Event, nn.Module]]:
    """The parts of a run besides its Linears that may compute something, and how many of the marks
    lie before each."""
    places = [*map(seen.events.index, marks)]
    for index, event in enumerate(seen.events):
        if event.part and event not in linears and event not in marks:
            child = module.get_submodule(event.part)
            if type(child) is not nn.Identity:
                yield sum(place < index for place in places), event, child


def _around(
    module: Any, seen: Observation, core: Event, before: list[Event], behind: list[Event]
) -> dict[str, str]:
    """The norms and dropouts about an attention."""
    found: dict[str, str] = {}
    marks = [before[0], core, *behind]
    for passed, event, child in _parts(module, seen, before, marks):
        drops, weighted = type(child) is nn.Dropout, any(True for _ in child.parameters())
        turns = passed == 1 and not weighted and any(True for _ in child.buffers())
        if turns and found.get("turn") in (None, event.part):
            found["turn"] = event.part
            continue
        if not (drops or weighted):
            continue
        if drops:
            scores = seen.shape(event.inputs[0])[-2:] == seen.shape(core.output)[-2:]
            role = "dropout" if passed == 2 and scores else "after" if passed == 3 else ""
        else:
            second = "k_norm" if "q_norm" in found else "q_norm"
            role = ("norm", second, "inner_norm", "")[passed]
        if not role or role in found:
            raise Unsupported(f"{event.part}, a {event.function}, stands where attention has none")
        found[role] = event.part
    return found


# MLPs.


def mlp_roles(module: Any, seen: Observation, whole: bool = True) -> Iterator[MlpRoles]:
    """The candidates of an MLP, by what its activation was seen to compute.

    Raises: Unsupported where it is none.
    """
    linears = _linears(module, seen)
    if len(linears) not in (2, 3):
        raise NotACandidate(f"{len(linears)} Linears in a forward without attention")
    *first, last = linears
    if any(e.function == "linear" for e in linears):
        raise Unsupported("it reads the weights of Linears without calling them")
    if seen.others:
        raise Unsupported("its result has a tensor besides: a hidden state")
    found = _around_mlp(module, seen, first, last)
    hidden = seen.tensors[found.pop("hidden")]
    roles = MlpRoles(first[0].part, last.part, "", **found, result=seen.place)
    activations = list(_activations(seen, first, hidden))
    if not activations:
        raise Unsupported("no kernel for what stands between its Linears")
    for name, gate in activations:
        candidate = roles._replace(activation=name, gate=gate)
        if gate and gate not in ("first", "second"):
            candidate = candidate._replace(fc1=next(e.part for e in first if e.part != gate))
        if whole:
            _all_known(module, candidate)
        yield candidate


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _activations(
    seen: Observation, first: list[Event], hidden: Tensor
) -> Iterator[tuple[str, str]]:
    """(activation, gate) that gives the hidden layer from the first Linears' outputs."""
    outputs = [seen.tensors[e.output] for e in first]
    if len(outputs) == 1:
        a, b = outputs[0].tensor_split(2, dim=-1)
        gates = "first", "second"
    else:
        a, b = outputs
        gates = first[0].part, first[1].part
    for name, function in ACTIVATIONS.items():
        if len(outputs) == 1 and _close(function(outputs[0]), hidden):
            yield name, ""
        if a.shape == b.shape:
            if _close(function(a) * b, hidden):
                yield name, gates[0]
            if _close(a * function(b), hidden):
                yield name, gates[1]


def _around_mlp(module: Any, seen: Observation, first: list[Event], last: Event) -> dict[str, Any]:
    """The norms and dropouts about an MLP, and the value that its activation gives."""
    found: dict[str, Any] = {"hidden": last.inputs[0]}
    event = seen.made.get(last.inputs[0])
    while event is not None and event.part and event not in first:  # back to the activation
        part = module.get_submodule(event.part)
        if type(part) is nn.Dropout and "drop" not in found:
            found["drop"] = event.part
        elif list(part.parameters()) and not found.get("drop"):
            found["inner_norm"] = event.part
        elif type(part) is not nn.Identity:
            break
        found["hidden"] = event.inputs[0]
        event = seen.made.get(event.inputs[0])
    for passed, event, child in _parts(module, seen, first, [first[0], last]):
        if passed == 0:
            found["norm"] = event.part
        elif passed == 2 and type(child) is nn.Dropout:
            found["after"] = event.part
        elif passed == 2:
            raise Unsupported(f"{event.part}, a {event.function}, stands behind its last Linear")
    return found
