"""`CudaRunner`: a prepared CUDA kernel, from the arguments of a call to its launch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from skuda.dispatch.cuda.binding import Binder
from skuda.dispatch.cuda.call import Call
from skuda.dispatch.cuda.driver import FORK_REMEDY, FORKED, Driver, inherited
from skuda.dispatch.cuda.recognizer import Recognizer
from skuda.dispatch.cuda.streams import stream_handle
from skuda.dispatch.system.forks import in_child
from skuda.kernels.launch import Launch, Step
from skuda.registry.descriptor import Descriptor, Role
from skuda.registry.errors import DriverError, InvalidProblem, NotPrepared, SkudaError

_MOST_CALLS = 4
_MOST_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without opting in."""

Send = Callable[[tuple[Any, ...], int, object], None]
"""Enqueues a step. Takes its parameters as `struct` packs them, the stream's handle (0: the default stream), and the
caller's stream object."""

Bound = Callable[[int, object], None]
"""Enqueues a step whose parameters are fixed: handle and stream as in `Send`."""


class Engine(Protocol):
    """The loaded steps of one launch."""

    @property
    def sends(self) -> Sequence[Send]:
        """The function that enqueues each step."""

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Return a function that enqueues one step with these parameters."""


class NoSteps:
    """The engine of a launch without steps: a problem of no elements."""

    sends = ()

    def bound(self, step: int, parameters: tuple[Any, ...]) -> Bound:
        """Never called: there is no step."""
        raise IndexError(step, parameters)


def must_opt_in(step: Step) -> bool:
    """Whether a step needs more shared memory than a block has by default."""
    return step.shared > _MOST_SHARED


class Scratch:
    """Scratch buffers, one set for every stream, so that runs on two streams do not share one.

    The first set is made with the plan and serves the first stream that is used. A run inside a graph capture gets a
    set of its own that lives as long as the process, because a graph may be replayed at any time on any stream. `sizes`
    are in bytes.
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
    if inherited():
        return
    with driver.using(context):
        for addresses in sets:
            for address in addresses:
                driver.free(address)


class CudaRunner:
    """A prepared kernel of a CUDA backend; its launch has no steps that do nothing."""

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
        self._result = problem.builder
        self._outputs = tuple(a.name for a in problem.arguments() if a.role is Role.OUTPUT)
        self._only = self._outputs[0] if self._result is None else None
        self._binder = Binder(problem, launch, self._ordinal)
        self._engine, self._driver = engine, driver
        self._sends = tuple(engine.sends)
        self._scratch = (
            Scratch(driver, self._context, tuple(size for _, size in launch.scratch)) if launch.scratch else None
        )
        # Steps that share scratch must not interleave with those of another thread on the same stream.
        self._lock = threading.Lock()
        # The latest calls, newest first; replaced as a whole, so that threads see a consistent tuple.
        self._calls: tuple[Call, ...] = ()
        self._latest: Call | None = None
        # With one card the driver refuses a launch in a wrong context; with several the context is checked before.
        self._careful = driver.device_count > 1
        self._only_send = self._sends[0] if len(self._sends) == 1 and not launch.scratch and not self._careful else None
        # The fastest path, if the latest call consists of one launch only.
        self._quick: tuple[Recognizer, Callable[[], int], Send] | None = None
        _runners.add(self)

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
        quick = self._quick
        if quick is not None:
            recognize, current, send = quick
            parameters = recognize(arrays)
            if parameters is not None:
                handle = current() if stream is None else stream_handle(self._op, stream, self._ordinal)
                try:
                    send(parameters, handle, stream)
                except Exception as error:  # noqa: BLE001  an error of PyCUDA or the driver
                    self._again(error, partial(send, parameters, handle, stream))
                return arrays[self._only] if self._only is not None else self._given(arrays)
        return self._run(arrays, stream)

    def _run(self, arrays: Mapping[str, object], stream: object) -> object:
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
        made = self._make(call, values, stream, handle)
        send = self._only_send if call.direct else None
        if send is None:
            self._enqueue(call, values, handle, stream)
        else:
            parameters = call.picks[0]([*values, *call.constants])
            try:
                send(parameters, handle, stream)
            except Exception as error:  # noqa: BLE001  an error of PyCUDA or the driver
                self._again(error, partial(send, parameters, handle, stream))
        return self._results(call, arrays, made)

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check once and return a callable that only launches and keeps the arrays alive.

        Raises
        ------
        InvalidProblem
            As `run`, and for arrays of a framework without streams.
        """
        call = self._binder.bind(arrays)
        if not call.direct:
            raise InvalidProblem(self._op, "arrays", f"{call.framework.name} arrays", "be run: they must never change")
        fixed = None if stream is None else stream_handle(self._op, stream, self._ordinal)
        values = call.checked_values(arrays)
        made = self._make(call, values, stream, call.stream() if fixed is None else fixed)
        result = self._results(call, arrays, made)
        parameters = [*values, *call.constants]
        steps = enumerate(() if self._scratch else call.picks)
        sends = [self._engine.bound(step, pick(parameters)) for step, pick in steps]

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
            except Exception as error:  # noqa: BLE001  an error of PyCUDA or the driver
                self._again(error, partial(send_all, handle))
            return result

        return launch

    def _remember(self, call: Call) -> None:
        self._calls = (call, *(other for other in self._calls if other is not call))[:_MOST_CALLS]
        self._latest = call
        quick = self._only_send if call.direct else None
        self._quick = (call.parameters, call.stream, quick) if call.parameters and quick else None

    def _enqueue(self, call: Call, values: list[Any], handle: int, stream: object) -> None:
        with self._driver.using(self._context):
            self._launch_all(call, values, handle, stream)
            if not call.direct:
                self._driver.synchronize(handle)

    def _again(self, error: Exception, send: Callable[[], None]) -> None:
        """Repeat a failed launch if the thread's context was wrong, which a launch does not check; else raise it."""
        if isinstance(error, SkudaError) and not isinstance(error, DriverError):
            raise error
        if self._driver.current() == self._context:
            raise DriverError(f"launching {self._op}", str(error)) from error
        with self._driver.using(self._context):
            send()

    def _launch_all(self, call: Call, values: list[Any], handle: int, stream: object) -> None:
        if self._scratch is None:
            parameters = [*values, *call.constants]
            for send, pick in zip(self._sends, call.picks, strict=True):
                send(pick(parameters), handle, stream)
            return
        parameters = [*values, *self._scratch.addresses(handle), *call.constants]
        with self._lock:
            for send, pick in zip(self._sends, call.picks, strict=True):
                send(pick(parameters), handle, stream)

    @staticmethod
    def _make(call: Call, values: list[Any], stream: object, handle: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if not call.made:
            return made
        # A framework allocates for its current stream by default, without switching streams.
        target = None if stream is None and not call.framework.borrows else handle
        for each in call.made:
            array = made[each.name] = each.make(target)
            values.append(each.address(array))
        return made

    def _results(self, call: Call, arrays: Mapping[str, Any], made: Mapping[str, Any]) -> object:
        deliver = call.framework.deliver
        outputs = [deliver(made[name]) if name in made else arrays[name] for name in self._outputs]
        return outputs[0] if self._result is None else self._result(*outputs)

    def _given(self, arrays: Mapping[str, Any]) -> object:
        """Return the outputs, all of which the caller gave."""
        outputs = [arrays[name] for name in self._outputs]
        return outputs[0] if self._result is None else self._result(*outputs)


_runners: weakref.WeakSet[CudaRunner] = weakref.WeakSet()


def _refuse_all() -> None:
    """Make every runner refuse, in a forked child. A check in every run would cost those that are not forked."""
    for runner in tuple(_runners):
        runner._careful = True  # noqa: SLF001  so that what `bind` returned calls `_enqueue`
        for name in ("check", "run", "bind", "_enqueue"):
            setattr(runner, name, _refuse)


def _refuse(*_: object, **__: object) -> object:
    raise NotPrepared(f"this plan was prepared in another process: {FORKED}; {FORK_REMEDY}")


in_child(_refuse_all)
