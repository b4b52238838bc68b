"""`ColumnLinear` and `RowLinear`: int8 layers on the ranks of a group, with the bits of the whole layer.

Each rank holds its part of the weight. `skuda.dispatch.shard` describes the exchanges, and why the number of ranks does
not change the bits.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from functools import lru_cache, partial
from math import prod
from typing import Any, Self, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from skuda.dispatch.preference import PlanPreference
from skuda.dispatch.select.explanation import Explanation
from skuda.dispatch.shard import layer
from skuda.dispatch.shard.cost import Traffic
from skuda.dispatch.shard.group import Group
from skuda.dispatch.shard.layer import LayerInput, RankWork, ShardSchedule, Sums
from skuda.dispatch.shard.shards import Shards, own, span, split
from skuda.functional import default_dispatcher
from skuda.kernels.linear import ScaledLinearDescriptor
from skuda.kernels.linear.problem import longest_k
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.distributed.digest import digest
from skuda.torch.formats import WeightFormat
from skuda.torch.formats.int8 import CODES, Q_MAX
from skuda.torch.formats.weight import Axis
from skuda.torch.linear.int8_linear import Arguments, DynamicLinear, Int8Linear, StaticLinear
from skuda.torch.linear.joined import JoinedLinear, Quantized
from skuda.torch.linear.nonfinite import propagates
from skuda.torch.ops.dtypes import element_of

_OPS = torch.ops.skuda


class ShardedLinear(Int8Linear):
    """The base class of split layers, of which each rank holds a part.

    The buffers have the names of the whole layer's buffers. There are no gradients.

    Parts begin where the weight's format can be cut: those of 4-bit weights at multiples of 16 output channels, or of
    128 inputs. By default they have multiples of 128 along either axis, so that the parts of one layer fit those of the
    next. Ranks for which none is left are empty.

    Many rows run in chunks, so that the ranks exchange one chunk while they compute the next; see `Shards.chunks`.
    Under ``torch.compile`` there is one chunk, because torch does not trace a collective that is only started.
    Therefore every rank must compile the layer, or none.

    Attributes
    ----------
    shards : Shards
        How the layer is split.
    whole : tuple of int
        N and K of the whole layer.
    parts : tuple of tuple of int
        The length of each rank's part of the split axis, for each of the joined layers.
    """

    op = "scaled_linear"
    sharded = True
    axis: Axis
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    smooth: Tensor | None

    def __init__(
        self,
        whole: DynamicLinear | StaticLinear,
        group: Group,
        shards: Shards | None = None,
        *,
        parts: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(whole, DynamicLinear | StaticLinear):
            raise InvalidProblem(name, "whole", type(whole).__name__, "be a DynamicLinear or a StaticLinear")
        if isinstance(whole, StaticLinear) and propagates(whole):
            rule = "be made without nonfinite='propagate': ranks pass on what is not finite in dynamic layers alone"
            raise InvalidProblem(name, "whole", type(whole).__name__, rule)
        n, k = whole.out_features, whole.in_features
        self._check_k(k)
        shards, cut = self._shared(whole, group, shards, parts)
        columns = shards.columns(k) if shards.input == "columns" else ()
        weight = _cut_codes(whole, self.axis, cut, group.rank)
        scale, bias = whole.weight_scale, whole.bias
        if self.axis == "n":
            scale = _cut(scale, "n", cut, group.rank)
            bias = None if bias is None else _cut(bias, "n", cut, group.rank)
        width = k if self.axis == "n" else cut[0][group.rank]
        super().__init__(weight, scale, bias, dtype=whole.weight_dtype, in_features=width)
        self.original = whole.original
        self.group, self.shards, self.whole, self.parts = group, shards, (n, k), cut
        kind = getattr(whole, "stored_as", type(whole))
        self.whole_kind = kind if kind in (DynamicLinear, JoinedLinear, StaticLinear) else None
        self.output_dtype = getattr(whole, "output_dtype", None)
        self._columns = columns
        self.in_features = columns[group.rank] if columns else k
        self.out_features = shards.parts(n, k)[group.rank] if shards.output == "columns" else n
        self._of_sums: dict[str, Any] = {"output_element": "s32"} | self.format.sizes(n)
        static = isinstance(whole, StaticLinear)
        self.register_buffer("input_scale", whole.input_scale if static else None)
        self.register_buffer("input_zero_point", whole.input_zero_point if static else None)
        smooth = whole.smooth if static else None
        if smooth is not None and columns:
            smooth = own(smooth, 0, columns, group.rank).clone()
        self.register_buffer("smooth", smooth)
        if static:
            self._hold_zero()
        if isinstance(whole, JoinedLinear):
            self._non_persistent_buffers_set |= set(self._buffers)
        self._schedules: dict[tuple[int, torch.dtype, bool], ShardSchedule] = {}
        self.name = ""
        self._number = next(_numbers)
        _layers[self._number] = self
        self._split = f"{list(self.whole)} split by {shards}"
        self.train(whole.training)
        if whole.nonfinite is not None:
            self.propagating()

    def _shared(
        self, whole: Int8Linear, group: Group, shards: Shards | None, parts: tuple[tuple[int, ...], ...] | None
    ) -> tuple[Shards, tuple[tuple[int, ...], ...]]:
        """Return the split, and the lengths of its parts."""
        name, sizes = type(self).__name__, (whole.out_features, whole.in_features)
        shards = Shards(axis=self.axis, count=group.count) if shards is None else shards
        if shards.axis != self.axis or shards.count != group.count:
            had, rule = f"axis {shards.axis}, {shards.count} ranks", f"have axis {self.axis} and {group.count} ranks"
            raise InvalidProblem(name, "shards", had, rule)
        shards = _even(shards, *sizes, whole.format.even)
        if parts is not None:
            if self.axis != "n" or any(len(each) != group.count for each in parts) or shards.output == "whole":
                raise InvalidProblem(name, "parts", shown(parts), "have a size for each rank, with the output columns")
            shards = shards.model_copy(update={"sizes": tuple(map(sum, zip(*parts, strict=True)))})
        cut = parts or (shards.parts(*sizes),)
        shards.parts(*sizes)
        check_parts(name, "parts" if parts else "shards", whole, self.axis, cut)
        return shards, cut

    @abstractmethod
    def _check_k(self, k: int) -> None:
        """Raise for a K whose sums could leave s32."""

    def like(self, whole: DynamicLinear | StaticLinear) -> Self:
        """Split another whole layer of these sizes in the same way. Return this rank's part."""
        made = type(self)(whole, self.group, self.shards, parts=self.parts if len(self.parts) > 1 else None)
        made.name = self.name
        self._as_this(made)
        return made

    def gathered(self) -> DynamicLinear | StaticLinear:
        """Return the whole layer, on the CPU. Every rank calls this.

        Raises
        ------
        InvalidProblem
            If the whole layer was of another class.
        GroupMismatch
            If another rank calls something else.
        GroupBroken
            If another rank does not take part.
        """
        if self.whole_kind is None:
            rule = "come from a DynamicLinear or a StaticLinear, not from a subclass, which may hold more"
            raise InvalidProblem(type(self).__name__, self.name or "layer", "a part of another layer", rule)
        self.group.agree(f"gathering {self.name or type(self).__name__} {self._split}")
        with torch.no_grad():
            whole = {name: self._gathered(name, held).cpu() for name, held in self._buffers.items() if held is not None}
        tensors: Any = whole["weight"], whole["weight_scale"], whole.get("bias")
        more: Any = {name: whole.get(name) for name in ("input_scale", "input_zero_point", "smooth")}
        dtype, k = self.weight_dtype, self.whole[1]
        made: DynamicLinear | StaticLinear
        if self.whole_kind is JoinedLinear:
            made = JoinedLinear(*tensors, sizes=self.whole_sizes, dtype=dtype, in_features=k)
        elif self.dynamic:
            made = DynamicLinear(*tensors, dtype=dtype, in_features=k)
        else:
            made = StaticLinear(*tensors, **more, dtype=dtype)
        made.train(self.training)
        self._as_this(made)
        return made

    def _as_this(self, made: Int8Linear) -> None:
        """Let another layer do likewise with what is not finite."""
        if self.nonfinite is not None:
            made.propagating()

    def _gathered(self, name: str, held: Tensor) -> Tensor:
        """Return a buffer of the whole layer."""
        if name == "smooth" and self._columns:
            return torch.as_tensor(self.group.gather(held, 0, self._columns))
        lengths = self.format.lengths if name == "weight" else lambda _, sizes: sizes
        parts = [tuple(lengths(self.axis, sizes)) for sizes in self.parts]
        if self.axis == "k":
            return torch.as_tensor(self.group.gather(held, 1, parts[0])) if name == "weight" else held
        if name not in ("weight", "weight_scale", "bias"):
            return held
        pieces = zip(held.split([sizes[self.group.rank] for sizes in parts]), parts, strict=True)
        return torch.cat([torch.as_tensor(self.group.gather(piece, 0, sizes)) for piece, sizes in pieces])

    @property
    def width(self) -> int:
        """K of this rank's part of the weight."""
        return self.whole[1] if self.axis == "n" else self.sizes[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of this rank's part of the split axis, for each of the joined layers."""
        return tuple(sizes[self.group.rank] for sizes in self.parts)

    @property
    def whole_sizes(self) -> tuple[int, ...]:
        """The length of the whole split axis, for each of the joined layers."""
        return tuple(sum(sizes) for sizes in self.parts)

    def held_of(self, number: int, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a buffer of a joined layer, split along the first axis."""
        at = span(self.parts[number], self.group.rank)
        return self.format.cut(whole, "n", at.start, at.stop) if name == "weight" else whole[at]

    @property
    def dynamic(self) -> bool:
        """Whether each row gets a scale at run time."""
        return self.input_scale is None

    def schedule(self, rows: int, dtype: torch.dtype, *, compiles: bool = False) -> ShardSchedule:
        """Return the schedule for a number of rows. Compiled code has one chunk."""
        key = rows, dtype, compiles
        found = self._schedules.get(key)
        if found is None:
            n, k = self.whole
            scale = 4 * self.dynamic
            traffic = Traffic(m=rows, n=n, k=k, output_bytes=dtype.itemsize, dynamic=self.dynamic, scale_bytes=scale)
            found = ShardSchedule.of(self.shards, traffic, whole=compiles)
            self._schedules[key] = found
        return found

    def forward(self, input: Tensor | Quantized) -> Tensor:
        """Return this rank's part of the output (`shards.output`) for its part of the input (`shards.input`).

        Parameters
        ----------
        input : tensor of shape (..., K), or this rank's columns or rows of it; or `Quantized`
            The same rows on every rank. Leading axes are rows. If the input or output is ``rows``, the input is a
            matrix.

        Raises
        ------
        InvalidProblem
            For an input of another shape, and for one that requires grad while gradients are recorded.
        GroupMismatch
            If another rank runs another layer, or has another input where each has the whole of it.
        GroupBroken
            If another rank does not take part.
        """
        if isinstance(input, Quantized):
            codes = LayerInput(input.codes.reshape(input.scale.numel(), self.in_features), input.scale.reshape(-1))
            if not self.dynamic:
                raise InvalidProblem(
                    type(self).__name__, "input", "rows with scales", "be floating: the scale is fixed"
                )
            given, dtype = codes, input.dtype
            leading = input.codes.shape[:-1]
        else:
            input = self._taken(input)
            if torch.is_grad_enabled() and input.requires_grad:
                rule = "be detached, or run under torch.no_grad(): layers of several ranks have no gradient"
                raise InvalidProblem(type(self).__name__, "input", "a tensor that requires grad", rule)
            leading, dtype = input.shape[:-1], input.dtype
            given = LayerInput(input.reshape(prod(leading), self.in_features))
        dtype = self.output_dtype or dtype
        by_rows = "rows" in (self.shards.input, self.shards.output)
        if by_rows and len(leading) != 1:
            raise InvalidProblem(type(self).__name__, "input", f"{len(leading)} leading axes", "have one axis of rows")
        rows = self._all_rows(int(given.data.shape[0]))
        if torch.compiler.is_compiling():
            schedule = _compiled_schedule(self._number, rows, dtype)
        else:
            schedule = self.schedule(rows, dtype)
            call = f"{self.name or type(self).__name__} {self._split}, {rows} rows of {dtype}"
            if self.shards.input == "whole" and getattr(self.group, "checks_calls", False):
                call += f", input {digest(given.data, given.scale)}"
            self.group.agree(call)
        if not self.dynamic and given.scale is None:
            given = LayerInput(self._codes(given.data), self.input_scale, self.input_zero_point)
        found: Tensor = layer.run(schedule, self._steps(dtype, hides=len(schedule.chunks) > 1), self.group, given)
        return found if by_rows else found.reshape(*leading, found.shape[-1])

    def _all_rows(self, held: int) -> int:
        """Return the rows of all ranks, where each has its own; they are split as `Shards.rows` does."""
        if self.shards.input != "rows":
            return held
        counts = [int(text) for text in self.group.exchange(str(held))]
        if tuple(counts) != self.shards.rows(sum(counts)):
            rule = f"be {list(self.shards.rows(sum(counts)))} of {sum(counts)} rows"
            raise InvalidProblem(type(self).__name__, "input", f"{counts} rows by rank", rule)
        return sum(counts)

    def _codes(self, data: Tensor) -> Tensor:
        if self.smooth is not None:
            data = _OPS.smooth(data, self.smooth)
        shifted = self.input_zero_point is not None
        assert self.input_scale is not None
        found: Tensor = _OPS.quantize_per_tensor.default(
            data,
            self.input_scale.to(torch.promote_types(data.dtype, torch.float32)),
            self.input_zero_point if shifted else self.zero,
            **CODES | {"q_min": -Q_MAX - shifted},
        )
        return found

    def _steps(self, dtype: torch.dtype, *, hides: bool) -> RankWork:
        """Return the local work of the rank. `hides` means that exchanges run beside its sums."""
        scale, output = self.weight_scale.view(-1), str(element_of(dtype))
        scope = "token" if self.dynamic else "tensor"
        spare = getattr(self.group, "spare_multiprocessors", 0) if hides else 0

        amax = partial(_OPS.amax.default, nonfinite=self.nonfinite)

        def sums(codes: Tensor) -> Tensor:
            if not spare:
                return cast("Tensor", _OPS.scaled_linear.default(codes, self.operand, **self._of_sums))
            problem = _sums_of(*codes.shape, self.out_features, self.format)
            preference = PlanPreference(spare_multiprocessors=spare)
            return cast("Tensor", default_dispatcher().run(problem, preference, act_q=codes, weight_q=self.operand))

        def channel_sums() -> Tensor:
            return self.format.integers(self.weight_q, len(self.weight_scale), self.width).sum(1, dtype=torch.int32)

        def rescale(whole: Sums, about: LayerInput) -> Tensor:
            given = whole.products, about.scale, scale, about.zero_point, whole.of_channels, None, None, self.bias
            made = _OPS.rescale.default(*given, k=self.whole[1], output_element=output, act_scale_scope=scope)
            return cast("Tensor", made)

        def product(given: LayerInput) -> Tensor:
            if given.scale is None:
                tensors = given.data, self.operand, scale, None, self.bias
                how = {"output_element": output, "nonfinite": self.nonfinite}
                return cast("Tensor", _OPS.quantized_linear.default(*tensors, **how))
            codes = given.data, self.operand, given.scale, given.zero_point, scale, None, self.bias
            made = _OPS.scaled_linear.default(*codes, output_element=output, act_scale_scope=scope)
            return cast("Tensor", made)

        return RankWork(
            amax=amax,
            quantize=lambda data, amax: _OPS.amax_quantize.default(data, amax, **CODES),
            quantize_rows=_coded if self.nonfinite is None else lambda data: _coded(data, amax(data)),
            sums=sums,
            channel_sums=None if self.input_zero_point is None else channel_sums,
            rescale=rescale,
            layer=product,
        )

    def _arguments(self, input: Tensor) -> Arguments:
        """Return the arguments of this rank's product, for `explain`."""
        codes = torch.empty(*input.shape[:-1], self.width, dtype=torch.int8, device="meta")
        if self.axis == "k":
            return (codes, self._held("weight")), self._of_sums
        rows = torch.empty(codes.shape[:-1] if self.dynamic else (1,), device="meta")
        tensors = codes, self._held("weight"), rows, self.input_zero_point, self.weight_scale.view(-1), None, self.bias
        scope = "token" if self.dynamic else "tensor"
        return tensors, {"output_element": str(element_of(self.output_dtype or input.dtype)), "act_scale_scope": scope}

    def explain(self, input: Tensor | int = 1) -> Explanation:
        """Explain the choice of the kernel for this rank's product."""
        return super().explain(input)

    def extra_repr(self) -> str:
        """Return the split in words."""
        n, k = self.whole
        return f"{n} x {k} split along {self.axis} over {self.group.count} ranks, {super().extra_repr()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise InvalidProblem(type(self).__name__, "copy", "a layer of a group", "be made anew from the whole layer")


class ColumnLinear(ShardedLinear):
    """A layer split along its output channels ("column parallel").

    Parameters
    ----------
    whole : DynamicLinear or StaticLinear
        The whole layer. A `JoinedLinear` needs `parts`.
    group : Group
        The ranks, for example a `TorchGroup`.
    shards : Shards, optional
        A split along ``n``. By default the input is whole, and each rank gets its columns of the output.
    parts : tuple of tuple of int, optional
        For each joined layer, the number of its output channels on each rank.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, for sizes that do not add up, and for parts of 4-bit weights that begin
        within a unit.
    """

    axis = "n"

    def _check_k(self, k: int) -> None:
        """Accept any K: every sum is computed on one rank, and its kernel checks K."""


class RowLinear(ShardedLinear):
    """A layer split along its input channels ("row parallel"). The ranks add exact sums.

    Parameters
    ----------
    whole : DynamicLinear or StaticLinear
        The whole layer.
    group : Group
        The ranks, for example a `TorchGroup`.
    shards : Shards, optional
        A split along ``k``. By default each rank gets the whole output.

    Raises
    ------
    InvalidProblem
        For an argument of the wrong type, sizes that do not add up, parts of 4-bit weights that begin within a block,
        and a K whose sums could leave s32.
    """

    axis = "k"

    def _check_k(self, k: int) -> None:
        longest = longest_k(ElementKind.S8, ElementKind.S8)
        if k > longest:
            raise InvalidProblem("RowLinear", "k", str(k), f"be at most {longest} where it is split, or split n")


def _coded(data: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of rows, from their largest magnitudes if these are given."""
    ops = _OPS.dynamic_range.default(data, **CODES) if amax is None else _OPS.amax_quantize.default(data, amax, **CODES)
    codes, scale, *_ = ops
    return codes, scale


@lru_cache(maxsize=4096)
def _sums_of(m: int, k: int, n: int, form: WeightFormat) -> ScaledLinearDescriptor:
    """Return the `scaled_linear` problem with exact s32 sums."""
    weight = {"weight_element": form.element, "group_size": form.group_size or 0}
    return ScaledLinearDescriptor(m=m, n=n, k=k, output_element=ElementKind.S32, **weight)


_layers: WeakValueDictionary[int, ShardedLinear] = WeakValueDictionary()
_numbers = itertools.count()


def _compiled_schedule(number: int, rows: int, dtype: torch.dtype) -> ShardSchedule:
    """Return the schedule of a layer in compiled code, where the number of rows is constant.

    Layers have numbers, because torch 2.11 accepts only constants here.
    """
    return _layers[number].schedule(rows, dtype, compiles=True)


# As `torch.compiler.assume_constant_result`, which imports the compiler.
_compiled_schedule._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def check_parts(subject: str, field: str, layer: nn.Module, axis: Axis, parts: tuple[tuple[int, ...], ...]) -> None:
    """Raise `InvalidProblem` for parts that do not begin where the format of a weight can be cut."""
    form = format_of_layer(layer)
    if form is not None and not form.fits(axis, tuple(itertools.chain.from_iterable(parts))):
        unit, what = form.units[axis], {"n": "output channels", "k": "inputs"}[axis]
        rule = (
            f"begin at multiples of {unit} {what}, as its {form.name} weights are packed: take other sizes or ranks, "
            "or 8 bits"
        )
        raise InvalidProblem(subject, field, f"parts of {' and '.join(shown(sizes) for sizes in parts)}", rule)


def format_of_layer(layer: object) -> WeightFormat | None:
    """Return the format of a layer's weight, or None for another module."""
    found = getattr(layer, "format", None)
    return found if isinstance(found, WeightFormat) else None


def _even(shards: Shards, n: int, k: int, multiple: int) -> Shards:
    """Return shards with parts of multiples of a number where sizes are left out."""
    if multiple == 1:
        return shards
    lengths = {"sizes": n if shards.axis == "n" else k}
    if (shards.axis, shards.input) == ("n", "columns"):
        lengths["input_sizes"] = k
    even = {field: split(length, shards.count, multiple) for field, length in lengths.items()}
    return shards.model_copy(update={field: even[field] for field in even if getattr(shards, field) is None})


def _cut(tensor: Tensor, axis: Axis, parts: tuple[tuple[int, ...], ...], rank: int) -> Tensor:
    """Copy a rank's part of a tensor of shape (N, 1) or (N,), with the parts of the joined layers along n."""
    pieces = tensor.split(tuple(map(sum, parts)))
    return torch.cat([own(piece, "nk".index(axis), sizes, rank) for piece, sizes in zip(pieces, parts, strict=True)])


def _cut_codes(whole: Int8Linear, axis: Axis, parts: tuple[tuple[int, ...], ...], rank: int) -> Tensor:
    """Copy a rank's part of a layer's codes. Along n, it has the parts of the joined layers."""
    found, begin = [], 0
    for sizes in parts:
        at = span(sizes, rank)
        found.append(whole.format.cut(whole.weight_q, axis, begin + at.start, begin + at.stop))
        begin += sum(sizes)
    if axis == "k":
        return found[0].clone(memory_format=torch.contiguous_format)
    return whole.format.join(found)
