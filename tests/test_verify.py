"""`skuda verify`: right kernels pass, each kind of wrong one is caught, and a record never says more than it knows."""

from __future__ import annotations

import importlib
import json
import re
import sys
import textwrap
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
import pytest

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.numpy import NumpyBackend
from skuda.dispatch.device import HOST, device_named
from skuda.kernels.catalog import built_in_ops, built_in_registry
from skuda.kernels.draw import draw
from skuda.kernels.dtypes import storage_dtype
from skuda.registry import (
    Argument,
    BackendSpec,
    Case,
    Descriptor,
    ElementKind,
    InvalidRecord,
    KernelSku,
    Op,
    OpCategory,
    PrecisionGuarantee,
    Registry,
    Role,
)
from skuda.registry.descriptor import storage_shape
from skuda.registry.value import Extent
from skuda.tools import evidence, listing, showing, verify_page
from skuda.tools.cli import main
from skuda.tools.evidence import EvidenceFile, Records, load_records, status, tally
from skuda.tools.fingerprint import modules_of, reference_hash, source_hash
from skuda.tools.large import large_problems, suitable
from skuda.tools.placing import LAYOUTS, Geometry, HostPlacement, Image, differing
from skuda.tools.trial import row_arguments, row_field
from skuda.tools.verifying import verify

F32 = ElementKind.F32
EXACT = PrecisionGuarantee(math_precision="f32", accumulator="f32")
LOOSE = PrecisionGuarantee(math_precision="f32", accumulator="f32", max_ulp=None)


class HalvedDescriptor(Descriptor):
    """Problem of `halved`: y = x / 2, row by row."""

    op: Literal["halved"] = "halved"
    category: ClassVar[OpCategory] = OpCategory.UNARY_ELEMENTWISE
    element_field: ClassVar[str] = "element"
    n: Extent
    d: Extent
    element: ElementKind = F32

    def arguments(self) -> tuple[Argument, ...]:
        return (
            Argument("x", Role.INPUT, (self.element,), (self.n, self.d)),
            Argument("y", Role.OUTPUT, (self.element,), (self.n, self.d)),
        )


def reference(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2


def wrong_at_one_place(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    if problem.n > 2:
        y[2, 1] = 1e30


def within_two(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = np.nextafter(np.nextafter(x / 2, np.float32(np.inf)), np.float32(np.inf))


def beside(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    whole = y
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    start = y.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    whole[start - 1] = 0


def over_its_input(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2
    x[...] = 0


_turns = count()


def another_every_time(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = x / 2 + next(_turns)


def unwritten(problem: Any, *, x: Any, y: Any) -> None:
    y[1:] = (x / 2)[1:]


def by_neighbours(problem: Any, *, x: Any, y: Any) -> None:
    y[...] = np.cumsum(x, axis=0, dtype=np.float32)


def raises(problem: Any, *, x: Any, y: Any) -> None:
    raise ZeroDivisionError("odd")


class ToyBackend(NumpyBackend):
    """A CPU backend that is no reference."""

    spec = BackendSpec(name="toycpu", processor="cpu")


def toy(entry: str, guarantee: PrecisionGuarantee = EXACT, **changes: Any) -> KernelSku:
    fields: dict[str, Any] = {
        "category": "unary_elementwise",
        "op": "halved",
        "element": "f32",
        "arch": "cpu",
        "backend": "toycpu",
        "variant": entry,
        "precision_guarantee": guarantee,
        "source": __name__,
        "entry_point": entry,
    }
    return KernelSku(**{**fields, **changes})


CASES = tuple(Case(HalvedDescriptor(n=n, d=d)) for n, d in ((5, 3), (0, 3), (1, 1), (7, 8)))
OP = Op(HalvedDescriptor, reference, CASES, (toy("reference", backend="numpy"),), source="tests/test_verify.py")


def dispatcher_of(*skus: KernelSku) -> Dispatcher:
    return Dispatcher(Registry([ToyBackend.spec, OP, *skus], origin="toy"), backends=(ToyBackend(), NumpyBackend()))


def verified(*skus: KernelSku, **more: Any) -> EvidenceFile:
    ids = [sku.id for sku in skus]
    return verify(dispatcher_of(*skus), HOST, **{"seed": 3, "skus": ids, **more})


def failure_of(entry: str, guarantee: PrecisionGuarantee = EXACT) -> evidence.Failure:
    (found,) = verified(toy(entry, guarantee)).skus
    assert found.verdict == "failed"
    assert found.first_failure is not None
    return found.first_failure


# ------------------------------------------------------------------------------------------------------------ running


def test_every_reference_verifies():
    found = verify(Dispatcher(built_in_registry()), HOST, seed=int(np.random.default_rng().integers(2**31)), quick=True)
    assert [(sku.sku, sku.first_failure) for sku in found.failed] == []
    assert {sku.verdict for sku in found.skus} == {"verified"}
    assert len(found.skus) == sum(sku.backend == "numpy" for sku in built_in_registry())
    rows = {sku.sku.split(".")[1] for sku in found.skus if sku.promises.batch_invariant}
    assert {"quantize_per_token", "fake_quantize_per_group", "dynamic_range", "quantized_linear"} <= rows
    assert "quantize_per_tensor" not in rows


def test_a_right_kernel_is_verified_with_its_promises():
    (found,) = verified(toy("reference")).skus
    assert found.verdict == "verified"
    assert found.first_failure is None
    assert found.cases == 4
    assert found.outputs == len(LAYOUTS) * (15 + 0 + 1 + 56)
    assert set(found.layouts) == set(LAYOUTS)
    assert found.promises == evidence.Promises(bit_exact=True, deterministic=True, batch_invariant=True)


def test_a_wrong_kernel_fails_with_coordinates():
    failure = failure_of("wrong_at_one_place")
    assert (failure.case, failure.check, failure.output, failure.at) == (0, "bits", "y", (2, 1))
    assert failure.got.startswith("1.0000000150474662e+30 (0x7149f2ca)")
    assert "1 of 15 elements" in failure.message
    assert json.loads(failure.problem)["n"] == 5
    assert "y[2, 1]" in failure.describe()


def test_a_promised_distance_is_measured():
    def sku(ulps):
        return toy("within_two", EXACT.model_copy(update={"max_ulp": ulps}), variant=f"ulp_{ulps}")

    found = {one.sku.rpartition(".")[2]: one for one in verified(sku(1), sku(2)).skus}
    assert found["ulp_2"].verdict == "verified"
    assert found["ulp_2"].promises.within_ulp is True
    assert found["ulp_2"].promises.bit_exact is None
    assert found["ulp_1"].first_failure.check == "ulp"


@pytest.mark.parametrize(
    ("entry", "guarantee", "check", "says"),
    [
        ("beside", EXACT, "guard", "byte -1 beside"),
        ("over_its_input", EXACT, "input", "of an input was written"),
        ("another_every_time", LOOSE, "repeat", "other bits"),
        ("unwritten", LOOSE, "repeat", "other bits"),
        ("by_neighbours", LOOSE, "rows", "rows"),
        ("raises", EXACT, "error", "ZeroDivisionError: odd"),
    ],
)
def test_each_kind_of_broken_kernel_is_caught(entry, guarantee, check, says):
    failure = failure_of(entry, guarantee)
    assert failure.check == check
    assert says in failure.message


def test_what_is_not_promised_is_not_held_against_a_kernel():
    nothing = LOOSE.model_copy(
        update={"deterministic": False, "bit_stable_on_same_hardware": False, "batch_invariant": False}
    )
    (found,) = verified(toy("another_every_time", nothing)).skus
    assert found.verdict == "verified"
    assert found.promises == evidence.Promises()


def test_one_failure_stops_nothing_and_the_seed_draws_the_same_again():
    skus = (toy("raises"), toy("wrong_at_one_place"), toy("reference"))
    seen = []
    found = verified(*skus, progress=lambda *told: seen.append(told))
    assert [sku.verdict for sku in found.skus] == ["failed", "failed", "verified"]
    assert [done for done, _, _ in seen] == list(range(1, 13))
    assert verified(*skus).skus == found.skus
    assert verified(*skus, seed=4).skus != found.skus


def test_what_cannot_run_here_is_skipped_and_says_why():
    registry = built_in_registry()
    dispatcher = Dispatcher(registry, backends=(NumpyBackend(),))
    found = verify(dispatcher, device_named("h200"), ops=["fill"], placement=HostPlacement())
    assert {sku.verdict for sku in found.skus} == {"skipped"}
    assert all("no such backend is installed" in sku.note for sku in found.skus)
    old = device_named("a100").model_copy(update={"compute_capability": (7, 5)})
    found = verify(dispatcher, old, ops=["fill"], placement=HostPlacement())
    assert {sku.note for sku in found.skus} == {"needs compute capability 8.0 or later"}


# -------------------------------------------------------------------------------------------------- inputs and layouts


def test_draw_gives_every_argument_its_element_and_shape():
    rng = np.random.default_rng()
    for op in built_in_ops():
        for case in op.cases[:12]:
            drawn = draw(op, case, rng)
            for argument in case.problem.arguments():
                if argument.role in (Role.OUTPUT, Role.SCRATCH):
                    assert argument.name not in drawn.inputs
                elif not argument.is_scalar:
                    value = drawn.inputs[argument.name]
                    assert value.dtype in {storage_dtype(element) for element in argument.elements}
                    assert value.shape == storage_shape(drawn.shapes[argument.name], argument.elements[0])


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_notices_every_byte(dtype, shape, layout):
    geometry = Geometry.of(shape, np.dtype(dtype), layout)
    image = Image(geometry, np.ones(shape, dtype))
    after = image.before.copy()
    geometry.view(after)[...] = 2
    assert image.spilt(after) is None
    assert int(geometry.outside.sum()) == geometry.size - int(np.prod(shape)) * geometry.dtype.itemsize
    if 0 not in shape:
        assert image.changed(after) is not None
    for at in np.flatnonzero(geometry.outside)[:: max(1, geometry.size // 40)]:
        spoilt = after.copy()
        spoilt[at] = 0
        assert image.spilt(spoilt) == at - geometry.start
    assert geometry.start % geometry.dtype.itemsize == 0
    assert geometry.plain is (layout in ("contiguous", "misaligned") or len(shape) < 2 or shape[0] == -1)


def test_differing():
    nan, quiet = np.float32(np.nan), np.array([0xFFC00001], np.uint32).view(np.float32)[0]
    got, want = np.array([1, nan, 0.0, -0.0, 5], np.float32), np.array([1, quiet, -0.0, -0.0, nan], np.float32)
    assert differing(got, want).tolist() == [False, False, True, False, True]
    assert differing(got, want, 1).tolist() == [False, False, False, False, True]
    steps = np.array([1.0, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    assert differing(steps, np.full(2, steps[0]), 1).tolist() == [False, False]
    tiny = np.array([np.nextafter(np.float64(0), 1), -np.nextafter(np.float64(0), 1)])
    assert differing(tiny, tiny[::-1], 1).tolist() == [True, True]
    assert differing(tiny, tiny[::-1], 2).tolist() == [False, False]
    codes = np.array([-128, 127, 3], np.int8)
    assert differing(codes, np.array([127, 127, 4], np.int8), 1).tolist() == [True, False, False]
    assert differing(np.array([np.inf]), np.array([np.nan]), 5).tolist() == [True]


def test_rows_are_known_by_the_problem():
    fields = {op.name: {row_field(case.problem) for case in op.cases} for op in built_in_ops()}
    assert fields["quantized_linear"] == {"m"}
    assert fields["quantize_per_group"] == {"outer_size"}
    assert fields["quantize_per_token"] == {"n"}
    assert fields["dynamic_range"] == {"n", None}
    assert fields["quantize_per_channel"] == fields["fill"] == {None}
    assert row_arguments(HalvedDescriptor(n=3, d=2)) == {"x", "y"}


def test_large_problems_are_large_and_made_of_small_ones():
    for op in built_in_ops():
        problem = suitable(case.problem for case in op.cases)
        names = []
        for large in large_problems(problem):
            names.append(large.name)
            for small, whole in zip(large.small.arguments(), large.problem.arguments(), strict=True):
                same = small.shape == whole.shape
                assert same or whole.shape == (small.shape[0] * large.copies, *small.shape[1:])
            sizes = [
                int(np.prod(storage_shape(a.shape, a.elements[0]), dtype=float)) * storage_dtype(a.elements[0]).itemsize
                for a in large.problem.arguments()
                if not a.is_scalar
            ]
            limit = {"70,000 rows": 0, "more than 2^31 bytes": 2**31}[large.name]
            assert limit < max(sizes) < 2**33
        assert names[-1:] == ["more than 2^31 bytes"]


# ------------------------------------------------------------------------------------------------------------ records


def test_json_round_trip(tmp_path):
    found = verified(toy("wrong_at_one_place"), toy("reference"), quick=True)
    found.save(tmp_path / "deep" / "cpu.json")
    assert EvidenceFile.load(tmp_path / "deep" / "cpu.json") == found
    assert load_records(tmp_path / "deep").files == (found,)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cpu.json"]
    assert (found.seed, found.quick, found.device) == (3, True, HOST)
    assert found.versions["numpy"] == np.__version__


def test_other_json_is_left_alone_and_a_broken_record_is_named(tmp_path):
    (tmp_path / "resources.json").write_text("[1]")
    (tmp_path / "later.json").write_text('{"kind": "skuda verify", "schema_version": 2}')
    assert load_records(tmp_path) == Records()
    (tmp_path / "bad.json").write_text('{"kind": "skuda verify", "schema_version": 1}')
    with pytest.raises(InvalidRecord, match=r"bad\.json"):
        load_records(tmp_path)
    with pytest.raises(InvalidRecord, match="be a folder"):
        load_records(tmp_path / "absent")


def test_a_record_speaks_for_this_very_kernel_only(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "halved_kernel.py"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x / 2\n")
    sku = toy("halve", source="halved_kernel", variant="module")
    assert status(sku, OP, Records()).word == "unverified"
    found = verified(sku, toy("wrong_at_one_place"))
    records = Records((found,))
    assert status(sku, OP, records).word == "verified"
    assert status(toy("wrong_at_one_place"), OP, records).word == "failed"
    assert status(toy("reference", variant="other"), OP, records).word == "unverified"
    assert status(toy("reference", backend="numpy"), OP, records).word == "reference"
    for changed in (
        sku.model_copy(update={"flags": ("-O3",)}),
        sku.model_copy(update={"launch": "toykernels.scaled:scaled"}),
        sku.model_copy(update={"precision_guarantee": LOOSE}),
        sku.model_copy(update={"entry_point": "other"}),
    ):
        assert status(changed, OP, records).word == "stale"
    module.write_text("def halve(problem, *, x, y):\n    y[...] = x * 0.5\n")
    assert status(sku, OP, records).word == "stale"
    module.unlink()
    assert status(sku, OP, records).word == "stale"


def test_the_hash_knows_headers(tmp_path, monkeypatch):
    package = tmp_path / "hashed_kernels"
    (package / "include").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "k.cu").write_text('#include "a.cuh"\nhalved')
    (package / "include" / "a.cuh").write_text('#include "b.cuh"')
    (package / "include" / "b.cuh").write_text("one")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    sku = toy("halved", source="hashed_kernels:k.cu", variant="cu")
    before = source_hash(sku)
    assert source_hash(sku) == before
    (package / "include" / "b.cuh").write_text("two")
    assert source_hash(sku) != before


@pytest.fixture
def meaning(tmp_path, monkeypatch):
    """An op in a package of its own: its module, what that imports, and what declares its kernels."""
    package = tmp_path / "meant_kernels"
    package.mkdir()
    texts = {
        "__init__.py": "",
        "shared.py": "from meant_kernels import deeper\n\ndef halve(x):\n    return x / deeper.TWO\n",
        "deeper.py": "TWO = 2\n",
        "rules.py": "from skuda.kernels.launch import Launch\n",
        "module.py": """
            from meant_kernels import rules
            from meant_kernels.shared import halve

            def reference(problem, *, x, y):
                'Halve.'
                y[...] = halve(x)  # the meaning

            SKUS = (
                1,
            )
            """,
    }
    for name, text in texts.items():
        (package / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield package
    for name in [name for name in sys.modules if name.startswith("meant_kernels")]:
        del sys.modules[name]


def test_a_record_speaks_for_this_very_meaning_only(meaning):
    module = importlib.import_module("meant_kernels.module")
    op, sku = replace(OP, reference=module.reference), toy("reference")
    registry = Registry([ToyBackend.spec, op, sku], origin="toy")
    dispatcher = Dispatcher(registry, backends=(ToyBackend(), NumpyBackend()))
    records = Records((verify(dispatcher, HOST, seed=3, skus=[sku.id]),))
    assert status(sku, op, records).word == "verified"

    def edit(file, old, new):
        path = meaning / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        return status(sku, op, records).word

    # What no result depends on.
    assert edit("module.py", "Halve.", "Write half of it.") == "verified"
    assert edit("module.py", "# the meaning", "") == "verified"
    assert edit("module.py", "    1,\n", "    1,\n    2,\n") == "verified"
    assert edit("rules.py", "import Launch", "import Step") == "verified"
    # What every result depends on: the module, what it imports, and what that imports.
    assert edit("module.py", "halve(x)", "halve(x + 0)") == "stale"
    assert edit("module.py", "halve(x + 0)", "halve(x)") == "verified"
    assert edit("shared.py", "x / deeper", "x // deeper") == "stale"
    assert edit("shared.py", "x // deeper", "x / deeper") == "verified"
    assert edit("deeper.py", "TWO = 2", "TWO = 3") == "stale"
    (meaning / "deeper.py").unlink()
    importlib.invalidate_caches()
    assert status(sku, op, records).word == "stale"


def test_a_record_from_before_meanings_were_recorded_is_stale():
    sku = toy("reference")
    found = verified(sku)
    old = found.model_copy(update={"skus": (found.skus[0].model_copy(update={"reference_hash": ""}),)})
    assert status(sku, OP, Records((old,))).word == "stale"


def test_every_built_in_op_has_a_meaning_of_its_own_that_reaches_its_arithmetic():
    ops = built_in_ops()
    assert len({reference_hash(op) for op in ops}) == len(ops)
    for op in ops:
        reached = modules_of(op)
        assert "skuda.kernels.blocks" in reached
        assert not [name for name in reached if re.search(r"launch|offers|_cuda", name)]
        assert ("skuda.kernels.quantize._activation" in reached) is op.name.endswith("linear")


def test_the_latest_run_of_each_device_counts_and_a_failure_anywhere_shows():
    sku = toy("reference")
    good = verified(sku)
    bad = good.skus[0].model_copy(update={"verdict": "failed"})

    def run(date, card, one):
        return good.model_copy(update={"date": date, "device": device_named(card), "skus": (one,)})

    first, second = run("2026-01-01", "h200", bad), run("2026-01-02", "h200", good.skus[0])
    assert status(sku, OP, Records((second, first))).word == "verified"
    assert status(sku, OP, Records((second, first, run("2026-01-01", "a100", bad)))).device == "NVIDIA A100-SXM4-80GB"
    old = good.skus[0].model_copy(update={"source_hash": "0"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", old),))).word == "stale"
    skipped = good.skus[0].model_copy(update={"verdict": "skipped"})
    assert status(sku, OP, Records((run("2026-01-03", "h200", skipped),))).word == "unverified"


def test_tally():
    assert tally(["verified", "reference"]) == "verified"
    assert tally(["reference"]) == "reference"
    assert tally(["stale", "verified", "verified"]) == "2 verified, 1 stale"
    assert tally([]) == "-"


# -------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def skuda(capsys, monkeypatch):
    monkeypatch.setenv("SKUDA_PLUGINS", "0")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def run(dispatcher, *arguments):
        for module in (verify_page, listing, showing):
            monkeypatch.setattr(module, "Dispatcher", lambda **_: dispatcher)
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


def test_verify_list_and_show(skuda, tmp_path):
    right = toy("reference")
    dispatcher = dispatcher_of(right)
    record = tmp_path / "cpu.json"
    done, out, err = skuda(dispatcher, "verify", "--device", "cpu", "--seed", "7", "--output", record)
    assert (done, out, err) == (0, f"halved\t2\t0\t0\t8\t{2 * 4 * 72}\n", "")
    assert EvidenceFile.load(record).seed == 7
    _, out, _ = skuda(dispatcher, "show", right.id, "--evidence", tmp_path, "--json")
    assert (json.loads(out)["verified"], json.loads(out)["evidence"]["word"]) == (True, "verified")
    _, out, _ = skuda(dispatcher, "list", "--evidence", tmp_path, "--json")
    assert json.loads(out)[0]["evidence"] == {"verified": 1, "reference": 1}
    changed = dispatcher_of(right.model_copy(update={"flags": ("-O3",)}))
    _, out, _ = skuda(changed, "show", right.id, "--evidence", tmp_path)
    assert "verified\tno: stale, the kernel or its reference has changed since it was run on CPU" in out
    _, out, _ = skuda(changed, "list", "--skus", "--evidence", tmp_path, "--json")
    assert {row["evidence"] for row in json.loads(out)} == {"reference", "stale"}


def test_a_failure_exits_with_1_and_is_told(skuda, monkeypatch):
    wrong = toy("wrong_at_one_place")
    done, out, _ = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--quick", "--backend", "toycpu")
    assert done == 1
    assert out.splitlines()[0].split("\t")[:4] == ["halved", "0", "1", "0"]
    assert out.splitlines()[1].startswith(f"failure\t{wrong.id}\tbits: y[2, 1]")
    done, out, _ = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--sku", wrong.id, "--json")
    assert done == 1
    assert EvidenceFile.model_validate_json(out).failed[0].sku == wrong.id
    monkeypatch.setenv("FORCE_COLOR", "1")
    done, out, err = skuda(dispatcher_of(wrong), "verify", "--device", "cpu", "--quick")
    assert done == 1
    assert "1 failed" in out
    assert "not recorded" in out
    assert err  # the bar


def test_without_a_cuda_device_it_says_so(skuda):
    done, out, err = skuda(dispatcher_of(), "verify")
    assert (done, out) == (1, "")
    assert "no CUDA device is here" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--op", "halve"], "near: halved"),
        (["--sku", "x"], "the id of a kernel"),
        (["--backend", "opencl"], "toycpu"),
        (["--device", "7"], "be one of cpu"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_words_are_refused(skuda, arguments, says):
    done, out, err = skuda(dispatcher_of(), "verify", *arguments)
    assert (done, out) == (2, "")
    assert says in err


def test_the_record_of_a_full_run_goes_to_the_checkout():
    path = verify_page._default_path(device_named("h200"))
    assert path == Path(__file__).parent.parent / "docs" / "evidence" / "nvidia-h200.json"
    assert verify_page._default_path(HOST) is None
