"""`ColumnLinear` and `RowLinear`: int8 layers on the ranks of a group, with the bits of the whole layer.

Each rank holds its part of the weight. `skuda.dispatch.shard` describes the exchanges, and why the number of ranks does
not change the bits.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from skuda.dispatch.preference import PlanPreference
from skuda.dispatch.shard import layer
from skuda.dispatch.shard.cost import Traffic
from skuda.dispatch.shard.group import Group
from skuda.dispatch.shard.layer import LayerInput, RankWork, ShardSchedule, Sums
from skuda.dispatch.shard.shards import Shards
from skuda.functional import default_dispatcher
from skuda.kernels.linear import ScaledLinearDescriptor
from skuda.kernels.linear.problem import sums_of
from skuda.registry.argument import storage_shape
from skuda.registry.elements import ElementKind
from skuda.registry.errors import InvalidProblem
from skuda.torch.distributed.digest import digest
from skuda.torch.formats import WeightFormat
from skuda.torch.formats.weight import Axis
from skuda.torch.linear.int8_linear import (
    Call,
    DynamicLinear,
    Int8Linear,
    StaticLinear,
    check_split,
    described_as,
    layer_of,
    splits,
)
from skuda.torch.linear.joined import JoinedLinear, Quantized
from skuda.torch.linear.split import Parts, Split
from skuda.torch.ops.dtypes import torch_dtype
from skuda.torch.ops.tensor_op import OPS

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

    split: Split
    axis: ClassVar[Axis]
    name = ""

    def __init__(
        self, whole: Int8Linear, group: Group, shards: Shards | None = None, *, parts: Parts | None = None
    ) -> None:
        name = type(self).__name__
        if not splits(whole):
            raise InvalidProblem(name, "whole", type(whole).__name__, "be a DynamicLinear or a StaticLinear")
        check_split(name, "whole", type(whole).__name__, whole.activation)
        made = Split.of(name, whole.whole, whole.format, self.axis, group, shards, parts)
        held = {**whole._buffers, "weight": whole.weight_q}  # noqa: SLF001  of the same class
        cut: dict[str, Any] = {
            each: None if tensor is None else made.cut(each, whole.format, tensor)
            for each, tensor in held.items()
            if each != "zero"
        }
        about: Any = {"activation": whole.activation, "split": made, "sizes": made.sizes if whole.sizes else ()}
        super().__init__(**cut, dtype=whole.weight_dtype, in_features=made.width, **about)
        if whole.activation.element.is_split and (self.axis, made.shards.input) == ("n", "columns"):
            rule = "have the whole input or rows of it: halves of columns from several ranks would not lie together"
            raise InvalidProblem(name, "shards", "columns of 16-bit codes", rule)
        self.original, self.stored_as = whole.original, described_as(whole)
        self.group, self.shards, self.parts = group, made.shards, made.parts
        self._number = next(_numbers)
        _layers[self._number] = self
        self.train(whole.training)

    def like(self, whole: Int8Linear) -> Self:
        """Split another whole layer of these sizes in the same way. Return this rank's part."""
        made = type(self)(super().like(whole), self.group, self.shards, parts=self.parts if self.sizes else None)
        made.name = self.name
        return made

    def gathered(self) -> Int8Linear:
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
        if self.stored_as not in (DynamicLinear, JoinedLinear, StaticLinear):
            rule = "come from a DynamicLinear or a StaticLinear, not from a subclass, which may hold more"
            raise InvalidProblem(type(self).__name__, self.name or "layer", "a part of another layer", rule)
        split = self.split
        self.group.agree(f"gathering {self.name or type(self).__name__} {split.text}")
        held = {each: tensor for each, tensor in self._buffers.items() if tensor is not None and each != "zero"}
        with torch.no_grad():
            whole: Any = {each: split.gathered(each, self.format, tensor).cpu() for each, tensor in held.items()}
        whole |= {"dtype": self.weight_dtype, "in_features": self.whole[1]}
        if self.sizes:
            how: Any = {"activation": self.activation} if self.activation.element.is_split else {}
            made: Int8Linear = JoinedLinear(**whole, sizes=split.whole_sizes, **how)
        else:
            made = layer_of(**whole, bits=self.activation.element.bits)
        return super().like(made.train(self.training))

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
        how, name = self.activation, type(self).__name__
        if isinstance(input, Quantized):
            data, scale, dtype = input.codes, input.scale.reshape(-1), input.dtype
            if not how.dynamic:
                raise InvalidProblem(name, "input", "rows with scales", "be floating: the scale is fixed")
        else:
            data, scale = self._taken(input), None
            dtype = data.dtype
            if torch.is_grad_enabled() and data.requires_grad:
                rule = "be detached, or run under torch.no_grad(): layers of several ranks have no gradient"
                raise InvalidProblem(name, "input", "a tensor that requires grad", rule)
        leading = data.shape[:-1]
        given = LayerInput(data.reshape(prod(leading), data.shape[-1]), scale)
        by_rows = "rows" in (self.shards.input, self.shards.output)
        if by_rows and len(leading) != 1:
            raise InvalidProblem(name, "input", f"{len(leading)} leading axes", "have one axis of rows")
        rows, element = self._all_rows(int(given.data.shape[0])), how.output(dtype)
        if torch.compiler.is_compiling():
            schedule = _compiled_schedule(self._number, rows, element)
        else:
            schedule = self.schedule(rows, element)
            call = f"{self.name or name} {self.split.text}, {rows} rows of {element}"
            if self.shards.input == "whole" and getattr(self.group, "checks_calls", False):
                call += f", input {digest(given.data, given.scale)}"
            self.group.agree(call)
        if scale is None:
            given = how.shared(given.data, self.held)
        found: Tensor = layer.run(schedule, self._steps(element, hides=len(schedule.chunks) > 1), self.group, given)
        return found if by_rows else found.reshape(*leading, found.shape[-1])

    def schedule(self, rows: int, element: str, *, compiles: bool = False) -> ShardSchedule:
        """Return the schedule for a number of rows and an element of the output. Compiled code has one chunk."""
        how: Any = {"dynamic": self.activation.dynamic, "halves": self.activation.element.halves}
        return _schedule(self.shards, *self.whole, rows, element, **how, compiles=compiles)

    def _all_rows(self, held: int) -> int:
        """Return the rows of all ranks, where each has its own; they are split as `Shards.rows` does."""
        if self.shards.input != "rows":
            return held
        counts = [int(text) for text in self.group.exchange(str(held))]
        if tuple(counts) != self.shards.rows(sum(counts)):
            rule = f"be {list(self.shards.rows(sum(counts)))} of {sum(counts)} rows"
            raise InvalidProblem(type(self).__name__, "input", f"{counts} rows by rank", rule)
        return sum(counts)

    def _steps(self, element: str, *, hides: bool) -> RankWork:
        """Return the local work of the rank. `hides` means that exchanges run beside its sums."""
        how, weight_scale = self.activation, self.weight_scale.view(-1)
        output = {"output_element": element, "act_scale_scope": "token" if how.dynamic else "tensor"}
        spare = getattr(self.group, "spare_multiprocessors", 0) if hides else 0

        def sums(codes: Tensor) -> Tensor:
            if not spare:
                return cast("Tensor", _OPS.scaled_linear.default(codes, self.operand, **self._of_sums()))
            problem = _sums_of(len(codes), self.width, self.out_features, how.element, self.format)
            preference = PlanPreference(spare_multiprocessors=spare)
            return cast("Tensor", default_dispatcher().run(problem, preference, act_q=codes, weight_q=self.operand))

        def channel_sums() -> Tensor:
            return self.format.integers(self.weight_q, len(self.weight_scale), self.width).sum(1, dtype=torch.int32)

        def rescale(whole: Sums, about: LayerInput) -> Tensor:
            tensors = whole.products, about.scale, weight_scale, about.zero_point, whole.of_channels, None, None
            return cast("Tensor", _OPS.rescale.default(*tensors, self.bias, k=self.whole[1], **output))

        def product(given: LayerInput) -> Tensor:
            if given.scale is None:
                tensors = self.operands(how.tensors(given.data, self.held))
                fields = how.fields(given.data.dtype) | {"output_element": element, **self.format.fields}
                return cast("Tensor", getattr(_OPS, how.op).default(*tensors, **fields))
            codes = given.data, self.operand, given.scale, given.zero_point, weight_scale, None, self.bias
            return cast("Tensor", _OPS.scaled_linear.default(*codes, **output, **self._of_codes))

        return RankWork(
            amax=how.maxima,
            quantize=how.coded,
            quantize_rows=how.coded,
            sums=sums,
            channel_sums=None if self._buffers.get("input_zero_point") is None else channel_sums,
            rescale=rescale,
            layer=product,
        )

    def _of_sums(self) -> dict[str, Any]:
        sums = str(sums_of(self.activation.element))
        return {"output_element": sums, **self.format.sizes(self.whole[0]), **self._of_codes}

    @property
    def _of_codes(self) -> dict[str, str]:
        """The fields of `scaled_linear` that codes do not show."""
        return {**self.activation.given, **self.format.fields}

    def call(self, input: Tensor) -> Call:
        """Return the call of this rank's product, for `explain`."""
        how, names = self.activation, OPS["scaled_linear"].names
        shape, weight = (*input.shape[:-1], self.width), self.operand
        codes = torch.empty(storage_shape(shape, how.element), dtype=torch_dtype(how.element), device="meta")
        if self.axis == "k":
            return "scaled_linear", {"act_q": codes, "weight_q": weight, **self._of_sums()}
        scale = torch.empty(shape[:-1] if how.dynamic else (1,), device="meta")
        zero_point = self._buffers.get("input_zero_point")
        tensors = codes, weight, scale, zero_point, self.weight_scale.view(-1), None, self.bias
        scope = "token" if how.dynamic else "tensor"
        fields = {"output_element": how.output(input.dtype), "act_scale_scope": scope, **self._of_codes}
        return "scaled_linear", dict(zip(names, tensors, strict=False)) | fields

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


@lru_cache(maxsize=4096)
def _sums_of(m: int, k: int, n: int, codes: ElementKind, form: WeightFormat) -> ScaledLinearDescriptor:
    """Return the `scaled_linear` problem with exact sums."""
    elements: Any = {"activation_element": codes, "weight_element": form.element, "output_element": sums_of(codes)}
    return ScaledLinearDescriptor(m=m, n=n, k=k, group_size=form.group_size or 0, **elements)


@lru_cache(maxsize=4096)
def _schedule(
    shards: Shards, n: int, k: int, rows: int, element: str, *, dynamic: bool, halves: int, compiles: bool
) -> ShardSchedule:
    size = torch_dtype(ElementKind(element)).itemsize
    traffic = Traffic(m=rows, n=n, k=k, output_bytes=size, dynamic=dynamic, scale_bytes=4 * dynamic, halves=halves)
    return ShardSchedule.of(shards, traffic, whole=compiles)


_layers: WeakValueDictionary[int, ShardedLinear] = WeakValueDictionary()
_numbers = itertools.count()


def _compiled_schedule(number: int, rows: int, element: str) -> ShardSchedule:
    """Return the schedule of a layer in compiled code, where the number of rows is constant.

    Layers have numbers, because torch 2.11 accepts only constants here.
    """
    return _layers[number].schedule(rows, element, compiles=True)


# As `torch.compiler.assume_constant_result`, which imports the compiler.
_compiled_schedule._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
