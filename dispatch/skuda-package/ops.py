"""Every op as a function of its arrays: the descriptor follows from their shapes and dtypes.

``make ops`` writes this file from the registry. An op of a plug-in is here as well, without a signature.

>>> import numpy, skuda
>>> skuda.ops.fake_quantize(input=numpy.float32([0.26, 99]), scale=0.5, zero_point=0, q_min=-128, q_max=127)
array([ 0.5, 63.5], dtype=float32)

Every argument is a keyword: the op's arguments, then the fields of its descriptor, of which those that are left out
follow from the arguments or have a default. Three more say how to run: `dispatcher` (one for the whole process where
it is left out), `preference` and `stream`. An output that is left out is made in the framework of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skuda.functional import call, function, op_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skuda.dispatch import Dispatcher, PlanPreference
    from skuda.kernels.quantize import AmaxQuantized, DynamicRangeQuantized, GatedAmax, GatedQuantized, NormQuantized
    from skuda.registry.elements import ElementKind
    from skuda.registry.vocabulary import DynamicRangeMode, DynamicRangeScope, EpilogueKind, GeluForm, Scaling


def __getattr__(name: str) -> Callable[..., Any]:
    found = None if name.startswith("_") else function(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return op_names()


def amax(
    *,
    input: Any,
    output: Any = None,
    n: int | None = None,
    d: int | None = None,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Amax: the largest magnitude of every row, from which `amax_quantize` makes the row's scale and codes."""
    return call("amax", locals())


def amax_quantize(
    *,
    input: Any,
    amax: Any,
    output: Any = None,
    scale_out: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> AmaxQuantized:
    """Amax quantize: a scale from each row's given largest magnitude, and the codes of the row or of a part of it."""
    found: AmaxQuantized = call("amax_quantize", locals())
    return found


def dequantize_per_channel(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
    return call("dequantize_per_channel", locals())


def dequantize_per_channel_backward(
    *,
    d_output: Any,
    scale: Any,
    d_input: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
    return call("dequantize_per_channel_backward", locals())


def dequantize_per_group(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
    return call("dequantize_per_group", locals())


def dequantize_per_group_backward(
    *,
    d_output: Any,
    scale: Any,
    d_input: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
    return call("dequantize_per_group_backward", locals())


def dequantize_per_tensor(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    numel: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
    return call("dequantize_per_tensor", locals())


def dequantize_per_tensor_backward(
    *,
    d_output: Any,
    scale: Any,
    d_input: Any = None,
    numel: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
    return call("dequantize_per_tensor_backward", locals())


def dequantize_per_token(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    n: int | None = None,
    d: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
    return call("dequantize_per_token", locals())


def dequantize_per_token_backward(
    *,
    d_output: Any,
    scale: Any,
    d_input: Any = None,
    n: int | None = None,
    d: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
    return call("dequantize_per_token_backward", locals())


def dynamic_range(
    *,
    input: Any,
    output: Any = None,
    scale_out: Any = None,
    zero_point_out: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    mode: DynamicRangeMode | str | None = None,
    scope: DynamicRangeScope | str | None = None,
    axis: int | None = None,
    group_size: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> DynamicRangeQuantized:
    """Dynamic-range quantize: scale and zero point from the data's own range, per tensor, channel, token or group."""
    found: DynamicRangeQuantized = call("dynamic_range", locals())
    return found


def fake_quantize(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    numel: int | None = None,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
    return call("fake_quantize", locals())


def fake_quantize_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    numel: int | None = None,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
    return call("fake_quantize_backward", locals())


def fake_quantize_per_channel(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
    return call("fake_quantize_per_channel", locals())


def fake_quantize_per_channel_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
    return call("fake_quantize_per_channel_backward", locals())


def fake_quantize_per_group(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
    return call("fake_quantize_per_group", locals())


def fake_quantize_per_group_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
    return call("fake_quantize_per_group_backward", locals())


def fake_quantize_per_token(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
    return call("fake_quantize_per_token", locals())


def fake_quantize_per_token_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int,
    q_max: int,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
    return call("fake_quantize_per_token_backward", locals())


def fill(
    *,
    value: Any,
    output: Any = None,
    numel: int | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Fill: every element is the value."""
    return call("fill", locals())


def gelu_mul_amax(
    *,
    gate: Any = None,
    up: Any = None,
    gate_up: Any = None,
    product: Any = None,
    amax: Any = None,
    n: int | None = None,
    d: int | None = None,
    fused: bool | None = None,
    input_element: ElementKind | str | None = None,
    approximation: GeluForm | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> GatedAmax:
    """Gated activation and amax: y = act(gate) * up and the largest magnitude of every row of y, in one pass."""
    found: GatedAmax = call("gelu_mul_amax", locals())
    return found


def gelu_mul_quantize(
    *,
    gate: Any = None,
    up: Any = None,
    gate_up: Any = None,
    scale: Any = None,
    zero_point: Any = None,
    output: Any = None,
    scale_out: Any = None,
    product: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    scaling: Scaling | str | None = None,
    fused: bool | None = None,
    has_product: bool | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    approximation: GeluForm | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> GatedQuantized:
    """Gated activation and quantize: act(gate) * up as codes, in one pass, with dynamic or given scales."""
    found: GatedQuantized = call("gelu_mul_quantize", locals())
    return found


def layer_norm_quantize(
    *,
    input: Any,
    residual: Any = None,
    weight: Any = None,
    bias: Any = None,
    scale: Any = None,
    zero_point: Any = None,
    output: Any = None,
    scale_out: Any = None,
    residual_out: Any = None,
    normalized_out: Any = None,
    n: int | None = None,
    d: int | None = None,
    eps: float,
    q_min: int | None = None,
    q_max: int | None = None,
    scaling: Scaling | str | None = None,
    has_residual: bool | None = None,
    has_weight: bool | None = None,
    has_normalized: bool | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    has_bias: bool | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> NormQuantized:
    """Layer norm and quantize: rows less their mean, over their standard deviation, then quantized, in one pass."""
    found: NormQuantized = call("layer_norm_quantize", locals())
    return found


def quantize_per_channel(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
    return call("quantize_per_channel", locals())


def quantize_per_channel_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    shape: Sequence[int] | None = None,
    axis: int,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
    return call("quantize_per_channel_backward", locals())


def quantize_per_group(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
    return call("quantize_per_group", locals())


def quantize_per_group_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    outer_size: int | None = None,
    axis_size: int | None = None,
    group_size: int,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
    return call("quantize_per_group_backward", locals())


def quantize_per_tensor(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    numel: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
    return call("quantize_per_tensor", locals())


def quantize_per_tensor_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    numel: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
    return call("quantize_per_tensor_backward", locals())


def quantize_per_token(
    *,
    input: Any,
    scale: Any,
    zero_point: Any,
    output: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
    return call("quantize_per_token", locals())


def quantize_per_token_backward(
    *,
    d_output: Any,
    input: Any,
    scale: Any,
    zero_point: Any,
    d_input: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
    return call("quantize_per_token_backward", locals())


def quantized_linear(
    *,
    activation: Any,
    weight_q: Any,
    weight_scale: Any,
    weight_zero_point: Any = None,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    output: Any = None,
    act_q_scratch: Any = None,
    act_scale_scratch: Any = None,
    weight_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None,
    has_weight_zero_point: bool | None = None,
    m: int | None = None,
    c_out: int | None = None,
    k: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Quantized linear: W8A8 with a dynamic activation scale per token."""
    return call("quantized_linear", locals())


def rescale(
    *,
    sums: Any,
    act_scale: Any,
    act_zero_point: Any = None,
    weight_sums: Any = None,
    weight_scale: Any,
    weight_zero_point: Any = None,
    act_sums: Any = None,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    output: Any = None,
    m: int | None = None,
    n: int | None = None,
    k: int,
    output_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None,
    act_scale_scope: DynamicRangeScope | str | None = None,
    has_act_zero_point: bool | None = None,
    has_weight_zero_point: bool | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Rescale: the second half of `scaled_linear`, which makes the layer's output from exact sums of codes."""
    return call("rescale", locals())


def rms_norm_quantize(
    *,
    input: Any,
    residual: Any = None,
    weight: Any = None,
    scale: Any = None,
    zero_point: Any = None,
    output: Any = None,
    scale_out: Any = None,
    residual_out: Any = None,
    normalized_out: Any = None,
    n: int | None = None,
    d: int | None = None,
    eps: float,
    q_min: int | None = None,
    q_max: int | None = None,
    scaling: Scaling | str | None = None,
    has_residual: bool | None = None,
    has_weight: bool | None = None,
    has_normalized: bool | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> NormQuantized:
    """RMS norm and quantize: rows divided by their root mean square, then quantized, in one pass."""
    found: NormQuantized = call("rms_norm_quantize", locals())
    return found


def scaled_linear(
    *,
    act_q: Any,
    act_scale: Any = None,
    act_zero_point: Any = None,
    weight_q: Any,
    weight_scale: Any = None,
    weight_zero_point: Any = None,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    output: Any = None,
    weight_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None,
    has_weight_zero_point: bool | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    act_scale_scope: DynamicRangeScope | str | None = None,
    has_act_zero_point: bool | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """Scaled linear: W8A8 with everything given as arrays, or its exact sums."""
    return call("scaled_linear", locals())


def silu_mul_amax(
    *,
    gate: Any = None,
    up: Any = None,
    gate_up: Any = None,
    product: Any = None,
    amax: Any = None,
    n: int | None = None,
    d: int | None = None,
    fused: bool | None = None,
    input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> GatedAmax:
    """Gated activation and amax: y = act(gate) * up and the largest magnitude of every row of y, in one pass."""
    found: GatedAmax = call("silu_mul_amax", locals())
    return found


def silu_mul_quantize(
    *,
    gate: Any = None,
    up: Any = None,
    gate_up: Any = None,
    scale: Any = None,
    zero_point: Any = None,
    output: Any = None,
    scale_out: Any = None,
    product: Any = None,
    n: int | None = None,
    d: int | None = None,
    q_min: int | None = None,
    q_max: int | None = None,
    scaling: Scaling | str | None = None,
    fused: bool | None = None,
    has_product: bool | None = None,
    input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> GatedQuantized:
    """Gated activation and quantize: act(gate) * up as codes, in one pass, with dynamic or given scales."""
    found: GatedQuantized = call("silu_mul_quantize", locals())
    return found


def smoothquant_linear(
    *,
    act_q: Any,
    weight_q: Any,
    weight_scale: Any,
    weight_zero_point: Any = None,
    bias: Any = None,
    output_scale: Any = None,
    output_zero_point: Any = None,
    output: Any = None,
    act_scale_scratch: Any = None,
    weight_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None,
    has_weight_zero_point: bool | None = None,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None,
    act_scale: float,
    act_zero_point: int | None = None,
    dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None,
    stream: object = None,
) -> Any:
    """SmoothQuant linear: W8A8 with one static activation scale for the whole tensor."""
    return call("smoothquant_linear", locals())
