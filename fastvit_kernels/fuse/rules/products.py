"""Linear layers by other names, as aten.linear, for the rules behind.

x @ w.t() [+ b], x @ w, of a parameter        ->  linear(x, w, b), linear(x, w.t())
addmm(b, x, w.t())                            ->  linear(x, w, b)
einsum("btk,nk->btn", x, w)                   ->  linear(x, w)

And the products of attention in one order of axes:

einsum("bthd,bshd->bhts", q, k)               ->  einsum("bhtd,bhsd->bhts", q and k turned)
einsum("bhts,bshd->bthd", w, v)               ->  einsum("bhts,bhsd->bhtd", w, v turned) turned
"""

from __future__ import annotations

from torch.fx import Node

from ..graph import Decline, Graph, aten, have_same_strides, is_float, need
from ..views import bound, eq, is_tensor, op, same_map, shape, source, val, view, view_base


def product_of_weight(g: Graph, n: Node) -> None:
    """matmul, mm: the weight is (K, N)."""
    x, columns = n.args
    check(x, columns)
    as_linear(g, n, x, columns)  # type: ignore[arg-type]


def addmm(g: Graph, n: Node) -> None:
    b = bound(n)
    x, columns = b["mat1"], b["mat2"]
    check(x, columns)
    need(b["alpha"] == 1 and b["beta"] == 1, "a scaled addmm")
    need(eq(shape(b["self"]), shape(columns)[1:]), "a bias by rows")
    emit_linear(g, n, [n], x, columns, b["self"])


def einsum(g: Graph, n: Node) -> None:
    b = bound(n)
    need(len(b["tensors"]) == 2 and b["path"] is None, "an einsum of several factors")
    x, weight = b["tensors"]
    check(x, weight)
    turned = is_by_weight(b["equation"].replace(" ", ""))
    columns = g.emit(n, aten.t.default, weight) if turned else weight
    emit_linear(g, n, [n], x, columns, None)


def is_by_weight(equation: str) -> bool:
    """Whether the weight of "...k,nk->...n" has its inputs last; Decline where it is none."""
    sides, _, result = equation.partition("->")
    rows, _, letters = sides.partition(",")
    axes, inner = rows.removeprefix("...")[:-1], rows[-1:]
    named = len(letters) == 2 and letters.isalpha() and inner in letters
    distinct = (axes + letters).isalnum() and len(set(axes + letters)) == len(axes) + 2
    need(named and distinct, "an einsum that is no linear layer")
    outer = letters.replace(inner, "")
    need(result == rows[:-1] + outer, "an einsum that is no linear layer")
    return letters[1] == inner


def einsum_by_heads(g: Graph, n: Node) -> None:
    """Heads before tokens in all operands, as `written_attention` reads them."""
    b = bound(n)
    need(len(b["tensors"]) == 2 and b["path"] is None, "an einsum of several factors")
    turned = in_order(spelled_out(b["equation"].replace(" ", ""), val(b["tensors"][0]).ndim))
    need(turned is not None, "an einsum in order, or no attention")
    swapped, axes, result, equation = turned
    operands = b["tensors"][::-1] if swapped else b["tensors"]
    need(all(map(is_float, operands)), "a product of no floating-point tensors")
    given = [
        x if order == sorted(order) else g.emit(n, aten.permute.default, x, order)
        for x, order in zip(operands, axes, strict=True)
    ]
    gone = g.absorb([], n)
    new = g.emit(n, aten.einsum.default, equation, given)
    if result != sorted(result):
        new = g.emit(n, aten.permute.default, new, result)
    g.check_alike(new, n)
    need(have_same_strides(val(new), val(n)), "an einsum that lies in another order")
    g.replace(n, new, gone, "einsum by heads")


def spelled_out(equation: str, rank: int) -> str:
    """Letters for the dots of "...qhd,...khd->...hqk", the first operand of this rank."""
    first = equation.partition(",")[0]
    letters = [x for x in "ABCDEFGH" if x not in equation][: rank - len(first) + 3]
    return equation.replace("...", "".join(letters)) if first[:3] == "..." else equation


def in_order(given: str) -> tuple[bool, list[list[int]], list[int], str] | None:
    """Whether operands change places, the order of each one's axes and of the result's, and the
    equation in between; None where it is that already, or no product by heads."""
    sides, arrow, out = given.partition("->")
    parts = sides.split(",")
    letters = (*parts, out)
    if (
        not arrow
        or len(parts) != 2
        or not all(x.isalpha() and len(set(x)) == len(x) for x in letters)
    ):
        return None
    swapped = out[-1:] in set(parts[0]) - set(parts[1])
    left, right = parts[::-1] if swapped else parts
    heads = [x for x in out if x in left and x in right]
    rows, columns = (
        [x for x in out if x in a and x not in b] for a, b in ((left, right), (right, left))
    )
    inner = [x for x in left if x in right and x not in out]
    sizes = len(heads) + 2
    if (
        not heads
        or not len(rows) == len(columns) == len(inner) == 1
        or {*map(len, letters)} != {sizes}
    ):
        return None
    lead, t, s, d = "".join(heads), rows[0], columns[0], inner[0]
    wanted = (lead + t + d, lead + (s + d if right[-1] == d else d + s), lead + t + s)
    if (left, right, out) == wanted:
        return None
    axes = [[a.index(x) for x in b] for a, b in ((left, wanted[0]), (right, wanted[1]))]
    return swapped, axes, [wanted[2].index(x) for x in out], f"{wanted[0]},{wanted[1]}->{wanted[2]}"


def check(x: object, weight: object) -> None:
    """Decline unless rows of x meet a matrix that is a parameter's, or an input's."""
    need(is_float(x) and is_float(weight), "a product of no floating-point tensors")
    need(val(weight).ndim == 2 and val(x).ndim >= 2, "a product of no matrix")
    need(source(weight, []).op in ("placeholder", "get_attr"), "a product of no parameter")  # type: ignore[arg-type]


def as_linear(g: Graph, n: Node, x: Node, columns: Node) -> None:
    """With the bias behind the product, where there is one."""
    user = g.only_reader(n)
    if op(user) == "add" and len(user.args) == 2 and not user.kwargs:  # type: ignore[union-attr]
        bias = user.args[0] if user.args[1] is n else user.args[1]  # type: ignore[union-attr]
        try:
            with g.attempt():
                need(is_tensor(bias) and eq(shape(bias), shape(columns)[1:]), "no bias")
                need(val(bias).dtype == val(columns).dtype, "a bias of another dtype")  # type: ignore[arg-type]
                return emit_linear(g, user, [n], x, columns, bias)  # type: ignore[arg-type]
        except Decline:
            pass
    emit_linear(g, n, [], x, columns, None)


def emit_linear(
    g: Graph, root: Node, inner: list[Node], x: Node, columns: Node, bias: Node | None
) -> None:
    rows = columns.args[0] if op(columns) in ("t", "transpose", "permute", "numpy_T") else None
    is_turned = (
        isinstance(rows, Node)
        and view_base(columns) is rows
        and val(rows).ndim == 2
        and same_map(view(columns), view(rows).turned(1, 0))
    )
    weight = rows if is_turned else g.emit(root, aten.t.default, columns)
    gone = g.absorb([columns, *inner] if is_turned else inner, root)
    new = g.emit(root, aten.linear.default, x, weight, bias, like=root)
    g.replace(root, new, gone, "product as linear")
