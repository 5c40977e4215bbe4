"""Probabilities that note what a forward decides by them.

A host that nobody read may branch on a probability, so that a proof at one says nothing of another.
In a proof it is a `Rate`: arithmetic gives Rates again, and whatever else is asked of one, a
comparison above all, is noted with its answer. Where another probability gives the same answers,
the same calculation runs on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Place = tuple[int, str]  # of a module among those of Facts, and its setting
Asked = dict[Any, Any]  # what was asked of rates -> the answer
# Numbers that a proof tries before others with the same answers need none: at 0.5 a probability is
# that of the opposite, at another it is not.
TRIED = 2


class _Term(NamedTuple):
    """A method of float, and what it was called on: Terms, Places and numbers."""

    method: str
    operands: tuple[Any, ...]

    def value(self, rates: dict[Place, float]) -> Any:
        found = (o.value(rates) if isinstance(o, _Term) else rates.get(o, o) for o in self.operands)
        return getattr(float, self.method)(*found)


class Rate(float):
    """A probability of a copy, or a number that follows from one."""

    term: Any
    asked: Asked

    @classmethod
    def of(cls, value: float, term: Any, asked: Asked) -> Rate:
        made = cls.__new__(cls, value)
        made.term, made.asked = term, asked
        return made


def _noting(name: str) -> Any:
    own = getattr(float, name)

    def method(self: Rate, *others: Any) -> Any:
        found = own(self, *others)
        if found is NotImplemented:
            return found
        term = _Term(name, tuple(o.term if isinstance(o, Rate) else o for o in (self, *others)))
        if isinstance(found, float) and name != "__float__":
            return Rate.of(found, term, self.asked)
        self.asked[term] = found
        return found

    return method


_BINARY = "add sub mul truediv floordiv mod divmod pow"
_OTHER = "lt le eq ne gt ge abs neg pos bool int float trunc floor ceil round hash str repr format"
for _name in (*_BINARY.split(), *(f"r{n}" for n in _BINARY.split()), *_OTHER.split()):
    setattr(Rate, f"__{_name}__", _noting(f"__{_name}__"))
for _name in ("is_integer", "as_integer_ratio", "hex"):
    setattr(Rate, _name, _noting(_name))


def answers_hold(asked: Asked, rates: dict[Place, float]) -> bool:
    """Whether these rates give the same answers."""
    try:
        return all(term.value(rates) == answer for term, answer in asked.items())
    except ArithmeticError:
        return False
