"""`Plan`: a chosen and prepared kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, SerializeAsAny

from skuda.dispatch.backends.base import Runner
from skuda.dispatch.preference import PlanPreference
from skuda.registry.descriptor import Argument, Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import NotPrepared, SkudaError, Unaligned
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku
from skuda.registry.text import one_line
from skuda.registry.value import Value

_set = object.__setattr__


def _descriptor(value: object) -> object:
    """Find the class of a descriptor that comes from JSON by its ``op``."""
    if not isinstance(value, dict):
        return value
    kinds: list[type[Descriptor]] = [Descriptor]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if "op" in kind.model_fields and kind.op_name() == value.get("op"):
            return kind.model_validate(value)
    return Plan.refuse("problem.op", repr(value.get("op")), "name an op whose module has been imported")


class Plan(Value):
    """A chosen kernel, ready to run. It holds none of the caller's arrays and is safe to share between threads.

    It survives JSON and pickling as plain data, and `Dispatcher.prepare` makes it ready again, also in another process.

    Attributes
    ----------
    sku : KernelSku
        The kernel.
    problem : Descriptor
        The problem that it was planned for.
    device : Device
        Where it runs.
    preference : PlanPreference
        The caller's requirements.
    choice : str
        The configuration that a measurement chose; empty for the first one of the kernel's launch rule.
    measured : str
        The measurement that decided for this kernel or configuration; empty if the ranking decided.
    """

    sku: KernelSku
    problem: Annotated[SerializeAsAny[Descriptor], BeforeValidator(_descriptor)]
    device: Device
    preference: PlanPreference
    choice: str = ""
    measured: str = ""
    _runner: Runner | None = PrivateAttr(default=None)
    _next: Callable[[], Plan | None] = PrivateAttr(default=lambda: None)
    _failed: Callable[[BaseException], None] | None = PrivateAttr(default=None)

    @classmethod
    def prepared(
        cls,
        sku: KernelSku,
        problem: Descriptor,
        device: Device,
        preference: PlanPreference,
        runner: Runner | None,
        following: Callable[[], Plan | None] = lambda: None,
        failed: Callable[[BaseException], None] | None = None,
        *,
        choice: str = "",
        measured: str = "",
    ) -> Self:
        """Build a plan around a runner; a plan without one can be inspected and saved, but not run.

        `following` gives the plan of the next kernel in the ranking, for arrays that this kernel cannot read
        because of their address or stride. `failed` is told what the kernel raised, if that is no answer (a
        `SkudaError`), and may raise another error for it.
        """
        chosen: dict[str, Any] = {"sku": sku, "problem": problem, "device": device, "preference": preference}
        fields = {**chosen, "choice": choice, "measured": measured}
        plan = cls.__new__(cls)
        # As pydantic's `model_construct`, in a fifth of its time: the values are records already.
        _set(plan, "__dict__", fields)
        _set(plan, "__pydantic_fields_set__", set(fields))
        _set(plan, "__pydantic_extra__", None)
        _set(plan, "__pydantic_private__", {"_runner": runner, "_next": following, "_failed": failed})
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        # What a runner holds belongs to this process.
        return type(self).model_validate, ({name: getattr(self, name) for name in type(self).model_fields},)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self  # it never changes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[KernelSku, Descriptor, Device, PlanPreference, str]:
        return (self.sku, self.problem, self.device, self.preference, self.choice)

    @property
    def precision_guarantee(self) -> PrecisionGuarantee:
        """What the kernel promises about its bits."""
        return self.sku.precision_guarantee

    @property
    def workspace_size(self) -> int:
        """Bytes of scratch that the plan needs, without what its configuration adds if it is not prepared.

        Plans that run on the same stream share them.
        """
        private = self.__pydantic_private__
        runner: Runner | None = private["_runner"] if private else None
        return int(getattr(runner, "workspace_size", 0)) or self.sku.workspace_size(self.problem)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What `run` takes: names, roles, elements and shapes."""
        return self.problem.arguments()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on how it runs, for example which package launches on streams of other libraries."""
        private = self.__pydantic_private__
        runner: Runner | None = private["_runner"] if private else None
        notes = tuple(map(one_line, runner.notes)) if runner is not None else ()
        return (self.measured, *notes) if self.measured else notes

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        from skuda.dispatch.select.explanation import as_json, html_table

        fields = as_json(self.problem).items()
        rows = {
            "problem": ", ".join(f"{name}={value}" for name, value in fields if name != "op"),
            "device": self.device.describe(),
            "configuration": self.choice,
            "workspace": f"{self.workspace_size} bytes",
            "guarantee": self.precision_guarantee.describe(),
            "notes": "; ".join(self.notes),
        }
        return html_table(f"plan: {self.sku.id}", ((name, value) for name, value in rows.items() if value))

    def can_implement(self, **arrays: Any) -> bool:
        """Check arguments without running.

        Returns
        -------
        bool
            True.

        Raises
        ------
        InvalidProblem
            For the argument that `run` would refuse.
        """
        try:
            self._ready().check(arrays)
        except Unaligned as error:
            return self._following(error).can_implement(**arrays)
        except BaseException as error:
            self._name_kernel(error)
            raise
        return True

    def run(self, *, stream: object = None, **arrays: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        stream : object
            Where to enqueue the work; None for the framework's current stream. Always None on a CPU.
        **arrays
            The op's arguments by name. An output left out is allocated in the framework of the inputs.

        Returns
        -------
        array or named tuple of arrays
            The op's outputs.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument.
        NotPrepared
            For a plan made for an absent card, or loaded from JSON or a pickle.
        KernelFailed
            If a plug-in's kernel raises something else. An error from another kernel has a note that names the kernel.
        """
        private = self.__pydantic_private__
        runner: Runner | None = private["_runner"] if private else None
        # Inlined: every Python call counts in a warm run.
        try:
            return (runner or self._ready()).run(arrays, stream)
        except Unaligned as error:
            return self._following(error).run(stream=stream, **arrays)
        except BaseException as error:
            self._name_kernel(error)
            raise

    def _run_again(self) -> Callable[[Mapping[str, object], object], Any] | None:
        """Return a function of arrays and stream that does what `run` does, or does nothing and returns None.

        It runs only where an array of the call is on the plan's device. None if the runner recognizes no calls, as
        only `CudaRunner` does.
        """
        runner: Any = self._ready()
        if not hasattr(runner, "run_again"):
            return None

        def again(arrays: Mapping[str, object], stream: object) -> Any:
            try:
                return runner.run_again(arrays, stream)
            except Unaligned:
                return None  # `run` asks the next kernel
            except BaseException as error:
                self._name_kernel(error)
                raise

        return again

    def bind(self, *, stream: object = None, **arrays: Any) -> Callable[[], Any]:
        """Check the arguments once and return a callable that only launches.

        It keeps the arrays alive, and returns the same outputs every time.

        Parameters
        ----------
        stream : object
            As in `run`; None for the framework's current stream at every call.
        **arrays
            As in `run`.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument.
        NotPrepared, KernelFailed
            As in `run`; the callable may raise `KernelFailed` too.
        """
        try:
            launch = self._ready().bind(arrays, stream)
        except Unaligned as error:
            return self._following(error).bind(stream=stream, **arrays)
        except BaseException as error:
            self._name_kernel(error)
            raise

        def bound() -> Any:
            try:
                return launch()
            except BaseException as error:
                self._name_kernel(error)
                raise

        return bound

    def _name_kernel(self, error: BaseException) -> None:
        """Name the kernel in an error of its code; an answer, or an interrupt by the user, stays as it is."""
        if isinstance(error, (SkudaError, KeyboardInterrupt)):
            return
        private = self.__pydantic_private__
        if private and private["_failed"] is not None:
            private["_failed"](error)
        error.add_note(f"raised in the kernel {self.sku.id}")

    def _following(self, error: Unaligned) -> Plan:
        private = self.__pydantic_private__
        following: Plan | None = private["_next"]() if private else None
        if following is None:
            raise error
        return following

    def _ready(self) -> Runner:
        private = self.__pydantic_private__
        runner: Runner | None = private["_runner"] if private else None
        if runner is None:
            where = "a device that is not here" if self.device.ordinal is None else "another process"
            raise NotPrepared(
                f"this plan was made for {where} ({self.device.describe()}); "
                "select again on a device that is here, or pass it to Dispatcher.prepare"
            )
        return runner
