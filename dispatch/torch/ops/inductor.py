"""Code of Inductor that calls launches without torch's dispatcher.

Inductor calls an op that it does not know through the dispatcher, and checks the sizes of every result. Here each call
site gets a function of its own, which knows the fields and looks up the launch by shapes. Nothing public of torch does
this. Where it fails, Inductor's own call remains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from torch._inductor import ir
from torch._inductor.graph import SubgraphLowering
from torch._inductor.lowering import add_needs_realized_inputs, fallback_handler, lowerings, register_lowering
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from skuda.torch.ops.registering import overload_of
from skuda.torch.ops.tensor_op import OPS, is_busy

_PLAIN = (str, int, float, bool)


class _Launched(ir.FallbackKernel):
    """A call of an op through `site`."""

    definition = ""

    def codegen_args(self) -> list[str]:
        """Return the arguments as code. The function that they go to is defined before all code."""
        V.graph.wrapper_code.add_import_once(self.definition)
        found: list[str] = super().codegen_args()
        return found

    def codegen_kwargs(self, skip_out: bool = False) -> list[str]:  # noqa: ARG002, FBT001, FBT002  torch's signature
        """Return nothing: the function knows the fields."""
        return []


def lower(name: str) -> None:
    """Let Inductor compile calls of an op in this way. `name` is that of an overload, as ``rms_norm.number``."""
    called: Any = overload_of(name)
    if called in lowerings:
        return
    add_needs_realized_inputs(called)
    plain = fallback_handler(called)

    def handler(*arguments: Any, **fields: Any) -> Any:
        given = {key: value for key, value in fields.items() if value is not None}
        if V.graph.cpp_wrapper or isinstance(V.graph, SubgraphLowering) or not _constant(given):
            return plain(*arguments, **fields)
        while arguments and arguments[-1] is None:
            arguments = arguments[:-1]
        made = _Launched.create(called, *arguments, **given)
        function = f"skuda_{name.replace('.', '_')}_{hashlib.sha256(repr(given).encode()).hexdigest()[:16]}"
        for output in pytree.tree_leaves(made):
            output.skip_size_stride_alignment_checks = True  # our ops keep to their schema
            call = output if isinstance(output, _Launched) else output.inputs[0]  # a single one, since torch 2.14
            call.python_kernel_name = function
            call.definition = f"from skuda.torch.ops.inductor import site; {function} = site({name!r}, {given})"
        return pytree.tree_map(ir.TensorBox.create, made)

    register_lowering(called, type_promotion_kind=None)(handler)


def _constant(fields: dict[str, Any]) -> bool:
    values = (part for value in fields.values() for part in (value if isinstance(value, (list, tuple)) else (value,)))
    return all(type(value) in _PLAIN for value in values)


def site(name: str, fields: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of an op's tensors, with constant fields. Compiled code that torch has cached calls it."""
    op, called = OPS[name.partition(".")[0]], overload_of(name)
    how = op.how(fields)

    def run(*arguments: Any) -> Any:
        found = None if is_busy() else op.known(how, arguments)
        return called(*arguments, **fields) if found is None else found

    return run
