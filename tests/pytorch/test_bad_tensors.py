"""Ops, functions and modules refuse a bad argument by its name, with and without data."""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import partial

import pytest
import torch
from support import fresh
from tensors import GatedMLP

from skuda.registry import InvalidProblem, SkudaError
from skuda.torch import (
    CodesLinear,
    Dynamic,
    DynamicLinear,
    FakeQuant,
    Mixed,
    StaticLinear,
    fake_quantize,
    frozen_linear,
    fuse_,
    linear_dynamic,
    mixed_linear,
    prepare,
    quantize_,
)
from skuda.torch.int4 import from_grouped, int4_linear, int4_weight
from skuda.torch.ops.registered import OPS

SKUDA = torch.ops.skuda
X = torch.linspace(-1, 1, 64).reshape(4, 16)
W, SCALE = torch.arange(-64, 64, dtype=torch.int8).reshape(8, 16), torch.linspace(0.1, 1, 8)
CODES, ZERO = torch.arange(-48, 48, dtype=torch.int8).reshape(2, 3, 16), torch.tensor(0, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": X.to(torch.complex64)}, r"activation must be of one of .* torch\.complex64"),
        ({"weight_scale": SCALE.to(torch.complex64)}, r"weight_scale must be .* complex64"),
        ({"activation": X > 0}, r"activation must be of one of .* torch\.bool"),
        ({"activation": torch.tensor(1.0)}, r"activation must have the axes \(m, k\); had shape \(\)"),
        ({"weight_q": W[None]}, r"weight_q must have as its last axis the bytes of a packed block"),
        ({"weight_q": W[:, :8]}, r"weight_q must be an array of shape \(8, 16\)"),
        ({"weight_q": W.t()}, r"weight_q must be an array of shape \(16, 16\)"),
        ({"weight_scale": SCALE[None]}, r"weight_scale must have the axes \(c_out\)"),
        ({"weight_scale": SCALE[0]}, r"weight_scale must have the axes \(c_out\); had shape \(\)"),
        ({"weight_scale": SCALE[:4]}, r"weight_scale must be an array of shape \(8,\)"),
        ({"bias": SCALE.to(torch.float64)}, r"bias must be .* float64"),
        ({"q_max": 1 << 15}, "q_max must"),
        ({"output_element": "f8"}, "output_element must be one of"),
        ({"epilogue": "tanh"}, "epilogue must be one of"),
    ],
)
def test_what_an_op_does_not_take_is_named(change, message):
    good = {"activation": X, "weight_q": W, "weight_scale": SCALE}
    for device in ("cpu", "meta"):
        given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in (good | change).items()}
        with pytest.raises(InvalidProblem, match=message):
            SKUDA.quantized_linear(**given)


def test_leading_axes_must_agree():
    rest = {"weight_scale": SCALE, "output_element": "f32"}
    assert SKUDA.scaled_linear(CODES, W, act_scale=torch.ones(2, 3), **rest).shape == (2, 3, 8)
    assert SKUDA.scaled_linear(CODES[0, 0], W, act_scale=torch.tensor(1.0), **rest).shape == (8,)
    for shape in ((3, 2), (6,), (2, 3, 1), (1, 2, 3), ()):
        with pytest.raises(InvalidProblem, match=r"act_scale must have the leading axes \(2, 3\)"):
            SKUDA.scaled_linear(CODES, W, act_scale=torch.ones(shape), **rest)


def test_scalars():
    op, x = SKUDA.quantize_per_tensor, torch.tensor([0.3, -4.0])
    want = torch.tensor([3, -40], dtype=torch.int8)
    for shape in ((), (1,), (1, 1)):
        got = op(x, torch.full(shape, 0.1), torch.zeros(shape, dtype=torch.int32), output_element="s8")
        assert torch.equal(got, want)
    assert torch.equal(op(x, 0.1, 0, output_element="s8"), want)
    for bad in (float("nan"), float("inf"), 0.0):
        with pytest.raises(InvalidProblem, match="scale must be finite and not zero"):
            op.number(x, bad, 0, output_element="s8")
    with pytest.raises(InvalidProblem, match=r"zero_point must be .* s32; had an array of int64"):
        op(x, torch.tensor(0.1), torch.tensor(0), output_element="s8")
    with pytest.raises(InvalidProblem, match=r"scale must be a number or an array of one element"):
        op(x, torch.ones(2), ZERO, output_element="s8")
    with pytest.raises(InvalidProblem, match="zero_point must be an integer in"):
        op.number(x, 0.1, 2**40, output_element="s8")
    with pytest.raises(RuntimeError, match=r"type 'int' for argument 'zero_point'"):
        op.number(x, 0.1, 0.5, output_element="s8")
    for given, text in ((4.0, "type 'float'"), ("4", "type 'str'"), (X, "type 'Tensor'")):
        with pytest.raises(RuntimeError, match=text):
            SKUDA.quantized_linear(X, W, SCALE, q_max=given)


def test_packed_elements_need_the_sizes_that_they_hide():
    rng = fresh()
    stored = torch.from_numpy(rng.integers(0, 255, (4, 2), "uint8", endpoint=True))
    given = (stored, SCALE[:4], torch.zeros(4, dtype=torch.int32))
    for device in ("cpu", "meta"):
        moved = [tensor.to(device) for tensor in given]
        with pytest.raises(InvalidProblem, match="shape must be given: input holds two elements to a byte"):
            SKUDA.dequantize_per_channel(*moved, axis=0, input_element="s4", output_element="f32")
        for columns in (3, 4):
            got = SKUDA.dequantize_per_channel(
                *moved, axis=0, shape=[4, columns], input_element="s4", output_element="f32"
            )
            assert got.shape == (4, columns)


OTHERS = {
    "torch.sparse_coo": lambda x: x.to_sparse(),
    "torch.sparse_csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "nested, ragged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
}
IGNORED = pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:torch.quantize_per", "ignore:The PyTorch API of nested"
)


@IGNORED
@pytest.mark.parametrize("kind", OTHERS)
def test_tensors_of_another_kind_are_refused_by_name(kind):
    words = f"must be dense: .* had a tensor that is {kind.partition(',')[0]}"
    other = OTHERS[kind]
    with pytest.raises(InvalidProblem, match=f"quantized_linear: activation {words}"):
        SKUDA.quantized_linear(other(X), W, SCALE)
    with pytest.raises(InvalidProblem, match=f"smooth: input {words}"):
        SKUDA.smooth(other(X), SCALE)
    if kind != "nested, ragged":  # torch does not mix these with others
        with pytest.raises(InvalidProblem, match=f"quantized_linear: weight_scale {words}"):
            SKUDA.quantized_linear(X, W, other(SCALE[None]))


def test_an_op_without_tensors_is_refused_by_name():
    with pytest.raises(InvalidProblem, match="gate must be given, as a tensor; had nothing"):
        SKUDA.silu_mul_quantize()


def test_an_op_on_another_device_is_refused_by_name():
    with pytest.raises(InvalidProblem, match="weight_q must be on a CPU or on a CUDA device; had on meta"):
        OPS["quantized_linear"].refuse(X, W.to("meta"), None)  # no other device is here


@pytest.mark.parametrize("value", [X.tolist(), X.numpy(), None, 3, "x"], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("warm", [False, True])
def test_a_module_refuses_what_is_no_tensor(warm, value):
    scale = {"input_scale": torch.ones(1)}
    mlp = GatedMLP(16, 8)
    quantize_(mlp, Dynamic())
    fuse_(mlp)
    for module, x in (
        (DynamicLinear(W, SCALE), X),
        (StaticLinear(W, SCALE, **scale), X),
        (StaticLinear(W, SCALE, **scale, smooth=torch.ones(16)), X),
        (CodesLinear(W, SCALE, **scale), CODES),
        (mlp, X),
    ):
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                if warm:
                    module(x)
                with pytest.raises(InvalidProblem, match=f"input must be a tensor of torch.* a {type(value).__name__}"):
                    module(value)


NOT = (None, "a", 2.5, True, [1], {}, -1, 2**70, float("nan"), object(), X.to(torch.complex64), X.to_sparse(), X[:0])
"""What few arguments take."""


def layer(config):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    quantize_(model, config)
    return model[0]


def cache(*, started=True, **given):
    kv_cache = pytest.importorskip("skuda.torch.attention.kv_cache")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8}
    config = importlib.import_module("transformers").LlamaConfig(num_hidden_layers=1, intermediate_size=8, **sizes)
    found = kv_cache.Int8Cache(**{"config": config} | given)
    if started:
        q, k = torch.ones(6, 64), torch.ones(6, 32)
        found.begin(0, (2, 1, 3, 32), k.device, None).append(q, k, k, 2)
    return found


WEIGHT, SCALES = torch.ones(8, 64), torch.ones(8, 2)
FIXED = {"weight_q": W, "weight_scale": SCALE}
LEVELS = SCALES.to(torch.int8).repeat_interleave(32, 1)
CALLS = {
    "Dynamic": (Dynamic, {"nonfinite": "ignore", "weights": "int4", "group_size": 64, "symmetric": False}),
    "int4_weight": (int4_weight, {"weight": WEIGHT, "group_size": 64, "symmetric": True}),
    "int4_linear": (int4_linear, {"linear": torch.nn.Linear(64, 8), "group_size": 64, "symmetric": True}),
    "packed": (int4_weight(WEIGHT, 64).packed, {"group_size": 64}),
    "from_grouped": (from_grouped, {"levels": LEVELS, "scales": SCALES, "zero_points": SCALES.to(torch.int8)}),
    "DynamicLinear": (DynamicLinear, {"weight": W, "weight_scale": SCALE, "bias": SCALE}),
    "StaticLinear": (StaticLinear, {"weight": W, "weight_scale": SCALE, "input_scale": SCALE[:1]}),
    "from_linear": (DynamicLinear.from_linear, {"linear": torch.nn.Linear(16, 8)}),
    "a dynamic layer": (DynamicLinear(W, SCALE), {"input": X}),
    "a static layer": (StaticLinear(W, SCALE, input_scale=SCALE[:1]), {"input": X}),
    "a mixed layer": (layer(Mixed()), {"input": X}),
    "a layer that rounds": (layer(FakeQuant()), {"input": X}),
    "linear_dynamic": (linear_dynamic, {"input": X, **FIXED, "epilogue": None, "output_element": "f32"}),
    "fake_quantize": (fake_quantize, {"input": X, "scale": SCALE[0]}),
    "mixed_linear": (mixed_linear, {"input": X, "weight": SCALES.new_ones(8, 16), "bias": None, **FIXED}),
    "frozen_linear": (frozen_linear, {"input": X, **FIXED, "output_element": "f32", "smooth": X[0]}),
    "crop": (lambda **given: cache().crop(**given), {"tokens_to_remove": -1}),
    "crop before tokens": (lambda **given: cache(started=False).crop(**given), {"tokens_to_remove": -1}),
    "reorder_cache": (lambda **given: cache().reorder_cache(**given), {"beam_idx": torch.tensor([1, 0])}),
    "select": (lambda **given: cache().batch_select_indices(**given), {"indices": torch.tensor([True, False])}),
    "repeat": (lambda **given: cache().batch_repeat_interleave(**given), {"repeats": 2}),
    "update": (lambda **given: cache().update(X, X, **given), {"layer_idx": 0}),
    "get_seq_length": (lambda **given: cache().get_seq_length(**given), {"layer_idx": 0}),
    "get_max_length": (lambda **given: cache().get_max_length(**given), {"layer_idx": 0}),
    "get_mask_sizes": (lambda **given: cache().get_mask_sizes(**given), {"query_length": 1, "layer_idx": 0}),
    "prepare": (
        partial(prepare, layer(Dynamic())),
        {"rows": (1, 2), "dtype": X.dtype, "tokens": 4, "progress": lambda *_: None},
    ),
    "Int8Cache": (partial(cache, started=False), {"max_cache_len": 8, "offloading": False}),
    "SkudaConfig": (
        lambda **given: pytest.importorskip("skuda.torch.hf.transformers").SkudaConfig(**given),
        {"ignore": ["a"], "weights": "int4", "group_size": 64, "symmetric": False, "exact": False},
    ),
}
WRONG = {
    "group_size": (64.0, True, 96, "64", [64]),
    "symmetric": (0, 1.0, X),
    "beam_idx": ([1, 0], torch.tensor([0, 2]), torch.tensor([-1, 0]), torch.tensor([[0]]), torch.tensor([0.5])),
    "indices": (torch.tensor([True]), None),
    "tokens_to_remove": ("a", 1, -1.0, True, X, torch.tensor([-1]), torch.tensor(-1.0)),
    "repeats": (0, -1, 1.5, 2**70),
    "layer_idx": (1, -1, 2**70, 0.0, True, "a", X),
    "query_length": (-1, 1.0, "a", X, None),
    "rows": (*OTHERS.values(), X, (2**70,), "12", 3),
    "progress": (3, X),
    "input": (X.tolist(), *OTHERS.values(), torch.Tensor.to_mkldnn),
    "weight": (X.tolist(), X.to_sparse()),
    "levels": (X.tolist(),),
}
"""What is wrong for certain, besides."""
NAMED = {"beam_idx": "indices", "input": "(input|activation)"}
"""What errors call an argument, if not by its own name."""


@IGNORED
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Sparse")
@pytest.mark.parametrize("call", CALLS)
def test_no_argument_raises_another_error_than_a_refusal(call):
    function, good = CALLS[call]
    function(**good)
    for name in good:
        for value in NOT:
            with suppress(SkudaError):  # some of them are right
                function(**good | {name: value})
        for value in WRONG.get(name, ()):
            with pytest.raises(InvalidProblem, match=rf"{NAMED.get(name, name)}\b.* must "):
                function(**good | {name: value(X) if callable(value) else value})


@pytest.mark.parametrize("config", [Dynamic(), Mixed(), FakeQuant(), FakeQuant(activation=None)])
def test_a_layer_refuses_inputs_of_another_width_or_place(config):
    for given, words in (
        (X[:, :8], r"input must have shape \[\.\.\., 16\]"),
        (X[0, 0], r"input must have shape \[\.\.\., 16\]"),
        (X.to("meta"), "(input must be on cpu|arrays must all be on one device).* had .*on meta"),
    ):
        with pytest.raises(InvalidProblem, match=words):
            layer(config)(given)


def test_an_op_that_writes_in_place_needs_each_of_its_arguments():
    found = cache()
    names, at = OPS["rope_quantize_append"].names[:11], found.sequences
    k = torch.ones(6, 32)
    values = (torch.ones(6, 64), k, k, at.unturned, at.block_table, at.ends, at.starts, *found.layers[0].tensors)
    given = dict(zip(names, values, strict=True))
    for name in names:
        with pytest.raises(InvalidProblem, match=rf"{name}\b.*; had nothing"):
            SKUDA.rope_quantize_append(**given | {name: None}, heads=2)
    with pytest.raises(InvalidProblem, match="v_scale must be given: an array of shape"):
        SKUDA.rope_quantize_append(*values[:-1], None, heads=2)
    with pytest.raises(RuntimeError, match="missing value for argument 'v_scale'"):  # torch's own words
        SKUDA.rope_quantize_append(*values[:-1], heads=2)


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("config", [Dynamic(), Mixed(), FakeQuant()])
def test_a_model_is_not_scripted_but_traced(config):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    quantize_(model, config)
    for each in (model, model[0]):
        with pytest.raises(InvalidProblem, match=r"a call of torch\.jit\.script"):
            torch.jit.script(each)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, X)(X), model(X))
