"""The process ``skuda``: its streams, its errors and its exit status.

The commands are imported when it runs, so that an interrupt during their import counts as one, too.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TextIO

_NO, _BAD_INPUT, _DEFECT, _INTERRUPTED = 1, 2, 70, 130
_SHORT = {"help": "--help", "version": "--version"}
"""Words that mean an option."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        The words after ``skuda``; the process's own arguments when not given.

    Returns
    -------
    int
        0; 1 where the answer is no (no kernel, a required part missing, accuracy not reached), where the packages of
        the extra ``cli`` are missing, or where the reader of standard output has left; 2 for bad input, or a file or
        stream that cannot be read or written; 70 for a defect of skuda; 130 for an interrupt. One line on standard
        error says what is wrong. In Python's development mode (``python -X dev -m skuda``), a defect is raised.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    with _interrupts() as interrupts:
        try:
            status = _run(given, interrupts)
        except BaseException:
            if not interrupts.came:
                raise
    return _INTERRUPTED if interrupts.came else status


@contextlib.contextmanager
def _interrupts() -> Iterator[SimpleNamespace]:
    """Note whether interrupts `came`, and while they are `repeated`, send one again that other code drops.

    NumPy's modules print it and fail to import, pydantic's core makes it an error of serializing, and Python goes on
    after a finalizer that raises it.
    """
    found, handler = SimpleNamespace(came=False, repeated=True), signal.getsignal(signal.SIGINT)
    uncaught, unraised = sys.excepthook, sys.unraisablehook

    class Interrupt(KeyboardInterrupt):
        def __del__(self) -> None:
            if found.repeated:
                _thread.start_new_thread(again, ())

    def again() -> None:
        time.sleep(0.05)  # what dropped it, and would drop the next one, has ended by then
        if found.repeated:
            os.kill(os.getpid(), signal.SIGINT)

    def note(*_: object) -> None:
        found.came = True
        raise Interrupt

    is_ours = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, note)
    sys.excepthook = lambda *error: None if found.came else uncaught(*error)
    sys.unraisablehook = lambda dropped: None if isinstance(dropped.exc_value, Interrupt) else unraised(dropped)
    try:
        yield found
    finally:
        found.repeated = False
        sys.excepthook, sys.unraisablehook = uncaught, unraised
        if is_ours:
            signal.signal(signal.SIGINT, handler)


def _run(given: list[str], interrupts: SimpleNamespace) -> int:
    """Run the command line, say what went wrong unless that was an interrupt, and return the exit status."""
    error: Exception | None = None
    status = 0
    _open_streams()
    streams = sys.stdout, sys.stderr
    try:
        status = _called(given)
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except SystemExit as left:
        # The libraries that print leave so where the reader has closed the pipe.
        status = left.code if isinstance(left.code, int) else _NO
    except Exception as raised:  # noqa: BLE001  every error is reported
        error = raised
    finally:
        interrupts.repeated = False
        # Where the reader has closed the pipe, typer replaces both.
        sys.stdout, sys.stderr = streams
    lost = _flush(sys.stdout)
    if isinstance(lost, BrokenPipeError):
        status = _NO
    elif lost is not None and isinstance(error, OSError | None):
        status = _fail(_system(OSError(lost.errno, lost.strerror, "standard output")))
    elif error is not None and not interrupts.came:
        status = _reported(error, given)
    _flush(sys.stderr)
    return status


def _called(given: list[str]) -> int:
    """Run the command line; see `main`."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        sys.stderr.write(f"skuda: the command needs {error.name} ({error}); run: pip install 'skuda[cli]'\n")
        return _NO
    from skuda.tools.commands import REMOVED, app

    for word in given:
        if "\0" in word or (not word.isascii() and word != word.encode(errors="replace").decode()):
            # Records, which are UTF-8, could not hold it, and would fail only after the work.
            raise typer.BadParameter(f"{word!a} is not UTF-8")
    for name in REMOVED.keys() & given[:1]:
        raise typer.BadParameter(f"`skuda {name}` is gone; instead use `{REMOVED[name]}`")
    words = [*given[1:], _SHORT[given[0]]] if given[:1] and given[0] in _SHORT else given
    try:
        return int(typer.main.get_command(app).main(args=words, prog_name="skuda", standalone_mode=False) or 0)
    except typer.Abort:
        return _INTERRUPTED


def _open_streams() -> None:
    """Replace closed streams, whose numbers the next file would get, and let the open ones print any text."""
    # Standard output is opened for reading, so that writing fails as it does where it is closed.
    for name, flags in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flush(stream: TextIO) -> OSError | None:
    """Write the rest; if that fails, return why, and drop the rest, or Python would report it again when it exits."""
    try:
        stream.flush()
    except OSError as error:
        with open(os.devnull, "wb") as null:  # noqa: PTH123  there is no path
            os.dup2(null.fileno(), stream.fileno())
        return error
    return None


def _reported(error: Exception, given: list[str]) -> int:
    """Say in one line what was wrong, and return the exit status."""
    if isinstance(error, ImportError):
        if given[:1] == ["doctor"]:
            # The doctor must also work if the packages that skuda itself needs are missing.
            from skuda.tools.show import doctor

            return doctor.run(as_json="--json" in given)
        return _fail(str(error) if hasattr(error, "command") else f"{error}; `skuda doctor` says what is missing")
    # Imported here, because these load pydantic and typer.
    from skuda.registry.errors import SkudaError
    from skuda.tools.commands import USAGE_ERROR
    from skuda.tools.output import shortened

    match error:
        case SkudaError():
            message = str(error)
        case USAGE_ERROR():
            context = getattr(error, "ctx", None)
            where = context.command_path if context is not None else "skuda"
            message = f"{getattr(error, 'format_message', error.__str__)()} (see `{where} --help`)"
        case OSError():
            message = _system(error)
        case MemoryError():
            message = "the memory of this machine is not enough"
        case _ if sys.flags.dev_mode:
            raise error
        case _:
            remedy = "please report it with what `python -X dev -m skuda ...` prints"
            return _fail(f"a defect of skuda: {type(error).__name__}: {error}; {remedy}", _DEFECT)
    for word in given:
        message = message.replace(word, shortened(word)) if shortened(word) != word else message
    return _fail(message)


def _system(error: OSError) -> str:
    """Return what the system refused, with the file."""
    try:
        os.getcwd()  # noqa: PTH109  its error is the question
    except FileNotFoundError:
        return "the working directory has been deleted; change to another one"
    except OSError:
        pass
    if error.errno == errno.EBADF:
        return "standard output is closed"
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{os.fsdecode(error.filename)}: {what}"


def _fail(message: str, status: int = _BAD_INPUT) -> int:
    """Print the one line, unless standard error cannot be written to; return the exit status."""
    from skuda.tools.output import tell

    with contextlib.suppress(OSError):
        tell(message, "red")
    return status


if __name__ == "__main__":
    sys.exit(main())
