"""Telemetry: selections go to a callback or to the log, launches become NVTX ranges."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from skuda.dispatch.settings import logged_topics
from skuda.dispatch.system.locks import lock
from skuda.registry.cached import cached_property
from skuda.registry.errors import InvalidProblem, MissingDependency, Unsupported
from skuda.registry.text import one_line, shown

if TYPE_CHECKING:
    from skuda.dispatch.backends.base import Runner
    from skuda.dispatch.preference import PlanPreference
    from skuda.dispatch.select.explanation import Decision, Explanation
    from skuda.dispatch.select.match import Pick
    from skuda.registry.descriptor import Descriptor
    from skuda.registry.device import Device
    from skuda.registry.sku import KernelSku

_log = logging.getLogger("skuda.dispatch")
_MOST_TOLD = 16
"""Late kernels of which each is told."""


@dataclass(frozen=True)
class Selection:
    """One selection and its outcome. Taking a plan from the dispatcher's cache is not a selection.

    Attributes
    ----------
    problem : Descriptor
        The problem.
    device : Device
        The device to run on.
    preference : PlanPreference
        The caller's requirements.
    pick : Pick or None
        The chosen kernel, the configuration if a measurement chose it, and that measurement. None if no kernel serves
        the problem.
    duration : float
        Seconds to choose.
    preparation : float
        Seconds to prepare the kernel: to compile it or find it in the cache, to load it, to allocate scratch.
    error : BaseException or None
        The exception raised while preparing.
    behind : str or None
        Id of the kernel that this one replaces, because that one could not read the arrays for their alignment.
    """

    problem: Descriptor
    device: Device
    preference: PlanPreference
    pick: Pick | None
    duration: float
    preparation: float
    error: BaseException | None = field(compare=False)
    behind: str | None
    _explain: Callable[[], Explanation] = field(repr=False, compare=False)

    @property
    def sku(self) -> KernelSku | None:
        """The kernel chosen, or None."""
        return self.pick.sku if self.pick is not None else None

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """The verdict on every kernel of the op, computed on first use."""
        return self._explain().decisions

    def attributes(self) -> dict[str, str | bool | int | float | list[Any]]:
        """Return flat attributes with OpenTelemetry's names. Times are in seconds. Unknown values are left out."""
        sku, device = self.sku, self.device
        found: dict[str, Any] = {
            "skuda.op": self.problem.op_name(),
            "skuda.device.name": device.name,
            "skuda.device.processor": device.processor,
            "skuda.device.ordinal": device.ordinal,
            "skuda.selection.duration": self.duration,
            "skuda.selection.preparation.duration": self.preparation,
            "skuda.selection.behind": self.behind,
        }
        if device.compute_capability is not None:
            found["skuda.device.compute_capability"] = "{}.{}".format(*device.compute_capability)
        found |= {f"skuda.problem.{name}": value for name, value in _fields(self.problem).items()}
        if sku is not None and self.pick is not None:
            found |= {"skuda.sku.id": sku.id, "skuda.sku.backend": sku.backend, "skuda.sku.variant": sku.variant}
            found |= {
                "skuda.sku.choice": self.pick.choice or None,
                "skuda.selection.measured": self.pick.reason or None,
            }
            promised = sku.precision_guarantee.model_dump(mode="json")
            found |= {f"skuda.guarantee.{name}": value for name, value in promised.items()}
        kind = Unsupported if sku is None else type(self.error) if self.error is not None else None
        if kind is not None:
            found["error.type"] = f"{kind.__module__}.{kind.__qualname__}"
        return {name: value for name, value in found.items() if value is not None}


Observer = Callable[[Selection], object]
"""A function that is called with every selection, in the requesting thread, before that thread gets its plan."""


class Guarded:
    """An observer whose exceptions never reach the selection. Only the first one is logged."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._reported = False

    def __call__(self, selection: Selection) -> None:
        """Notify the observer."""
        try:
            self._observer(selection)
        except Exception:  # noqa: BLE001  an observer may raise anything
            if not self._reported:
                self._reported = True
                # Level ERROR appears even if logging is not configured.
                _log.exception("%s failed; selections continue, and its later failures are not shown", self._origin())

    def _origin(self) -> str:
        code = getattr(self._observer, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"on_selection {getattr(self._observer, '__qualname__', repr(self._observer))}{where}"


def log_selection(selection: Selection) -> None:
    """Log a selection to ``skuda.dispatch``: a line at INFO, and a line at DEBUG for every refused kernel.

    ``SKUDA_LOG=dispatch`` turns this on. An application with its own handlers passes this function as `on_selection`.

    Raises
    ------
    InvalidProblem
        For an argument that is not a `Selection`.
    """
    given: object = selection
    if not isinstance(given, Selection):
        raise InvalidProblem("log_selection", "selection", shown(given), "be a Selection")
    fields = ", ".join(f"{name}={value}" for name, value in _fields(selection.problem).items())
    question = f"{selection.problem.op_name()}({fields}) on {selection.device.describe()}"
    _log.info("%s: %s", question, _outcome(selection))
    if _log.isEnabledFor(logging.DEBUG):
        for decision in selection.decisions:
            if not decision.accepted:
                reasons = "; ".join(f"[{reason.code}] {reason}" for reason in decision.reasons)
                _log.debug("refused %s: %s", decision.sku, reasons)


def _fields(problem: Descriptor) -> dict[str, Any]:
    return problem.model_dump(mode="json", exclude={"op"})


def _outcome(selection: Selection) -> str:
    behind = f" behind {selection.behind}, which the arrays' alignment rules out" if selection.behind else ""
    if selection.sku is None:
        return f"no kernel{behind}"
    measured = f", {selection.pick.reason}," if selection.pick is not None and selection.pick.reason else ""
    chose = f"chose {selection.sku.id}{behind}{measured} in {selection.duration * 1e3:.3f} ms"
    if selection.error is not None:
        trouble = one_line(str(selection.error))
        return f"{chose}, which could not be prepared: {type(selection.error).__name__}: {trouble}"
    return f"{chose}, prepared in {selection.preparation * 1e3:.3f} ms"


class Loaded(NamedTuple):
    """A kernel that was loaded."""

    sku: str
    built: bool
    """Whether it was compiled here. Otherwise it came from a bundle or the cache."""
    seconds: float  # the time until it was loaded


class Kernels:
    """Counts the kernels that this process loads onto GPUs.

    `compiled` kernels were compiled here; `found` came from a bundle or the cache. `late` has those of them that were
    loaded outside of `expected`, after `watch`: a call had to wait for each.
    """

    def __init__(self) -> None:
        self.compiled = self.found = 0
        self.late: list[Loaded] = []
        self._lock, self._expected = lock(), 0
        self._tell: Callable[[str], object] | None = None

    def add(self, loaded: Loaded) -> None:
        """Count a kernel, and tell if it is late. Of many late ones, those with numbers that are powers of two."""
        with self._lock:
            if loaded.built:
                self.compiled += 1
            else:
                self.found += 1
            tell = None if self._expected else self._tell
            if tell is not None:
                self.late.append(loaded)
            number = len(self.late)
        if tell is not None and (number <= _MOST_TOLD or number & (number - 1) == 0):
            how = "compiled" if loaded.built else "loaded"
            tell(f"{loaded.sku} was {how} in {loaded.seconds:.2f} s while a call waited: kernel {number} of this kind")

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Return a context inside of which, in any thread, no kernel is late."""
        with self._lock:
            self._expected += 1
        try:
            yield
        finally:
            with self._lock:
                self._expected -= 1

    def watch(self, tell: Callable[[str], object] = _log.warning) -> None:
        """From now on, kernels are late. `tell` gets a line about each."""
        self._tell = tell


KERNELS = Kernels()
"""The kernels of this process."""


class _ToStandardError(logging.Handler):
    """Writes to standard error, but only if the application has no handler, so that no line appears twice."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if not all(handler is self or isinstance(handler, logging.NullHandler) for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001  a stream that is closed or full, as for every handler of `logging`
            self.handleError(record)


# One handler for all loggers: a logger adds the same handler only once.
_to_standard_error = _ToStandardError()
_to_standard_error.setFormatter(logging.Formatter("%(name)s: %(message)s"))


def logger_of(topic: str) -> logging.Logger | None:
    """Return the logger of a topic (``dispatch`` or ``compile``) if ``SKUDA_LOG`` names the topic, else None.

    Raise `InvalidRecord` if ``SKUDA_LOG`` names an unknown topic.
    """
    if topic not in logged_topics():
        return None
    logging.getLogger("skuda").addHandler(_to_standard_error)
    logger = logging.getLogger(f"skuda.{topic}")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.DEBUG)
    return logger


class Ranges:
    """Opens and closes ranges of the domain ``skuda``. Raise `MissingDependency` if the package ``nvtx`` is absent."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise MissingDependency("nvtx", "pip install 'skuda[nvtx]'") from error
        self._domain = nvtx.get_domain("skuda")

    def round(self, runner: Runner, sku: KernelSku) -> Runner:
        """Return a runner whose launches are ranges, named by op and SKU."""
        attributes = self._domain.get_event_attributes(message=f"{sku.op}: {sku.id}")

        @contextmanager
        def ranged() -> Iterator[None]:
            self._domain.push_range(attributes)
            try:
                yield
            finally:
                self._domain.pop_range()

        return _InRange(runner, ranged)


class _InRange:
    """A runner whose launches are in a context that `ranged` makes, or functions that it decorates. A check is not."""

    def __init__(self, runner: Runner, ranged: Callable[[], Any]) -> None:
        self.notes, self.check = runner.notes, runner.check
        self._runner, self._ranged = runner, ranged

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Run inside the context."""
        with self._ranged():
            return self._runner.run(arrays, stream)

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Return a callable that launches inside the context."""
        ranged: Callable[[], object] = self._ranged()(self._runner.bind(arrays, stream))
        return ranged
