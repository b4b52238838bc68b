"""Patterns of graphs: gated activations and RMS norms, as one op or decomposed into aten ops.

`NORMS` and `GATES` hold ops of other packages, which register them: nothing here imports these packages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized

_aten, _prims = torch.ops.aten, torch.ops.prims
_CASTS = (_prims.convert_element_type.default, _aten._to_copy.default)  # noqa: SLF001  the op's name
_ADD, _MUL = (_aten.add.Tensor, _aten.add.Scalar), (_aten.mul.Tensor, _aten.mul.Scalar)
_SQRT_HALF, _SQRT_2_OVER_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


NORMS: dict[Any, tuple[str, str | None, str, str]] = {}
"""RMS norms over the last axis, by overload: how its schema calls input, residual, weight and epsilon. One that adds a
residual has two results, the norm and the sum. Its other arguments must have their defaults, which change nothing."""

GATES: dict[Any, tuple[str, Mapping[str, str]]] = {}
"""Ops that write a gated activation of the halves of one tensor to another tensor: as the first results of `curve`."""


class Left(Exception):
    """A group of layers that does not change. The message says why."""


class Norm(NamedTuple):
    """An RMS norm over the last axis, as nodes.

    Attributes
    ----------
    node : Node
        What computes the norm.
    x, weight : Node
        Its input and weight; the weight may be None.
    eps : float
        Anything else if it is an input of the graph.
    residual : Node or None
        What the norm itself adds to x first.
    totals : tuple of Node
        The results that are this sum.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: Any
    residual: fx.Node | None = None
    totals: tuple[fx.Node, ...] = ()


def curve(node: Any) -> tuple[str, Mapping[str, str], fx.Node] | None:
    """Return an activation: the first word of its op, the op's further fields, and its input."""
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    args = node.args
    if node.target is _aten.silu.default:
        return "silu", {}, args[0]  # type: ignore[return-value]
    if node.target is _aten.gelu.default:
        form = {"none": "erf", "tanh": "tanh"}[node.kwargs.get("approximate", "none")]  # type: ignore[index]
        return "gelu", {"approximation": form}, args[0]  # type: ignore[return-value]
    if node.target is _aten.div.Tensor:
        x = _uncast(args[0])
        return ("silu", {}, x) if _is(args[1], _ADD, (_exp_of_negative, x), 1) else None
    for one, other in (args[:2], args[1::-1]) if node.target in _MUL and len(args) > 1 else ():
        x = _uncast(one)
        if _is(other, (_aten.sigmoid.default,), x):
            return "silu", {}, x
        half = _half_of(one)
        if half is not None and _is(other, _ADD, (_erf, half), 1):
            return "gelu", {"approximation": "erf"}, half
        if half is not None and _is(other, _ADD, (_tanh, half), 1):
            return "gelu", {"approximation": "tanh"}, half
    return None


def _half_of(node: Any) -> fx.Node | None:
    """Return x of 0.5 * x."""
    node = _uncast(node)
    if isinstance(node, fx.Node) and node.target in _MUL and node.args[1] == 0.5:
        found: fx.Node = _uncast(node.args[0])
        return found
    return None


def _exp_of_negative(node: Any, x: fx.Node) -> bool:
    """Whether this is exp(-x)."""
    node = _uncast(node)
    return _is(node, (_aten.exp.default,), (lambda inner, x: _is(inner, (_aten.neg.default,), x), x))


def _erf(node: Any, x: fx.Node) -> bool:
    """Whether this is erf(x * sqrt(1 / 2))."""
    return _is(node, (_aten.erf.default,), (lambda inner, x: _is(inner, _MUL, x, _SQRT_HALF), x))


def _tanh(node: Any, x: fx.Node) -> bool:
    """Whether this is tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))."""

    def cube(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _MUL, (square, x), x) or _is(inner, (_aten.pow.Tensor_Scalar,), x, 3)

    def square(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _MUL, x, x)

    def polynomial(inner: Any, x: fx.Node) -> bool:
        return _is(inner, _ADD, x, (lambda term, x: _is(term, _MUL, (cube, x), 0.044715), x))

    return _is(node, (_aten.tanh.default,), (lambda inner, x: _is(inner, _MUL, (polynomial, x), _SQRT_2_OVER_PI), x))


def _is(node: Any, targets: tuple[Any, ...], *wanted: Any) -> bool:
    """Whether a node, apart from casts, calls one of the targets with these arguments.

    A wanted argument is a node, a number, or a pair of a pattern and the node that it is about.
    """
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.target not in targets or len(node.args) != len(wanted) or node.kwargs:
        return False
    for given, want in zip(node.args, wanted, strict=True):
        if isinstance(want, tuple):
            pattern, about = want
            fits = bool(pattern(given, about))
        elif isinstance(want, fx.Node):
            fits = _uncast(given) is want
        else:
            fits = isinstance(given, int | float) and math.isclose(given, want, rel_tol=1e-12)
        if not fits:
            return False
    return True


def rms_norm(node: fx.Node) -> Norm | None:
    """Return the RMS norm over the last axis whose result a node is, or None for another node.

    Raises
    ------
    Left
        For a norm of `NORMS` with further arguments.
    """
    inner = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else node
    if isinstance(inner, fx.Node) and inner.target in (_aten.rms_norm.default, _aten._fused_rms_norm.default):  # noqa: SLF001
        x, shape, weight, eps = (*inner.args, None, None)[:4]
        return Norm(inner, x, weight, eps) if len(shape) == 1 else None  # type: ignore[arg-type]
    if isinstance(inner, fx.Node) and inner.target in NORMS:
        return _registered_norm(inner)
    node = _uncast(node)
    if not isinstance(node, fx.Node) or node.target is not _aten.mul.Tensor:
        return None
    bare = _scaled_by_rsqrt(node)
    if bare is not None:
        return Norm(node, bare[0], None, bare[1])
    for one, weight in (node.args[:2], node.args[1::-1]):
        found = _scaled_by_rsqrt(_uncast(one))
        if found is not None and isinstance(weight, fx.Node):
            return Norm(node, found[0], _uncast(weight), found[1])
    return None


def _registered_norm(node: fx.Node) -> Norm:
    """Return a norm of `NORMS`."""
    x, residual, weight, eps = NORMS[node.target]
    given = arguments(node)
    others = [name for name, value in given.items() if value is not None and name not in NORMS[node.target]]
    if others:
        raise Left(f"the norm {node.name} has {' and '.join(others)}")
    totals = tuple(user for user in node.users if user.target is operator.getitem and user.args[1] == 1)
    added = given[residual] if residual is not None else None
    return Norm(node, given[x], given.get(weight), given[eps], added, totals)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an overload by name; those that are left out are missing."""
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]  # noqa: SLF001
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def gated(node: fx.Node) -> tuple[str, Mapping[str, str], tuple[fx.Node | None, ...]] | None:
    """Return a gated activation: as `curve`, but in place of its input gate, up and gate_up, as the ops take them.

    Raises
    ------
    Left
        If gate and up differ in dtype or shape.
    """
    if node.target is operator.getitem and node.args[1] == 1:
        return _written_gate(node.args[0])
    if node.target is not _aten.mul.Tensor:
        return None
    for act, up in (node.args[:2], node.args[1::-1]):
        found = curve(act)
        if found is not None and isinstance(up, fx.Node):
            break
    else:
        return None
    name, fields, gate = found
    if not alike(node, gate) or not alike(gate, up):
        raise Left(f"gate and up of {node.name} differ in dtype or shape")
    joined = whole(gate, up)
    return name, fields, (gate, up, None) if joined is None else (None, None, joined)


def _written_gate(node: Any) -> tuple[str, Mapping[str, str], tuple[fx.Node | None, ...]] | None:
    """Return the gated activation that an op of `GATES` writes, in the functional form of its call."""
    if not isinstance(node, fx.Node) or node.target is not auto_functionalized or node.args[0] not in GATES:
        return None
    read = [each.name for each in node.args[0]._schema.arguments if not each.is_write]  # type: ignore[union-attr]  # noqa: SLF001
    return (*GATES[node.args[0]], (None, None, node.kwargs[read[0]])) if len(read) == 1 else None  # type: ignore[return-value]


def _scaled_by_rsqrt(node: Any) -> tuple[fx.Node, Any] | None:
    """Return x and eps of x * rsqrt(mean(x^2) + eps)."""
    if not isinstance(node, fx.Node) or node.target is not _aten.mul.Tensor:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        x, root = _uncast(one), _uncast(other)
        if not isinstance(x, fx.Node) or not isinstance(root, fx.Node) or root.target is not _aten.rsqrt.default:
            continue
        total = root.args[0]
        if not isinstance(total, fx.Node) or total.target not in _ADD or total.kwargs:
            continue
        mean, eps = total.args
        if not isinstance(mean, fx.Node) or mean.target is not _aten.mean.dim or len(mean.args) < 3:
            continue
        square, axes, keeps = mean.args[:3]
        squared = _is(square, (_aten.pow.Tensor_Scalar,), x, 2) or _is(square, _MUL, x, x)
        wide = fake_of(square).dtype is torch.float32  # type: ignore[arg-type]
        if squared and wide and keeps and axes in ([-1], [fake_of(x).dim() - 1]):
            return x, eps
    return None


def _uncast(node: Any) -> Any:
    """Return a node without casts between floating types, which ops that round once leave out."""
    while isinstance(node, fx.Node) and node.target in _CASTS:
        given = node.args[0]
        if not isinstance(given, fx.Node) or not fake_of(given).is_floating_point():
            return node
        if not fake_of(node).is_floating_point() or fake_of(node).device != fake_of(given).device:
            return node
        node = given
    return node


def whole(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """Return the tensor whose first half is the gate and whose second half is the up, or None."""
    parts = (gate, up)
    if not isinstance(fake_of(gate).shape[-1], int):
        return None
    if all(part.target is operator.getitem for part in parts) and gate.args[0] is up.args[0]:
        split: Any = gate.args[0]
        whole, size, *axis = split.args
        fits = (gate.args[1], up.args[1]) == (0, 1) and split.target in (
            _aten.split.Tensor,
            _aten.split_with_sizes.default,
        )
        fits = fits and size in (fake_of(gate).shape[-1], [fake_of(gate).shape[-1]] * 2)
    elif all(part.target is _aten.slice.Tensor for part in parts) and gate.args[0] is up.args[0]:
        whole, *axis = gate.args[:2]
        width = fake_of(gate).shape[-1]
        fits = gate.args[1:4] in ((axis[0], 0, width), (axis[0], None, width)) and up.args[1:3] == (axis[0], width)
    else:
        return None
    last = fake_of(whole).dim() - 1
    return (
        whole if fits and axis in ([-1], [last]) and fake_of(whole).shape[-1] == 2 * fake_of(gate).shape[-1] else None
    )


def alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have the same dtype and shape, whatever the symbolic sizes are."""
    one, two = fake_of(node), fake_of(other)
    return one.dtype is two.dtype and same_sizes(one.shape, two.shape)


def same_sizes(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are equal, whatever the symbolic ones are. To compare them would make guards; vLLM drops these."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow, so not with the module

    return len(some) == len(others) and all(statically_known_true(a == b) for a, b in zip(some, others, strict=True))


def fake_of(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node.

    Raises
    ------
    Left
        If it has none.
    """
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor):
        raise Left(f"{node.name} has no fake tensor in its meta")
    return found
