"""From events of a profiler to the kernels of each replay, and how long each kind ran."""

from __future__ import annotations

import pytest
from support import fresh

from skuda.tools.parallel.trace import (
    MARK,
    MOST_KERNELS,
    Kernel,
    Trace,
    extents,
    median_at,
    replays,
    shortened,
    waiting,
)

PRODUCT, SMALL, SUM = "scaled_linear_warpgroup", "rescale", "ncclDevKernel_ReduceScatter_Sum_u32_RING_LL"
INFINITE = float("inf")


def event(kind, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": kind, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1, "args": args}


def graph(name, at, correlation, kernels, *, later=100.0):
    """Return the events of a replay that is launched at a time: its range, the launch, and kernels on a device."""
    yield event("user_annotation", f"{MARK}{name}", at, 20.0)
    yield event("cuda_runtime", "cudaGraphLaunch", at + 5, 10.0, correlation=correlation)
    for kernel, stream, start, us in kernels:
        yield event("kernel", kernel, at + later + start, us, tid=stream, stream=stream, correlation=correlation)


def traced(kernels):
    ((found,),) = replays(list(graph("x", 1e9, 3, kernels))).values()
    return Trace.of(found)


def test_what_overlaps_is_counted_once_and_gaps_are_idle():
    trace = traced(
        [
            (PRODUCT, 7, 0, 10),
            (PRODUCT, 7, 8, 10),  # begins before the first ends
            (SUM, 20, 15, 10),  # 3 of it behind the product
            (SMALL, 7, 30, 5),  # after a gap of 5
            (SUM, 20, 33, 4),  # 2 of it behind the small kernel
        ]
    )
    assert trace.products == 18
    assert trace.others == 5
    assert trace.exchange == 14
    assert trace.hidden == 5
    assert trace.idle == 5
    assert trace.total == 37
    assert [one.stream for one in trace.kernels] == [0, 0, 1, 0, 1]
    assert [one.start for one in trace.kernels] == [0, 8, 15, 30, 33]


def test_parts_add_up_to_the_total():
    rng = fresh("trace")
    kernels = [
        ((PRODUCT, SMALL, SUM)[rng.integers(3)], int(rng.integers(3)), *map(int, rng.integers(0, 100, 2)))
        for _ in range(int(rng.integers(1, 40)))
    ]
    busy = {kind: set() for kind in (PRODUCT, SMALL, SUM)}
    for name, _, start, us in kernels:
        busy[name] |= set(range(start, start + us))
    local = busy[PRODUCT] | busy[SMALL]
    first, last = min(start for *_, start, _ in kernels), max(start + us for *_, start, us in kernels)
    trace = traced(kernels)
    assert [trace.products, trace.others, trace.exchange] == [len(busy[kind]) for kind in (PRODUCT, SMALL, SUM)]
    assert trace.hidden == len(local & busy[SUM])
    assert trace.idle == last - first - len(local | busy[SUM])
    assert trace.total == last - first


def test_kernels_belong_to_the_launch_and_not_to_the_time():
    events = [
        event("cuda_runtime", "cudaLaunchKernel", 0.0, 5.0, correlation=1),
        event("kernel", "flush", 160.0, 100.0, stream=7, correlation=1),  # runs when the first replay does
        *graph("2 skuda xN", 10.0, 2, [(PRODUCT, 7, 3, 10), (SUM, 9, 20, 5)], later=150.0),
        *graph("2 skuda xN", 40.0, 5, [(SUM, 9, 0, 6), (PRODUCT, 7, 7, 11)], later=300.0),
        *graph("1 bf16 x1", 80.0, 6, [("nvjet_tst_128x8", 7, 0, 50)], later=400.0),
        {"ph": "s", "id": 2, "ts": 11.0, "name": "ac2g"},
        {"ph": "M", "name": "process_name"},
    ]
    assert replays(reversed(events)) == {
        "2 skuda xN": [
            (Kernel(name=PRODUCT, stream=0, start=0, us=10), Kernel(name=SUM, stream=1, start=17, us=5)),
            (Kernel(name=SUM, stream=0, start=0, us=6), Kernel(name=PRODUCT, stream=1, start=7, us=11)),
        ],
        "1 bf16 x1": [(Kernel(name="nvjet_tst_128x8", stream=0, start=0, us=50),)],
    }


def test_copies_of_a_device_are_kernels_and_what_the_host_calls_is_none():
    events = [
        *graph("x", 10.0, 2, [(PRODUCT, 7, 0, 10)]),
        event("cpu_op", "aten::mm", 11.0, 1.0),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 130.0, 4.0, stream=7, correlation=2),
        event("gpu_user_annotation", f"{MARK}x", 110.0, 24.0, stream=7),
    ]
    ((found,),) = replays(events).values()
    assert [(one.name, one.kind) for one in found] == [(PRODUCT, "product"), ("Memcpy PtoP", "exchange")]


def test_a_replay_of_which_nothing_was_recorded_is_empty():
    assert replays([*graph("x", 0.0, 2, []), *graph("x", 50.0, 3, [(SMALL, 7, 0, 1)])])["x"][0] == ()


def test_calls_on_a_cpu_are_those_of_its_thread_and_of_gloo():
    events = [
        event("user_annotation", f"{MARK}x", 0.0, 100.0),
        event("cpu_op", "aten::linear", 10.0, 20.0),
        event("cpu_op", "aten::mm", 11.0, 8.0),
        event("cpu_op", "aten::copy_", 40.0, 2.0, tid=2),
        event("cpu_op", "c10d::allreduce_", 45.0, 5.0),
        event("user_annotation", "gloo:all_reduce", 46.0, 30.0, tid=3),
        event("cpu_op", "aten::silu", 80.0, 5.0),
        event("cpu_op", "aten::silu", 101.0, 5.0),
    ]
    ((found,),) = replays(events).values()
    assert [(one.name, one.stream, one.start, one.kind) for one in found] == [
        ("aten::linear", 0, 0, "product"),
        ("gloo:all_reduce", 1, 36, "exchange"),
        ("aten::silu", 0, 70, "other"),
    ]


def test_the_median_is_one_of_the_replays_that_are_whole():
    def replay(us, *names):
        return [Kernel(name=name, stream=0, start=0, us=us) for name in names]

    usual = (PRODUCT, SUM)
    found = [replay(9, *usual), replay(1, PRODUCT), replay(7, *usual), [], replay(8, SUM, PRODUCT)]
    assert extents(found) == [9, INFINITE, 7, INFINITE, 8]
    assert median_at(extents(found)) == 4
    assert median_at([INFINITE, 3.0]) == 1
    assert median_at(extents([[], []])) is None
    assert median_at([]) is None


def test_a_rank_that_comes_early_waits():
    early = traced([(PRODUCT, 7, 0, 10), (SUM, 9, 10, 30), (SUM, 9, 50, 6)])
    late = traced([(PRODUCT, 7, 0, 35), (SUM, 9, 35, 5), (SUM, 9, 45, 7)])
    assert waiting((early, late)) == 25
    assert waiting((late, early)) == 1
    assert waiting((early,)) == 0
    assert waiting((early, traced([(SUM, 9, 0, 5)]))) is None


def test_a_table_has_the_longest_kernels_in_their_order():
    count = MOST_KERNELS + 7
    order = fresh("trace").permutation(count)
    trace = traced([(SMALL, 7, 1000.0 * at, float(us)) for at, us in enumerate(order)])
    assert trace.left_out == 7
    assert [one.us for one in trace.kernels] == [us for us in order if us >= 7]
    assert trace.others == order.sum()


@pytest.mark.parametrize(
    ("name", "short", "kind"),
    [
        ("quantized_linear_codes", "quantized_linear_codes", "other"),
        ("quantized_linear_streamed", "quantized_linear_streamed", "product"),
        ("gated_amax_lanes_1", "gated_amax_lanes_1", "other"),
        ("nvjet_tst_192x8_64x4_2x1_v_bz_TNT", "nvjet_tst_192x8_64x4_2x1_v_bz_TNT", "product"),
        ("void cublasLt::splitKreduce_kernel<32, 16>(int)", "cublasLt::splitKreduce_kernel<32, 16>(int)", "product"),
        ("ncclDevKernel_AllGather_RING_LL(Arguments<4096ul>)", "ncclDevKernel_AllGather_RING_LL", "exchange"),
        ("void at::native::(anonymous namespace)::f(int)", "f", "other"),
        ("triton_poi_fused_mul_silu_0", "triton_poi_fused_mul_silu_0", "other"),
        ("Memset (Device)", "Memset", "other"),
        ("skuda::scaled_linear", "skuda::scaled_linear", "product"),
        ("aten::mm", "aten::mm", "product"),
    ],
)
def test_names_are_short_and_tell_the_kind(name, short, kind):
    assert shortened(name) == short
    assert Kernel(name=short, stream=0, start=0, us=1).kind == kind


def test_long_names_are_cut():
    assert shortened("x" * 500) == "x" * 71 + "…"
