"""Dynamic-range quantize: scale and zero point from the data's own range, per tensor, channel, token or group.

Formula
-------
Symmetric: m = max |input| over the segment; s = RN_C(m / q_max), and if that is 0, s = 1; z = 0.
Asymmetric: lo = min(0, min input), hi = max(0, max input); s = RN_C(RN_C(hi - lo) / C(q_max - q_min)), and if that is
0, s = 1; z = clamp(q_min - rne(RN_C(lo / s)), q_min, q_max).
Then output = clamp(rne(RN_C(input / s)) + z, q_min, q_max). NaN is skipped by the range and quantizes to z; an
infinity in a segment makes s infinite and every code z. An empty segment has s = 1 and z = 0.

Elements
--------
input f16, bf16, f32, f64; output s8, u8, s4, u4 (two to a byte, low nibble first, every row starting at a byte), s16
(stored as [n, 2 d] s8: the high halves of a row, then its low ones); `scale_out` has the compute type C (f64 for f64
data, f32 otherwise), `zero_point_out` is s32.

Units
-----
`scale_out` is real units per code step, `zero_point_out` the code that stands for 0.0.

Errors
------
`InvalidProblem` for `n` or `d` outside [0, 2^31-1]; `q_max` below `q_min` or bounds outside the range of
`output_element`; `q_max` below 1 when symmetric, not above `q_min` when asymmetric; an `axis` missing or outside the
rank for scope channel, a `group_size` missing, below 1 or not dividing `d` for scope group, and either where the
scope has none; an argument that is missing, unknown, of another element or shape, or that overlaps an output.
`Unsupported` for an element outside the lists above.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from skuda.kernels.offers import cuda_skus, numpy_skus
from skuda.kernels.quantize import affine
from skuda.kernels.quantize.granularity import (
    AffineProblem,
    Granularity,
    bounds_of_case,
    per_channel,
    per_group,
    per_tensor,
    per_token,
)
from skuda.registry.argument import ArgumentSpec, Role
from skuda.registry.elements import CODES, FLOATS, ElementKind
from skuda.registry.op import Case, Op
from skuda.registry.value import Extent, Int32, Integer
from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope

_OUTPUTS = (*CODES, ElementKind.S16)


class DynamicRangeQuantized(NamedTuple):
    """The op's result."""

    output: Any
    """Codes, [n, d]."""
    scale_out: Any
    """Scale of every segment, in the compute type."""
    zero_point_out: Any
    """Zero point of every segment, s32; all 0 when symmetric."""


def _segments_of(name: str, element: str | ElementKind) -> tuple[ArgumentSpec, ...]:
    """Return an output of one value per segment."""
    scope = DynamicRangeScope
    return (
        ArgumentSpec(name, Role.OUTPUT, element, "1", when={"scope": (scope.TENSOR,)}),
        ArgumentSpec(name, Role.OUTPUT, element, "n, num_groups", when={"scope": (scope.GROUP,)}),
        ArgumentSpec(name, Role.OUTPUT, element, "d", when={"scope": (scope.CHANNEL,), "axis": (1, -1)}),
        ArgumentSpec(name, Role.OUTPUT, element, "n"),
    )


class DynamicRangeQuantizeDescriptor(AffineProblem):
    """Problem of `dynamic_range`.

    Attributes
    ----------
    n, d : int
        Rows and columns.
    q_min, q_max : int
        Bounds of the codes, inclusive, within the range of `output_element`.
    mode : DynamicRangeMode
        ``symmetric`` or ``asymmetric``.
    scope : DynamicRangeScope
        Which elements share a scale: ``tensor``, ``channel``, ``token`` or ``group``.
    axis : int or None
        The channel axis for scope channel; for scope group the last axis, which is also the default.
    group_size : int or None
        Elements that share a scale, for scope group.
    input_element, output_element : ElementKind
        Elements of data and codes.
    """

    kernel: ClassVar[str] = "dynamic_range"
    op: Literal["dynamic_range"] = "dynamic_range"
    n: Extent
    d: Extent
    q_min: Int32
    q_max: Int32
    mode: DynamicRangeMode = DynamicRangeMode.SYMMETRIC
    scope: DynamicRangeScope = DynamicRangeScope.TOKEN
    axis: Integer | None = None
    group_size: Annotated[Integer, Field(gt=0, lt=2**31)] | None = None
    input_element: ElementKind
    output_element: ElementKind
    element_field: ClassVar[str] = "input_element"
    aux_field: ClassVar[str | None] = "output_element"
    result = DynamicRangeQuantized
    signature = (
        ArgumentSpec("input", Role.INPUT, "input_element", "n, d"),
        ArgumentSpec("output", Role.OUTPUT, "output_element", "n, d"),
        *_segments_of("scale_out", "compute"),
        *_segments_of("zero_point_out", ElementKind.S32),
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        self.check_bounds(self.q_min, self.q_max, self.output_element)
        if self.mode is DynamicRangeMode.SYMMETRIC and self.q_max <= 0:
            self.refuse("q_max", self.q_max, "be greater than 0: it divides the largest magnitude")
        if self.mode is DynamicRangeMode.ASYMMETRIC and self.q_max == self.q_min:
            self.refuse(
                "q_max", self.q_max, f"be greater than q_min = {self.q_min}: their difference divides the range"
            )
        self._check_scope()
        return self

    def _check_scope(self) -> None:
        allowed, rule = {
            DynamicRangeScope.CHANNEL: ((-2, -1, 0, 1), "lie in [-2, 1]"),
            DynamicRangeScope.GROUP: ((None, -1, 1), "be the last axis (1, -1 or left out)"),
        }.get(self.scope, ((None,), "be left out"))
        if self.axis not in allowed:
            self.refuse("axis", self.axis, f"{rule} for scope {self.scope}")
        grouped = self.scope is DynamicRangeScope.GROUP
        if grouped is (self.group_size is None):
            self.refuse(
                "group_size", self.group_size, f"be {'given' if grouped else 'left out'} for scope {self.scope}"
            )
        if self.group_size is not None and self.d % self.group_size:
            self.refuse("d", self.d, f"be a multiple of group_size = {self.group_size}")
        # Normalized: axis -1 and the last axis describe the same problem.
        if grouped or self.axis is not None:
            object.__setattr__(self, "axis", 1 if grouped else (self.axis or 0) % 2)

    @property
    def granularity(self) -> Granularity:
        """How the data divide into segments."""
        shape, axis, group_size = (self.n, self.d), self.axis or 0, self.group_size or 1
        match self.scope:
            case DynamicRangeScope.TENSOR:
                return Granularity(shape, (1,), per_tensor)
            case DynamicRangeScope.CHANNEL:
                return Granularity(shape, (shape[axis],), per_channel(axis))
            case DynamicRangeScope.TOKEN:
                return Granularity(shape, (self.n,), per_token)
            case DynamicRangeScope.GROUP:
                return Granularity(shape, (self.n, self.num_groups), per_group(group_size))

    @property
    def num_groups(self) -> int:
        """Groups per row."""
        return self.d // (self.group_size or 1)

    @property
    def segment_shape(self) -> tuple[int, ...]:
        """Shape of `scale_out` and `zero_point_out`."""
        return self.granularity.segments


def reference(
    problem: DynamicRangeQuantizeDescriptor, *, input: Any, output: Any, scale_out: Any, zero_point_out: Any
) -> None:
    """Write `output`, `scale_out` and `zero_point_out` by the formula of the module."""
    view, axes = _segments(problem, input)
    data, bounds = problem.input_element, (problem.q_min, problem.q_max)
    kept = tuple(1 if axis in axes else extent for axis, extent in enumerate(view.shape))
    outputs = (scale_out.reshape(kept), zero_point_out.reshape(kept))  # axes of extent 1 can be added without a copy
    asymmetric = problem.mode is DynamicRangeMode.ASYMMETRIC
    affine.dynamic_scales(view, axes, data, bounds, outputs, asymmetric=asymmetric)
    elements = (data, problem.output_element)
    affine.quantize(problem.granularity.spread, elements, bounds, (input, scale_out, zero_point_out, output))


def _segments(problem: DynamicRangeQuantizeDescriptor, data: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a view of the data whose segments run over whole axes, and those axes."""
    if problem.scope is DynamicRangeScope.GROUP:
        # Splitting one axis gives a view for any strides.
        return data.reshape(*problem.segment_shape, problem.group_size), (2,)
    axes = {DynamicRangeScope.TENSOR: (0, 1), DynamicRangeScope.CHANNEL: (1 - (problem.axis or 0),)}
    return data, axes.get(problem.scope, (1,))


def _cases() -> tuple[Case, ...]:
    scopes: tuple[dict[str, Any], ...] = (
        {"scope": "token"},
        {"scope": "tensor"},
        {"scope": "channel", "axis": 0},
        {"scope": "channel", "axis": -1},
        {"scope": "group", "group_size": 8},
    )
    sizes = ((17, 64), (0, 8), (5, 0), (1, 8), (3, 70008), (260, 16))
    plan = [(FLOATS[0], CODES[0], scope, size) for scope in scopes for size in sizes]
    plan += [(data, code, scope, sizes[0]) for data in FLOATS for code in CODES for scope in scopes]
    split: tuple[tuple[dict[str, Any], tuple[int, int]], ...] = (
        *((scope, sizes[0]) for scope in scopes),
        *((scope, (6, 33)) for scope in scopes[:-1]),
        ({"scope": "group", "group_size": 3}, (9, 24)),
        ({"scope": "tensor"}, (1, 37)),
    )
    plan += [(data, ElementKind.S16, scope, size) for data in FLOATS for scope, size in split]
    plan += [(data, ElementKind.S16, scopes[0], size) for data, size in zip(FLOATS, sizes[1:], strict=False)]
    made = []
    for number, (data, code, scope, (n, d)) in enumerate(plan):
        low, high = bounds_of_case(code, number, raised=number % 2 == 1)
        mode = DynamicRangeMode.SYMMETRIC if number % 2 else DynamicRangeMode.ASYMMETRIC
        problem = DynamicRangeQuantizeDescriptor(
            n=n, d=d, q_min=low, q_max=high, mode=mode, input_element=data, output_element=code, **scope
        )
        made.append(Case(problem, "special" if number % 3 == 0 else "normal"))
    return tuple(dict.fromkeys(made))


CASES = _cases()
SKUS = (
    *cuda_skus(
        DynamicRangeQuantizeDescriptor,
        __name__,
        FLOATS,
        _OUTPUTS,
        launch="skuda.kernels.quantize.dynamic_range_launch:dynamic_range",
        entry_point="dynamic_range_4",
        summary="one read per segment where it is one run",
    ),
    *numpy_skus(DynamicRangeQuantizeDescriptor, __name__, FLOATS, _OUTPUTS),
)
OP = Op(DynamicRangeQuantizeDescriptor, reference, CASES, SKUS, source="baracuda_kernels/quantize/dynamic_range.rs")
