"""The ops of torch give the bits of the dispatcher, whatever the layout of their tensors."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from support import arguments_of, assert_same_bits, dispatcher, fresh, parts_of
from tensors import NAMES, OPS, REGISTRY, all_same, array_of, call_of, overloads, same
from torch._subclasses.fake_tensor import FakeTensorMode

from skuda.dispatch.dispatcher import Dispatcher
from skuda.functional import LAUNCHES
from skuda.registry import InvalidProblem
from skuda.registry.argument import Role

SKUDA = torch.ops.skuda
CALLS = [(name, overload) for name in NAMES for overload in overloads(name)]
LED = [name for name in NAMES if OPS[name]._rows]


def some(name, rng, most=6):
    """A sample of an op's cases."""
    cases = REGISTRY[name].cases
    return [cases[i] for i in rng.permutation(len(cases))[:most]]


def check(call):
    """Compare a call with the dispatcher, and with what it returns for tensors without data."""
    before = {name: value.clone() for name, value in call.tensors.items() if isinstance(value, torch.Tensor)}
    state = {argument.name: call.arrays[argument.name].copy() for argument in arguments_of(call.problem, Role.STATE)}
    try:
        want = parts_of(dispatcher().run(call.problem, **call.arrays | state))
    except InvalidProblem as error:  # a number that is no scale
        refusal = str(error)
        with pytest.raises(InvalidProblem, match=f"^{re.escape(refusal)}$"):
            call()
        return
    got = call()
    for array, tensor in zip(want, got, strict=True):
        assert_same_bits(array_of(tensor), array)
    memory = {tensor.untyped_storage().data_ptr() for tensor in got if tensor.numel()}
    for name, array in state.items():
        assert_same_bits(array_of(call.tensors[name]), array)
        assert call.tensors[name]._version == 1
    for name, tensor in before.items():
        assert name in state or same(call.tensors[name], tensor), f"{name} was written to"
        assert tensor.numel() == 0 or call.tensors[name].untyped_storage().data_ptr() not in memory
    meta = call(**{name: tensor.to("meta") for name, tensor in before.items()})
    with FakeTensorMode() as mode:
        fake = call(**{name: mode.from_tensor(tensor) for name, tensor in before.items()})
    for kind, device in ((meta, "meta"), (fake, "cpu")):
        for tensor, real in zip(kind, got, strict=True):
            assert (tensor.shape, tensor.dtype, tensor.device.type) == (real.shape, real.dtype, device)
            assert real.numel() == 0 or tensor.stride() == real.stride()


@pytest.mark.parametrize("most", [6, pytest.param(10_000, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "overload"), CALLS)
def test_an_op_gives_the_bits_of_the_dispatcher(name, overload, most):
    rng = fresh(name, overload)
    for case in some(name, rng, most):
        check(call_of(name, case, rng, overload))


def test_every_op_that_takes_a_tensor_is_an_op_of_torch():
    assert set(REGISTRY) - set(NAMES) == {"fill"}
    for name in NAMES:
        for overload in overloads(name):
            schema = getattr(getattr(SKUDA, name), overload)._schema
            assert {each.name for each in schema.arguments if each.is_write} == OPS[name].state
            assert schema.is_mutable is bool(OPS[name].state)


@pytest.mark.parametrize("name", LED)
def test_leading_axes_are_rows(name):
    rng = fresh(name)
    done = 0
    for case in some(name, rng, 24):
        call = call_of(name, case, rng)
        call = call._replace(fields={n: v for n, v in call.fields.items() if n != OPS[name]._rows})
        led = OPS[name]._fields.led(OPS[name]._rows, call.tensors | call.fields)
        want, rows = call(), getattr(case.problem, OPS[name]._rows)
        outputs = [argument.name for argument in OPS[name]._flattened(call.tensors | call.fields).results]
        factor = next((f for f in (2, 3, 5) if rows and rows % f == 0), 1)
        for leading in ((rows // factor, factor), (1, rows), (rows, 1), (1, factor, rows // factor), ()):
            if leading or rows == 1:
                split = {
                    n: call.tensors[n].reshape((*leading, *call.tensors[n].shape[1:]))
                    for n in led.keys() & call.tensors
                }
                got = call(**split)
                for output, tensor, flat in zip(outputs, got, want, strict=True):
                    shape = (*leading, *flat.shape[1:]) if output in led else flat.shape
                    assert tensor.shape == shape
                    assert same(tensor.reshape(flat.shape), flat)
                meta = call(**{n: t.to("meta") for n, t in (call.tensors | split).items()})
                assert [(t.shape, t.dtype) for t in meta] == [(t.shape, t.dtype) for t in got]
                done += rows > 1
    assert done


def layouts(tensor, rng):
    """The same values in other layouts."""
    if tensor.dim():
        yield tensor.transpose(0, -1).contiguous().transpose(0, -1)
        junk = torch.full_like(tensor, 3)
        at = int(rng.integers(3))
        fused = torch.cat([*[junk] * at, tensor, junk], -1)
        yield fused.narrow(-1, at * tensor.shape[-1], tensor.shape[-1])
        yield torch.stack([tensor, junk], -1)[..., 0]
        yield torch.stack([junk, tensor])[1]
        yield torch.cat([tensor, junk])[: tensor.shape[0]]


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_of_a_tensor_does_not_matter(name):
    rng = fresh(name)
    for case in some(name, rng, 3):
        call = call_of(name, case, rng)
        want = call()
        for argument, tensor in call.tensors.items():
            for laid_out in layouts(tensor, rng):
                assert torch.equal(laid_out, tensor) or laid_out.is_floating_point()
                assert all_same(call(**{argument: laid_out}), want)
        everything = {n: next(layouts(t, rng), t) for n, t in call.tensors.items()}
        assert all_same(call(**everything), want)


@pytest.mark.parametrize("name", LED)
def test_a_slice_of_rows_with_leading_axes_is_taken_as_it_lies(name, monkeypatch):
    """Such as the queries in the result of a fused projection: no copy."""
    rng = fresh(name)
    case = next(case for case in some(name, rng, 200) if case.problem.arguments()[0].shape[0] > 4)
    call = call_of(name, case, rng)
    first = next(iter(call.tensors))
    rows, *own = call.tensors[first].shape
    call = call._replace(fields={n: v for n, v in call.fields.items() if n != OPS[name]._rows})
    led = OPS[name]._fields.led(OPS[name]._rows, call.tensors | call.fields)
    want = call()
    split = {n: call.tensors[n].reshape(1, rows, *call.tensors[n].shape[1:]) for n in led.keys() & call.tensors}
    wide = torch.cat([split[first]] * 3, -1)
    split[first] = wide[..., own[0] : 2 * own[0]]
    seen, run = [], Dispatcher.first_run

    def spied(self, key, problem, arrays, positions):
        seen.append(arrays[first])
        return run(self, key, problem, arrays, positions)

    monkeypatch.setattr(Dispatcher, "first_run", spied)
    LAUNCHES.forget()  # another test may have made such a call
    got = call(**split)
    assert all(same(tensor.reshape(flat.shape), flat) for tensor, flat in zip(got, want, strict=True))
    assert seen[0].untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()


# --- what is remembered between calls --------------------------------------------------------------------------------


def product(rng, m=4, n=8, k=16):
    """Arguments of `quantized_linear`."""
    x = torch.from_numpy(rng.standard_normal((m, k), "float32"))
    w = torch.from_numpy(rng.integers(-127, 127, (n, k), "int8", endpoint=True))
    return x, w, torch.from_numpy(rng.random(n, "float32"))


def test_calls_that_differ_in_anything_are_kept_apart():
    rng = fresh()
    x, w, scale = product(rng)
    op = SKUDA.quantized_linear.default
    bias = torch.from_numpy(rng.random(8, "float32"))
    for _ in range(2):
        assert op(x, w, scale).dtype is torch.float32
        assert op(x, w, scale, output_element="bf16").dtype is torch.bfloat16
        assert op(x, w, scale, output_element="f16").dtype is torch.float16
        assert op(x.half(), w, scale).dtype is torch.float16
        narrow = op(x, w, scale, q_min=-7, q_max=7)
        assert not torch.equal(narrow, op(x, w, scale))
        biased = op(x, w, scale, None, bias)
        assert torch.equal(biased, op(x, w, scale) + bias)
        assert torch.equal(op(x, w, scale, None, bias, epilogue="bias_relu"), biased.relu())
        assert op(x[:1], w, scale).shape == (1, 8)
        assert op(x[0], w, scale).shape == (8,)
        assert op(x[None], w, scale).shape == (1, 4, 8)
        strided = torch.cat([x, x], 1)[:, :16]
        assert torch.equal(op(strided, w, scale), op(x, w, scale))
        weak = x.clone().requires_grad_()
        with pytest.raises(InvalidProblem, match="requires grad"):
            op(weak, w, scale)
        with torch.no_grad():
            assert torch.equal(op(weak, w, scale), op(x, w, scale))
        with pytest.raises(InvalidProblem, match="activation on cpu, weight_q on meta"):
            op(x, w.to("meta"), scale)
        assert op(x.to("meta"), w.to("meta"), scale.to("meta")).is_meta


def test_zeros_of_either_sign_are_different_fields():
    codes, weight = torch.ones(1, 4, dtype=torch.int8), torch.ones(2, 4, dtype=torch.int8)
    for _ in range(2):
        for zero in (0.0, -0.0):
            found = SKUDA.smoothquant_linear(codes, weight, torch.ones(2), act_scale=zero, output_element="f32")
            assert bool(found.signbit().all()) is (str(zero) == "-0.0")


def test_no_tensor_is_kept():
    x, w, scale = product(fresh())
    watched = [weakref.ref(tensor) for tensor in (x, w, scale)]
    for _ in range(2):
        result = SKUDA.quantized_linear(x[None], w, scale)
    watched.append(weakref.ref(result))
    del x, w, scale, result
    gc.collect()
    assert [one() for one in watched] == [None] * 4


def test_the_number_of_launches_is_bounded_and_only_the_oldest_go(monkeypatch):
    monkeypatch.setattr("skuda.dispatch.launch_cache._MOST_KEYS", 3)
    x, w, scale = product(fresh(), m=9)
    want = SKUDA.quantized_linear(x, w, scale)
    LAUNCHES.forget()
    for at in range(16):
        rows, before = 1 + at % 8, set(LAUNCHES.of)
        assert torch.equal(SKUDA.quantized_linear(x[:rows], w, scale), want[:rows])
        assert 1 <= len(LAUNCHES.of) <= 3
        assert at < 4 or len(before - set(LAUNCHES.of)) == 1


def test_a_scale_of_channels_may_be_a_matrix_of_one_column():
    """As in checkpoints and modules."""
    x, w, scale = product(fresh())
    want = SKUDA.quantized_linear(x, w, scale)
    for column in (scale[:, None], torch.stack([scale, scale], 1)[:, :1]):
        assert torch.equal(SKUDA.quantized_linear(x, w, column), want)
        assert SKUDA.quantized_linear(x.to("meta"), w.to("meta"), column.to("meta")).shape == want.shape
    with pytest.raises(InvalidProblem, match=r"weight_scale must"):
        SKUDA.quantized_linear(x, w, scale[None])


# --- gradients, modes and subclasses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_requires_grad_is_refused_where_gradients_are_recorded(name):
    rng = fresh(name)
    call = call_of(name, some(name, rng, 1)[0], rng)
    want = call()
    floating = {n: t for n, t in call.tensors.items() if t.is_floating_point()}
    for argument, tensor in floating.items():
        for kind in (torch.nn.Parameter(tensor.clone()), tensor.clone().requires_grad_()):
            for given in (
                {argument: kind},
                {n: (kind if n == argument else t).to("meta") for n, t in call.tensors.items()},
            ):
                with pytest.raises(InvalidProblem, match=rf"{argument} must be detached.*linear\.autograd"):
                    call(**given)
            with torch.no_grad():
                got = call(**{argument: kind})
            assert all_same(got, want)
            assert not any(result.requires_grad for result in got)
            with torch.inference_mode():
                assert all_same(call(**{argument: kind}), want)


def test_a_subclass_without_code_of_its_own_is_served():
    class Named(torch.Tensor):
        pass

    x, w, scale = product(fresh())
    got = SKUDA.quantized_linear(x.as_subclass(Named), torch.nn.Buffer(w), scale)
    assert type(got) is Named
    assert torch.equal(got.as_subclass(torch.Tensor), SKUDA.quantized_linear(x, w, scale))


def test_tensors_that_are_negated_lazily():
    x, w, scale = product(fresh())
    want = SKUDA.quantized_linear(-x, w, scale)
    assert torch.equal(SKUDA.quantized_linear(torch._neg_view(x), w, scale), want)
    assert torch.equal(SKUDA.quantized_linear(torch.complex(x, x).conj().imag, w, scale), want)
