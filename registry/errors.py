"""The errors: every exception that skuda raises on purpose is a `SkudaError`.

An exception carries data as well as text. `InvalidProblem` means that the request is wrong. `Unsupported` means that
the request is valid, but no kernel here serves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from skuda.registry.text import one_line

if TYPE_CHECKING:
    from pathlib import Path


_MOST_NAME, _MOST_VALUE, _MOST_RULE = 400, 200, 2000
"""Characters of a name, of a value and of a rule that an error repeats."""


class SkudaError(Exception):
    """Base of every error that skuda raises on purpose."""


class _RuleBroken(SkudaError):
    """A value breaks a rule. The error names the record, the field, the value and the rule.

    It is not a ValueError, because pydantic would wrap a ValueError of a nested record and hide its data.

    Attributes
    ----------
    subject : str
        The record, for example ``FakeQuantizeDescriptor``.
    field : str
        The offending field or argument.
    had : str
        The value, shortened if it is long.
    must : str
        The rule, worded to follow "must".
    """

    def __init__(self, subject: str, field: str, had: str, must: str) -> None:
        field, had, must = one_line(field, _MOST_NAME), one_line(had, _MOST_VALUE), one_line(must, _MOST_RULE)
        super().__init__(subject, field, had, must)  # args rebuild the exception when it is unpickled
        self.subject, self.field, self.had, self.must = subject, field, had, must

    def __str__(self) -> str:
        return f"{self.subject}: {self.field} must {self.must}; had {self.had}"


class InvalidProblem(_RuleBroken):
    """The request itself is wrong: a size, a range, a shape, a type, an argument."""


class Unaligned(InvalidProblem):
    """The kernel cannot read an array because of its address or stride. Another kernel may be able to."""


class InvalidRecord(_RuleBroken):
    """A record (`KernelSku`, `Device`, `PlanPreference`, ...) with a field that breaks its rule."""


class FrozenRecord(SkudaError, AttributeError):
    """A field of a record was assigned to or deleted. Records are frozen.

    Attributes
    ----------
    subject : str
        The record.
    field : str
        The field.
    """

    def __init__(self, subject: str, field: str) -> None:
        super().__init__(subject, field)
        self.subject, self.field = subject, one_line(field, _MOST_NAME)

    def __str__(self) -> str:
        return f"{self.subject} is frozen: make another one with model_copy(update={{{self.field!r}: ...}})"


class RegistrationError(SkudaError):
    """The registry refuses a record.

    Attributes
    ----------
    record : str
        Id of the refused record.
    field : str
        The field at fault.
    reason : str
        What is wrong with it and what to do.
    origins : tuple of str
        Who registered it. For a duplicate, the first owner and then the second.
    """

    def __init__(self, record: str, field: str, reason: str, origins: tuple[str, ...]) -> None:
        super().__init__(record, field, reason, origins)
        self.record, self.field, self.reason, self.origins = record, field, reason, origins

    def __str__(self) -> str:
        return f"{self.record}: {self.field}: {self.reason} (registered by {' and by '.join(self.origins)})"


class Refusal(Protocol):
    """Why no kernel serves a problem; the `Explanation` of `skuda.dispatch` is one."""

    @property
    def decisions(self) -> tuple[Any, ...]:
        """The verdict on every candidate."""

    def why_not(self) -> str:
        """Return why no kernel was chosen, the nearest candidates first."""


class Unsupported(SkudaError):
    """No registered kernel serves this problem here.

    Attributes
    ----------
    explanation : Refusal
        Every candidate with the reasons for which it was refused.
    """

    def __init__(self, explanation: Refusal) -> None:
        super().__init__(explanation)
        self.explanation = explanation

    def __str__(self) -> str:
        return self.explanation.why_not()


class NotPrepared(SkudaError):
    """A plan cannot run in this process: it is for an absent card, from JSON, or for a GPU and from before a fork."""


class MissingDependency(SkudaError, ImportError):
    """An optional package is absent.

    Attributes
    ----------
    package : str
        The missing package.
    command : str
        The command that installs it.
    """

    def __init__(self, package: str, command: str) -> None:
        super().__init__(package, command)
        self.package, self.command = package, command

    def __str__(self) -> str:
        return f"{self.package} is not installed; run: {self.command}"


class FloatModeError(SkudaError):
    """In the calling thread's floating-point mode, arithmetic would give other bits.

    Attributes
    ----------
    mode : str
        How the thread's arithmetic differs.
    remedy : str
        How to restore the mode.
    """

    def __init__(self, mode: str, remedy: str) -> None:
        super().__init__(mode, remedy)
        self.mode, self.remedy = mode, remedy

    def __str__(self) -> str:
        return (
            "the floating-point mode must be round to nearest, with subnormal numbers kept; "
            f"this thread {self.mode}: {self.remedy}"
        )


class OutOfMemory(SkudaError, MemoryError):
    """An output that the caller left out cannot be allocated.

    Attributes
    ----------
    subject : str
        The op.
    argument : str
        The output.
    size : int
        Bytes that it needs.
    """

    def __init__(self, subject: str, argument: str, size: int) -> None:
        super().__init__(subject, argument, size)
        self.subject, self.argument, self.size = subject, argument, size

    def __str__(self) -> str:
        return (
            f"{self.subject}: {self.argument} needs {self.size} bytes, which cannot be allocated; "
            "solve a smaller problem, or pass an array of your own"
        )


class DriverError(SkudaError):
    """A call of the CUDA driver failed, or there is no driver.

    Attributes
    ----------
    action : str
        The call, for example ``cuInit``.
    reason : str
        Why it failed.
    code : int or None
        Its ``CUresult``; None if it returned none.
    """

    def __init__(self, action: str, reason: str, code: int | None = None) -> None:
        super().__init__(action, reason, code)
        self.action, self.reason, self.code = action, reason, code

    def __str__(self) -> str:
        return f"CUDA driver: {self.action}: {self.reason}"


class BundleError(SkudaError):
    """A file of compiled kernels cannot be used or written.

    Attributes
    ----------
    path : Path
        The file.
    reason : str
        What is wrong with it, and what to do.
    """

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"bundle {self.path}: {self.reason}"


class CompileError(SkudaError):
    """A kernel could not be compiled.

    Attributes
    ----------
    sku : str
        Id of the kernel.
    reason : str
        What went wrong, and what to do.
    command : str
        The command that was run, or the options that were given.
    log : str
        The compiler's full output.
    """

    def __init__(self, sku: str, reason: str, command: str = "", log: str = "") -> None:
        super().__init__(sku, reason, command, log)
        self.sku, self.reason, self.command, self.log = sku, reason, command, log

    def __str__(self) -> str:
        lines = [f"{self.sku}: {self.reason}"]
        lines += [f"  {self.command}"] if self.command else []
        return "\n".join(lines + [f"  {line}" for line in self.log.splitlines()])


class KernelFailed(SkudaError):
    """A plug-in's kernel raised an error while it was checked, bound or run. The plug-in is set aside.

    The outputs of a run may be half written. ``__cause__`` is the kernel's own error.

    Attributes
    ----------
    sku : str
        Id of the kernel.
    origin : str
        The package that brings it, with version.
    reason : str
        Type and text of the kernel's error.
    """

    def __init__(self, sku: str, origin: str, reason: str) -> None:
        super().__init__(sku, origin, reason)
        self.sku, self.origin, self.reason = sku, origin, reason

    def __str__(self) -> str:
        return f"{self.sku} of {self.origin} raised {self.reason}; it is set aside, so select again for the next kernel"
