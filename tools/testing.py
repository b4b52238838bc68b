"""A conformance suite for kernels and backends of other packages, in three lines of pytest.

In a test file of the package, for example ``tests/test_conformance.py``::

    from skuda.tools.testing import Conformance

    class TestConformance(Conformance):
        package = "my-package"  # the distribution's name

The suite runs every kernel that the package registers, and every kernel on its backends. Each check of each kernel is
one test item; the checks are those of ``skuda verify``. What this machine cannot run is skipped with the reason.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from skuda.dispatch import Dispatcher
from skuda.dispatch.settings import conformance_seed, environment
from skuda.registry.device import HOST
from skuda.registry.errors import MissingDependency
from skuda.tools.output import nearest
from skuda.tools.verify import checks
from skuda.tools.verify.compare import Broken, NotRun
from skuda.tools.verify.placement import HostPlacement, placement_for
from skuda.tools.verify.trial import Examples, Trial

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

_SEED = "SKUDA_TEST_SEED"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_ATTRIBUTES = ("package", "cases", "seed", "dispatcher", "placement")


class Conformance:
    """Base class of a package's conformance tests; a subclass names the package.

    Attributes
    ----------
    package : str
        The distribution that brings the plug-ins, or the origin of records that `dispatcher` has registered.
    cases : tuple of Case
        Problems in addition to those of the ops, for kernels that the ops' own cases do not reach.
    seed : int
        Seed of the inputs, a fresh one unless the variable ``SKUDA_TEST_SEED`` is set. A failure shows it.
    """

    package: ClassVar[str]
    cases: ClassVar[tuple[Case, ...]] = ()
    seed: ClassVar[int] = conformance_seed()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in vars(cls):
            near = nearest(name, _ATTRIBUTES)
            if near and name not in _ATTRIBUTES and not hasattr(Conformance, name) and not name.startswith("_"):
                raise TypeError(f"{cls.__name__}.{name}: the suite has no such attribute; did you mean {near[0]}?")
        if not isinstance(getattr(cls, "package", ""), str) or not isinstance(cls.cases, tuple):
            raise TypeError(f"{cls.__name__}: package must be a str, and cases a tuple of Case")

    @classmethod
    def dispatcher(cls) -> Dispatcher:
        """Return a dispatcher that has the package; by default one with everything that is installed."""
        return Dispatcher()

    @classmethod
    def placement(cls, device: Device) -> Placement:
        """Return the placement for a device; by default NumPy on the CPU, and torch on a GPU."""
        return placement_for(device)

    @classmethod
    @cache
    def _dispatcher(cls) -> Dispatcher:
        if not hasattr(cls, "package"):
            pytest.fail(f'{cls.__name__} must name its package: package = "my-package"', pytrace=False)
        return cls.dispatcher()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test item per kernel, backend or op of the package."""
        here, package = self._dispatcher(), self.package
        items: dict[str, dict[str, Any]] = {
            "sku": {sku.id: sku for sku in checks.kernels_of(here, package=package)},
            "backend": {name: each for name, each in here.backends.items() if checks.owns(here, package, name)},
            "op": {name: op for name, op in here.registry.ops.items() if checks.owns(here, package, name)},
        }
        for name, found in items.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, found.values(), ids=found.keys())

    @classmethod
    @cache
    def _examples(cls, op: str) -> Examples:
        return Examples(cls._dispatcher().registry.ops[op], cls.seed)

    @classmethod
    @cache
    def _trial(cls, sku: KernelSku, *, anywhere: bool) -> Trial:
        """Return the trial of a kernel; raise `NotRun` if a device is needed, and none here can run it."""
        here, device, placement = cls._dispatcher(), HOST, HostPlacement()
        if not anywhere:
            device = checks.device_for(here, sku, here.devices)
            try:
                placement = cls.placement(device)
            except MissingDependency as error:
                raise NotRun(str(error)) from error
        return Trial(sku, here, device, placement, cls._examples(sku.op), cls.cases)

    def _check(self, request: pytest.FixtureRequest, what: str, check: Callable[..., Any], *asked: Any) -> None:
        """Run a check and report its result to pytest."""
        repeat = f"{_SEED}={self.seed} pytest '{request.node.nodeid}'"
        try:
            lines = check(*asked) or ()
        except NotRun as reason:
            pytest.skip(str(reason))
        except Broken as broken:
            lines = (str(broken),)
        if lines:
            pytest.fail("\n".join((what, *lines, f"to repeat it: {repeat}")), pytrace=False)

    def _perform(self, name: str, sku: KernelSku) -> tuple[str, ...]:
        """Run a check of a kernel, and return what is wrong."""
        trial = self._trial(sku, anywhere=checks.CHECKS[name].anywhere)
        checks.perform(trial, name)
        if name not in trial.failures and trial.checks[name]:
            raise NotRun(trial.checks[name])
        return trial.failures[name].lines() if name in trial.failures else ()

    def test_package_is_loaded(self, request: pytest.FixtureRequest) -> None:
        """Every plug-in of the package is installed and loaded."""
        self._check(request, self.package, checks.check_loaded, self._dispatcher(), self.package)

    def test_loading_imports_nothing_heavy(self, request: pytest.FixtureRequest) -> None:
        """Loading the package's plug-ins imports no heavy module, so that programs start fast."""
        self._check(request, self.package, checks.check_light, self._dispatcher(), self.package)

    def test_op(self, op: Op, request: pytest.FixtureRequest) -> None:
        """An op of the package is documented, has a reference, and has cases that survive JSON."""
        self._check(request, op.name, checks.check_op, op, self._dispatcher())

    def test_status_is_honest(self, backend: Backend, request: pytest.FixtureRequest) -> None:
        """`status` and `devices` do not raise, are complete, and are consistent."""
        self._check(request, f"backend {backend.spec.name}", checks.check_status, backend, self._dispatcher())

    def test_bit_stable(self, sku: KernelSku, request: pytest.FixtureRequest) -> None:
        """If stable bits are promised, another process with other threads and another hash seed gives the same bits."""
        self._check(request, sku.id, self._compare_processes, sku)

    def _compare_processes(self, sku: KernelSku) -> tuple[str, ...]:
        if not sku.precision_guarantee.bit_stable_on_same_hardware:
            raise NotRun("it does not promise bit_stable_on_same_hardware")
        if "<locals>" in type(self).__qualname__:
            raise NotRun("the class must stand in a module: another process imports it")
        here = self._digests()
        if sku.id not in here:
            raise NotRun("it does not run here: see test_meaning")
        there = self._digests_of_another_process()
        return () if there.get(sku.id) == here[sku.id] else ("bit_stable: another process gets other bits",)

    @classmethod
    @cache
    def _digests_of_another_process(cls) -> dict[str, str]:
        threads = {name: "2" if environment().get(name) == "1" else "1" for name in _THREADS}
        changed = {**threads, "PYTHONHASHSEED": "1", _SEED: str(cls.seed)}
        with mock.patch.dict("os.environ", changed), multiprocessing.get_context("spawn").Pool(1) as pool:
            found: dict[str, str] = pool.apply(cls._digests)
        return found

    @classmethod
    @cache
    def _digests(cls) -> dict[str, str]:
        """Return a digest of the outputs of every kernel that runs here, by id."""
        found = {}
        for sku in checks.kernels_of(cls._dispatcher(), package=cls.package):
            try:
                found[sku.id] = checks.digest(cls._trial(sku, anywhere=False))
            except Exception:  # noqa: BLE001, S112  `test_meaning` reports it
                continue
        return found


def _test_of(name: str) -> Callable[..., None]:
    def test(self: Any, sku: KernelSku, request: pytest.FixtureRequest) -> None:
        self._check(request, sku.id, self._perform, name, sku)

    test.__name__, test.__doc__ = f"test_{name}", checks.CHECKS[name].run.__doc__
    return test


for _name in checks.CHECKS:
    setattr(Conformance, f"test_{_name}", _test_of(_name))
