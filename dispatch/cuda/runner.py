"""`CudaRunner`: a prepared CUDA kernel. It takes the arguments of a call and launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from skuda.dispatch.cuda.call import Binder, CheckedCall
from skuda.dispatch.cuda.driver import FORK_REMEDY, FORKED, Driver, inherited
from skuda.dispatch.cuda.launcher import Engine, LaunchSetup, Sender, launch_of
from skuda.dispatch.cuda.scratch import Scratch
from skuda.dispatch.cuda.streams import stream_handle
from skuda.dispatch.launch_cache import FirstRun, PositionalCall
from skuda.kernels.launch import Launch, Step
from skuda.registry.cached import cached_property
from skuda.registry.descriptor import Descriptor
from skuda.registry.errors import InvalidProblem, NotPrepared

_MOST_SHARED = 48 << 10
"""Bytes of shared memory that a block gets without opting in."""


def must_opt_in(step: Step) -> bool:
    """Whether a step needs more shared memory than a block has by default."""
    return step.shared > _MOST_SHARED


class CudaRunner:
    """A prepared kernel of a CUDA backend. Every step of its launch does something."""

    def __init__(
        self,
        problem: Descriptor,
        launch: Launch,
        engine: Engine,
        driver: Driver,
        place: tuple[int, int],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._problem, self._launch, self._notes = problem, launch, notes
        self._ordinal, self._context = place
        self._engine, self._driver = engine, driver
        self._scratch = Scratch(driver, place, launch.scratch) if launch.scratch else None

    @cached_property
    def _op(self) -> str:
        return self._problem.op_name()

    @cached_property
    def _binder(self) -> Binder:
        return Binder(self._problem, self._launch, self._ordinal)

    @cached_property
    def _sender(self) -> Sender:
        return Sender(self._op, self._engine, self._driver, self._context)

    @cached_property
    def _waiting(self) -> Sender:
        return Sender(self._op, self._engine, self._driver, self._context, waits=True)

    @property
    def notes(self) -> tuple[str, ...]:
        """The configuration, and the notes of the backend."""
        return (*self._launch.explanation(), *self._notes)

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch."""
        return sum(size for _, size in self._launch.scratch)

    def check(self, arrays: Mapping[str, object]) -> None:
        """Raise `InvalidProblem` for arguments that `run` would refuse."""
        self._bound(arrays)

    def run(self, arrays: Mapping[str, object], stream: object) -> object:
        """Enqueue the kernel and return the op's result.

        Raise `InvalidProblem` for a missing, unknown or unsuitable argument or stream.
        """
        return self._run(arrays, stream)[0]

    def first_run(
        self,
        arrays: Mapping[str, object],
        stream: object,
        failed: Callable[[BaseException], None],
        positions: PositionalCall | None,
    ) -> FirstRun:
        """Run, and return a launch for calls like this one, which passes its errors to `failed` before it raises them.

        Raise `InvalidProblem` as `run`.
        """
        if type(self).run is not CudaRunner.run:  # a launch would not do what a derived class does
            return FirstRun(self.run(arrays, stream), None, placed=True)
        result, call, sender = self._run(arrays, stream)
        setup = LaunchSetup(
            sender=sender,
            handle_of=partial(stream_handle, self._op, ordinal=self._ordinal),
            place=None if self._scratch is None else self._scratch.place,
            scratch=len(self._launch.scratch),
            outputs=self._binder.outputs,
            result=self._problem.builder,
            failed=failed,
        )
        like = call if positions is None else self._binder.at_positions(call, positions)
        return FirstRun(result, None if like is None else launch_of(like, setup, positions), call.placed)

    def _run(self, arrays: Mapping[str, object], stream: object) -> tuple[object, CheckedCall, Sender]:
        call = self._bound(arrays)
        sender = self._waiting if call.framework.waits else self._sender
        # Checked arrays need not be recognized, and some kinds never are.
        values = call.values(arrays)
        handle = call.stream() if stream is None else stream_handle(self._op, stream, self._ordinal)
        made = self._make(call, values, stream, handle)
        self._send(sender, call, values, handle, stream)
        return self._results(call, arrays, made), call, sender

    def _bound(self, arrays: Mapping[str, object]) -> CheckedCall:
        if inherited():
            raise _other_process()
        return self._binder.bind(arrays)

    def bind(self, arrays: Mapping[str, object], stream: object) -> Callable[[], object]:
        """Check once and return a callable that only launches and keeps the arrays alive.

        Raise `InvalidProblem` as `run`, and for arrays of a framework without streams.
        """
        call = self._bound(arrays)
        if call.framework.waits:
            raise InvalidProblem(self._op, "arrays", f"{call.framework.name} arrays", "be run: they must never change")
        fixed = None if stream is None else stream_handle(self._op, stream, self._ordinal)
        values = call.values(arrays)
        made = self._make(call, values, stream, call.stream() if fixed is None else fixed)
        result = self._results(call, arrays, made)
        sender = self._sender
        steps = enumerate(() if self._scratch else call.parameters(values))
        sends = [self._engine.bound(step, parameters) for step, parameters in steps]

        def send_all(handle: int) -> None:
            for send in sends:
                send(handle, stream)

        def launch(_kept: object = (dict(arrays), made)) -> object:
            if inherited():
                raise _other_process()
            handle = call.stream() if fixed is None else fixed
            if not sender.plain or self._scratch is not None:
                self._send(sender, call, values, handle, stream)
                return result
            try:
                send_all(handle)
            except Exception as error:  # noqa: BLE001  an error of PyCUDA or the driver
                sender.trouble(error)
                with self._driver.using(self._context):
                    send_all(handle)
            return result

        return launch

    def _send(self, sender: Sender, call: CheckedCall, values: list[Any], handle: int, stream: object) -> None:
        if self._scratch is None:
            sender.send(call.parameters(values), handle, stream)
            return
        lock, addresses, held = self._scratch.place(handle)
        try:
            with lock:
                sender.send(call.parameters(values, addresses), handle, stream)
        finally:
            del held  # an error keeps the variables of the functions that it has left

    @staticmethod
    def _make(call: CheckedCall, values: list[Any], stream: object, handle: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        # A framework allocates for its current stream by default, without switching streams.
        target = None if stream is None and not call.framework.borrows else handle
        for each in call.made:
            array = made[each.name] = each.make(target)
            values.append(each.address(array))
        return made

    def _results(self, call: CheckedCall, arrays: Mapping[str, Any], made: Mapping[str, Any]) -> object:
        deliver = call.framework.deliver
        outputs = [deliver(made[name]) if name in made else arrays[name] for name in self._binder.outputs]
        result = self._problem.builder
        return outputs[0] if result is None else result(*outputs)


def _other_process() -> NotPrepared:
    return NotPrepared(f"this plan was prepared in another process: {FORKED}; {FORK_REMEDY}")
