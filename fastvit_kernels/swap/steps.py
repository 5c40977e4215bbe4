"""From what a block's forward was seen to do, to its steps: the candidates of a residual block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from .candidates import PRODUCTS, SUMS, attention_roles, mlp_roles, origins
from .facts import ClassOf, level_of
from .hosts.block import BlockRoles, Step
from .hosts.fused import arguments_of, part as get_part
from .observe import Event, NotACandidate, Observation, Unsupported, Value, is_mask

BRANCHES = ("attention", "mlp")
MOST = 16  # candidates of an inline branch
# What moves values and computes none: on the way into windows of a grid, and out of them.
MOVES = (
    "view",
    "reshape",
    "permute",
    "transpose",
    "flatten",
    "unflatten",
    "contiguous",
    "pad",
    "__getitem__",
)
# A step whose values have the numbers of the run, and the roles that its inline body may have.
Branch = tuple[Step, list[Any]]


class ResidualBlock:
    """A run of a block that is taken apart into steps, from their ends. Its methods raise
    Unsupported where the forward does more than add branches and call parts."""

    def __init__(self, module: nn.Module, class_of: ClassOf, seen: Observation):
        self.module, self.class_of = module, class_of
        self.seen, self.channels = _channels(seen)
        self.taken: set[int] = set()  # outputs of events that a step has

    def candidates(self) -> Iterator[BlockRoles]:
        """Its steps, with what its inline branches may be."""
        found = self.numbered(self.branches())
        for turn in range(max(len(inlined) or 1 for _, inlined in found)):
            steps = tuple(
                step._replace(inline=inlined[turn % len(inlined)]) if inlined else step
                for step, inlined in found
            )
            rounded, through = any(map(self.rounds, steps)), self.through(steps)
            place, channels = self.seen.place, self.channels
            yield BlockRoles(steps, through, place, rounded=rounded, channels=channels)

    def branches(self) -> list[Branch]:
        """The steps in their order: those that end in a sum, and calls of other parts."""
        seen = self.seen
        if seen.others:
            raise Unsupported("its result has a tensor besides: a hidden state")
        sums = [e for e in seen.events if e.function in SUMS and len(e.inputs) == 2 and not e.part]
        found = [*filter(None, map(self.ending_in, sums))]
        if not found:
            raise NotACandidate("it has no residual")
        for event in seen.events:
            if event.output in self.taken:
                continue
            if isinstance(get_part(self.module, event.part), nn.Module):
                how = self.call(event)
                found.append((Step(event.output, event.inputs[0], body=event.part, **how), []))
            elif origins(seen, seen.result, {event.output}):  # the result was made with it
                raise Unsupported(f"its forward has a step that is none of ours: {event.function}")
        order = [e.output for e in seen.events]
        return sorted(found, key=lambda branch: order.index(branch[0].output))

    def numbered(self, found: list[Branch]) -> list[Branch]:
        """The same with the numbers that a block's steps give their values."""
        if found[-1][0].output != self.seen.result:
            raise Unsupported("its result is not the end of its last branch")
        numbers = {-1: -1, self.seen.first: 0}
        numbers |= {s.output: i + 1 for i, (s, _) in enumerate(found)}
        ends = ("output", "source", "residual")
        if not numbers.keys() >= {getattr(s, end) for s, _ in found for end in ends}:
            raise Unsupported("a branch begins with a value that is none of ours")
        return [
            (step._replace(**{end: numbers[getattr(step, end)] for end in ends}), inlined)
            for step, inlined in found
        ]

    def ending_in(self, event: Event) -> Branch | None:
        """residual + tail(body(norm(source))) that ends in this sum; None where no branch does."""
        seen = self.seen
        for residual, end in (event.inputs, event.inputs[::-1]):
            tail: list[str] = []
            path: list[int] = [event.output]
            moved = False
            while end in seen.made and sum(e.inputs.count(end) for e in seen.events) == 1:
                inner = seen.made[end]
                part: Any = get_part(self.module, inner.part)
                step = Step(event.output, -1, residual, tail=tuple(tail[::-1]))
                if part is not None and level_of(self.class_of(part)) in BRANCHES:
                    path.append(end)
                    how = self.call(inner)
                    step = step._replace(source=inner.inputs[0], body=inner.part, **how)
                    windowed = self.windowed(step, path) if moved else step
                    if windowed is None:
                        break
                    return self.with_norm(windowed, path), []
                if isinstance(part, nn.Linear):
                    found = self.inline(residual, end, path)
                    if found is None:
                        break
                    return self.with_norm(step._replace(source=found[0]), path), found[1]
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

    def windowed(self, step: Step, path: list[int]) -> Step | None:
        """The step with the setting that has the size of the windows that its source is cut into,
        and with what was cut."""
        seen, source = self.seen, step.source
        sizes = [n for n, v in seen.settings.items() if (v, v) == seen.shape(source)[1:-1]]
        while (event := seen.made.get(source)) and not event.part and event.function in MOVES:
            path.append(source)
            source = event.inputs[0]
        return step._replace(window=sizes[0], source=source) if sizes else None

    def with_norm(self, step: Step, path: list[int]) -> Step:
        """The step with the norm before it, where that reads the residual and nobody else reads
        it. What lies on the path is taken."""
        norm = self.seen.made.get(step.source)
        alone = all(e.output in path for e in self.seen.events if step.source in e.inputs)
        if norm is not None and alone and self.is_norm_of(norm, step.residual):
            path.append(norm.output)
            step = step._replace(norm=norm.part, source=step.residual)
        self.taken.update(path)
        return step

    def is_norm_of(self, event: Event, *values: int) -> bool:
        if not event.part or event.inputs[0] not in values:
            return False
        cls = self.class_of(get_part(self.module, event.part))
        return level_of(cls) in ("layer_norm", "rms_norm")

    def inline(self, residual: int, end: int, path: list[int]) -> tuple[int, list[Any]] | None:
        """(source, candidates) of a branch whose last Linear gives the value `end`."""
        seen, begin = self.seen, (residual, self.seen.first)
        normed = {e.output for e in seen.events if self.is_norm_of(e, *begin)}
        sources = origins(seen, end, {*begin, *normed})
        if len(sources) != 1:
            return None
        inside = [end]
        for number in inside:  # grows as we go
            inputs = seen.made[number].inputs if number in seen.made else ()
            inside += [n for n in dict.fromkeys(inputs) if n not in inside and n != sources[0]]
        events = [e for e in seen.events if e.output in inside]
        branch = Observation(events, seen.tensors, seen.parameters, sources[0], end)
        candidates = attention_roles(self.module, branch, whole=False)
        if candidates is None:
            candidates = mlp_roles(self.module, branch, whole=False)
        path += [e.output for e in events]
        return sources[0], list(candidates)[:MOST]

    def call(self, event: Event) -> dict[str, Any]:
        """How the host calls a part, for a Step: "x" stands for the first tensor; a value of the
        block's own argument is context."""

        def read(value: Any) -> Any:
            if isinstance(value, Value):
                if value.number == event.inputs[0]:
                    return "x"
                raise Unsupported(f"{event.part} is called with more than its input")
            if value is None or isinstance(value, (bool, int, float)):
                return value
            raise Unsupported(f"{event.part} is called with a {type(value).__name__}")

        names = arguments_of(type(self.module.get_submodule(event.part)).forward).names
        given = {**dict(enumerate(event.args)), **event.kwargs}
        args, kwargs, context, masks = [], {}, {}, {}
        for name, value in given.items():
            own = [n for n, v in self.seen.extras.items() if v == value]
            held = self.held(value)
            if isinstance(name, int) and not (own or held or context or masks):
                args.append(read(value))
                continue
            name = names[name] if isinstance(name, int) else name
            if own:
                context[name] = own[0]
            elif held and is_mask(name):
                masks[name] = held
            else:
                kwargs[name] = read(value)
        how, context = (tuple(args), tuple(kwargs.items())), tuple(context.items())
        more = {"context": context, "held": tuple(masks.items())}
        return {"arguments": how, "item": event.item, **more}

    def held(self, value: Any) -> str:
        """The tensor of the block's own that this is, perhaps cast; "" for none."""
        number = value.number if isinstance(value, Value) else -1
        while (cast := self.seen.made.get(number)) and cast.function in ("to", "type_as", "type"):
            self.taken.add(number)
            number = cast.inputs[0]
        return self.seen.held.get(number, "")

    def rounds(self, step: Step) -> bool:
        """Whether a part of a step gives what fp32 gives, in any dtype."""
        named = [self.class_of(self.module.get_submodule(n)) for n in (step.norm, step.body) if n]
        rounds = any(getattr(c, "fused_tolerance", 0.0) > 1e-9 for c in named)
        return rounds or getattr(step.inline, "rounded", False)

    def through(self, steps: tuple[Step, ...]) -> tuple[str, ...]:
        """The modules whose forwards the steps stand for, beside the block's own."""
        called = tuple(f"{n}." for s in steps for n in (s.norm, s.body, *s.tail) if n)
        inside = {n: m for n, m in self.module.named_modules() if n}
        apart = {n: m for n, m in inside.items() if not f"{n}.".startswith(called)}
        return tuple(n for n, m in apart.items() if type(m).forward is not nn.Module.forward)


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
