"""From what a block's forward was seen to do, to its steps: the candidates of a residual block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from .candidates import PRODUCTS, SUMS, Refused, Unlike, attention_roles, mlp_roles, origins
from .facts import ClassOf
from .hosts.fused import arguments_of
from .hosts.searched import BlockRoles, Step
from .observe import Event, Observation, Value
from .runs import level_of

MOST = 16  # candidates of an inline branch
# What moves values and computes none: on the way into windows of a grid, and out of them.
MOVES = ("view", "reshape", "permute", "transpose", "contiguous", "pad", "__getitem__", "flatten",
         "unflatten")  # fmt: skip


def block_roles(module: nn.Module, class_of: ClassOf, seen: Observation) -> Iterator[BlockRoles]:
    """The candidates of a residual block: its steps, with what its inline branches may be.

    Raises: Refused where the forward does more than add branches and call parts.
    """
    seen, channels = _channels(seen)
    found: list[tuple[Step, list[Any]]] = []  # and the candidates of an inline branch
    taken: set[int] = set()  # outputs of events that a step has
    if seen.others:
        raise Refused("its result has a tensor besides: a hidden state")
    for event in seen.events:
        if event.function in SUMS and len(event.inputs) == 2 and not event.part:
            step = _sum(module, class_of, seen, event, taken)
            if step is not None:
                found.append(step)
    if not any(step.residual >= 0 for step, _ in found):
        raise Unlike("it has no residual")
    for event in seen.events:
        if event.output in taken:
            continue
        if not event.part:
            if not origins(seen, seen.result, {event.output}):
                continue  # the result was made without it
            raise Refused(f"its forward has a step that is none of ours: {event.function}")
        call = _call(event, module.get_submodule(event.part), seen.extras)
        step = Step(event.output, event.inputs[0], body=event.part, **call)
        found.append((step, []))
    order = {e.output: i for i, e in enumerate(seen.events)}
    found.sort(key=lambda f: order[f[0].output])
    if found[-1][0].output != seen.result:
        raise Refused("its result is not the end of its last branch")
    numbers = {seen.first: 0} | {step.output: i + 1 for i, (step, _) in enumerate(found)}
    for i, (step, inlined) in enumerate(found):
        if step.source not in numbers or (step.residual >= 0 and step.residual not in numbers):
            raise Refused("a branch begins with a value that is none of ours")
        residual = numbers[step.residual] if step.residual >= 0 else -1
        step = step._replace(output=i + 1, source=numbers[step.source], residual=residual)
        found[i] = step, inlined
    for turn in range(max(len(inlined) or 1 for _, inlined in found)):
        steps = tuple(
            step._replace(inline=inlined[turn % len(inlined)]) if inlined else step
            for step, inlined in found
        )
        rounded = any(_rounds(module, class_of, step) for step in steps)
        yield BlockRoles(
            steps, _through(module, steps), seen.place, rounded=rounded, channels=channels
        )


def _channels(seen: Observation) -> tuple[Observation, bool]:
    """What is seen between two permutations, from (B, C, height, width) and back."""
    first = [e for e in seen.events if seen.first in e.inputs]
    last = seen.made.get(seen.result)
    if len(first) != 1 or last is None or (first[0].function, last.function) != ("permute",) * 2:
        return seen, False
    if (first[0].args[1:], last.args[1:]) != ((0, 2, 3, 1), (0, 3, 1, 2)):
        return seen, False
    events = [e for e in seen.events if e is not first[0] and e is not last]
    inner = replace(seen, events=events, first=first[0].output, result=last.inputs[0])
    return inner, True


def _rounds(module: nn.Module, class_of: ClassOf, step: Step) -> bool:
    """Whether a part of a step gives what fp32 gives, in any dtype."""
    named = [class_of(module.get_submodule(n)) for n in (step.norm, step.body) if n]
    rounds = any(getattr(c, "fused_tolerance", 0.0) > 1e-9 for c in named)
    return rounds or getattr(step.inline, "rounded", False)


def _through(module: nn.Module, steps: tuple[Step, ...]) -> tuple[str, ...]:
    """The modules whose forwards the steps stand for, beside the block's own."""
    called = [n for s in steps for n in (s.norm, s.body, *s.tail) if n]
    return tuple(
        name for name, m in module.named_modules()
        if name and type(m).forward is not nn.Module.forward
        and not any(name == n or name.startswith(f"{n}.") for n in called)
    )  # fmt: skip


def _call(event: Event, part: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """How the host calls a part, for a Step: "x" stands for the first tensor; a value of the
    block's own argument is context."""

    def read(value: Any) -> Any:
        if isinstance(value, Value):
            if value.number == event.inputs[0]:
                return "x"
            raise Refused(f"{event.part} is called with more than its input")
        if value is None or isinstance(value, (bool, int, float)):
            return value
        raise Refused(f"{event.part} is called with a {type(value).__name__}")

    names = arguments_of(type(part).forward).names
    args, kwargs, context = [], {}, {}
    for place, value in enumerate(event.args):
        own = [n for n, v in extras.items() if v == value]
        if own:
            context[names[place]] = own[0]
        elif context:
            kwargs[names[place]] = read(value)
        else:
            args.append(read(value))
    for name, value in event.kwargs.items():
        own = [n for n, v in extras.items() if v == value]
        if own:
            context[name] = own[0]
        else:
            kwargs[name] = read(value)
    return {
        "arguments": (tuple(args), tuple(kwargs.items())),
        "context": tuple(context.items()),
        "item": event.item,
    }


def _sum(
    module: nn.Module, class_of: ClassOf, seen: Observation, event: Event, taken: set[int]
) -> tuple[Step, list[Any]] | None:
    """residual + tail(body(norm(source))) that ends in this sum, with the candidates of an inline
    body; None where no branch ends in it."""
    for residual, end in (event.inputs, event.inputs[::-1]):
        tail: list[str] = []
        path: list[int] = [event.output]
        moved = False
        while end in seen.made and seen.uses(end) == 1:
            inner = seen.made[end]
            part: Any = module.get_submodule(inner.part) if inner.part else None
            if part is not None and hasattr(class_of(part), "fused_branch"):
                step = Step(
                    event.output, inner.inputs[0], residual, "", inner.part, tuple(tail[::-1]),
                    **_call(inner, part, seen.extras),
                )  # fmt: skip
                path.append(end)
                if moved:
                    window = _window(seen, step.source, path)
                    if window is None:
                        break
                    step = step._replace(window=window[0], source=window[1])
                return _with_norm(module, class_of, seen, step, path, taken), []
            if isinstance(part, nn.Linear):
                found = _inline(module, class_of, seen, residual, end, path)
                if found is None:
                    break
                source, inlined = found
                step = Step(event.output, source, residual, tail=tuple(tail[::-1]))
                return _with_norm(module, class_of, seen, step, path, taken), inlined
            path.append(end)
            scale = [n for n in inner.inputs if n in seen.parameters]
            if part is None and inner.function in MOVES:
                moved, end = True, inner.inputs[0]
            elif part is not None and len(inner.inputs) == 1:
                tail.append(inner.part)
                end = inner.inputs[0]
            elif inner.function in PRODUCTS and len(inner.inputs) == 2 and len(scale) == 1:
                tail.append(seen.parameters[scale[0]])
                end = next(n for n in inner.inputs if n != scale[0])
            else:
                break
    return None


def _window(seen: Observation, number: int, path: list[int]) -> tuple[str, int] | None:
    """The setting with the size of the windows that a value is cut into, and what was cut."""
    shape = seen.shape(number)
    sizes = [n for n, v in seen.settings.items() if (v, v) == shape[1:-1]]
    while (event := seen.made.get(number)) and not event.part and event.function in MOVES:
        path.append(number)
        number = event.inputs[0]
    return (sizes[0], number) if sizes else None


def _is_norm(module: nn.Module, class_of: ClassOf, event: Event) -> bool:
    levels = ("layer_norm", "rms_norm")
    return bool(event.part) and level_of(class_of(module.get_submodule(event.part))) in levels


def _with_norm(
    module: nn.Module, class_of: ClassOf, seen: Observation, step: Step, path: list[int],
    taken: set[int],
) -> Step:  # fmt: skip
    """The step with the norm before it, where that reads the residual and nobody else reads it."""
    norm = seen.made.get(step.source)
    if norm is not None and _is_norm(module, class_of, norm) and norm.inputs[0] == step.residual:
        readers = [e for e in seen.events if step.source in e.inputs]
        if all(e.output in path for e in readers):
            path.append(norm.output)
            step = step._replace(norm=norm.part, source=step.residual)
    taken.update(path)
    return step


def _inline(
    module: nn.Module, class_of: ClassOf, seen: Observation, residual: int, end: int,
    path: list[int],
) -> tuple[int, list[Any]] | None:  # fmt: skip
    """(source, candidates) of a branch whose last Linear gives the value `end`."""
    stop = {residual, seen.first} | {
        e.output for e in seen.events
        if _is_norm(module, class_of, e) and e.inputs[0] in (residual, seen.first)
    }  # fmt: skip
    sources = origins(seen, end, stop)
    if len(sources) != 1:
        return None
    inside, todo = {end}, [end]
    while todo:
        event = seen.made.get(todo.pop())
        for n in event.inputs if event is not None else ():
            if n not in inside and n != sources[0]:
                inside.add(n)
                todo.append(n)
    events = [e for e in seen.events if e.output in inside]
    branch = Observation(events, seen.tensors, seen.parameters, sources[0], end)
    candidates = attention_roles(module, branch, whole=False)
    if candidates is None:
        candidates = mlp_roles(module, branch, whole=False)
    path += [e.output for e in events]
    return sources[0], list(candidates)[:MOST]
