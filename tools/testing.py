"""A conformance suite for kernels and backends of other packages, in three lines of pytest.

In a test file of the package, for example ``tests/test_conformance.py``::

    from skuda.tools.testing import Conformance

    class TestConformance(Conformance):
        package = "my-package"  # the distribution's name

The suite runs every kernel that the package registers, and every kernel on its backends, over the cases of its op. Each
check of each kernel is one test item. What this machine cannot run is skipped with the reason. No other module of skuda
imports pytest.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from skuda.dispatch import Dispatcher
from skuda.dispatch.settings import environment
from skuda.registry.errors import MissingDependency
from skuda.tools.verify.conformance import Checks
from skuda.tools.verify.kit import Broken, NotRun
from skuda.tools.verify.placement import placement_for

try:
    import pytest
except ImportError as error:
    raise MissingDependency("pytest", "pip install pytest") from error

if TYPE_CHECKING:
    from skuda.dispatch.backends.base import Backend
    from skuda.registry.device import Device
    from skuda.registry.op import Case, Op
    from skuda.registry.sku import KernelSku
    from skuda.tools.verify.placement import Placement

HEAVY = frozenset(
    {"cuda", "cupy", "jax", "matplotlib", "numba", "pandas", "pycuda", "scipy", "tensorflow", "torch", "triton"}
)
"""Modules that loading a plug-in must not import: each would delay the start of every program by about a second."""

_SEED = secrets.randbelow(2**32)


class Conformance:
    """Base class of a package's conformance tests; a subclass names the package.

    Attributes
    ----------
    package : str
        The distribution that brings the plug-ins, or the origin of records that `dispatcher` has registered.
    cases : tuple of Case
        Problems in addition to those of the ops, for kernels that the ops' own cases do not reach.
    seed : int
        Seed of the inputs, different in every process. A failure prints it; set it to reproduce that failure.
    """

    package: ClassVar[str]
    cases: ClassVar[tuple[Case, ...]] = ()
    seed: ClassVar[int] = _SEED
    _made: ClassVar[Checks]
    _compared: ClassVar[tuple[dict[str, str], dict[str, str]]]

    @classmethod
    def dispatcher(cls) -> Dispatcher:
        """Return a dispatcher that has the package; by default one with everything that is installed."""
        return Dispatcher()

    @classmethod
    def placement(cls, device: Device) -> Placement:
        """Return the placement for a device; by default NumPy on the CPU, and torch or CuPy on a GPU."""
        return placement_for(device)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test item per kernel, backend or op of the package."""
        kit = self._kit()
        items: dict[str, dict[str, Any]] = {
            "sku": {sku.id: sku for sku in kit.skus},
            "backend": {backend.spec.name: backend for backend in kit.backends},
            "op": {op.name: op for op in kit.ops},
        }
        for name, found in items.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, found.values(), ids=found.keys())

    @classmethod
    def _kit(cls) -> Checks:
        """Return the checks of the package; they are made once for each class."""
        if "_made" not in vars(cls):
            cls._made = Checks(cls.package, cls.dispatcher(), cls.placement, cls.seed, cls.cases)
        return cls._made

    @classmethod
    def _digests(cls) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests of the kernels' outputs in this process and in another one."""
        if "_compared" not in vars(cls):
            where = (inspect.getfile(cls), cls.__module__, cls.__qualname__, cls.seed)
            code = f"from skuda.tools.testing import _tell; _tell(*{where!r})"
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
            given = environment()
            threads = {name: "2" if given.get(name) == "1" else "1" for name in names}
            there = json.loads(_child(code, PYTHONHASHSEED="1", **threads))
            cls._compared = (cls._kit().digests(), there)
        return cls._compared

    def _check(self, what: str, check: Callable[..., None], *asked: Any) -> None:
        """Run a check and report its result to pytest."""
        try:
            check(*asked)
        except NotRun as reason:
            skipped, wrong = str(reason), ""
        except Broken as broken:
            skipped, wrong = "", str(broken)
        except Exception as error:  # noqa: BLE001  a kernel may raise anything
            skipped, wrong = "", f"raised {type(error).__name__}: {error}"
        else:
            return
        if wrong:
            self._fail(what, wrong)
        pytest.skip(skipped)

    def _fail(self, what: str, message: str) -> None:
        pytest.fail(f"{what}\n{message}\nto draw these numbers again: seed = {self.seed}", pytrace=False)

    # --- the package -------------------------------------------------------------------------------------------------

    def test_package_is_loaded(self) -> None:
        """Every plug-in of the package is installed and loaded."""
        self._check(self.package, self._kit().check_loaded)

    def test_loading_imports_nothing_heavy(self) -> None:
        """Loading the package's plug-ins imports no heavy module, so that programs start fast."""
        if not self._kit().plugins:
            pytest.skip(f"{self.package!r} is not an installed package with plug-ins")
        code = "import json; from skuda.dispatch import Dispatcher; Dispatcher(); print(json.dumps([*sys.modules]))"
        loaded = json.loads(_child(code, SKUDA_PLUGINS=self.package).strip())
        heavy = sorted(HEAVY & set(loaded))
        if heavy:
            self._fail(
                self.package, f"loading its plug-ins imports {', '.join(heavy)}; import them where they are used"
            )

    def test_op(self, op: Op) -> None:
        """An op of the package is documented, has a reference, and has cases that survive JSON."""
        self._check(op.name, self._kit().check_op, op)

    # --- its backends ------------------------------------------------------------------------------------------------

    def test_status_is_honest(self, backend: Backend) -> None:
        """`status` and `devices` do not raise, are complete, and are consistent."""
        self._check(f"backend {backend.spec.name}", self._kit().check_status, backend)

    # --- its kernels -------------------------------------------------------------------------------------------------

    def test_record(self, sku: KernelSku) -> None:
        """The id parses back, the record survives JSON, and a case fits the kernel."""
        self._check(sku.id, self._kit().check_record, sku)

    def test_meaning(self, sku: KernelSku) -> None:
        """In every layout, the outputs are within the promised distance of the reference."""
        self._check(sku.id, self._kit().check_meaning, sku)

    def test_memory(self, sku: KernelSku) -> None:
        """Nothing outside the outputs is written."""
        self._check(sku.id, self._kit().check_memory, sku)

    def test_deterministic(self, sku: KernelSku) -> None:
        """If determinism is promised, a second run with other bytes around the arrays gives the same bits."""
        self._check(sku.id, self._kit().check_deterministic, sku)

    def test_batch_invariant(self, sku: KernelSku) -> None:
        """If batch invariance is promised, permuted rows and a subset of the rows give the same rows."""
        self._check(sku.id, self._kit().check_batch_invariant, sku)

    def test_bit_stable(self, sku: KernelSku) -> None:
        """If stable bits are promised, another process with other threads and another hash seed gives the same bits."""
        if not sku.precision_guarantee.bit_stable_on_same_hardware:
            pytest.skip("it does not promise bit_stable_on_same_hardware")
        if "<locals>" in type(self).__qualname__:
            pytest.skip("the class must stand in a module: another process imports it")
        here, there = self._digests()
        if sku.id not in here:
            pytest.skip("it does not run here: see test_meaning")
        if there.get(sku.id) != here[sku.id]:
            what = "got other bits" if sku.id in there else "cannot run it"
            self._fail(sku.id, f"promises bit_stable_on_same_hardware\nanother process {what}")

    def test_constraints(self, sku: KernelSku) -> None:
        """Problems beyond an edge of a constraint are refused, with a constraint as the reason."""
        self._check(sku.id, self._kit().check_constraints, sku)

    def test_compiles(self, sku: KernelSku) -> None:
        """CUDA source compiles, and fits its launch rule, for cards that need not be present."""
        self._check(sku.id, self._kit().check_compiles, sku)

    def test_refusals(self, sku: KernelSku) -> None:
        """Wrong arguments raise `InvalidProblem`, and nothing is written."""
        self._check(sku.id, self._kit().check_refusals, sku)

    def test_outputs(self, sku: KernelSku) -> None:
        """A given output is written and returned; an omitted one is a new array."""
        self._check(sku.id, self._kit().check_outputs, sku)

    def test_calls(self, sku: KernelSku) -> None:
        """Many calls all give the same outputs, print nothing and leave the process state unchanged."""
        self._check(sku.id, self._kit().check_calls, sku)

    def test_reuse(self, sku: KernelSku) -> None:
        """One plan serves several runs; `bind` and a plan from JSON give the same outputs."""
        self._check(sku.id, self._kit().check_reuse, sku)

    def test_threads(self, sku: KernelSku) -> None:
        """Several concurrent threads get the same outputs as one thread alone."""
        self._check(sku.id, self._kit().check_threads, sku)

    def test_streams(self, sku: KernelSku) -> None:
        """Work on the given stream waits for the work enqueued before it."""
        self._check(sku.id, self._kit().check_streams, sku)


def _tell(file: str, module: str, name: str, seed: int) -> None:
    """Print the digests of a suite; called in the other process."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    suite: Any = loaded
    for part in name.split("."):
        suite = getattr(suite, part)
    suite.seed = seed
    sys.stdout.write("\n" + json.dumps(suite._kit().digests()))  # noqa: SLF001  one module


def _child(code: str, **changes: str) -> str:
    """Return the last line that a program prints, run with this process's `sys.path`."""
    program = f"import sys; sys.path[:] = {sys.path!r}; {code}"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment(**changes), capture_output=True, text=True, check=False
    )
    if ran.returncode:
        pytest.fail(f"another process failed with status {ran.returncode}:\n{ran.stderr[-2000:]}", pytrace=False)
    return ran.stdout.splitlines()[-1]
