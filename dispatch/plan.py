"""`Plan`: a chosen and prepared kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, PrivateAttr, SerializeAsAny

from skuda.dispatch.backends.base import Runner
from skuda.dispatch.launch_cache import FirstRun, LaunchCache, PositionalCall
from skuda.dispatch.preference import PlanPreference
from skuda.registry.descriptor import Argument, Descriptor
from skuda.registry.device import Device
from skuda.registry.errors import NotPrepared, SkudaError, Unaligned
from skuda.registry.guarantee import PrecisionGuarantee
from skuda.registry.sku import KernelSku
from skuda.registry.text import one_line
from skuda.registry.value import Value


def _descriptor(value: object) -> object:
    """Return the descriptor that JSON describes. Its ``op`` names the class."""
    if not isinstance(value, dict):
        return value
    kinds: list[type[Descriptor]] = [Descriptor]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        if "op" in kind.model_fields and kind.op_name() == value.get("op"):
            return kind.model_validate(value)
    return Plan.refuse("problem.op", repr(value.get("op")), "be an op whose module has been imported")


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """What makes a plan able to run."""

    runner: Runner
    launches: LaunchCache = field(default_factory=LaunchCache)
    following: Callable[[], Plan | None] = lambda: None
    """Returns the plan of the next kernel in the ranking, for arrays whose address or stride this one cannot read."""
    failed: Callable[[BaseException], None] | None = None
    """Called with an error of the kernel that is not a `SkudaError`. It may raise another error in its place."""


class Plan(Value):
    """A chosen kernel, ready to run. It holds none of the caller's arrays. Threads can share a plan.

    A plan can be saved as JSON or pickled. `Dispatcher.prepare` makes it ready again, here or in another process.

    Attributes
    ----------
    sku : KernelSku
        The kernel.
    problem : Descriptor
        The problem that it solves.
    device : Device
        The device that it runs on.
    preference : PlanPreference
        The caller's requirements.
    choice : str
        The configuration that a measurement chose. Empty for the first one of the kernel's launch rule.
    measured : str
        The measurement that decided for this kernel or configuration. Empty if the ranking decided.
    """

    sku: KernelSku
    problem: Annotated[SerializeAsAny[Descriptor], BeforeValidator(_descriptor)]
    device: Device
    preference: PlanPreference
    choice: str = ""
    measured: str = ""
    _prepared: Ready | None = PrivateAttr(default=None)

    @classmethod
    def prepared(cls, ready: Ready | None, **fields: Any) -> Self:
        """Build a plan of valid fields. One that is not ready can be inspected and saved, but not run."""
        plan = cls.unchecked(**{"choice": "", "measured": "", **fields})
        object.__setattr__(plan, "__pydantic_private__", {"_prepared": ready})
        return plan

    def __reduce__(self) -> tuple[Any, ...]:
        # A runner belongs to this process and is not pickled.
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
        """Bytes of scratch that the plan needs. Plans that run on the same stream share them.

        For a plan that is not prepared, the scratch of its configuration is not included.
        """
        runner = self._prepared.runner if self._prepared is not None else None
        return int(getattr(runner, "workspace_size", 0)) or self.sku.workspace_size(self.problem)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of `run`: names, roles, elements and shapes."""
        return self.problem.arguments()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user, for example the configuration and its predicted time."""
        notes = tuple(map(one_line, self._prepared.runner.notes)) if self._prepared is not None else ()
        return (self.measured, *notes) if self.measured else notes

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
            self._ready().runner.check(arrays)
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
            The stream to enqueue the work on. None means the framework's current stream. It must be None on a CPU.
        **arrays
            The op's arguments by name. An output that is left out is allocated in the framework of the inputs.

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
            If a plug-in's kernel raises any other error. An error of a built-in kernel gets a note that names it.
        """
        private: Any = self.__pydantic_private__
        prepared = private and private["_prepared"]
        if prepared:
            for launch in prepared.launches.of.get(prepared, ()):
                result = launch(arrays, stream)
                if result is not None:
                    return result
        return self.first_run(None, arrays, stream)

    def first_run(
        self, key: Hashable, arrays: Mapping[str, object], stream: object, positions: PositionalCall | None = None
    ) -> Any:
        """Run a call that no known launch serves. Keep a launch for calls like it.

        It is kept for this plan and, if an array of the call is on the plan's device, under `key`, unless that is None.
        With `positions` it is kept under `key` only. Parameters, result and errors are those of `run`.
        """
        prepared = self._ready()
        first = getattr(prepared.runner, "first_run", None)
        try:
            if first is None:
                return prepared.runner.run(arrays, stream)
            found: FirstRun = first(arrays, stream, self._name_kernel, positions)
        except Unaligned as error:
            return self._following(error).first_run(key, arrays, stream, positions)
        except BaseException as error:
            self._name_kernel(error)
            raise
        if found.launch is not None and positions is None:
            prepared.launches.keep(prepared, found.launch)
        if found.launch is not None and found.placed and key is not None:
            prepared.launches.keep(key, found.launch)
        return found.result

    def bind(self, *, stream: object = None, **arrays: Any) -> Callable[[], Any]:
        """Check the arguments once and return a callable that only launches.

        The callable keeps the arrays alive and returns the same outputs every time.

        Parameters
        ----------
        stream : object
            As in `run`. None means the stream that is current at each call.
        **arrays
            As in `run`.

        Raises
        ------
        InvalidProblem
            For a missing, unknown or unsuitable argument.
        NotPrepared, KernelFailed
            As in `run`. The callable may raise `KernelFailed`, too.
        """
        try:
            launch = self._ready().runner.bind(arrays, stream)
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
        """Add the kernel's name to an error of its code. A `SkudaError` and an interrupt stay as they are."""
        if isinstance(error, (SkudaError, KeyboardInterrupt)):
            return
        failed = self._ready().failed
        if failed is not None:
            failed(error)
        error.add_note(f"raised in the kernel {self.sku.id}")

    def _following(self, error: Unaligned) -> Plan:
        following = self._ready().following()
        if following is None:
            raise error
        return following

    def _ready(self) -> Ready:
        private: Any = self.__pydantic_private__
        prepared: Ready | None = private and private["_prepared"]
        if prepared is None:
            where = "a device that is not here" if self.device.ordinal is None else "another process"
            raise NotPrepared(
                f"this plan was made for {where} ({self.device.describe()}); "
                "select again on a device that is here, or pass it to Dispatcher.prepare"
            )
        return prepared
