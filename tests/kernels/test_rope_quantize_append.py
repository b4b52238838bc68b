"""What `rope_quantize_append` promises: codes and scales of the plain ops, in the right slots, whatever the batch."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from harness import emulator
from harness.binding import launch_of, ran
from support import assert_same_bits, dispatcher, draw, fresh, run, sampled

from skuda.kernels.attention.cache import PAGE, column_of
from skuda.kernels.attention.rope_quantize_append import OP, RopeQuantizeAppendDescriptor
from skuda.registry.device import KNOWN_DEVICES
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Case
from skuda.registry.vocabulary import RotaryLayout

CACHE = ("k_codes", "k_scale", "v_codes", "v_scale")
CASES = sampled(
    [pytest.param(case, id=str(i)) for i, case in enumerate(OP.cases)], 8, each=lambda case: case.values == "zero"
)


def drawn(case, *key):
    """Return inputs of a case; `run` copies the cache."""
    return draw(OP, case, fresh(OP.name, case, *key)).inputs


def _places(inputs):
    """Yield sequence, row and position of every new token that is no padding."""
    lengths, starts = inputs["lengths"].tolist(), inputs["starts"].tolist()
    for s, length in enumerate(lengths):
        for row in range(starts[s], starts[s + 1]):
            position = length - starts[s + 1] + row
            if position >= 0:
                yield s, row, position


@pytest.mark.parametrize("case", CASES)
def test_a_token_depends_neither_on_other_tokens_nor_on_pages(case):
    """Each sequence alone, one token at a time, in other pages and a cache that holds other things."""
    problem, inputs = case.problem, drawn(case)
    rng, whole = fresh("alone", case), run(problem, inputs)
    places = list(_places(inputs))
    for i in rng.permutation(len(places))[:4]:
        s, row, position = places[i]
        block, slot = divmod(position, PAGE)
        alone = inputs | {name: inputs[name][row : row + 1] for name in "qkv"}
        alone |= {name: np.full_like(inputs[name], 85) for name in CACHE}
        page = int(rng.integers(problem.pages))
        alone["block_table"] = np.full((1, problem.most_blocks), page, np.int32)
        alone |= {"lengths": np.int32([position + 1]), "starts": np.int32([0, 1])}
        found = run(problem.model_copy(update={"tokens": 1, "sequences": 1}), alone)
        assert_same_bits(found["q_codes"][0], whole["q_codes"][row], "q_codes")
        assert_same_bits(found["q_scale"][0], whole["q_scale"][row], "q_scale")
        own = inputs["block_table"][s, block]
        for name in CACHE:
            at = column_of(slot) if name == "v_codes" else slot
            where = np.s_[:, at] if name == "k_codes" else np.s_[..., at]
            assert_same_bits(found[name][page][where], whole[name][own][where], name)


def _padded(problem, rng):
    """Return inputs of sequences of one number of rows, whose first rows are padding, and the rows that are not."""
    inputs = drawn(Case(problem, "special"), rng.random())
    rows = problem.tokens // problem.sequences
    lengths = np.append(rng.integers(0, rows, problem.sequences - 1), rows).astype(np.int32)
    table = rng.permutation(problem.pages)[: problem.sequences].astype(np.int32)[:, None]
    inputs |= {"lengths": lengths, "block_table": np.where(lengths[:, None], table, -1).astype(np.int32)}
    inputs["starts"] = np.arange(0, problem.tokens + 1, rows, dtype=np.int32)
    return inputs, np.concatenate([np.arange(rows * (s + 1) - n, rows * (s + 1)) for s, n in enumerate(lengths)])


PADDED = {"rows": {"tokens": 24, "sequences": 4}, "tiles": {"tokens": 160, "sequences": 2}}


@pytest.mark.parametrize("sizes", PADDED.values(), ids=PADDED)
def test_padding_writes_nothing_and_the_rest_is_as_it_is_without(sizes):
    rng = fresh("padded", sizes)
    problem = _small(**sizes, most_blocks=1, has_q_norm=True, has_k_norm=True, has_k_offset=True)
    inputs, live = _padded(problem, rng)
    found = run(problem, inputs)
    padding = np.setdiff1d(np.arange(problem.tokens), live)
    assert len(padding)
    assert not found["q_codes"][padding].any()
    assert (found["q_scale"][padding] == 1).all()
    starts = np.concatenate(([0], np.cumsum(inputs["lengths"]))).astype(np.int32)
    bare = inputs | {name: inputs[name][live] for name in "qkv"} | {"starts": starts}
    want = run(problem.model_copy(update={"tokens": len(live)}), bare)
    for name in CACHE:
        assert_same_bits(found[name], want[name], name)
    for name in ("q_codes", "q_scale"):
        assert_same_bits(found[name][live], want[name], name)


def _small(**fields):
    sizes = {"tokens": 3, "sequences": 2, "heads": 2, "kv_heads": 1, "head_size": 32, "pages": 4, "most_blocks": 2}
    return RopeQuantizeAppendDescriptor(
        **sizes | {"rotated": 32, "most_positions": 200, "input_element": "f32"} | fields
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"heads": 3, "kv_heads": 2}, "heads"),
        ({"heads": 0}, "heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_size": 96}, "head_size"),
        ({"rotated": 31}, "rotated"),
        ({"rotated": 34}, "rotated"),
        ({"eps": -1.0}, "eps"),
        ({"eps": 1e39}, "eps"),
        ({"tokens": 2**31 - 1}, "tokens"),
        ({"rotary_layout": "other"}, "rotary_layout"),
    ],
)
def test_a_problem_that_breaks_a_rule_is_refused_by_field(fields, named):
    with pytest.raises(InvalidProblem) as refused:
        _small(**fields)
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"starts": [1, 2, 3]}, "starts[0]"),
        ({"starts": [0, 2, 1]}, "starts[2]"),
        ({"starts": [0, 2, 4]}, "starts[2]"),
        ({"lengths": [9, 257]}, "lengths[1]"),
        ({"lengths": [201, 9]}, "lengths[0]"),
        ({"block_table": [[4, 0], [1, 0]]}, "block_table[0, 0]"),
        ({"block_table": [[0, 0], [-1, 0]]}, "block_table[1, 0]"),
        ({"block_table": [[1, 0], [1, 0]], "lengths": [9, 8]}, "block_table"),
    ],
)
def test_tables_that_break_a_rule_are_refused_by_name_and_nothing_is_written(changes, named):
    problem = _small()
    inputs = drawn(Case(problem))
    inputs |= {"starts": [0, 2, 3], "lengths": [9, 9], "block_table": [[0, 2], [1, 9]]} | changes
    inputs |= {name: np.array(inputs[name], np.int32) for name in ("starts", "lengths", "block_table")}
    cache = {name: inputs[name].copy() for name in CACHE}
    with pytest.raises(InvalidProblem) as refused:
        dispatcher().run(problem, **inputs)
    assert refused.value.field == named
    for name in CACHE:
        assert_same_bits(inputs[name], cache[name], name)


@pytest.mark.parametrize("name", CACHE)
def test_a_cache_must_be_given_writable_and_apart_from_the_rest(name):
    problem = _small()
    inputs = drawn(Case(problem))
    fixed = inputs[name].copy()
    fixed.flags.writeable = False
    codes = name.endswith("codes")
    shared = np.zeros_like(inputs["k_codes"]).reshape(inputs[name].shape) if codes else inputs[name]
    other = {"k_codes": "v_codes", "v_codes": "k_codes", "k_scale": "v_scale", "v_scale": "k_scale"}[name]
    for change in ({name: None}, {name: fixed}, {name: shared, other: shared.reshape(inputs[other].shape)}):
        with pytest.raises(InvalidProblem) as refused:
            dispatcher().run(problem, **inputs | change)
        assert refused.value.field in (name, other)


# --- the kernel on a CPU ---------------------------------------------------------------------------------------------

KERNELS = [sku for sku in OP.skus if sku.backend == "pycuda"]
SMALL_DEVICE = KNOWN_DEVICES["h200"].model_copy(update={"sm_count": 1})  # so that a warp takes several turns
ONLY_WITH_A_COMPILER = pytest.mark.skipif(shutil.which(emulator.COMPILER) is None, reason="no C++ compiler")


def _launched(sku, problem, inputs, rng):
    """Run a kernel on arrays of any layout, and return them."""
    (step,) = launch_of(sku, problem, SMALL_DEVICE).steps
    return step.entry.rpartition("_")[2], ran(sku, problem, inputs, SMALL_DEVICE, rng)


class _Aligned:
    """Choose the first of everything: arrays are aligned and without gaps, which a kernel reads by vectors."""

    random = staticmethod(lambda: 1.0)
    choice = staticmethod(lambda values: values[0])
    integers = staticmethod(lambda low, *_, **__: low)


@ONLY_WITH_A_COMPILER
@pytest.mark.parametrize("sku", KERNELS, ids=lambda sku: sku.element)
@pytest.mark.parametrize("way", ["rows", "tiles"])
def test_tables_of_anything_write_nothing_outside_of_the_arrays(sku, way):
    rng = fresh(sku.id, way)
    sequences = 2 if way == "tiles" else 9
    problem = _small(tokens=40, sequences=sequences, input_element=sku.element)
    for _ in range(20):
        inputs = drawn(Case(problem), rng.random())
        for name in ("starts", "lengths", "block_table"):
            far = rng.integers(-(2**31), 2**31, inputs[name].shape)
            near = rng.integers(-3, 300 if name == "lengths" else 45, inputs[name].shape)
            table = np.where(rng.random(inputs[name].shape) < rng.choice([0, 0.2]), far, near)
            inputs[name] = np.where(rng.random(inputs[name].shape) < 0.5, table, inputs[name]).astype(np.int32)
        found, placed = _launched(sku, problem, inputs, rng)
        assert found == way
        assert not np.isnan(placed["q_scale"].array).any(), "a query was not written"


@ONLY_WITH_A_COMPILER
@pytest.mark.parametrize("sku", KERNELS, ids=lambda sku: sku.element)
@pytest.mark.parametrize("way", PADDED)
def test_the_kernel_treats_padding_like_the_reference(sku, way):
    rng = fresh(sku.id, way)
    problem = _small(**PADDED[way], most_blocks=1, input_element=sku.element, has_q_norm=True, has_k_offset=True)
    inputs, _ = _padded(problem, rng)
    found, placed = _launched(sku, problem, inputs, rng)
    assert found == way
    for name, want in run(problem, inputs).items():
        assert_same_bits(placed[name].array, want, name)


@ONLY_WITH_A_COMPILER
@pytest.mark.parametrize("sku", KERNELS, ids=lambda sku: sku.element)
@pytest.mark.parametrize("way", ["rows", "tiles"])
@pytest.mark.parametrize("layout", list(RotaryLayout))
@pytest.mark.parametrize("aligned", [False, True], ids=["anywhere", "aligned"])
def test_the_kernel_gives_the_bits_of_the_reference_for_sizes_of_models(sku, way, layout, aligned):
    """Queries and keys share warps, parts turn by octets or not, and a sequence begins anywhere in a tile.

    Aligned ones have more heads than a warp takes.
    """
    rng = fresh(sku.id, way, layout, aligned)
    for head_size in (32, 64, 128):
        kv_heads = int(rng.integers(1, 4))
        problem = _small(
            tokens=70,
            sequences=int(rng.integers(1, 4)) if way == "tiles" else 7,
            heads=kv_heads * int(rng.integers(10 if aligned else 1, 12 if aligned else 5)),
            kv_heads=kv_heads,
            head_size=head_size,
            rotated=int(rng.choice([16, head_size // 2, head_size] if aligned else [2, 16, head_size - 2, head_size])),
            pages=15,
            rotary_layout=layout,
            eps=1e-6,
            input_element=sku.element,
            **{f"has_{name}": bool(rng.integers(2)) for name in ("q_norm", "k_norm", "k_offset")},
        )
        inputs = drawn(Case(problem, "special"), head_size)
        found, placed = _launched(sku, problem, inputs, _Aligned if aligned else rng)
        assert found == way
        for name, want in run(problem, inputs).items():
            assert_same_bits(placed[name].array, want, f"{name} of {problem!r}")
