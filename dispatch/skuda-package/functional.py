"""Ops as functions: the implementation of `skuda.ops`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

from skuda.dispatch.launch_cache import LaunchCache
from skuda.dispatch.system.locks import lock
from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown

if TYPE_CHECKING:
    from inspect import Signature

    from skuda.dispatch.dispatcher import Dispatcher
    from skuda.dispatch.select.fields import Fields
    from skuda.registry.op import Op

LAUNCHES = LaunchCache()
"""The launches of the default dispatcher. An op of torch asks here before there is one."""

_lock = lock()
_default: list[Dispatcher] = []
_fields: dict[type, Fields] = {}


def default_dispatcher() -> Dispatcher:
    """Return the dispatcher for calls without one. The first such call makes it."""
    if not _default:
        with _lock:
            if not _default:
                from skuda.dispatch.dispatcher import Dispatcher

                _default.append(Dispatcher(launches=LAUNCHES))
    return _default[0]


def op_names() -> list[str]:
    """Return the names of all ops, including those of plug-ins."""
    return list(default_dispatcher().registry.ops)


def built_in() -> dict[str, Op]:
    """Return the built-in ops by name."""
    from skuda.kernels.catalog import built_in_ops

    return {op.name: op for op in sorted(built_in_ops(), key=lambda op: op.name)}


def function(op: Op, module: str, *, strict: bool = True) -> Callable[..., Any]:
    """Return an op as a function of keywords, with the signature that follows from its descriptor.

    `module` has the function. `strict` says whether an unknown or missing keyword raises a TypeError, as for any
    function. Otherwise `call` judges it.
    """
    name, signature = op.name, signature_of(op)
    needed = frozenset(key for key, one in signature.parameters.items() if one.default is one.empty)
    known = frozenset(signature.parameters) if strict else None

    def run(**given: Any) -> Any:
        if known is not None and not needed <= given.keys() <= known:
            _refuse_keywords(name, given, signature)
        return call(name, given)

    run.__name__ = run.__qualname__ = name
    run.__module__, run.__doc__ = module, op.documentation
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def signature_of(op: Op) -> Signature:
    """Return the signature of an op as a function: its arguments, its fields, and how to run it, all by keyword.

    What follows from the arguments or has a default may be left out. A descriptor that computes its arguments says
    neither what they are nor what follows from them.
    """
    from inspect import Parameter, Signature

    from skuda.dispatch.dispatcher import Dispatcher
    from skuda.dispatch.preference import PlanPreference

    fields = _fields_of(op)
    kinds: dict[str, Any] = dict.fromkeys(fields.arguments, Any)
    needed = {name for name in fields.always if fields.arguments[name].is_needed}
    for name, info in op.descriptor.model_fields.items():
        if name != "op":
            kinds[name] = _accepted(info.annotation)
            needed |= {name} if info.is_required() and not fields.follows(name) else set()
    kinds = {name: kind if name in needed or kind is Any else kind | None for name, kind in kinds.items()}
    kinds |= {"dispatcher": Dispatcher | None, "preference": PlanPreference | None, "stream": object}
    made = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=Parameter.empty if name in needed else None, annotation=kind)
        for name, kind in kinds.items()
    ]
    if not fields.arguments:
        made.append(Parameter("arguments", Parameter.VAR_KEYWORD, annotation=Any))
    return Signature(made, return_annotation=op.descriptor.result or Any)


def _accepted(annotation: Any) -> Any:
    """Return the type of the values that a caller may pass for a field, not of what the descriptor makes of them."""
    if get_origin(annotation) is tuple:
        return Sequence[int]
    if not isinstance(annotation, type):  # an optional type, or one with rules: what is accepted comes first
        return _accepted(get_args(annotation)[0])
    return annotation | str if issubclass(annotation, StrEnum) else annotation


def _refuse_keywords(name: str, given: Mapping[str, Any], signature: Signature) -> NoReturn:
    for key in given:
        if key not in signature.parameters:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
    missing = [repr(key) for key, one in signature.parameters.items() if one.default is one.empty and key not in given]
    listed = " and ".join(missing) if len(missing) < 3 else f"{', '.join(missing[:-1])}, and {missing[-1]}"
    several = "s" if len(missing) > 1 else ""
    raise TypeError(f"{name}() missing {len(missing)} required keyword-only argument{several}: {listed}")


def call(op: str, given: Mapping[str, Any]) -> Any:
    """Derive the descriptor of a call from its arguments, and run it.

    Raise `InvalidProblem` for an unknown op, a bad argument, and a missing field that follows from no argument;
    `Unsupported` if no kernel can serve the problem. `given` has the op's arguments, the descriptor's fields, and
    `dispatcher`, `preference` and `stream`. None means left out.
    """
    given = dict(given)
    dispatcher = given.pop("dispatcher", None)
    if dispatcher is None:
        dispatcher = default_dispatcher()
    how = {"stream": given.pop("stream", None), "preference": given.pop("preference", None)}
    try:
        known = dispatcher.registry.ops
    except AttributeError:
        rule = "be a Dispatcher, or None for one that all calls share"
        raise InvalidProblem(op, "dispatcher", shown(dispatcher), rule) from None
    if op not in known:
        raise InvalidProblem("skuda.ops", "op", repr(op), f"be one of {', '.join(known)}, which this dispatcher has")
    problem, arguments = _fields_of(known[op]).split(given)
    return dispatcher.run(problem, **how, **arguments)


def _fields_of(op: Op) -> Fields:
    found = _fields.get(op.descriptor)
    if found is None:
        from skuda.dispatch.select.fields import Fields

        found = _fields[op.descriptor] = Fields(op)
    return found
