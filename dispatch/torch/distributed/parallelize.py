"""`parallelize_`: splits the int8 layers of a model over the ranks of a group."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

from torch import nn

from skuda.dispatch.shard.cost import Traffic
from skuda.dispatch.shard.group import Group, GroupMismatch, differing
from skuda.dispatch.shard.plan import compare
from skuda.dispatch.shard.shards import NVLINK, Link, Shards, split
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.distributed.digest import digest
from skuda.torch.distributed.group import TorchGroup
from skuda.torch.distributed.sharded_linear import ColumnLinear, RowLinear, ShardedLinear
from skuda.torch.fuse.fused_modules import Fused, FusedAttention, FusedGatedMLP
from skuda.torch.linear.dequantized_weight import CodedLayer
from skuda.torch.linear.int8_linear import Int8Linear, check_split, splits
from skuda.torch.linear.joined import Part, is_joined
from skuda.torch.linear.split import check_parts
from skuda.torch.models.replaceable_layers import check_count, check_model
from skuda.torch.models.source import Forward, NotProven

_QKV, _O = ("q_proj", "k_proj", "v_proj"), "o_proj"
_GATE_UP, _DOWN = ("gate_proj", "up_proj"), "down_proj"
_UNIT = 16
_READS = frozenset(
    {*_QKV, _O, "q_norm", "k_norm", "head_dim", "scaling", "attention_dropout", "training", "layer_idx", "config"}
    | {"sliding_window", "is_causal", "layer_type"}
)
"""Attributes that an attention may read: none that counts heads. `num_key_value_groups` is equal on all ranks."""
_HEADS = "(*input_shape, -1, self.head_dim)"
_GATED = (
    "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
    "self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))",
)
_ELEMENTWISE = ("torch.nn.modules.activation", "transformers.activations")


@dataclass(frozen=True)
class Parallelization:
    """The report of `parallelize_`.

    Attributes
    ----------
    converted : mapping of str to str
        How each layer is split, by its name.
    left : tuple of str
        Int8 layers that are whole on every rank.
    """

    converted: Mapping[str, str]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{name}: {how}" for name, how in self.converted.items()]
        return "\n".join([*lines, *(f"{name}: whole on every rank" for name in self.left)])


class _Cut(NamedTuple):
    """The split of one layer, with its name."""

    name: str
    kind: type[ColumnLinear | RowLinear]
    shards: Shards
    parts: tuple[tuple[int, ...], ...] | None = None


def parallelize_(
    model: nn.Module,
    group: Any = None,
    plan: Mapping[str, str] | None = None,
    *,
    rows: int | None = None,
    lm_head: bool = False,
    chunks: int | None = None,
    link: Link = NVLINK,
) -> Parallelization:
    """Split the int8 layers of a model over the ranks of a group, in place. Every rank calls this.

    Without a plan, attentions with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` are split by heads; heads of keys
    and values stay with their queries. Gated MLPs with ``gate_proj``, ``up_proj`` and ``down_proj`` are split by inner
    channels. Neither needs to divide evenly. The source of ``forward`` must show that this is right.

    Layers of 4-bit weights are split at multiples of 16 output channels, or of 128 inputs; inner channels beside such
    a layer at multiples of 128. An ``o_proj`` whose heads begin elsewhere is split along its outputs.

    The layers give the same bits on any number of ranks. The modules between them may not: on CPUs, torch's functions
    such as SiLU may round the last elements of a tensor differently from the others.

    The ranks compare their int8 layers first, because ranks with other weights would compute a mixture of models. A
    model is split once; with a plan, other layers can follow later.

    Parameters
    ----------
    model : Module
        A model after `quantize_`, with or without `fuse_`. Fused modules stay fused. A fused gated MLP gets the scales
        of its rows from the maxima of all ranks.
    group : Group, ProcessGroup, DeviceMesh of one axis, or None
        The ranks. None means all ranks of torch.distributed.
    plan : mapping of str to str, optional
        ``column`` or ``row`` for layers by name, or by the last parts of a name. A column layer returns the rank's
        channels. A row layer takes them.
    rows : int, optional
        Typical number of tokens: ``o_proj`` and ``down_proj`` are then split along the axis that is cheaper to
        exchange. By default they are split along their inputs.
    lm_head : bool
        Whether to split the layer ``lm_head``, too. Every rank gets its whole output.
    chunks : int, optional
        Number of chunks of tokens in layers with a whole output; see `Shards`. By default `Traffic.chunks` decides.
    link : Link
        The connection between the ranks, for the cost model.

    Returns
    -------
    Parallelization

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, an unknown structure, heads of 4-bit weights that begin within 16 channels,
        and layers that are split already. The model is then unchanged.
    GroupMismatch
        If the ranks split differently, or a layer has other codes, scales or biases on another rank. The error names
        the first such layer. The model is then unchanged.
    GroupBroken
        If a rank does not take part.
    """
    check_model("parallelize_", model, None)
    if rows is not None:
        check_count("parallelize_", "rows", rows)
    if chunks is not None:
        check_count("parallelize_", "chunks", chunks, 1)
    if plan is None:
        for name, module in model.named_modules():
            _check_not_split(name, module)
    ranks: Group = group if isinstance(group, Group) else TorchGroup(group)
    wishes = _Wishes(ranks.count, rows, chunks, link)
    cuts = [*(wishes.structures(model) if plan is None else _planned(model, plan, wishes))]
    head = dict(model.named_modules()).get("lm_head")
    if lm_head:
        _check_not_split("lm_head", head)
    if lm_head and splits(head):
        shards = Shards(axis="n", count=ranks.count, output="whole", chunks=chunks, link=link)
        cuts.append(_Cut("lm_head", ColumnLinear, shards))
    elif lm_head:
        raise InvalidProblem("parallelize_", "lm_head", "True", "be False: there is no int8 layer of this name")
    _check_cuts(model, cuts)
    kinds = {cut.name: f"{cut.kind.__name__} {list(model.get_submodule(cut.name).weight.shape)}" for cut in cuts}
    compare(ranks, {"version": version("skuda"), "layers": kinds, "shards": {c.name: str(c.shards) for c in cuts}})
    _compare_weights(model, ranks)
    return _applied(model, ranks, cuts)


def _check_cuts(model: nn.Module, cuts: list[_Cut]) -> None:
    """Raise for a layer that cannot be split so."""
    for cut in cuts:
        layer: Any = model.get_submodule(cut.name)
        check_split("parallelize_", cut.name, "a static layer that propagates NaN", layer.activation)
        check_parts("parallelize_", cut.name, layer.format, cut.shards.axis, cut.parts or ())


def _compare_weights(model: nn.Module, ranks: Group) -> None:
    """Raise on every rank if the ranks do not hold the same whole int8 layers."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Int8Linear) and m.split is None}
    held = {name: digest(*layer._buffers.values()) for name, layer in layers.items()}  # noqa: SLF001  also what is None
    every = [json.loads(text) for text in ranks.exchange(json.dumps(held))]
    for name in dict.fromkeys(name for one in every for name in one):
        found = differing(tuple(str(one.get(name)) for one in every))
        if found:
            raise GroupMismatch(f"codes, scales and bias of {name}", found)


def _check_not_split(name: str, module: nn.Module | None) -> None:
    if isinstance(module, Int8Linear) and module.split is not None:
        had = f"a {type(module).__name__} on {module.split.group.count} ranks"
        rule = "be whole, but is split already: make the model anew to split it in another way"
        raise InvalidProblem("parallelize_", name or "model", had, rule)


def _applied(model: nn.Module, ranks: Group, cuts: list[_Cut]) -> Parallelization:
    """Replace the layers."""
    for name, module in model.named_modules():
        if isinstance(module, FusedGatedMLP) and any(cut.name.startswith(_within(name, "")) for cut in cuts):
            module.fused_form = module.fused_form._replace(group=ranks)
    converted = {}
    for cut in cuts:
        whole: Any = model.get_submodule(cut.name)
        made = cut.kind(whole, ranks, cut.shards, parts=cut.parts)
        made.name = cut.name
        if whole.sizes:
            _rejoin(model.get_submodule(cut.name.rpartition(".")[0]), whole, made)
        model.set_submodule(cut.name, made)
        converted[cut.name] = f"{cut.kind.__name__}, {made.shards.parts(*made.whole)} along {cut.shards.axis}"
    left = [name for name, layer in model.named_modules() if isinstance(layer, Int8Linear) and layer.split is None]
    return Parallelization(converted, tuple(left))


@dataclass(frozen=True)
class _Wishes:
    """The arguments of `parallelize_`."""

    count: int
    rows: int | None
    chunks: int | None
    link: Link

    def structures(self, model: nn.Module) -> Iterator[_Cut]:
        """Yield the splits of the layers of all attentions and MLPs."""
        for name, module in model.named_modules():
            try:
                yield from self._structure(name, module)
            except NotProven as reason:
                rule = "be understood; nothing was changed"
                raise InvalidProblem("parallelize_", name or "model", str(reason), rule) from None

    def _structure(self, name: str, module: nn.Module) -> list[_Cut]:
        """Return the splits of the layers of an attention or an MLP. Empty for another module."""
        if not any(isinstance(child, Int8Linear) for child in module.children()):
            return []
        if all(hasattr(module, each) for each in (*_QKV, _O)):
            return self._attention(name, module)
        if all(hasattr(module, each) for each in (*_GATE_UP, _DOWN)):
            return self._mlp(name, module)
        return []

    def _attention(self, name: str, module: nn.Module) -> list[_Cut]:
        head = _heads(module)
        fused = isinstance(module, FusedAttention)
        q, k, v = (getattr(module, each) for each in _QKV)
        queries, keys = (_width(each) // head for each in (q, k))
        if _width(k) != _width(v) or queries % keys or queries * head != _width(q) or keys * head != _width(k):
            raise NotProven("its queries, keys and values do not have a whole number of heads")
        if keys < self.count:
            raise NotProven(f"it has {keys} heads of keys and values for {self.count} ranks; use at most {keys} ranks")
        of_keys = tuple(size * head for size in split(keys, self.count))
        of_queries = tuple(size * (queries // keys) for size in of_keys)
        sizes = (of_queries, of_keys, of_keys)
        if fused:
            joined = module.fused_form.joined
            cuts = [self._column(_within(name, joined), getattr(module, joined), sizes)]
        else:
            cuts = [
                self._column(_within(name, each), getattr(module, each), (size,))
                for each, size in zip(_QKV, sizes, strict=True)
            ]
        return [*cuts, self._last(_within(name, _O), getattr(module, _O), of_queries)]

    def _mlp(self, name: str, module: nn.Module) -> list[_Cut]:
        if not isinstance(module, FusedGatedMLP):
            act = getattr(module, "act_fn", None)
            if Forward(module).expression() not in _GATED:
                raise NotProven("its forward is not a known form of a gated MLP")
            if type(act).__module__ not in _ELEMENTWISE or "softmax" in type(act).__name__.lower():
                raise NotProven(f"its activation, {type(act).__name__}, is not known to work element by element")
        inner = _width(getattr(module, _DOWN), 1)
        unit = _UNIT if inner >= _UNIT * self.count else 1
        unit = max(unit, *(_even(getattr(module, each)) for each in (*_GATE_UP, _DOWN)))
        sizes = split(inner, self.count, unit)
        if isinstance(module, FusedGatedMLP):
            joined = module.fused_form.joined
            cuts = [self._column(_within(name, joined), module.get_submodule(joined), (sizes, sizes))]
        else:
            cuts = [self._column(_within(name, each), getattr(module, each), (sizes,)) for each in _GATE_UP]
        return [*cuts, self._last(_within(name, _DOWN), getattr(module, _DOWN), sizes)]

    def _column(self, name: str, layer: nn.Module, parts: tuple[tuple[int, ...], ...]) -> _Cut:
        _check_layer(name, layer)
        sizes = tuple(map(sum, zip(*parts, strict=True)))
        if _width(layer) != sum(sizes):
            raise NotProven(f"{name} has {_width(layer)} channels, not {sum(sizes)}")
        shards = Shards(axis="n", count=self.count, sizes=sizes, link=self.link)
        return _Cut(name, ColumnLinear, shards, parts)

    def _last(self, name: str, layer: Any, sizes: tuple[int, ...]) -> _Cut:
        """Return the split of a layer whose input is split and whose output every rank needs."""
        _check_layer(name, layer)
        n, k = layer.weight.shape
        if k != sum(sizes):
            raise NotProven(f"{name} takes {k} channels, not {sum(sizes)}")
        given = {"count": self.count, "chunks": self.chunks, "link": self.link}
        row = Shards(axis="k", sizes=sizes, **given)
        fits = layer.format.fits("k", sizes)
        if self.rows is None and fits:
            return _Cut(name, RowLinear, row)
        column = Shards(axis="n", input="columns", output="whole", input_sizes=sizes, **given)
        if not fits:
            return _Cut(name, ColumnLinear, column)
        dynamic = layer.activation.dynamic
        traffic = Traffic(m=self.rows, n=n, k=k, output_bytes=2, dynamic=dynamic, scale_bytes=4 * dynamic)
        best = traffic.cheapest((row, column))
        return _Cut(name, RowLinear if best is row else ColumnLinear, best)


def _planned(model: nn.Module, plan: Mapping[str, str], wishes: _Wishes) -> Iterable[_Cut]:
    if not isinstance(plan, Mapping):
        raise InvalidProblem("parallelize_", "plan", shown(plan), "map names to column or row")
    modules = dict(model.named_modules())
    even = max(map(_even, modules.values()))
    kinds: dict[str, tuple[type[ColumnLinear | RowLinear], str]] = {
        "column": (ColumnLinear, "n"),
        "row": (RowLinear, "k"),
    }
    for key, how in plan.items():
        found = [name for name in modules if name == key or name.endswith(f".{key}")]
        if how not in kinds:
            raise InvalidProblem("parallelize_", f"plan[{key!r}]", shown(how), "be column or row")
        if not found:
            raise InvalidProblem("parallelize_", f"plan[{key!r}]", "no layer of this name", "name int8 layers")
        for name in found:
            _check_not_split(name, modules[name])
            if not splits(modules[name]) or is_joined(modules[name]):
                raise InvalidProblem("parallelize_", name, type(modules[name]).__name__, "be a whole int8 layer")
            kind, axis = kinds[how]
            chunks = wishes.chunks if axis == "k" else None
            sizes = None
            if even > 1:  # so that the parts of 8-bit layers fit those of 4-bit ones
                sizes = split(_width(modules[name], "nk".index(axis)), wishes.count, even)
            given = {"count": wishes.count, "chunks": chunks, "link": wishes.link}
            shards = Shards(axis=axis, sizes=sizes, **given)  # type: ignore[arg-type]
            yield _Cut(name, kind, shards)


def _heads(module: nn.Module) -> int:
    """Return the head width of an attention whose forward infers the number of heads from its layers' outputs."""
    if "forward" in vars(module):
        raise NotProven("its forward was replaced")
    kind: Any = type(module).__bases__[1] if isinstance(module, Fused) else type(module)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, SyntaxError, TypeError):
        raise NotProven("the source of its forward cannot be read") from None
    reads = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    if reads - _READS or _HEADS not in ast.unparse(tree):
        raise NotProven(
            f"its forward may count heads by itself: it reads {', '.join(sorted(reads - _READS)) or 'them'}"
        )
    head = getattr(module, "head_dim", None)
    if not isinstance(head, int) or head < 1:
        raise NotProven("it has no head_dim")
    for norm in (getattr(module, each, None) for each in ("q_norm", "k_norm")):
        if norm is not None and tuple(norm.weight.shape) != (head,):
            raise NotProven("a norm of its queries or keys spans several heads")
    return head


def _check_layer(name: str, layer: nn.Module) -> None:
    if not splits(layer) and not isinstance(layer, Part):
        raise NotProven(f"{name} is a {type(layer).__name__}, no whole int8 layer")


def _even(layer: nn.Module) -> int:
    """Return what the lengths of a layer's parts are multiples of by default; 1 for another module."""
    return layer.format.even if isinstance(layer, CodedLayer) else 1


def _within(name: str, child: str) -> str:
    """Return the name of a module's child. The model itself has no name."""
    return f"{name}.{child}" if name else child


def _width(layer: Any, axis: int = 0) -> int:
    return int(layer.weight.shape[axis])


def _rejoin(parent: nn.Module, whole: Int8Linear, made: ShardedLinear) -> None:
    """Turn the parts of a joined layer into views of the rank's part of it."""
    for name, child in list(parent.named_children()):
        if isinstance(child, Part) and child.joined is whole:
            parent.register_module(name, Part(made, child.number))
