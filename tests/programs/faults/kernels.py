"""Faults in `skuda.kernels`: CUDA sources, which the tests run on the CPU, and the references, launch rules and costs.

Names begin with ``kernel-``, ``curve-``, ``linear-`` or ``reference-``.
"""

from faults.fault import listed

ON_CPU = "tests/kernels/test_cuda_on_cpu.py"


def on_cpu(*skus: str, test: str = "test_kernel_equals_the_reference") -> list[str]:
    """Return tests that run kernels on the CPU; a SKU is given by op and elements."""
    return [f"{ON_CPU}::{test}[quantization.{sku}.plain.sm_80.chunked]" for sku in skus]


def hopper(*ways: str) -> list[str]:
    """Return the tests of Hopper's kernels at the ends of all ranges; a way is given with its zero points."""
    return [
        f"tests/kernels/test_hopper_on_cpu.py::test_extreme_values_give_the_bits_of_the_reference[{w}]" for w in ways
    ]


SUMS = on_cpu("rms_norm_quantize.f32-s8", "rms_norm_quantize.bf16-s8")
NORM = on_cpu("layer_norm_quantize.f32-s8", "layer_norm_quantize.f16-s8")
MAGNITUDES = "test_gradients_are_divided_exactly_whatever_their_magnitude"
CURVES = ["tests/kernels/test_curves.py::test_every_16_bit_argument_gives_the_same_bits_on_the_fast_path"]
SAMPLING = ["tests/kernels/test_sampling_on_cpu.py"]
MEANING = ["tests/kernels/test_sampling.py"]
PACKED = ["tests/kernels/test_packed_weight.py"]

_READS_PACKED = "test_kernels_that_read_packed_weights_equal_the_reference"
STREAMED_PACKED = [f"tests/kernels/test_hopper_on_cpu.py::{_READS_PACKED}[scaled_linear-True-8-32]"]


def packing(op: str) -> list[str]:
    """Return the tests of an op on packed weights."""
    return [f"{ON_CPU}::test_kernel_equals_the_reference[shape_layout.{op}.s8.plain.sm_80.blocks]"]


NUMERICS = ["tests/kernels/test_numerics.py"]
LINEAR = ["tests/kernels/test_numerics_linear.py"]
FAULTS = listed(
    {
        "kernels/include/quotient.cuh": {
            "kernel-product-with-the-reciprocal": (
                "  C q = mul_rn(x, g.y);\n#pragma",
                "  return mul_rn(x, g.y);\n  C q = 0;\n#pragma",
                on_cpu("quantize_per_tensor.f32-s8", "quantize_per_token.f32-s8"),
            ),
            "kernel-quotient-without-the-rest": (
                "mul_rn(x, g.rest)) : quotient",
                "(C)0) : quotient",
                [f"{ON_CPU}::test_codes_are_exact_where_quotients_are_hardest_to_round"],
            ),
            "kernel-special-values-on-the-fast-path": (
                "if (all_quick(g) && all_finite(x)) {\n    quick_codes(x, g, q);",
                "if (true) {\n    quick_codes(x, g, q);",
                on_cpu("quantize_per_token.f32-s8", "quantize_per_tensor.f32-s8"),
            ),
            "kernel-the-mask-excludes-its-bound": (
                "t <= (C)(g.q_max - g.z)",
                "t < (C)(g.q_max - g.z)",
                on_cpu("fake_quantize_backward.f32", "fake_quantize_backward.bf16"),
            ),
            "kernel-negative-scales-divide-fast": (
                "divide && g[j].s > 0",
                "divide",
                on_cpu(*(f"quantize_per_token_backward.{e}" for e in ("f32", "f64")), test=MAGNITUDES),
            ),
            "kernel-tiny-gradients-divide-fast": (
                "fabs(v) >= Divisible<C>::min()",
                "true",
                on_cpu(*(f"quantize_per_token_backward.{e}" for e in ("f32", "f64")), test=MAGNITUDES),
            ),
            "kernel-huge-gradients-divide-fast": (
                "fabs(v) < Divisible<C>::limit()",
                "true",
                on_cpu(*(f"quantize_per_token_backward.{e}" for e in ("f32", "f64")), test=MAGNITUDES),
            ),
            "kernel-rounds-half-away": (
                "const f64 t = (f64)rint(div_rn(x, s));\n  return t >=",
                "const f64 t = (f64)round(div_rn(x, s));\n  return t >=",
                on_cpu("fake_quantize_backward.f32", "fake_quantize_per_token_backward.f32"),
            ),
        },
        "kernels/include/affine.cuh": {
            "kernel-tiny-bf16-gradients-divide-fast": (
                "+ 0x72807280u",
                "+ 0x7fff7fffu",
                on_cpu("quantize_per_token_backward.bf16", test=MAGNITUDES),
            ),
            "kernel-huge-bf16-gradients-divide-fast": (
                "found.up() < bits_of(Divisible<f32>::limit())",
                "found.up() < Infinity<f32>::bits()",
                on_cpu("quantize_per_token_backward.bf16", test=MAGNITUDES),
            ),
        },
        "kernels/include/walk.cuh": {
            "kernel-the-tail-is-missing": (
                "unit < all_units;",
                "unit < all_units - 1;",
                on_cpu("fake_quantize_per_channel.f32", "quantize_per_channel.f32-s8"),
            ),
            "kernel-a-row-ends-a-unit-early": (
                "if ((u64)run * chunks",
                "if ((u64)(run + 1) * chunks",
                on_cpu("dequantize_per_token.f32-s8", "quantize_per_token.f32-s8"),
            ),
        },
        "kernels/include/elements.cuh": {
            "kernel-nibbles-in-another-order": (
                "w |= (q[i] & 15u) << 4 * i",
                "w |= (q[i] & 15u) << 4 * (N - 1 - i)",
                on_cpu("quantize_per_group.f32-s4"),
            ),
        },
        "kernels/include/runs.cuh": {
            "kernel-a-range-with-nan": (
                "bool quick = by_chunks && !has_nan(r);",
                "bool quick = by_chunks;",
                on_cpu("dynamic_range.f32-s8", "dynamic_range.f16-s8"),
            ),
        },
        "kernels/include/gated.cuh": {
            "kernel-gates-before-the-previous-kernel-ends": (
                "  griddepcontrol_launch_dependents();\n  griddepcontrol_wait();\n  const u32 lane",
                "  griddepcontrol_launch_dependents();\n  const u32 lane",
                on_cpu("silu_mul_quantize.f32-s8", "silu_mul_quantize.f16-s8"),
            ),
        },
        "kernels/quantize/dynamic_range.cu": {
            "kernel-a-missing-barrier": (
                "    __syncthreads();\n    up[band][lane] = r.up, down[band][lane] = r.down;\n    __syncthreads();\n",
                "    up[band][lane] = r.up, down[band][lane] = r.down;\n",
                on_cpu("dynamic_range.f32-s8", "dynamic_range.f16-s8"),
            ),
        },
        "kernels/quantize/norm.cuh": {
            "kernel-sums-in-another-order": (
                "half[i] = v[i] + v[i + N / 2];",
                "half[i] = v[2 * i] + v[2 * i + 1];",
                SUMS,
            ),
            "kernel-a-lane-is-lost": ("lanes[1] = lanes[2], lanes[2] = lanes[3]", "lanes[2] = lanes[3]", SUMS),
            "kernel-absent-octets-are-squared": (
                "&& !exists(k) ? (Real)0",
                "&& false ? (Real)0",
                [f"{ON_CPU}::test_rows_are_centred"],
            ),
            "kernel-infinity-on-the-fast-path": ("range.up < Infinity<Real>::bits() && g.quick", "g.quick", NORM),
            "kernel-rows-before-the-previous-kernel-ends": (
                "  griddepcontrol_wait();\n  const s64 own",
                "  const s64 own",
                SUMS,
            ),
            "kernel-a-sum-of-zeros-has-a-sign": (
                "lanes[k] = lanes[k] + (CENTRED",
                "lanes[k] = (CENTRED",
                [f"{ON_CPU}::test_rows_are_centred"],
            ),
        },
        "kernels/include/curves.cuh": {
            "curve-doubtful-values-are-kept": ("if (any) {", "if (false) {", CURVES),
            "curve-bounds-change-sides": ("fminf(fabsf(t), 130.0f)", "fabsf(t)", CURVES),
            "curve-rounded-twice": ("bits - 1 : bits) | 1", "bits : bits)", CURVES),
            "curve-far-gates-on-the-fast-path": ("lowest = 0xc120c120u", "lowest = 0xc700c700u", CURVES),
            "curve-tiny-gates-on-the-fast-path": ("small = 0x0d800d80u", "small = 0x00010001u", CURVES),
            "curve-constants-without-their-turn": ("-7.0f / 16777216.0f", "0.0f", CURVES),
            "curve-squares-of-f32-are-exact": ("if (!SQUARES) slope = 2.0f / 16777216.0f;", "", CURVES),
            "curve-tiny-results-by-bounds": ("if (least < tiny) {", "if (false) {", CURVES),
            "curve-codes-without-doubt": ("< 0.5f - reach", "< 0.5f", CURVES),
            "curve-fused-without-doubt": ("0x1fffffffu) > 2048u", "0x1fffffffu) >= 0u", CURVES),
        },
        "kernels/quantize/curves.py": {
            "curve-the-page-has-another-coefficient": (
                "1.0000000000000067, 1.0)",
                "1.0000000000000069, 1.0)",
                ["tests/kernels/test_curves.py::test_the_curves_in_the_documentation_give_the_same_bits"],
            ),
        },
        "kernels/linear/warpgroup.cuh": {
            "linear-zero-points-of-one-column": (
                "(2 + A_ZERO_POINTS) * TILE_N + c + thread]",
                "(2 + A_ZERO_POINTS) * TILE_N]",
                hopper("warpgroup-both"),
            ),
            "linear-no-sums-of-the-weight": ("zero_points.w_sums[at]", "0", hopper("warpgroup-activation")),
            "linear-rows-without-their-zero-points": (
                " - (Sum)zero_points.k * zero_point",
                "",
                hopper("warpgroup-both"),
            ),
            "linear-boxes-before-the-previous-kernel-ends": (
                "    griddepcontrol_wait();\n    for (u32 s = 0; s < prefetched",
                "    for (u32 s = 0; s < prefetched",
                hopper("warpgroup-none"),
            ),
            "linear-a-stage-is-read-before-it-is-full": (
                "        mbarrier_wait(full + 8 * at.stage, at.parity);\n",
                "",
                hopper("warpgroup-none"),
            ),
        },
        "kernels/linear/code_sums.cuh": {
            "linear-the-last-unit-is-not-added": (
                "first + 32 * i < units",
                "first + 32 * i + 1 < units",
                hopper("warpgroup-activation"),
            ),
        },
        "kernels/linear/epilogue.cuh": {
            "linear-sums-of-32-bits": (
                "return acc - (s64)za * w;",
                "return (s32)((u32)acc - (u32)za * (u32)w);",
                hopper("warpgroup-both"),
            ),
            "linear-128-bits-cut-to-64": ("return a == (s32)a ?", "return true ?", hopper("shared-both")),
            "linear-another-order-of-scales": (
                "mul_rn(mul_rn(sa, sw), (f32)acc)",
                "mul_rn(sa, mul_rn(sw, (f32)acc))",
                hopper("warpgroup-none", "shared-none"),
            ),
        },
        "kernels/linear/streamed.cuh": {
            "linear-zero-points-are-not-staged": (
                "if (A_ZERO_POINTS) za =",
                "if (false) za =",
                hopper("shared-activation"),
            ),
            "linear-codes-beyond-k-are-added": (
                "if (W_ZERO_POINTS) {  // beyond",
                "if (false) {  // beyond",
                hopper("fused-weight"),
            ),
            "linear-codes-of-other-parts-of-k": (
                "order.at(step) * K_BLOCKS + c, token0",
                "step * K_BLOCKS + c, token0",
                hopper("ordered-none"),
            ),
            "linear-weights-before-the-previous-kernel-ends": (
                "if (warp == CONSUMERS / 32) {\n    if (lane != 0) return;\n    griddepcontrol_wait();",
                "if (warp == CONSUMERS / 32) {\n    if (lane != 0) return;",
                hopper("shared-none"),
            ),
        },
        "kernels/linear/direct.cuh": {
            "linear-the-sums-of-a-warp-are-left-out": (
                "int i = 0; i < WARPS",
                "int i = 1; i < WARPS",
                hopper("registers-none"),
            ),
            "linear-halves-of-a-unit-are-swapped": ("second, w.z, w.w", "second, w.w, w.z", hopper("registers-none")),
            "linear-sums-of-another-row": (
                "of_w = sum_of_parts(parts + TOKENS",
                "of_w = sum_of_parts(parts + 0",
                hopper("registers-activation"),
            ),
            "linear-registers-before-the-previous-kernel-ends": (
                "  griddepcontrol_wait();\n  uint4 next",
                "  uint4 next",
                hopper("registers-none"),
            ),
            "linear-tokens-without-zero-points": ("- all_k * za", "- 0 * all_k * za", hopper("registers-both")),
        },
        "kernels/quantize/affine.py": {
            "reference-rounds-toward-zero": ("np.rint(np.divide(x, scale))", "np.trunc(np.divide(x, scale))", NUMERICS),
            "reference-a-range-of-0-has-scale-0": ("    scale[scale == 0] = 1\n", "", LINEAR),
        },
        "kernels/linear/reference.py": {
            "reference-sums-round-between-parts": ("exact.astype(np.float64)", "exact", LINEAR),
            "reference-zero-points-of-the-other-side": (
                "shift: Any = -k * act_zero_point",
                "shift: Any = k * act_zero_point",
                LINEAR,
            ),
        },
        "kernels/linear/epilogue.py": {
            "reference-the-bias-comes-before-the-scale": (
                "            value *= product\n",
                "            value *= product + 1\n",
                LINEAR,
            ),
        },
        "kernels/sampling/weights.cuh": {
            "kernel-a-negative-nan-is-the-least": ("z != z ? 0xffffffffu : ", "", SAMPLING),
            "kernel-a-power-without-the-rest-of-log2e": ("(c, 0x1.4ae0c0p-26f", "(c, 0.0f", SAMPLING),
            "kernel-of-equal-logits-the-last": ("| (u32)~index", "| index", SAMPLING),
        },
        "kernels/sampling/sample.cu": {
            "kernel-one-token-more-than-top-p": ("+ each - 1) / each", "+ each) / each", SAMPLING),
            "kernel-a-bound-that-too-few-tokens-reach": ("reached >= k)", "reached >= k - 1)", SAMPLING),
            "kernel-all-tokens-that-tie-stay": (
                "amount.count < cut.left ? amount.count : cut.left",
                "amount.count",
                SAMPLING,
            ),
        },
        "kernels/sampling/sample.py": {
            "reference-top-p-of-all-tokens": ("    w[order[k:]] = 0\n    if", "    if", MEANING),
            "reference-ties-in-any-order": ('np.argsort(-z, kind="stable")', "np.argsort(z)[::-1]", MEANING),
        },
        "kernels/sampling/log_softmax_at.py": {
            "reference-weights-of-f32": ("integers(e).sum(axis=1)", "e.sum(axis=1)", MEANING),
        },
        "kernels/linear/pack_weight.cu": {
            "kernel-a-negative-scale-stays": ("turn = scale < 0 ? 15 : 0", "turn = 0", packing("pack_weight")),
            "kernel-padding-counts-as-misfits": ("if (held && !(fits", "if (!(fits", packing("pack_weight")),
            "kernel-misfits-of-the-call-before": ("  *zeros = 0;\n", "", PACKED),
            "kernel-misfits-wrap": ("*zeros < 0x7fffffff ? *zeros : 0x7fffffff", "*zeros", PACKED),
        },
        "kernels/linear/unpacked_codes.cuh": {
            "kernel-the-first-group-of-a-block-is-all-of-it": ("j * groups / 4", "0", packing("unpack_weight")),
            "kernel-codes-end-behind-the-row": ("codes, k - column", "codes", packing("unpack_weight")),
        },
        "kernels/linear/packed_streamed.cuh": {
            "kernel-ones-beyond-k": ("32 * j < left ? 0x01010101u : 0", "0x01010101u", STREAMED_PACKED),
            "kernel-codes-are-read-without-the-swizzle": ("(unit ^ lane % 8) * 16", "unit * 16", STREAMED_PACKED),
        },
        "kernels/linear/pack_weight.py": {
            "reference-a-level-0-that-does-not-occur-fits": (" | (least < -128)", "", PACKED),
        },
        "kernels/linear/warpgroup_cost.py": {
            "linear-the-model-forgets-the-waves": (
                "waves, busy = float(parts)",
                "waves, busy = 1.0",
                ["tests/programs/test_refit.py::test_the_loss_at_held_out_shapes_is_small"],
            ),
        },
    }
)
