"""The layer for PyTorch on CUDA devices: bits, streams, graphs and compilers.

Everything is compared with the CPU, whose values are those of NumPy. The same tests run at small sizes on the CPU,
where a capture is a call, so that what they are written in is checked everywhere; `docs/bench.md` has the command that
runs them on a GPU. `test_no_forward_waits_for_the_device` needs no GPU: it runs on tensors without data.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import time
from functools import partial

import pytest
from support import fresh

torch = pytest.importorskip("torch")

from tensors import NAMES, REGISTRY, call_of, same  # noqa: E402  it needs torch
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from skuda import ops  # noqa: E402
from skuda.dispatch.cuda import scratch  # noqa: E402
from skuda.registry import Case  # noqa: E402
from skuda.tools.studies import llama  # noqa: E402
from skuda.torch import (  # noqa: E402
    CodesLinear,
    Dynamic,
    DynamicLinear,
    FakeQuantLinear,
    MixedLinear,
    StaticLinear,
    fuse_,
    observe,
    prepare,
    quantize_,
)
from skuda.torch.formats.int8 import quantized_weight  # noqa: E402

# Compilers of torch warn of much that is not about these tests.
pytestmark = pytest.mark.filterwarnings("default")

GPUS = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
DEVICES = ["cpu", *GPUS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_gpu(device):
    return device != "cpu"


def sizes(device):
    """Pairs of N and K: typical and odd."""
    if not on_gpu(device):
        return [(8, 16), (3, 5)]
    return [(4096, 4096), (1024, 14336), (1536, 384), (129, 77), (7, 4097), (1, 1)]


def rows(device):
    return (1, 2, 3, 16, 17, 64, 128, 1000) if on_gpu(device) else (1, 3, 17)


@contextlib.contextmanager
def using(device, stream=None):
    """Make a stream current, which follows what was enqueued before, and is waited for."""
    if not on_gpu(device):
        yield
        return
    stream = stream or torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def captured(device, call, stream=None, pool=None):
    """Return a replay of a call, and its output; on the CPU a replay is a call that writes to that output."""
    if not on_gpu(device):
        output = call()
        return lambda: output.copy_(call()), output
    graph = torch.cuda.CUDAGraph()
    stream = stream or torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, pool=pool, stream=stream):
        output = call()
    return graph.replay, output


def drawn(rng, *shape, dtype=torch.float32, spread=1.0):
    """Gaussian numbers, the rows of different sizes."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 60)))
    found = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        found *= spread ** torch.randn((*shape[:-1], 1), generator=generator)
    return found.to(dtype)


def linear(rng, n, k, dtype):
    layer = nn.Linear(k, n, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(drawn(rng, n, k, spread=3.0) * k**-0.5)
        layer.bias.copy_(drawn(rng, n))
    return layer.requires_grad_(requires_grad=False)


def dynamic(rng, n, k, dtype):
    return DynamicLinear.from_linear(linear(rng, n, k, dtype))


def static(rng, n, k, dtype, *, smooth=False, shifted=False):
    layer = linear(rng, n, k, dtype)
    return StaticLinear(
        *quantized_weight(layer.weight),
        layer.bias,
        input_scale=torch.tensor([0.03]),
        input_zero_point=torch.tensor([-11], dtype=torch.int32) if shifted else None,
        smooth=torch.rand(k) + 0.5 if smooth else None,
    )


def codes(rng, n, k, dtype, *, real=False):
    layer = linear(rng, n, k, dtype)
    more = {"output_element": {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]}
    return CodesLinear(
        *quantized_weight(layer.weight),
        layer.bias,
        input_scale=torch.tensor([0.02]),
        epilogue="bias_relu",  # GELU on a GPU may differ in the last place
        **(more if real else {"output_scale": torch.tensor([0.04])}),
    )


def mixed(rng, n, k, dtype):
    return MixedLinear(linear(rng, n, k, dtype))


KINDS = {
    "dynamic": dynamic,
    "static": static,
    "smooth": partial(static, smooth=True),
    "shifted": partial(static, shifted=True),
    "codes": codes,
    "codes to real": partial(codes, real=True),
    "mixed": mixed,
}


def given(rng, kind, m, k, dtype):
    """An input of a module of `KINDS`."""
    if kind.startswith("codes"):
        return torch.from_numpy(rng.integers(-127, 128, (m, k), "int8"))
    return drawn(rng, m, k, dtype=dtype, spread=5.0)


def layer_sizes(device):
    many = {"hidden": 1024, "intermediate": 2816, "heads": 8, "kv_heads": 2, "layers": 1}
    few = {"hidden": 16, "intermediate": 24, "heads": 4, "kv_heads": 2, "layers": 1}
    return llama.LlamaSizes(**(many if on_gpu(device) else few))


def fused_layer(rng, device, dtype):
    """A decoder layer, fused; its MLP is a fused gated one."""
    stack = llama.drawn(llama.LlamaStack, layer_sizes(device), seed=int(rng.integers(1 << 30)), dtype=dtype)
    quantize_(stack, Dynamic(), strict=True)
    fusion = fuse_(stack)
    assert len(fusion.fused) == 3
    assert not fusion.left
    return stack.layers[0]


class Whole(nn.Module):
    """A decoder layer as a function of its input alone."""

    def __init__(self, layer, sizes, most, dtype):
        super().__init__()
        self.layer = layer
        cosine, sine = llama.angles_of(sizes, torch.arange(most), dtype)
        cache = torch.zeros(2, 1, sizes.kv_heads, most, sizes.head, dtype=dtype)
        for name, value in {"cosine": cosine, "sine": sine, "cache": cache, "at": torch.arange(most)}.items():
            self.register_buffer(name, value)

    def forward(self, x):
        m = x.shape[0]
        keys, values = self.cache[0, :, :, :m], self.cache[1, :, :, :m]
        return self.layer(x[None], (self.cosine[:m], self.sine[:m]), (keys, values), self.at[:m])[0]


@pytest.fixture
def plain_attention(monkeypatch):
    """Let attention return its values of the query: torch's own has other bits on other devices."""
    monkeypatch.setattr(llama.F, "scaled_dot_product_attention", lambda query, *_, **__: query)


def models(rng, device, dtype):
    """Modules of several layers, on the CPU, with the columns of their input."""
    n, k = (640, 416) if on_gpu(device) else (8, 12)
    yield nn.Sequential(dynamic(rng, n, k, dtype), static(rng, k, n, dtype, smooth=True)), k
    layer, hidden = fused_layer(rng, device, dtype), layer_sizes(device).hidden
    yield layer.mlp, hidden
    yield Whole(layer, layer_sizes(device), 64, dtype), hidden


def moved(module, device):
    return copy.deepcopy(module).to(device)


CHECKED = [(device, name) for device in DEVICES for name in (NAMES if on_gpu(device) else ["dynamic_range"])]


@pytest.mark.parametrize(("device", "name"), CHECKED)
def test_opcheck(device, name):
    rng = fresh(device, name)
    cases = REGISTRY[name].cases
    for i in rng.permutation(len(cases)):
        call = call_of(name, Case(cases[i].problem), rng)
        want = call()
        if any(bool(result.isnan().any()) for result in want):
            continue  # opcheck compares values
        tensors = {key: value.to(device) for key, value in call.tensors.items()}
        got = call(**tensors)
        assert all(same(one.cpu(), other) for one, other in zip(got, want, strict=True))
        positional = [tensors.get(argument.name) for argument in call.op._schema.arguments if not argument.kwarg_only]
        torch.library.opcheck(call.op, tuple(positional), call.fields)
        return
    raise AssertionError(f"every result of {name} holds NaN")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_modules_have_the_bits_of_the_cpu(device, kind, dtype):
    rng = fresh(device, kind, dtype)
    for n, k in sizes(device):
        module = KINDS[kind](rng, n, k, dtype)
        there = moved(module, device)
        x = given(rng, kind, max(rows(device)), k, dtype)
        # A row's value depends on nothing but that row, so that one reference serves all numbers of rows.
        want, on_device = module(x), x.to(device)
        for m in rows(device):
            got = there(on_device[:m])
            assert got.device == on_device.device
            assert same(got.cpu(), want[:m]), f"{m} x {n} x {k}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("plain_attention")
@torch.no_grad()
def test_models_have_the_bits_of_the_cpu(device, dtype):
    rng = fresh(device, dtype)
    for model, columns in models(rng, device, dtype):
        there = moved(model, device)
        for m in (1, 2, 17, 64):
            x = drawn(rng, m, columns, dtype=dtype, spread=5.0)
            assert same(there(x.to(device)).cpu(), moved(model, "cpu")(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_a_row_has_the_same_bits_in_every_batch(device, kind):
    rng = fresh(device, kind)
    n, k = (1536, 2048) if on_gpu(device) else (8, 16)
    module = moved(KINDS[kind](rng, n, k, torch.bfloat16), device)
    most = 4096 if on_gpu(device) else 64
    x = given(rng, kind, most, k, torch.bfloat16).to(device)
    whole = module(x)
    for m in (1, 2, 3, 8, 16, 17, 33, 64, 127, 128, 129, 256, 1000, 2048, 4095):
        for _ in range(3 if m < most else 0):
            start = int(rng.integers(0, most - m + 1))
            assert same(module(x[start : start + m]), whole[start : start + m]), f"{m} rows from {start}"


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_observed_scales_have_the_bits_of_the_cpu(device):
    rng = fresh(device)
    for _ in range(64):
        layer, x = FakeQuantLinear(linear(rng, 3, 4, torch.float32), activation="tensor"), drawn(rng, 2, 4)
        there = moved(layer, device)
        for one, value in ((layer, x), (there, x.to(device))):
            with observe(one):
                one(value)
        assert same(there.input_scale.cpu(), layer.input_scale)
        assert same(there(x.to(device)).cpu().isnan(), layer(x).isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("plain_attention")
@torch.no_grad()
def test_other_streams_and_devices_being_current(device):
    rng = fresh(device)
    for model, columns in models(rng, device, torch.bfloat16):
        there = moved(model, device)
        xs = [drawn(rng, 16, columns, dtype=torch.bfloat16).to(device) for _ in range(20)]
        want = [there(x).clone() for x in xs]
        for current in GPUS if on_gpu(device) else [None]:
            with torch.cuda.device(current) if current else contextlib.nullcontext():
                streams = [torch.cuda.Stream(device) for _ in range(2)] if on_gpu(device) else [None]
                for i, x in enumerate(xs):
                    with using(device, streams[i % len(streams)]):
                        assert same(there(x), want[i])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("plain_attention")
@torch.no_grad()
def test_a_graph_is_captured_after_prepare_without_another_call(device):
    rng = fresh(device)
    for dtype, m in itertools.product(DTYPES, (1, 16) if on_gpu(device) else (2,)):
        for model, columns in models(rng, device, dtype):
            there = moved(model, device)
            if isinstance(model, Whole):
                # What is not int8 here is torch's own, some of which loads its code when it is first called.
                moved(model, device)(torch.zeros(m, columns, dtype=dtype, device=device))
            prepare(there, (m,), dtype)
            x = torch.zeros(m, columns, dtype=dtype, device=device)
            replay, output = captured(device, partial(there, x))
            for _ in range(100 if on_gpu(device) else 3):
                x.copy_(drawn(rng, m, columns, dtype=dtype, spread=5.0))
                replay()
                assert same(output, there(x))


MIB = 1 << 20


def used(device):
    """Bytes of a GPU's memory that are in use, without those that torch keeps for later."""
    if not on_gpu(device):
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def pools():
    return [pool for contexts in scratch._pools.values() for pool in contexts.values()]


def owned():
    """What the scratch of every capture owns, by the number of the capture."""
    return {number: each for pool in pools() for number, each in pool._owned.items()}


def destroyed(numbers):
    """Whether the driver says that the graphs of captures are destroyed, which it may say somewhat later."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        now = owned()
        if all(now[number].destroyed() for number in numbers if number in now):
            return True
        time.sleep(0.01)
    return False


def split(rng, device):
    """Draw operands, on the CPU, of a product whose blocks share tiles, so that it needs zeros and other scratch."""
    m, n, k = (256, 512, 16384) if on_gpu(device) else (3, 5, 16)
    weight = torch.from_numpy(rng.integers(-127, 128, (n, k), dtype="int8"))
    return [torch.from_numpy(rng.integers(-127, 128, (m, k), dtype="int8")) for _ in range(3)], weight


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_many_graphs_take_scratch_from_their_pool_and_give_back_their_zeros(device):
    rng, many = fresh(device), 300 if on_gpu(device) else 2
    acts, weight = split(rng, device)
    width = 16384 if on_gpu(device) else 16  # on a GPU, several blocks share a row and add up in zeros
    rows = [drawn(rng, 4, width, dtype=torch.bfloat16) for _ in acts]

    def found(act, weight, data):
        product = torch.ops.skuda.scaled_linear(act, weight, output_element="s32")
        results = (product, *torch.ops.skuda.silu_mul_amax(gate_up=data))
        return torch.cat([each.flatten().view(torch.uint8) for each in results])

    wants = [found(act, weight, data).to(device) for act, data in zip(acts, rows, strict=True)]
    acts, rows, weight = [act.to(device) for act in acts], [data.to(device) for data in rows], weight.to(device)
    act, data, output = acts[0].clone(), rows[0].clone(), torch.empty_like(wants[0])
    call = lambda: output.copy_(found(act, weight, data))  # noqa: E731
    stream = torch.cuda.Stream(device) if on_gpu(device) else None
    assert same(call(), wants[0])
    captured(device, call, stream)[0]()
    before, after, slabs = used(device), [], []
    reserved = torch.cuda.memory_reserved(device) if on_gpu(device) else 0
    for _ in range(3):
        known = set(owned())
        pool = torch.cuda.graph_pool_handle() if on_gpu(device) else None
        replays = [captured(device, call, stream, pool)[0] for _ in range(many)]
        numbers = set(owned()) - known
        assert len(numbers) == (many if on_gpu(device) else 0), "each has zeros"
        assert not any(owned()[number].blocks for number in numbers), "and no block"
        assert used(device) - before < many * 3 * MIB // 2, "a block of a graph would have 4 MiB, as two pages"
        assert not on_gpu(device) or torch.cuda.memory_reserved(device) - reserved < 64 * MIB
        for at in rng.permutation(many):
            which = int(rng.integers(len(wants)))
            act.copy_(acts[which])
            data.copy_(rows[which])
            output.zero_()
            replays[at]()
            assert same(output, wants[which]), f"graph {at}"
        del replays
        after.append(used(device))
        assert destroyed(numbers)
        slabs.append(sum(len(pool._slabs) for pool in pools()))
    assert after[-1] - after[0] < 64 * MIB
    assert slabs[0] == slabs[-1], "zeros are used again"


@pytest.mark.parametrize("device", DEVICES)
@torch.no_grad()
def test_graphs_of_other_streams_have_a_block_until_destroyed(device):
    rng, many, most = fresh(device), 300 if on_gpu(device) else 3, 10
    acts, weight = split(rng, device)
    wants = [torch.ops.skuda.scaled_linear(act, weight, output_element="s32").to(device) for act in acts]
    acts, weight = [act.to(device) for act in acts], weight.to(device)
    act, output = acts[0].clone(), torch.empty_like(wants[0])
    side = torch.cuda.Stream(device) if on_gpu(device) else None
    stream = torch.cuda.Stream(device) if on_gpu(device) else None

    def call():
        if on_gpu(device):
            side.wait_stream(torch.cuda.current_stream(device))
        ops.scaled_linear(act_q=act, weight_q=weight, output=output, output_element="s32", stream=side)
        if on_gpu(device):
            torch.cuda.current_stream(device).wait_stream(side)
        return output

    assert same(call(), wants[0])
    captured(device, call, stream)[0]()
    before, known, replays, numbers = used(device), set(owned()), [], set()
    for _ in range(many):
        replays.append(captured(device, call, stream)[0])
        numbers |= set(owned()) - known
        for replay in [replays[at] for at in rng.permutation(len(replays))[:3]]:
            which = int(rng.integers(len(wants)))
            act.copy_(acts[which])
            output.zero_()
            replay()
            assert same(output, wants[which])
        del replay
        if len(replays) > most:
            replays.pop(int(rng.integers(most)))
    assert len(numbers) == (many if on_gpu(device) else 0)
    assert used(device) - before < 256 * MIB, "not 300 blocks of 4 MiB, counted in pages of 2 MiB"
    replays.clear()
    assert destroyed(numbers)
    captured(device, call, stream)[0]()
    assert used(device) - before < 64 * MIB


MODES = [("cpu", "default"), *itertools.product(GPUS, ("default", "reduce-overhead"))]


def normed(data):
    return torch.ops.skuda.rms_norm_quantize(data, eps=1e-6, q_min=-127, q_max=127, output_element="s8")[0]


def gated(data):
    return torch.ops.skuda.silu_mul_quantize(gate_up=data, q_min=-127, q_max=127, output_element="s8")[0]


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("write", [normed, gated, torch.clone], ids=lambda write: write.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_the_kernel_in_front_writes_is_read_whole(device, write, replayed):
    """A product may start before that one has ended, and before its stores can be seen: few of them, or very many."""
    rng = fresh(device, write.__name__, replayed)
    n, k = (8, 64) if not on_gpu(device) else (8192, 8192) if write is torch.clone else (32, 4096)
    act = torch.from_numpy(rng.integers(-127, 128, (16, k), dtype="int8")).to(device)
    if write is torch.clone:
        contents = [torch.from_numpy(rng.integers(-127, 128, (n, k), dtype="int8")).to(device) for _ in range(3)]
    else:
        wide = 2 * k if write is gated else k
        contents = [drawn(rng, n, wide, dtype=torch.bfloat16).to(device) for _ in range(3)]
    data = torch.zeros_like(contents[0])

    def product(weight):
        return torch.ops.skuda.scaled_linear(act, weight, output_element="s32")

    want = []
    for content in contents:
        weight = write(content)
        if on_gpu(device):
            torch.cuda.synchronize(device)
        want.append(product(weight).clone())
    assert same(want[0].cpu(), (act.cpu().double() @ write(contents[0]).cpu().double().T).to(torch.int32))
    replay, output = captured(device, lambda: product(write(data))) if replayed else (None, None)
    for turn in rng.integers(3, size=200 if on_gpu(device) else 4):
        data.copy_(contents[turn])
        if replay is None:
            output = product(write(data))
        else:
            replay()
        assert same(output, want[turn])


@pytest.mark.parametrize(("device", "mode"), MODES)
@pytest.mark.usefixtures("plain_attention")
@torch.no_grad()
def test_compiled_models_have_the_bits_of_eager_ones(device, mode):
    rng = fresh(device, mode)
    # Inductor compiles for a minute what the CPU tests of `tests/pytorch` compile at small sizes.
    how = {"mode": mode} if on_gpu(device) else {"backend": "aot_eager"}
    # The last one alone holds all kinds of fused modules.
    for model, columns in itertools.islice(models(rng, device, torch.bfloat16), 0 if on_gpu(device) else 2, None):
        torch._dynamo.reset()
        there = moved(model, device)
        with torch._inductor.config.patch(emulate_precision_casts=True):
            compiled = torch.compile(moved(model, device), fullgraph=True, dynamic=True, **how)
            for m in (5, 16, 64, 16, 1, 16) if on_gpu(device) else (5,):
                for _ in range(4 if on_gpu(device) else 1):
                    x = drawn(rng, m, columns, dtype=torch.bfloat16).to(device)
                    assert same(compiled(x).clone(), there(x)), f"{m} rows"


@pytest.mark.parametrize("device", DEVICES)
def test_a_training_step_of_mixed_layers(device):
    """Gradients are products of torch, so only the loss has the bits of the CPU."""
    rng = fresh(device)
    n, k = (512, 256) if on_gpu(device) else (8, 12)
    layer = mixed(rng, n, k, torch.float32).requires_grad_()
    for run in (lambda module: module, partial(torch.compile, fullgraph=True, backend="aot_eager")):
        torch._dynamo.reset()
        here, there = moved(layer, "cpu"), moved(layer, device)
        optimizer = torch.optim.AdamW(there.parameters(), lr=1e-3, fused=True)
        for _ in range(3):
            x = drawn(rng, 32, k)
            here.load_state_dict(there.state_dict())
            found = run(there)(x.to(device))
            assert same(found.detach().cpu(), here(x).detach())
            found.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class Watched(TorchDispatchMode):
    """Collects the ops that wait for a device: they read a value, or copy between devices."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")):
            self.waits.append(func.name())
        found = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, found) if isinstance(value, torch.Tensor)]
        places = {value.device.type for value in tensors if value.device.type != "meta"}
        # Elsewhere a number is passed as a tensor without axes on the CPU, which kernels take by value.
        if func.name().startswith(("aten::_to_copy", "aten::copy_")) and len(places) > 1:
            self.waits.append(func.name())
        return found


def on_no_gpu(tensor):
    """A tensor without data that says that it is on a GPU; none may be here."""
    return tensor if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def test_copies_and_reads_are_seen():
    with FakeTensorMode(), Watched() as watched:
        on_no_gpu(torch.ones(2)).cpu()
        with contextlib.suppress(DataDependentOutputException):
            on_no_gpu(torch.ones(1)).item()
    assert watched.waits == ["aten::_to_copy", "aten::_local_scalar_dense"]


@pytest.mark.parametrize("kind", [*KINDS, "gated"])
@torch.no_grad()
def test_no_forward_waits_for_the_device(kind):
    rng, dtype = fresh(kind), torch.bfloat16
    if kind == "gated":
        module, x = fused_layer(rng, "cpu", dtype).mlp, torch.ones(4, layer_sizes("cpu").hidden, dtype=dtype)
    else:
        module, x = KINDS[kind](rng, 8, 16, dtype), given(rng, kind, 4, 16, dtype)
    with FakeTensorMode():
        for inner in module.modules():
            for held in (inner._parameters, inner._buffers):
                held.update({name: on_no_gpu(value) for name, value in held.items()})
        x = on_no_gpu(x)
        with Watched() as watched:
            assert module(x).device.type == "cuda"
    assert watched.waits == []


@pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
@torch.no_grad()
def test_no_forward_waits_for_a_real_device():
    rng = fresh()
    for kind, make in KINDS.items():
        module = moved(make(rng, 64, 128, torch.bfloat16), GPUS[0])
        x = given(rng, kind, 16, 128, torch.bfloat16).to(GPUS[0])
        module(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
