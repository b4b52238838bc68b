"""`fuse_graph`: fewer launches in any graph of aten ops that has int8 layers, whatever the model's source looks like.

The graph may come from `torch.export`, from AOTAutograd, or from Inductor's passes after it: activations and norms are
found whole or decomposed. `graph_pass` and `fused_backend` bring the pass into `torch.compile`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import fx

from skuda.registry.elements import WHOLE_CODES
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.formats import CODES_OF
from skuda.torch.fuse import patterns
from skuda.torch.fuse.fuse import Fusion
from skuda.torch.fuse.patterns import Left, fake_of
from skuda.torch.ops.dtypes import element_of

Bits = Literal["eager", "fused"]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_aten, _skuda = torch.ops.aten, torch.ops.skuda
_LINEAR, _STATIC = _skuda.quantized_linear.default, _skuda.quantize_per_tensor.default
_RANGE = _skuda.dynamic_range.default
_BOUNDS = {(codes["q_min"], codes["q_max"]): codes for codes in CODES_OF.values()}
"""The codes of layers with dynamic scales, by their range."""
NORM, NORM_OF_SUM = "the norm writes codes", "the norm adds the residual and writes codes"
GATED = "the gated activation writes codes"


class _Group(NamedTuple):
    """Nodes that quantize the same input in the same way.

    Attributes
    ----------
    input : Node
        What they quantize.
    nodes : list of Node
        Layers with dynamic scales, which quantize their input themselves, or calls of `quantize_per_tensor`.
    fields : dict
        The fields of the codes, for an op that writes them.
    scale : tuple of Node
        Scale and zero point if they are given.
    """

    input: fx.Node
    nodes: list[fx.Node]
    fields: Mapping[str, Any]
    scale: tuple[Any, ...] = ()

    @property
    def is_dynamic(self) -> bool:
        """Whether each row gets its own scale."""
        return not self.scale


class _Coded(NamedTuple):
    """The results of an op that writes codes, as nodes (codes, dynamic scales, the rest), and what it does."""

    results: list[fx.Node]
    how: str


def fuse_graph(graph_module: fx.GraphModule, *, bits: Bits = "eager") -> Fusion:
    """Fuse what surrounds the int8 layers of a graph, in place: calls of ``torch.ops.skuda.quantized_linear``.

    - Layers with the same input share one quantization. The bits stay.
    - With ``bits="fused"``, an RMS norm whose result only such layers use writes codes (`rms_norm_quantize`), and adds
      the residual before. So does a gated activation, ``silu(a) * b`` or ``gelu(a) * b``, of two tensors or of the
      halves of one (`silu_mul_quantize`, `gelu_mul_quantize`). These ops round once where torch rounds several times.
      Where a ``quantize_per_tensor`` stands behind the norm or the activation, they write its static codes.

    Gates and ups of separate layers stay two products: weights are inputs of a graph, so joining them would copy them
    in every call. `fuse_` joins them once.

    Parameters
    ----------
    graph_module : GraphModule
        A functional graph of aten ops, whose nodes have fake tensors in ``meta["val"]``. Sizes may be symbolic.
    bits : str
        ``eager`` keeps the bits of the graph. ``fused`` gives those of the fused ops.

    Returns
    -------
    Fusion
        What changed and what did not, by the names of the nodes of the layers. For other layers than
        ``quantized_linear``, by the names of the nodes that quantize their inputs.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type.
    """
    if not isinstance(graph_module, fx.GraphModule):
        raise InvalidProblem("fuse_graph", "graph_module", shown(graph_module), "be a torch.fx.GraphModule")
    _check_bits("fuse_graph", bits)
    found = fuse(graph_module.graph, bits)
    if found.fused:
        graph_module.recompile()
    return found


def fuse(graph: fx.Graph, bits: Bits, *, gates: bool = True) -> Fusion:
    """Change a graph as `fuse_graph` does, without compiling its module again. Without `gates`, activations stay."""
    fused: dict[str, str] = {}
    left: dict[str, str] = {}
    for group in _groups(graph):
        names = ", ".join(node.name for node in group.nodes)
        try:
            fused[names] = _fuse(group, bits, gates)
        except Left as reason:
            left[names] = str(reason)
    if fused:
        graph.eliminate_dead_code()
        graph.lint()
    return Fusion(fused, left)


def _groups(graph: fx.Graph) -> list[_Group]:
    """Return what quantizes, in the order of the graph."""
    found: dict[Any, _Group] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (_LINEAR, _STATIC, _RANGE):
            continue
        given = patterns.arguments(node)
        if node.target is _LINEAR:
            more = {"nonfinite": given["nonfinite"]} if given.get("nonfinite") is not None else {}
            codes = CODES_OF[8] if given.get("q_min") is None else _BOUNDS.get((given["q_min"], given["q_max"]), {})
            group = _Group(given["activation"], [], {**codes, **more})
        elif node.target is _STATIC:
            fields = {name: given[name] for name in CODES_OF[8] if given.get(name) is not None}
            group = _Group(given["input"], [], {"scaling": "static", **fields}, (given["scale"], given["zero_point"]))
        elif given.get("mode") == "asymmetric":
            group = _Group(given["input"], [], {})
        else:
            continue
        key = (group.input, node.target, group.scale, *group.fields.items())
        found.setdefault(key, group).nodes.append(node)
    return list(found.values())


def _check(group: _Group) -> None:
    """Raise `Left` if codes that another op writes could not take the place of those of a group."""
    for node in group.nodes:
        given, fake = patterns.arguments(node), fake_of(group.input)
        if node.target is _RANGE:
            raise Left("its rows have zero points, which no norm or gated activation writes")
        if group.is_dynamic and "q_max" not in group.fields:
            raise Left(f"{node.name} has another range of codes than {' and '.join(f'{a}..{b}' for a, b in _BOUNDS)}")
        if fake.dtype not in _DTYPES or given.get("output_element") == "f64":
            raise Left(f"{node.name} computes in f64")
        if group.fields.get("output_element") not in WHOLE_CODES:
            raise Left(f"{node.name} has codes of another element than {' and '.join(WHOLE_CODES)}")


def _fuse(group: _Group, bits: Bits, gates: bool) -> str:  # noqa: FBT001
    """Let what quantizes the same input take codes. Return how."""
    _check(group)
    input, nodes, *_ = group
    why = "only with bits='fused' may a norm or gated activation write its codes"
    if bits == "fused":
        try:
            coded = _norm(group) or (_gated(group) if gates else None)
            why = "its input is no known form of a norm" + (" or gated activation" if gates else "; activations stay")
        except Left as reason:
            coded, why = None, str(reason)
        if coded is not None:
            return _rewired(group, coded)
    if not group.is_dynamic:
        raise Left(why)
    if len(nodes) == 1:
        raise Left(f"no other layer has its input, and {why}")
    if group.fields.get("nonfinite", "ignore") != "ignore":
        raise Left(f"layers that propagate NaN quantize their input themselves, and {why}")
    codes = {name: group.fields[name] for name in CODES_OF[8]}
    coded = _called(nodes[0], _RANGE, (input,), codes, "one quantization of the input for all")
    return _rewired(group, coded) + (f" ({why})" if bits == "fused" else "")


def _rewired(group: _Group, coded: _Coded) -> str:
    """Replace layers by products of codes, and other nodes by codes."""
    for node in group.nodes:
        made = _product(node, group.fields, *coded.results[:2]) if group.is_dynamic else coded.results[0]
        node.replace_all_uses_with(made)
        node.graph.erase_node(node)
    return coded.how


def _product(layer: fx.Node, written: Mapping[str, Any], codes: fx.Node, scale: fx.Node) -> fx.Node:
    """Insert the product of a layer, for codes with a scale per row, and the fields with which they were written."""
    given = patterns.arguments(layer)
    element = given.get("output_element") or str(element_of(fake_of(given["activation"]).dtype))
    names = ("weight_scale", "weight_zero_point", "bias", "output_scale", "output_zero_point")
    tensors = codes, given["weight_q"], scale, None, *(given.get(name) for name in names)
    fields = {"output_element": element, "act_scale_scope": "token", "activation_element": written["output_element"]}
    fields |= {name: given[name] for name in ("epilogue", "weight_element") if given.get(name) is not None}
    with layer.graph.inserting_before(layer):
        made = layer.graph.call_function(_skuda.scaled_linear.default, tensors, fields)
    made.meta.update({key: value for key, value in layer.meta.items() if key != "eager_input_vals"})
    return made


def _norm(group: _Group) -> _Coded | None:
    """Let an RMS norm write codes, or return None for another input.

    Raises
    ------
    Left
        If it is such a norm, but no op computes the same.
    """
    found = patterns.rms_norm(group.input)
    if found is None:
        return None
    _check_norm(found, group)
    x, weight = found.x, found.weight
    own = found.residual is not None
    terms, totals, at = ((x, found.residual), found.totals, found.node) if own else (_sum_before(x), (x,), x.next)
    order = {each: number for number, each in enumerate(x.graph.nodes)}
    early = all(order[each] < order[at] for each in (weight, *group.scale) if isinstance(each, fx.Node))
    if own and not early:
        raise Left(f"the norm {group.input.name} stands before the scale of its codes")
    fields, op = {"eps": found.eps, **group.fields}, _skuda.rms_norm_quantize.default
    if terms is None or not early:
        return _called(group.nodes[0], op, (x, None, weight, *group.scale), fields, NORM)
    coded = _called(at, op, (*terms, weight, *group.scale), fields, NORM_OF_SUM)
    for total in totals:
        total.replace_all_uses_with(coded.results[-1])
    return coded


def _check_norm(norm: patterns.Norm, group: _Group) -> None:
    """Raise `Left` unless the op that writes codes computes a norm."""
    name, x = group.input.name, fake_of(norm.x)
    if not isinstance(norm.eps, float):
        raise Left("the norm's eps is an input of the graph: dynamic=True makes one of every number; leave it out")
    _only_used_by(group.input, group.nodes)
    if norm.node is not group.input:
        _only_used_by(norm.node, [group.input, *norm.totals])
    if x.dtype is not fake_of(group.input).dtype:
        raise Left(f"the norm {name} changes the dtype")
    weight = None if norm.weight is None else fake_of(norm.weight)
    if weight is not None and (weight.dtype is not x.dtype or not patterns.same_sizes(weight.shape, x.shape[-1:])):
        raise Left(f"the weight of the norm {name} has another dtype or shape than its columns")
    if norm.residual is not None and not patterns.alike(norm.x, norm.residual):
        raise Left(f"the residual of the norm {name} has another dtype or shape than its input")


def _sum_before(x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the terms of a sum of two tensors alike, or None."""
    if x.target is not _aten.add.Tensor or x.kwargs or len(x.args) != 2:
        return None
    one, other = x.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    return (one, other) if patterns.alike(one, x) and patterns.alike(other, x) else None


def _gated(group: _Group) -> _Coded | None:
    """Let a gated activation write codes, or return None for another input; errors as `_norm`."""
    found = patterns.gated(group.input)
    if found is None:
        return None
    name, fields, tensors = found
    _only_used_by(group.input, group.nodes)
    op = getattr(_skuda, f"{name}_mul_quantize").default
    return _called(group.nodes[0], op, (*tensors, *group.scale), {**fields, **group.fields}, GATED)


def _only_used_by(node: fx.Node, known: list[fx.Node]) -> None:
    others = [user.name for user in node.users if user not in known]
    if others:
        raise Left(f"{node.name} is also used by {', '.join(others)}")


def _called(at: fx.Node, op: Any, tensors: tuple[Any, ...], fields: Mapping[str, Any], how: str) -> _Coded:
    """Insert a call of an op that writes codes."""
    values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in tensors]
    fake: Any = next(value for value in values if value is not None)
    try:
        with fake.fake_mode:
            results = op(*values, **fields)
    except InvalidProblem as error:
        raise Left(str(error)) from None
    with at.graph.inserting_before(at):
        made = at.graph.call_function(op, tensors, dict(fields))
        items = [at.graph.call_function(operator.getitem, (made, number)) for number in range(len(results))]
    for node, value in zip((made, *items), (results, *results), strict=True):
        node.meta["val"] = value
    return _Coded(items, how)


def _check_bits(subject: str, bits: object) -> None:
    if bits not in get_args(Bits):
        raise InvalidProblem(subject, "bits", shown(bits), f"be one of {', '.join(get_args(Bits))}")


def graph_pass(*, bits: Bits = "eager") -> Any:
    """Return `fuse_graph` as a pass of Inductor. Its ``reports`` has one `Fusion` for each graph that is not cached.

    ``torch.compile(model, options={"post_grad_custom_pre_pass": graph_pass()})`` fuses what it compiles.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`. ``eager`` keeps the bits that Inductor gives without the pass.

    Raises
    ------
    InvalidProblem
        For another value of `bits`.
    """
    _check_bits("graph_pass", bits)
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # importing it takes long

    class Pass(CustomGraphPass):
        def __init__(self) -> None:
            self.reports: list[Fusion] = []

        def __call__(self, graph: fx.Graph) -> None:
            assert graph.owning_module is not None
            self.reports.append(fuse_graph(graph.owning_module, bits=bits))

        def uuid(self) -> bytes:  # part of the key of Inductor's cache
            return bytes(get_hash_for_files((__file__, patterns.__file__), bits))

    return Pass()


class FusedBackend:
    """A backend of `torch.compile` that runs a fused graph as it is, without Inductor.

    Graphs that record gradients run unchanged.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`.

    Attributes
    ----------
    reports : list of Fusion
        One for each graph that was compiled.
    """

    def __init__(self, bits: Bits) -> None:
        self.bits = bits
        self.reports: list[Fusion] = []

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile a graph of Dynamo."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def unchanged(made: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(made.forward)

        def fused(made: fx.GraphModule, _: Any) -> Any:
            self.reports.append(fuse_graph(made, bits=self.bits))
            return make_boxed_func(made.forward)

        backend = aot_autograd(fw_compiler=unchanged, bw_compiler=unchanged, inference_compiler=fused)
        found: Callable[..., Any] = backend(graph_module, example_inputs)
        return found


def fused_backend(*, bits: Bits = "eager") -> FusedBackend:
    """Return a backend for ``torch.compile(model, backend=fused_backend())``: aten ops as in eager mode, fused.

    Parameters
    ----------
    bits : str
        As in `fuse_graph`. ``eager`` gives the bits of the uncompiled model.

    Raises
    ------
    InvalidProblem
        For another value of `bits`.
    """
    _check_bits("fused_backend", bits)
    return FusedBackend(bits)
