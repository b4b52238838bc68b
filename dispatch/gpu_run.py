"""Running a prepared CUDA kernel: what both CUDA backends share between a bound call and the driver."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from skuda.dispatch.driver import Driver
from skuda.dispatch.gpu_bind import Binder
from skuda.dispatch.gpu_call import Call
from skuda.dispatch.gpu_streams import stream_handle
from skuda.kernels.launch import Launch
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import DriverError, InvalidProblem, SkudaError

_MOST_CALLS = 4

Send = Callable[[int, object], None]


class Engine(Protocol):
    """The loaded steps of one launch."""

    def launch(self, step: int, parameters: tuple[Any, ...], handle: int, stream: object) -> None:
        """Enqueue one step.

        Parameters
        ----------
        step : int
            Which.
        parameters : tuple
            Its parameters, as `struct` packs them.
        handle : int
            The stream, 0 for the default one.
        stream : object
            What the caller gave for it.
        """

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Send:
        """Return what enqueues one step with these parameters, given handle and stream."""


class Scratch:
    """Scratch buffers, one set for every stream, so that runs on two streams do not share one.

    The first set is made with the plan and serves the first stream that comes. A run inside a graph capture gets a set
    that nothing else uses and that lives as long as the process: a graph may be replayed at any time, beside anything.

    Parameters
    ----------
    driver : Driver
        The driver.
    context : int
        Where to allocate.
    sizes : tuple of int
        Bytes of every buffer.
    """

    def __init__(self, driver: Driver, context: int, sizes: tuple[int, ...]) -> None:
        self._driver, self._context, self._sizes = driver, context, sizes
        self._lock = threading.Lock()
        self._sets: dict[tuple[int, int], tuple[int, ...]] = {}
        self._owned: list[tuple[int, ...]] = []
        self._spare: tuple[int, ...] | None = self._allocate()
        weakref.finalize(self, _free, driver, context, self._owned).atexit = False

    def addresses(self, handle: int) -> tuple[int, ...]:
        """Return the addresses for work on a stream."""
        capture = self._driver.capture_of(handle) if handle else 0
        key = (handle, capture)
        return self._sets.get(key) or self._take(key)

    def _take(self, key: tuple[int, int]) -> tuple[int, ...]:
        with self._lock:
            if key not in self._sets:
                spare, captured = self._spare, key[1] != 0
                if spare is not None:
                    self._spare = None
                found = spare or self._allocate()
                if captured:
                    self._owned.remove(found)
                self._sets[key] = found
            return self._sets[key]

    def _allocate(self) -> tuple[int, ...]:
        with self._driver.using(self._context):
            found = tuple(self._driver.allocate(size) for size in self._sizes)
        self._owned.append(found)
        return found


def _free(driver: Driver, context: int, sets: list[tuple[int, ...]]) -> None:
    with driver.using(context):
        for addresses in sets:
            for address in addresses:
                driver.free(address)


class CudaRunner:
    """A prepared kernel of a CUDA backend.

    Parameters
    ----------
    problem : Descriptor
        The problem.
    launch : Launch
        Its launch, without steps that do nothing.
    engine : Engine
        The loaded steps.
    driver : Driver
        The driver.
    ordinal, context : int
        The device and its primary context.
    notes : tuple of str
        What a person should know about how it runs.
    """

    def __init__(
        self,
        problem: Descriptor,
        launch: Launch,
        engine: Engine,
        driver: Driver,
        place: tuple[int, int],
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes
        self._ordinal, self._context = place
        self._op = problem.op_name()
        self._result = type(problem).result
        self._outputs = tuple(a.name for a in problem.arguments() if a.role is Role.OUTPUT)
        self._only = self._outputs[0] if self._result is None else None
        self._binder = Binder(problem, launch, self._ordinal)
        self._engine, self._driver = engine, driver
        self._steps = range(len(launch.steps))
        self._scratch = (
            Scratch(driver, self._context, tuple(size for _, size in launch.scratch)) if launch.scratch else None
        )
        # Steps that hand each other scratch must not mix with those of another thread on the same stream.
        self._lock = threading.Lock()
        # What was called with lately, the latest first; replaced whole, so threads see one or the other.
        self._calls: tuple[Call, ...] = ()
        self._latest: Call | None = None
        # With one card a wrong context makes the driver refuse the launch; with several it is asked before.
        self._careful = driver.device_count > 1
        simple = len(launch.steps) == 1 and not launch.scratch and not self._careful
        self._launch_one = engine.launch if simple else None

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise `InvalidProblem` for arguments that `run` would refuse."""
        self._binder.bind(arrays)

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Enqueue the kernel and return the op's result.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument or stream.
        """
        for call in self._calls:
            values = call.values(arrays)
            if values is not None:
                break
        else:
            call = self._binder.bind(arrays)
            values = call.checked_values(arrays)
        if call is not self._latest:
            self._remember(call)
        handle = call.stream() if stream is None else stream_handle(self._op, stream, self._ordinal)
        made = self._make(call, values, stream, handle) if call.made else None
        if self._launch_one is None or not call.direct:
            self._enqueue(call, values, handle, stream)
        else:
            try:
                self._launch_one(0, call.picks[0]([*values, *call.constants]), handle, stream)
            except Exception as error:  # noqa: BLE001  PyCUDA's or cuda-bindings'
                self._again(error, call, values, handle, stream)
        if made is None and self._only is not None:
            return arrays[self._only]
        return self._results(call, arrays, made or {})

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check once and return a callable that only launches; it keeps the arrays alive.

        Raises
        ------
        InvalidProblem
            As `run`; and for arrays of a framework that has no streams.
        """
        call = self._binder.bind(arrays)
        if not call.direct:
            raise InvalidProblem(self._op, "arrays", f"{call.framework.name} arrays", "be run: they must never change")
        fixed = None if stream is None else stream_handle(self._op, stream, self._ordinal)
        values = call.checked_values(arrays)
        made = self._make(call, values, stream, call.stream() if fixed is None else fixed) if call.made else {}
        result = self._results(call, arrays, made)
        parameters = [*values, *call.constants]
        sends = [] if self._scratch else [self._engine.bound(s, call.picks[s](parameters)) for s in self._steps]

        def send_all(handle: int) -> None:
            for send in sends:
                send(handle, stream)

        def launch(_kept: object = (dict(arrays), made)) -> object:
            handle = call.stream() if fixed is None else fixed
            if self._careful or self._scratch is not None:
                self._enqueue(call, values, handle, stream)
                return result
            try:
                send_all(handle)
            except Exception as error:  # noqa: BLE001  PyCUDA's or cuda-bindings'
                self._again(error, call, values, handle, stream)
            return result

        return launch

    def _remember(self, call: Call) -> None:
        self._calls = (call, *(other for other in self._calls if other is not call))[:_MOST_CALLS]
        self._latest = call

    def _enqueue(self, call: Call, values: list[Any], handle: int, stream: object) -> None:
        with self._driver.using(self._context):
            self._launch_all(call, values, handle, stream)
            if not call.direct:
                self._driver.synchronize(handle)

    def _again(self, error: Exception, call: Call, values: list[Any], handle: int, stream: object) -> None:
        """Launch again where the thread's context was to blame, which a launch does not ask; else raise the error."""
        if isinstance(error, SkudaError) and not isinstance(error, DriverError):
            raise error
        if self._driver.current() == self._context:
            raise DriverError(f"launching {self._op}", str(error)) from error
        self._enqueue(call, values, handle, stream)

    def _launch_all(self, call: Call, values: list[Any], handle: int, stream: object) -> None:
        launch = self._engine.launch
        if self._scratch is None:
            parameters = [*values, *call.constants]
            for step in self._steps:
                launch(step, call.picks[step](parameters), handle, stream)
            return
        parameters = [*values, *self._scratch.addresses(handle), *call.constants]
        with self._lock:
            for step in self._steps:
                launch(step, call.picks[step](parameters), handle, stream)

    @staticmethod
    def _make(call: Call, values: list[Any], stream: object, handle: int) -> dict[str, Any]:
        made = {}
        # A framework makes arrays for its current stream by itself, and at once.
        target = None if stream is None and not call.framework.borrows else handle
        for each in call.made:
            array = made[each.name] = each.make(target)
            values.append(each.address(array))
        return made

    def _results(self, call: Call, arrays: Mapping[str, Any], made: Mapping[str, Any]) -> object:
        deliver = call.framework.deliver
        outputs = [deliver(made[name]) if name in made else arrays[name] for name in self._outputs]
        return outputs[0] if self._result is None else self._result(*outputs)
