"""The vocabularies of records: closed and open enumerations."""

from __future__ import annotations

from enum import StrEnum


class OpCategory(StrEnum):
    """Top level of the op taxonomy; not every category has implemented ops."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    GEMM = "gemm"
    UNARY_ELEMENTWISE = "unary_elementwise"
    BINARY_ELEMENTWISE = "binary_elementwise"
    TERNARY_ELEMENTWISE = "ternary_elementwise"
    GATED_ACTIVATION = "gated_activation"
    REDUCTION = "reduction"
    SCAN = "scan"
    NORMALIZATION = "normalization"
    SOFTMAX = "softmax"
    CONVOLUTION = "convolution"
    POOLING = "pooling"
    ATTENTION = "attention"
    INDEXING = "indexing"
    EMBEDDING = "embedding"
    SHAPE_LAYOUT = "shape_layout"
    SORTING = "sorting"
    QUANTIZATION = "quantization"
    RANDOM = "random"
    LOSS = "loss"
    SEGMENT_OPS = "segment_ops"
    IMAGE = "image"
    FFT = "fft"
    LINALG = "linalg"
    MOE = "moe"


class QuantizeKind(StrEnum):
    """The built-in ops of the quantization category; other packages may register more by name."""

    PER_TENSOR = "quantize_per_tensor"
    PER_TENSOR_BACKWARD = "quantize_per_tensor_backward"
    DEQUANTIZE_PER_TENSOR = "dequantize_per_tensor"
    DEQUANTIZE_PER_TENSOR_BACKWARD = "dequantize_per_tensor_backward"
    PER_CHANNEL = "quantize_per_channel"
    PER_CHANNEL_BACKWARD = "quantize_per_channel_backward"
    DEQUANTIZE_PER_CHANNEL = "dequantize_per_channel"
    DEQUANTIZE_PER_CHANNEL_BACKWARD = "dequantize_per_channel_backward"
    PER_TOKEN = "quantize_per_token"
    PER_TOKEN_BACKWARD = "quantize_per_token_backward"
    DEQUANTIZE_PER_TOKEN = "dequantize_per_token"
    DEQUANTIZE_PER_TOKEN_BACKWARD = "dequantize_per_token_backward"
    PER_GROUP = "quantize_per_group"
    PER_GROUP_BACKWARD = "quantize_per_group_backward"
    DEQUANTIZE_PER_GROUP = "dequantize_per_group"
    DEQUANTIZE_PER_GROUP_BACKWARD = "dequantize_per_group_backward"
    FAKE_QUANTIZE = "fake_quantize"
    FAKE_QUANTIZE_BACKWARD = "fake_quantize_backward"
    FAKE_QUANTIZE_PER_CHANNEL = "fake_quantize_per_channel"
    FAKE_QUANTIZE_PER_CHANNEL_BACKWARD = "fake_quantize_per_channel_backward"
    FAKE_QUANTIZE_PER_TOKEN = "fake_quantize_per_token"
    FAKE_QUANTIZE_PER_TOKEN_BACKWARD = "fake_quantize_per_token_backward"
    FAKE_QUANTIZE_PER_GROUP = "fake_quantize_per_group"
    FAKE_QUANTIZE_PER_GROUP_BACKWARD = "fake_quantize_per_group_backward"
    DYNAMIC_RANGE = "dynamic_range"
    RMS_NORM_QUANTIZE = "rms_norm_quantize"
    LAYER_NORM_QUANTIZE = "layer_norm_quantize"
    SILU_MUL_QUANTIZE = "silu_mul_quantize"
    GELU_MUL_QUANTIZE = "gelu_mul_quantize"
    QUANTIZED_LINEAR = "quantized_linear"
    SMOOTHQUANT_LINEAR = "smoothquant_linear"
    SCALED_LINEAR = "scaled_linear"


class ElementwiseKind(StrEnum):
    """The built-in elementwise ops."""

    FILL = "fill"


class BackendKind(StrEnum):
    """The built-in backends; a plug-in's backend has its own name."""

    NUMPY = "numpy"
    PYCUDA = "pycuda"
    CUDA_CORE = "cuda_core"


class MathPrecision(StrEnum):
    """Precision of the arithmetic instruction itself."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    F16 = "f16"
    BF16 = "bf16"
    TF32 = "tf32"
    F32 = "f32"
    F64 = "f64"
    INT8 = "int8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    INT4 = "int4"
    BINARY = "binary"


class LayoutSku(StrEnum):
    """Operand layouts of a matrix product D = A B."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    RCR = "rcr"
    """A and D row-major, B column-major: a linear layer whose weight is stored as [N, K]."""
    RRR = "rrr"
    """All three row-major."""


class ActivationKind(StrEnum):
    """The activation function that a fused epilogue applies."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    RELU = "relu"
    GELU = "gelu"
    """In the erf form."""
    SILU = "silu"


class EpilogueKind(StrEnum):
    """What happens to a product before it is rounded to the output element."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    IDENTITY = "identity"
    BIAS = "bias"
    BIAS_RELU = "bias_relu"
    BIAS_GELU = "bias_gelu"
    BIAS_SILU = "bias_silu"

    @property
    def requires_bias(self) -> bool:
        """Whether the op takes a bias of one value per output channel."""
        return self is not EpilogueKind.IDENTITY

    @property
    def activation(self) -> ActivationKind | None:
        """The activation applied after the bias, if any."""
        return _ACTIVATIONS.get(self)


_ACTIVATIONS = {EpilogueKind(f"bias_{kind}"): kind for kind in ActivationKind}


class DynamicRangeMode(StrEnum):
    """How a dynamic range becomes scale and zero point."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class DynamicRangeScope(StrEnum):
    """Which elements share one scale and zero point."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    TENSOR = "tensor"
    CHANNEL = "channel"
    TOKEN = "token"
    GROUP = "group"


class Scaling(StrEnum):
    """Where the scale of a fused quantization comes from."""

    DYNAMIC = "dynamic"
    """From each token's own range, symmetric, as in `dynamic_range`."""
    STATIC = "static"
    """Given, one for the tensor, with a zero point."""


class Nonfinite(StrEnum):
    """What a NaN does to the range of its row, where a scale follows from that."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    IGNORE = "ignore"
    """Nothing: it is skipped, and its code is 0."""
    PROPAGATE = "propagate"
    """It counts as an infinity: the scale is infinite and all codes are 0, so every product of the row is NaN."""


class GeluForm(StrEnum):
    """How GELU is defined."""

    ERF = "erf"
    """x Phi(x), Phi the normal distribution function."""
    TANH = "tanh"
    """x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2."""


class RotaryLayout(StrEnum):
    """Which elements of a head a rotary embedding turns together."""

    __hash__ = str.__hash__  # an enumeration's own is a slower Python function

    HALF = "half"
    """Elements i and i + r / 2 of the first r."""
    INTERLEAVED = "interleaved"
    """Elements 2 i and 2 i + 1."""
