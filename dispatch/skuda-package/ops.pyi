# Made by `make ops` from the registry. For an op of a plug-in there is a function too, of any type.
# fmt: off
from collections.abc import Callable, Sequence
from typing import Any

from skuda.dispatch import Dispatcher, PlanPreference
from skuda.kernels.attention import Attended, RopeQuantizedQueries
from skuda.kernels.linear import PackedWeight
from skuda.kernels.quantize import AmaxQuantized, DynamicRangeQuantized, GatedAmax, GatedQuantized, NormQuantized
from skuda.kernels.sampling import LogProbabilities
from skuda.registry import DynamicRangeMode, DynamicRangeScope, ElementKind, EpilogueKind, Scaling
from skuda.registry.vocabulary import GeluForm, Nonfinite, RotaryLayout

def __getattr__(name: str) -> Callable[..., Any]: ...
def amax(
    *, input: Any, output: Any = None, n: int | None = None, d: int | None = None,
    input_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Amax: the largest magnitude of every row, from which `amax_quantize` makes the row's scale and codes."""
def amax_quantize(
    *, input: Any, amax: Any, output: Any = None, scale_out: Any = None, n: int | None = None, d: int | None = None,
    q_min: int | None = None, q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> AmaxQuantized:
    """Amax quantize: a scale from each row's given largest magnitude, and the codes of the row or of a part of it."""
def argmax(
    *, logits: Any, token: Any = None, n: int | None = None, v: int | None = None,
    input_element: ElementKind | str | None = None, token_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Argmax: the index of the largest logit of every row."""
def attention(
    *, q_codes: Any, q_scale: Any, k_codes: Any, k_scale: Any, v_codes: Any, v_scale: Any, block_table: Any,
    lengths: Any, starts: Any, output: Any = None, output_codes: Any = None, output_scale: Any = None,
    tokens: int | None = None, kv_heads: int | None = None, head_size: int | None = None, sequences: int | None = None,
    pages: int | None = None, most_blocks: int | None = None, heads: int | None = None, scale: float,
    causal: bool | None = None, window: int | None = None, output_element: ElementKind | str | None = None,
    quantized: bool | None = None, dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None,
    stream: object = None,
) -> Attended:
    """Attention over a paged int8 cache: the same bits of a row in prefill, decode and any batch or split."""
def dequantize_per_channel(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, shape: Sequence[int] | None = None, axis: int,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
def dequantize_per_channel_backward(
    *, d_output: Any, scale: Any, d_input: Any = None, shape: Sequence[int] | None = None, axis: int,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
def dequantize_per_group(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, outer_size: int | None = None,
    axis_size: int | None = None, group_size: int, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
def dequantize_per_group_backward(
    *, d_output: Any, scale: Any, d_input: Any = None, outer_size: int | None = None, axis_size: int | None = None,
    group_size: int, input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
def dequantize_per_tensor(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, numel: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
def dequantize_per_tensor_backward(
    *, d_output: Any, scale: Any, d_input: Any = None, numel: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
def dequantize_per_token(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, n: int | None = None, d: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Dequantize: integer codes to floating data."""
def dequantize_per_token_backward(
    *, d_output: Any, scale: Any, d_input: Any = None, n: int | None = None, d: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of dequantize with respect to the codes, as if they were real numbers."""
def dynamic_range(
    *, input: Any, output: Any = None, scale_out: Any = None, zero_point_out: Any = None, n: int | None = None,
    d: int | None = None, q_min: int | None = None, q_max: int | None = None,
    mode: DynamicRangeMode | str | None = None, scope: DynamicRangeScope | str | None = None, axis: int | None = None,
    group_size: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> DynamicRangeQuantized:
    """Dynamic-range quantize: scale and zero point from the data's own range, per tensor, channel, token or group."""
def fake_quantize(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, numel: int | None = None, q_min: int, q_max: int,
    input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
def fake_quantize_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, numel: int | None = None,
    q_min: int, q_max: int, input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
def fake_quantize_per_channel(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, shape: Sequence[int] | None = None, axis: int,
    q_min: int, q_max: int, input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
def fake_quantize_per_channel_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, shape: Sequence[int] | None = None,
    axis: int, q_min: int, q_max: int, input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
def fake_quantize_per_group(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, outer_size: int | None = None,
    axis_size: int | None = None, group_size: int, q_min: int, q_max: int,
    input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
def fake_quantize_per_group_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, outer_size: int | None = None,
    axis_size: int | None = None, group_size: int, q_min: int, q_max: int,
    input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
def fake_quantize_per_token(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, n: int | None = None, d: int | None = None,
    q_min: int, q_max: int, input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Fake-quantize: quantize and dequantize without leaving floating point."""
def fake_quantize_per_token_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, n: int | None = None,
    d: int | None = None, q_min: int, q_max: int, input_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of fake-quantize, straight through."""
def fill(
    *, value: Any, output: Any = None, numel: int | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Fill: every element is the value."""
def gelu_mul_amax(
    *, gate: Any = None, up: Any = None, gate_up: Any = None, product: Any = None, amax: Any = None,
    n: int | None = None, d: int | None = None, fused: bool | None = None,
    input_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    approximation: GeluForm | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> GatedAmax:
    """Gated activation and amax: y = act(gate) * up and the largest magnitude of every row of y, in one pass."""
def gelu_mul_quantize(
    *, gate: Any = None, up: Any = None, gate_up: Any = None, scale: Any = None, zero_point: Any = None,
    output: Any = None, scale_out: Any = None, product: Any = None, n: int | None = None, d: int | None = None,
    q_min: int | None = None, q_max: int | None = None, scaling: Scaling | str | None = None, fused: bool | None = None,
    has_product: bool | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    approximation: GeluForm | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> GatedQuantized:
    """Gated activation and quantize: act(gate) * up as codes, in one pass, with dynamic or given scales."""
def layer_norm_quantize(
    *, input: Any, residual: Any = None, weight: Any = None, bias: Any = None, scale: Any = None,
    zero_point: Any = None, output: Any = None, scale_out: Any = None, residual_out: Any = None,
    normalized_out: Any = None, n: int | None = None, d: int | None = None, eps: float, q_min: int | None = None,
    q_max: int | None = None, scaling: Scaling | str | None = None, has_residual: bool | None = None,
    has_weight: bool | None = None, has_normalized: bool | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    has_bias: bool | None = None, dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None,
    stream: object = None,
) -> NormQuantized:
    """Layer norm and quantize: rows less their mean, over their standard deviation, then quantized, in one pass."""
def log_softmax_at(
    *, logits: Any, tokens: Any, temperature: Any = None, logprob: Any = None, entropy: Any = None,
    n: int | None = None, v: int | None = None, input_element: ElementKind | str | None = None,
    token_element: ElementKind | str | None = None, t: int | None = None, has_temperature: bool | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> LogProbabilities:
    """Log-softmax at given tokens: their log-probabilities, and the entropy of every row."""
def pack_weight(
    *, codes: Any, group_scale: Any, group_offset: Any, output: Any = None, misfits: Any = None, n: int | None = None,
    k: int | None = None, code_element: ElementKind | str | None = None, group_size: int | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> PackedWeight:
    """Pack weight: 4-bit codes with an integer scale and offset per group, in the layout that kernels read."""
def quantize_per_channel(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, shape: Sequence[int] | None = None, axis: int,
    q_min: int | None = None, q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
def quantize_per_channel_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, shape: Sequence[int] | None = None,
    axis: int, q_min: int | None = None, q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
def quantize_per_group(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, outer_size: int | None = None,
    axis_size: int | None = None, group_size: int, q_min: int | None = None, q_max: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
def quantize_per_group_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, outer_size: int | None = None,
    axis_size: int | None = None, group_size: int, q_min: int | None = None, q_max: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
def quantize_per_tensor(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, numel: int | None = None, q_min: int | None = None,
    q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
def quantize_per_tensor_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, numel: int | None = None,
    q_min: int | None = None, q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
def quantize_per_token(
    *, input: Any, scale: Any, zero_point: Any, output: Any = None, n: int | None = None, d: int | None = None,
    q_min: int | None = None, q_max: int | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Quantize: floating data to integer codes."""
def quantize_per_token_backward(
    *, d_output: Any, input: Any, scale: Any, zero_point: Any, d_input: Any = None, n: int | None = None,
    d: int | None = None, q_min: int | None = None, q_max: int | None = None,
    input_element: ElementKind | str | None = None, output_element: ElementKind | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Gradient of quantize, straight through."""
def quantized_linear(
    *, activation: Any, weight_q: Any, weight_scale: Any, weight_zero_point: Any = None, bias: Any = None,
    output_scale: Any = None, output_zero_point: Any = None, output: Any = None, act_q_scratch: Any = None,
    act_scale_scratch: Any = None, weight_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None, has_weight_zero_point: bool | None = None,
    group_size: int | None = None, m: int | None = None, c_out: int | None = None, k: int | None = None,
    q_min: int | None = None, q_max: int | None = None, activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Quantized linear: W8A8 with a dynamic activation scale per token."""
def rescale(
    *, sums: Any, act_scale: Any, act_zero_point: Any = None, weight_sums: Any = None, weight_scale: Any,
    weight_zero_point: Any = None, act_sums: Any = None, bias: Any = None, output_scale: Any = None,
    output_zero_point: Any = None, output: Any = None, m: int | None = None, n: int | None = None, k: int,
    output_element: ElementKind | str | None = None, sums_element: ElementKind | str | None = None,
    epilogue: EpilogueKind | str | None = None, act_scale_scope: DynamicRangeScope | str | None = None,
    has_act_zero_point: bool | None = None, has_weight_zero_point: bool | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Rescale: the second half of `scaled_linear`, which makes the layer's output from exact sums of codes."""
def rms_norm_quantize(
    *, input: Any, residual: Any = None, weight: Any = None, scale: Any = None, zero_point: Any = None,
    output: Any = None, scale_out: Any = None, residual_out: Any = None, normalized_out: Any = None,
    n: int | None = None, d: int | None = None, eps: float, q_min: int | None = None, q_max: int | None = None,
    scaling: Scaling | str | None = None, has_residual: bool | None = None, has_weight: bool | None = None,
    has_normalized: bool | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> NormQuantized:
    """RMS norm and quantize: rows divided by their root mean square, then quantized, in one pass."""
def rope_quantize_append(
    *, q: Any, k: Any, v: Any, q_norm: Any = None, k_norm: Any = None, cos_sin: Any, k_offset: Any = None,
    block_table: Any, lengths: Any, starts: Any, k_codes: Any, k_scale: Any, v_codes: Any, v_scale: Any,
    q_codes: Any = None, q_scale: Any = None, tokens: int | None = None, kv_heads: int | None = None,
    head_size: int | None = None, sequences: int | None = None, pages: int | None = None,
    most_blocks: int | None = None, heads: int | None = None, most_positions: int | None = None,
    rotated: int | None = None, rotary_layout: RotaryLayout | str | None = None, eps: float | None = None,
    has_q_norm: bool | None = None, has_k_norm: bool | None = None, has_k_offset: bool | None = None,
    input_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> RopeQuantizedQueries:
    """Rotary embedding and quantize: new q, k and v as int8, keys and values written into a paged cache."""
def sample(
    *, logits: Any, temperature: Any, top_k: Any = None, top_p: Any = None, seed: Any, sequence: Any, position: Any,
    token: Any = None, n: int | None = None, v: int | None = None, input_element: ElementKind | str | None = None,
    token_element: ElementKind | str | None = None, has_top_k: bool | None = None, has_top_p: bool | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Sample: a token drawn from the softmax of every row, by temperature, top-k and top-p."""
def scaled_linear(
    *, act_q: Any, act_scale: Any = None, act_zero_point: Any = None, weight_q: Any, weight_scale: Any = None,
    weight_zero_point: Any = None, bias: Any = None, output_scale: Any = None, output_zero_point: Any = None,
    output: Any = None, weight_element: ElementKind | str | None = None, epilogue: EpilogueKind | str | None = None,
    has_weight_zero_point: bool | None = None, group_size: int | None = None, m: int | None = None,
    n: int | None = None, k: int | None = None, activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, act_scale_scope: DynamicRangeScope | str | None = None,
    has_act_zero_point: bool | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Scaled linear: W8A8 with everything given as arrays, or its exact sums."""
def silu_mul_amax(
    *, gate: Any = None, up: Any = None, gate_up: Any = None, product: Any = None, amax: Any = None,
    n: int | None = None, d: int | None = None, fused: bool | None = None,
    input_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> GatedAmax:
    """Gated activation and amax: y = act(gate) * up and the largest magnitude of every row of y, in one pass."""
def silu_mul_quantize(
    *, gate: Any = None, up: Any = None, gate_up: Any = None, scale: Any = None, zero_point: Any = None,
    output: Any = None, scale_out: Any = None, product: Any = None, n: int | None = None, d: int | None = None,
    q_min: int | None = None, q_max: int | None = None, scaling: Scaling | str | None = None, fused: bool | None = None,
    has_product: bool | None = None, input_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, nonfinite: Nonfinite | str | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> GatedQuantized:
    """Gated activation and quantize: act(gate) * up as codes, in one pass, with dynamic or given scales."""
def smoothquant_linear(
    *, act_q: Any, weight_q: Any, weight_scale: Any, weight_zero_point: Any = None, bias: Any = None,
    output_scale: Any = None, output_zero_point: Any = None, output: Any = None, act_scale_scratch: Any = None,
    weight_element: ElementKind | str | None = None, epilogue: EpilogueKind | str | None = None,
    has_weight_zero_point: bool | None = None, group_size: int | None = None, m: int | None = None,
    n: int | None = None, k: int | None = None, activation_element: ElementKind | str | None = None,
    output_element: ElementKind | str | None = None, act_scale: float, act_zero_point: int | None = None,
    dispatcher: Dispatcher | None = None, preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """SmoothQuant linear: W8A8 with one static activation scale for the whole tensor."""
def unpack_weight(
    *, packed: Any, output: Any = None, n: int | None = None, k: int | None = None, group_size: int,
    output_element: ElementKind | str | None = None, dispatcher: Dispatcher | None = None,
    preference: PlanPreference | None = None, stream: object = None,
) -> Any:
    """Unpack weight: the 8-bit codes of a weight that `pack_weight` made."""
