"""Modules of a transformer block that need fewer launches. They are subclasses of the modules that they replace.

`skuda.torch.fuse_` changes the class of a module in place, so hooks, attributes, the names of parameters and
``isinstance`` stay as they are. The results:

- A product of joined weights has the bits of the separate products.
- Norms and gated activations are those of `rms_norm_quantize`, `layer_norm_quantize`, `silu_mul_quantize` and
  `gelu_mul_quantize`, which round once where torch's modules round several times.

The results have the same bits where gradients are recorded. The gradients are those of the original formulas; see
`coded_linear`. The original ``forward`` runs under autocast if there is a norm, if a norm's weight and input differ in
dtype, if a layer gets an argument by its former name, and as long as `Fused.changes` finds something: a
fused module does not call some of its children, so it would ignore what was done to them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's name
from torch.nn.modules import module as torch_module

from skuda.dispatch.shard.group import Group
from skuda.registry.errors import InvalidProblem
from skuda.torch.formats import CODES_OF
from skuda.torch.linear.int8_linear import DynamicLinear, Int8Linear
from skuda.torch.linear.joined import JoinedLinear, JoinedOutput, Part, Quantized, projected
from skuda.torch.ops.tensor_op import launched, not_scripted, refuse_other, run_module

_VECTORS = {"rms_norm_quantize": ("weight",), "layer_norm_quantize": ("weight", "bias")}
"""The vectors of a norm's op, in the order of its schema, after the input and the residual."""


PROPAGATE = {"nonfinite": "propagate"}
"""The field of an op that passes on what is not finite."""

_gradients = torch._C.is_grad_enabled  # type: ignore[attr-defined]  # noqa: SLF001  as in `tensor_op`
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_ALL_HOOKS, _ALL_BACKWARD_HOOKS = (
    tuple(getattr(torch_module, f"_global{name}") for name in names) for names in (_HOOKS, _BACKWARD_HOOKS)
)
"""Torch's hooks of all modules."""


class Fused(nn.Module):
    """The base of the modules that `skuda.torch.fuse_` makes.

    Attributes
    ----------
    fused_form : AttentionForm, MLPForm or LayerForm
        The parts of the original.
    fused_held : tuple
        What `intact` looks at: names and modules of the children that are not called as in the original, the hooks that
        would not run or would see other tensors, and attributes of the children whose ``forward`` would not run.
    fused_exact : bool
        Whether the original ``forward``, whose bits differ, is refused.
    """

    __prepare_scriptable__ = not_scripted

    fused_form: Any
    fused_held: tuple[tuple[tuple[str, nn.Module], ...], tuple[dict[int, Any], ...], tuple[dict[str, Any], ...]]
    fused_exact: bool = False

    @property
    def width(self) -> int:
        """Columns of the input."""
        return int(getattr(self, self.fused_form.joined).in_features)

    def propagate(self) -> None:
        """Pass on what is not finite; see `propagating`. The layers do so by themselves."""

    @abstractmethod
    def warm(self, rows: Tensor) -> None:
        """Run the ops that the original lacks on a tensor of shape (rows, width), so their kernels are ready."""

    @abstractmethod
    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the children that are not called as in the original, with the kinds of hooks that this concerns."""

    def hold(self, children: tuple[nn.Module, ...] | None = None) -> None:
        """Take these children, by default the present ones, as those for which the module was made."""
        kinds = self.bypassed()
        children = tuple(getattr(self, name) for name in kinds) if children is None else children
        hooks = (getattr(child, kind) for child, each in zip(children, kinds.values(), strict=True) for kind in each)
        uncalled = (vars(child) for child in children if not isinstance(child, Part))
        self.fused_held = tuple(zip(kinds, children, strict=True)), (*hooks, *_ALL_HOOKS), tuple(uncalled)

    def intact(self) -> bool:
        """Whether nothing was done to the children that the fused ``forward`` would ignore.

        Every call asks this, so it is fast. Torch's compilers trace it.
        """
        children, hooks, uncalled = self.fused_held
        if any(hooks):
            return False
        modules = self._modules
        try:
            for name, child in children:
                if modules[name] is not child:
                    return False
        except KeyError:  # it was deleted
            return False
        for attributes in uncalled:
            if "forward" in attributes:
                return False
        return not _gradients() or self._unhooked()

    # Dynamo would check all of this in every call. It does not notice later hooks of any module either, unless it is
    # told to. `torch.compiler.assume_constant_result` does the same, but imports the compiler.
    intact._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "__class__":  # with another class it is no longer fused
            self._admit(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child, as torch does."""
        super().add_module(name, module)
        self._admit(name, module)

    def _admit(self, name: str, value: object) -> None:
        """Hold an int8 layer that takes the place of another one, as by `load_` or `parallelize_`. It is called."""
        if isinstance(value, (Part, Int8Linear)):
            held = dict(self.fused_held[0])
            kinds = (Part,) if isinstance(held.get(name), Part) else (DynamicLinear, JoinedLinear)
            if name in held and (type(value) in kinds or (isinstance(value, Int8Linear) and value.split)):
                self.hold(tuple((held | {name: value}).values()))

    def _unhooked(self) -> bool:
        """Whether no hook waits for the gradients of these children."""
        return not any(_ALL_BACKWARD_HOOKS) and not any(
            getattr(child, kind) for _, child in self.fused_held[0] for kind in _BACKWARD_HOOKS
        )

    def changes(self) -> str:
        """Return what was done to the children since `fuse_`, in words, or nothing."""
        found = []
        for (name, child), kinds in zip(self.fused_held[0], self.bypassed().values(), strict=True):
            if self._modules.get(name) is not child:
                found.append(f"{name} was replaced")
            elif any(getattr(child, kind) for kind in (*kinds, *_BACKWARD_HOOKS)):
                found.append(f"{name} has hooks")
            elif "forward" in vars(child):
                found.append(f"the forward of {name} was replaced")
        if any(_ALL_HOOKS) or any(_ALL_BACKWARD_HOOKS):
            found.append("there are hooks of all modules")
        return ", ".join(found)

    def fall_back(self) -> None:
        """Warn, once, that the original ``forward`` runs.

        Raises
        ------
        InvalidProblem
            For a module that is split over ranks: its layers are no longer those of the original ``forward``.
        """
        self.refuse_inexact(self.changes())
        if any(isinstance(child, Int8Linear) and child.split is not None for child in self.children()):
            rule = "be as they were when it was fused: it is split over ranks and has no other way to run"
            raise InvalidProblem(type(self).__name__, "children", self.changes(), rule)
        if torch.compiler.is_compiling() or "fused_told" in vars(self):
            return
        self.fused_told = True
        warnings.warn(
            f"{type(self).__name__} runs its original forward, with more launches, and with the bits of the unfused "
            f"model: {self.changes()} after fuse_",
            stacklevel=4,
        )

    def refuse_inexact(self, had: str) -> None:
        """Raise `InvalidProblem` if the original ``forward`` is refused."""
        if self.fused_exact:
            rule = "be as exact_ left it: other ways to run have other bits"
            raise InvalidProblem(type(self).__name__, "module", had, rule)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only the children, since torch's hooks of all modules are not the module's.
        children = tuple(child for _, child in self.fused_held[0])
        return _empty, type(self).__bases__, vars(self) | {"fused_held": children}

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.hold(state["fused_held"])


_CLASSES: dict[tuple[type, type], type[Fused]] = {}


def fused_class(kind: type[Fused], original: type[nn.Module]) -> type[Fused]:
    """Return the subclass of `original` that runs as `kind`. The same arguments give the same class."""
    made = type(f"Fused{original.__name__}", (kind, original), {"__module__": kind.__module__})
    return _CLASSES.setdefault((kind, original), made)


def _empty(kind: type[Fused], original: type[nn.Module]) -> Fused:
    """Return a module without state, for a copy or a pickle."""
    made = fused_class(kind, original)
    return made.__new__(made)


class AttentionForm(NamedTuple):
    """An attention.

    Attributes
    ----------
    input : str
        The name of its first parameter.
    joined : str
        The name of the child with the first product.
    parts : tuple of str
        The names of the layers that are joined.
    """

    input: str
    joined: str
    parts: tuple[str, ...]


class FusedAttention(Fused):
    """An attention with one quantization and one product for queries, keys and values. The rest is the original."""

    fused_form: AttentionForm

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the joined layers. Their hooks would see the joined output in the place of the input."""
        return dict.fromkeys(self.fused_form.parts, _HOOKS)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the original. The first argument may be `Quantized`."""
        form = self.fused_form
        rows = args[0] if args else kwargs[form.input]
        if not isinstance(rows, Quantized) and not self.intact():
            self.fall_back()
            return super().forward(*args, **kwargs)
        output = projected(getattr(self, form.joined), rows)
        joined = JoinedOutput(output, output.shape)
        if args:
            return super().forward(joined, *args[1:], **kwargs)
        return super().forward(**{**kwargs, form.input: joined})

    def warm(self, rows: Tensor) -> None:
        """Run the joined product."""
        projected(getattr(self, self.fused_form.joined), rows)


class MLPForm(NamedTuple):
    """A gated feed-forward layer.

    Attributes
    ----------
    joined, down : str
        Names of the layers of the first and of the last product.
    op : str
        The op of the activation.
    fields : dict
        Further fields of the op.
    parts : tuple of str
        Names of the layers of gates and ups, if they are separate in the original.
    act : str
        Name of the activation, or nothing if it is a function.
    group : Group, optional
        The ranks that share the layer. Each has some columns of the gated product; scales are those of whole rows.
    codes : dict
        Fields of the op for the codes that the last layer takes.
    """

    joined: str
    down: str
    op: str
    fields: dict[str, str]
    parts: tuple[str, ...]
    act: str
    group: Group | None = None
    codes: Mapping[str, Any] = CODES_OF[8]


class FusedGatedMLP(Fused):
    """A gated feed-forward layer: one product for gates and ups, a gated activation that writes codes, a product."""

    fused_form: MLPForm

    def propagate(self) -> None:
        """Let the activation pass on what is not finite."""
        self.fused_form = self.fused_form._replace(fields={**self.fused_form.fields, **PROPAGATE})

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return all layers and the activation."""
        form = self.fused_form
        return dict.fromkeys(filter(None, (*(form.parts or (form.joined,)), form.act, form.down)), _HOOKS)

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """Return the layer's output. It has the shape of the input."""
        form = self.fused_form
        if not isinstance(x, Quantized) and not self.intact():
            self.fall_back()
            original: Tensor = super().forward(x)
            return original
        gate_up, down = projected(getattr(self, form.joined), x), getattr(self, form.down)
        if form.group is not None:
            op = getattr(torch.ops.skuda, form.op.replace("_quantize", "_amax"))
            rows, amax = op.default(gate_up=gate_up, **form.fields)
            codes, scale = torch.ops.skuda.amax_quantize.default(rows, form.group.max(amax), **form.codes)
            return projected(down, Quantized(codes, scale, gate_up.dtype))
        recorded = _recorded(gate_up)
        given = gate_up.detach() if recorded else gate_up
        key = form.op, *form.fields.values(), *form.codes.values(), given.shape
        found = launched(key, None, None, given)
        if found is None:
            found = run_module(form.op, key, (None, None, given), {**form.fields, **form.codes})
        codes, scale = found
        rows = gated_rows(form, *gate_up.chunk(2, dim=-1)) if recorded else None
        return projected(down, Quantized(codes, scale, given.dtype, rows))

    def warm(self, rows: Tensor) -> None:
        """Run the whole layer."""
        self(rows)


class NormForm(NamedTuple):
    """How an op computes a norm.

    Attributes
    ----------
    name : str
        The norm's name in its layer.
    op : str
        ``rms_norm_quantize`` or ``layer_norm_quantize``.
    eps : str
        Name of the norm's attribute that holds epsilon.
    vectors : tuple of str
        The norm's parameters, of ``weight`` and ``bias``.
    fields : dict
        Further fields of the op.
    codes : dict
        Those of the codes that the next layer takes.
    """

    name: str
    op: str
    eps: str
    vectors: tuple[str, ...]
    fields: Mapping[str, str] = {}
    codes: Mapping[str, Any] = CODES_OF[8]

    def held(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return the norm's parameters by name."""
        norm = getattr(layer, self.name)
        return {name: getattr(norm, name) for name in self.vectors}


class LayerForm(NamedTuple):
    """A decoder layer: h = x + attention(norm(x)), then h + mlp(norm(h)).

    Attributes
    ----------
    input : str
        The name of its first parameter.
    attention, mlp : str
        Names of the children.
    norms : tuple of NormForm
        The norms of the attention and of the MLP.
    order : tuple of str
        The original's other parameters.
    defaults : dict
        Their defaults. Some may have none.
    keyword : str
        The parameter of the attention that gets the normalized rows by name, or nothing.
    passed : tuple of (str, str)
        For every further argument of the attention, its name, or nothing, and the parameter that is passed.
    others : bool
        Whether further arguments by name go to the attention.
    first : bool
        Whether the attention returns a tuple, of which only the first is used.
    renamed : frozenset of str
        Former names of these parameters.
    """

    input: str
    attention: str
    mlp: str
    norms: tuple[NormForm, NormForm]
    order: tuple[str, ...]
    defaults: dict[str, Any]
    keyword: str
    passed: tuple[tuple[str, str], ...]
    others: bool
    first: bool
    renamed: frozenset[str] = frozenset()


class FusedDecoderLayer(Fused):
    """A decoder layer whose norms write codes. The second norm first adds the residual."""

    fused_form: LayerForm

    def propagate(self) -> None:
        """Let the norms pass on what is not finite."""
        first, second = (norm._replace(fields=PROPAGATE) for norm in self.fused_form.norms)
        self.fused_form = self.fused_form._replace(norms=(first, second))

    def bypassed(self) -> dict[str, tuple[str, ...]]:
        """Return the norms, and the parts that get codes in the place of the norms' results."""
        form = self.fused_form
        # A hook after an attention does not see an argument that is passed by name, unless it asks for them.
        attention = ("_forward_pre_hooks", "_forward_hooks_with_kwargs") if form.keyword else _HOOKS
        norms = dict.fromkeys((norm.name for norm in form.norms), _HOOKS)
        return {**norms, form.attention: attention, form.mlp: _HOOKS}

    def intact(self) -> bool:
        """Whether nothing was done to the children, or to theirs, that the fused ``forward`` would ignore."""
        if not Fused.intact(self):
            return False
        *_, (_, attention), (_, mlp) = self.fused_held[0]
        return all(isinstance(part, Fused) and part.intact() for part in (attention, mlp))

    intact._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001

    def changes(self) -> str:
        """Return what was done to the children, and to theirs, since `fuse_`, in words, or nothing."""
        fused = {name: child for name, child in self._modules.items() if isinstance(child, Fused)}
        of_children = (f"of {name}, {found}" for name, child in fused.items() if (found := child.changes()))
        return "; ".join(filter(None, (super().changes(), *of_children)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output. It has the shape of the input."""
        form = self.fused_form
        x, given = self._bound(args, kwargs)
        if given is None or not self.intact():
            if given is not None:
                self.fall_back()
            return super().forward(*args, **kwargs)
        try:
            first = self._launched(form.norms[0], x)
        except AttributeError:
            refuse_other(type(self).__name__, form.input, x)
            raise
        if first is None:
            if not self._serves(x):
                return super().forward(*args, **kwargs)
            first = self._norm(form.norms[0], x)
        attended = self._attended(first[0], given)
        rows, total = self._norm(form.norms[1], attended, x)
        return total + getattr(self, form.mlp)(rows)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
        """Return the input, and the other arguments by name, or None if this is for the original to judge."""
        form = self.fused_form
        given = {**form.defaults, **dict(zip(form.order, args[1:], strict=False)), **kwargs}
        x = args[0] if args else given.pop(form.input, None)
        more = [name for name in given if name not in form.order]
        fits = len(given) - len(more) == len(form.order) >= len(args) - 1 and x is not None
        if more and (not form.others or any(name == form.input or name in form.renamed for name in more)):
            fits = False
        return x, given if fits else None

    def _attended(self, rows: Quantized, given: dict[str, Any]) -> Tensor:
        form = self.fused_form
        positional: list[Any] = [] if form.keyword else [rows]
        named: dict[str, Any] = {form.keyword: rows} if form.keyword else {}
        for name, parameter in form.passed:
            if name:
                named[name] = given[parameter]
            else:
                positional.append(given[parameter])
        if form.others:
            named |= {name: value for name, value in given.items() if name not in form.order}
        found = getattr(self, form.attention)(*positional, **named)
        return found[0] if form.first else found

    @property
    def width(self) -> int:
        """Columns of the input."""
        return int(getattr(self, self.fused_form.attention).width)

    def warm(self, rows: Tensor) -> None:
        """Run everything except the attention between its products."""
        form = self.fused_form
        first, _ = self._norm(form.norms[0], rows)
        attention = getattr(self, form.attention)
        projected(getattr(attention, attention.fused_form.joined), first)
        second, _ = self._norm(form.norms[1], rows, rows)
        getattr(self, form.mlp)(second)

    def _serves(self, x: Tensor) -> bool:
        refuse_other(type(self).__name__, "hidden_states", x)
        vectors = [vector for norm in self.fused_form.norms for vector in norm.held(self).values()]
        return not torch.is_autocast_enabled(x.device.type) and all(vector.dtype is x.dtype for vector in vectors)

    def _launched(self, form: NormForm, x: Tensor, residual: Tensor | None = None) -> tuple[Quantized, Tensor] | None:
        """Run a known launch of a norm, or do nothing and return None. The result is that of `_norm`."""
        key, tensors, _ = self._call(form, x, residual)
        found = launched(key, *tensors)
        return None if found is None else _normed(x, found)

    def _norm(self, form: NormForm, x: Tensor, residual: Tensor | None = None) -> tuple[Quantized, Tensor]:
        """Return the codes of a norm, and the sum of input and residual, which the norm normalizes."""
        key, tensors, eps = self._call(form, x, residual)
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            with torch.no_grad():
                coded, _ = self._norm(form, x, residual)
            total = x if residual is None else residual + x
            return coded._replace(rows=getattr(self, form.name)(total)), total
        found = launched(key, *tensors)
        if found is None:
            found = run_module(form.op, key, tensors, {"eps": eps, **form.fields, **form.codes})
        return _normed(x, found)

    def _call(self, form: NormForm, x: Tensor, residual: Tensor | None) -> tuple[Any, tuple[Tensor | None, ...], float]:
        """Return the key, the tensors and epsilon of a call of a norm's op."""
        norm: Any = self._modules[form.name]
        eps, held = float(getattr(norm, form.eps)), norm._parameters  # noqa: SLF001  reading an attribute is slow in torch
        vectors = [held[name] if name in held else getattr(norm, name, None) for name in _VECTORS[form.op]]
        key = form.op, eps, x.shape, *form.fields.values(), *form.codes.values()
        return key, (x, residual, *vectors), eps


def gated_rows(form: MLPForm, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gated product as torch computes it, with its gradient."""
    if form.op == "silu_mul_quantize":
        return F.silu(gate) * up
    return F.gelu(gate, approximate={"erf": "none", "tanh": "tanh"}[form.fields["approximation"]]) * up


def _recorded(x: Tensor) -> bool:
    """Whether gradients of a tensor are recorded."""
    return bool(_gradients() and x.requires_grad)


def _normed(x: Tensor, found: list[Tensor]) -> tuple[Quantized, Tensor]:
    codes, scale, *total = found
    return Quantized(codes, scale, x.dtype), total[0] if total else x
