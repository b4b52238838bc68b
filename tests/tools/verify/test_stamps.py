"""Stamps of evidence: a new name changes none, and a wrong grid or another instruction does."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from skuda.dispatch import Dispatcher
from skuda.dispatch.backends.cuda import CudaBackend
from skuda.dispatch.compile.cubin import machine_code
from skuda.kernels.catalog import built_in_registry
from skuda.registry.device import device_named
from skuda.tools.verify.stamps import Stamp, meaning, stamp

REGISTRY, H200 = built_in_registry(), device_named("h200")
SKU = next(sku for sku in REGISTRY if sku.op == "fake_quantize" and sku.backend == "pycuda")
OP = REGISTRY.ops[SKU.op]
PROBLEMS = [case.problem for case in OP.cases]


def cubin(*kernels: tuple[str, bytes], registers: int = 32, table: bytes = b"\1\2", debug: bytes = b"") -> bytes:
    """A cubin as compilers write it: sections of each kernel, a table that all read, attributes by a symbol's index."""
    symbols, strings = bytes(24), b"\0"
    sections = [("", 0, 0, b""), (".nv.global.init", 1, 0, table), (".debug_line", 1, 0, debug)]
    about = b""
    for index, (name, code) in enumerate(kernels, 1):
        symbols += struct.pack("<I", len(strings)) + bytes(20)
        strings += name.encode() + b"\0"
        about += struct.pack("<BBHII", 4, 0x2F, 8, index, registers)
        bank = struct.pack("<BBHI", 4, 0x0A, 8, index) + b"\x10\2\4\0"
        sections += [(f".text.{name}", 1, registers << 24 | index, code), (f".nv.info.{name}", 1, 0, bank)]
        sections += [(f".nv.shared.{name}", 8, 0, b"\0" * 64), (f".nv.constant0.{name}", 1, 0, b"\0" * 8)]
    sections += [(".nv.info", 1, 0, about), (".symtab", 2, 0, symbols), (".strtab", 3, 0, strings)]
    names = b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, 0, names))
    body, headers, at = b"", b"", 0
    for name, kind, info, content in sections:
        headers += struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), len(content), 0, info, 0, 0)
        at += len(name) + 1
        body += content
    head = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64 + len(body)) + bytes(10)
    return head + struct.pack("<HHH", 64, len(sections), len(sections) - 1) + body + headers


def test_names_order_and_debuggers_count_not():
    one = machine_code(cubin(("a", b"add"), ("b", b"multiply")))
    other = machine_code(cubin(("second", b"multiply"), ("first", b"add"), debug=b"line 7"))
    assert one == {"a": other["first"], "b": other["second"]}


@pytest.mark.parametrize("changes", [{"registers": 40}, {"table": b"\1\3"}, {}], ids=["registers", "table", "code"])
def test_what_runs_counts(changes):
    code = b"add" if changes else b"sub"
    assert machine_code(cubin(("a", b"add")))["a"] != machine_code(cubin(("a", code), **changes))["a"]


def test_other_bytes_are_no_cubin():
    with pytest.raises(ValueError, match="not a cubin"):
        machine_code(b"\x7fELF\x02\x01" + bytes(80))


class Compiler:
    """Compiles any source to a kernel for each name of its own."""

    version = "1.0"

    def __init__(self, code: bytes) -> None:
        self.code = code

    def identity(self, source: Any) -> str:
        return f"toy {self.code!r}"

    def compile(self, job: Any) -> bytes:
        rule = CudaBackend.launch_of(SKU, PROBLEMS[0], H200)
        return cubin(*((step.entry, self.code) for step in rule.steps))


@pytest.fixture
def stamped(monkeypatch, tmp_path):
    """Stamp a kernel by a compiler that gives this code, with launches changed."""
    monkeypatch.setenv("SKUDA_CACHE_DIR", str(tmp_path))
    launch_of = CudaBackend.launch_of

    def run(code: bytes = b"add", change: Any = lambda launch: launch, sku: Any = SKU) -> Stamp:
        backend = Dispatcher().backends["pycuda"]
        with monkeypatch.context() as within:
            within.setattr(type(backend), "compiler", lambda _: Compiler(code))
            within.setattr("skuda.dispatch.compile.provider.read_kernels", lambda _: {})
            within.setattr(type(backend), "launch_of", staticmethod(lambda *given: change(launch_of(*given))))
            return stamp(sku, PROBLEMS, H200, backend)

    return run


def with_steps(**changes: Any) -> Any:
    return lambda launch: launch._replace(steps=tuple(step._replace(**changes) for step in launch.steps))


def test_a_planted_grid_block_or_parameter_changes_launches(stamped):
    right = stamped()
    assert all(right)
    assert stamped() == right
    for changes in ({"grid": (9, 9, 1)}, {"block": (32, 1, 1)}, {"shared": 16}, {"parameters": ()}, {"overlaps": True}):
        found = stamped(change=with_steps(**changes))
        assert (found.machine_code, found.launches != right.launches) == (right.machine_code, True), changes
    assert stamped(b"sub").launches == right.launches
    assert stamped(b"sub").machine_code != right.machine_code
    weaker = SKU.precision_guarantee.model_copy(update={"max_ulp": None})
    assert stamped(sku=SKU.model_copy(update={"precision_guarantee": weaker})).launches != right.launches


def test_the_meaning_of_an_op_follows_its_reference():
    op = REGISTRY.ops["fill"]

    def renamed(problem, **arrays):
        op.reference(problem, **arrays)

    def wrong(problem, **arrays):
        op.reference(problem, **arrays)
        arrays["output"].view("u1").ravel()[:1] ^= 1

    assert meaning(op) == meaning(replace(op, reference=renamed)) != meaning(replace(op, reference=wrong))
