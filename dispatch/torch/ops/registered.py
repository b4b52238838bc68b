"""Every op of the registry that takes a tensor, as an op of torch: ``torch.ops.skuda.<name>``.

The schemas are generated from the registry. The inputs of an op come first, as tensors. The fields of its descriptor
follow, by keyword. A field can be left out if it has a default or follows from the tensors, as in `skuda.ops`. Outputs
are new tensors. The ops write no argument but those of role STATE, such as a cache, which the schemas mark; these are
never copied. An op whose number of outputs depends on the problem returns a list.

An argument with one row per token may have any number of leading axes, and outputs get the same axes. A tensor whose
rows are not dense is copied first, as torch does. A single scale or zero point is a tensor of one element, or with the
overload ``number`` a plain number, which need not be read from the device. `weight_scale` may be a matrix of one
column.

The dispatcher serves CUDA tensors, and the ``numpy`` backend CPU tensors, with the same bits. These ops have no
gradient; see `skuda.torch.linear.autograd`. A tensor that requires grad is refused while gradients are recorded, also
in `torch.func` and in an exported program, and so is a tensor with a tangent of forward mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch.library import Library

from skuda.functional import default_dispatcher
from skuda.kernels.attention.rope_table import cos_sin
from skuda.kernels.catalog import built_in_registry
from skuda.registry.argument import Role
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.text import one_line, shown
from skuda.torch.ops.derivatives import refusing
from skuda.torch.ops.registering import NAMESPACE, overload_of, registering
from skuda.torch.ops.tensor_op import OPS, TensorOp, refuse_gradient, refuse_other

# Results are contiguous and follow from the values of the inputs, not from their strides. So Inductor may pass inputs
# in any layout. With torch's default, `needs_exact_strides`, it would copy inputs that it lays out differently from
# eager execution. These ops mutate and alias nothing, so one with an unused result may be removed.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
TAGS_IN_PLACE = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
"""Of an op that writes an argument, whose memory must be the caller's."""

_OTHERS = ("CompositeExplicitAutograd", "AutogradNestedTensor")
"""The keys of all other kinds of tensors, such as sparse ones."""


def _takes_a_tensor(op: Op) -> bool:
    return any(argument.role is Role.INPUT for argument in op.descriptor.signature)


def _register(op: Op) -> None:
    """Register an op with torch."""
    made = TensorOp(op)
    for schema in made.schemas.values():
        torch._C.parse_schema(f"{NAMESPACE}::{schema}")  # noqa: SLF001  all overloads or none are defined
    with registering(op.name) as library:
        for name, schema in made.schemas.items():
            library.define(schema, tags=TAGS if not made.state else TAGS_IN_PLACE)
            run, fake = (made.run_in_place, made.fake) if made.state else (made.run, _faked(made, name))
            _implement(library, name, made.names, run, fake, made.refuse)
            torch.library.register_vmap(f"{NAMESPACE}::{name}", made.mapped, lib=library)
            if not made.state:  # `run_in_place` must see every call
                called = overload_of(name)
                called._op = made.before(called._op)  # noqa: SLF001  what an overload calls; the rest of torch does not use it
        OPS[op.name] = made


def _implement(
    library: Library,
    name: str,
    names: Sequence[str],
    run: Callable[..., Any],
    fake: Callable[..., Any],
    refuse: Callable[..., NoReturn],
) -> None:
    """Register the implementations of an overload that is defined."""
    for key in ("CPU", "CUDA"):
        library.impl(name, run, key)
    kernel = refusing(name.partition(".")[0], overload_of(name), names, run)
    library.impl(name, kernel, "Autograd", with_keyset=True)
    for key in _OTHERS:
        library.impl(name, refuse, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


def _faked(made: TensorOp, name: str) -> Callable[..., Any]:
    def fake(*arguments: Any, **fields: Any) -> Any:
        # Inductor is loaded by the first compilation, which calls this before it compiles a call of the op.
        if "torch._inductor.lowering" in sys.modules:
            with suppress(ImportError, AttributeError):  # private to torch and may change; the dispatcher remains
                from skuda.torch.ops.inductor import lower

                lower(name)
        return made.fake(*arguments, **fields)

    return fake


for _op in built_in_registry().ops.values():
    if _takes_a_tensor(_op):
        _register(_op)


def register(name: str) -> Any:
    """Register an op of another package with torch. The built-in ops are registered already.

    Parameters
    ----------
    name : str
        Name of an op of an installed plug-in (entry-point group ``skuda.kernels``).

    Returns
    -------
    torch.ops.OpOverloadPacket
        ``torch.ops.skuda.<name>``. Calling this twice returns the same one.

    Raises
    ------
    InvalidProblem
        For an unknown op, an op without a signature (the schema follows from it), without a tensor among its inputs, or
        with names that torch does not allow.
    """
    known = default_dispatcher().registry.ops
    named: object = name
    op = known.get(named) if isinstance(named, str) else None
    if op is None:
        raise InvalidProblem("skuda.torch.register", "name", shown(name), f"be one of {', '.join(known)}")
    if name not in OPS:
        if not op.descriptor.signature:
            _refuse(name, "have a descriptor that declares its signature: the schema follows from it")
        if not _takes_a_tensor(op):
            _refuse(name, "take a tensor: call it through skuda.ops")
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            _refuse(name, f"have another name: torch.ops.{NAMESPACE}.{name} is something else")
        try:
            _register(op)
        except RuntimeError as error:
            _refuse(name, f"have names that a schema of torch can hold ({one_line(str(error))})")
    return getattr(getattr(torch.ops, NAMESPACE), name)


def _refuse(name: str, rule: str) -> NoReturn:
    raise InvalidProblem("skuda.torch.register", "name", shown(name), f"name an op for torch, which must {rule}")


def _smooth(input: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    for name, tensor in (("input", input), ("factors", factors)):
        if tensor.requires_grad:
            refuse_gradient("smooth", name)
    # Contiguous, so that the layout does not depend on that of the input; see `TAGS`.
    return (input.to(torch.promote_types(input.dtype, torch.float32)) / factors).contiguous()


def _refuse_smooth(input: torch.Tensor, factors: torch.Tensor) -> NoReturn:
    for name, tensor in (("input", input), ("factors", factors)):
        refuse_other("smooth", name, tensor)
    raise InvalidProblem("smooth", "input", f"on {input.device}", "be on a CPU or on a CUDA device")


# An op, because torch's compilers may replace the division by one that is not correctly rounded.
with registering("smooth") as _library:
    _library.define("smooth(Tensor input, Tensor factors) -> Tensor", tags=TAGS)
    _implement(_library, "smooth", ("input", "factors"), _smooth, _smooth, _refuse_smooth)


def _rope_table(frequencies: torch.Tensor, positions: int, scaling: float) -> torch.Tensor:
    return torch.from_numpy(cos_sin(frequencies.float().cpu().numpy(), positions, scaling)).to(frequencies.device)


def _fake_rope_table(frequencies: torch.Tensor, positions: int, scaling: float) -> torch.Tensor:  # noqa: ARG001
    return frequencies.new_empty((positions, 2 * frequencies.shape[0]), dtype=torch.float32)


def _refuse_rope_table(frequencies: torch.Tensor, positions: int, scaling: float) -> NoReturn:  # noqa: ARG001
    refuse_other("rope_table", "frequencies", frequencies)
    raise InvalidProblem("rope_table", "frequencies", f"on {frequencies.device}", "be on a CPU or on a CUDA device")


# An op, because torch's cosines differ from device to device; compilers do not look into it.
with registering("rope_table") as _library:
    _library.define("rope_table(Tensor frequencies, int positions, float scaling) -> Tensor", tags=TAGS)
    _implement(_library, "rope_table", ("frequencies",), _rope_table, _fake_rope_table, _refuse_rope_table)


def linear_dynamic(
    input: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str | None = None,
    nonfinite: str | None = None,
) -> torch.Tensor:
    """Return the output of a linear layer: quantize each row with its own scale, then multiply in int8.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    weight_q : tensor of shape (N, K), s8 or u8
    weight_scale : tensor of shape (N,), f32 or narrower
    bias : tensor of shape (N,), f32 or narrower, optional
    epilogue : str, optional
        ``bias_relu``, ``bias_gelu`` or ``bias_silu``, which need a bias. By default there is no activation.
    output_element : str, optional
        Element of the result. By default that of the input.
    nonfinite : str, optional
        ``propagate`` makes a row with a NaN or an infinity a row of NaN. By default a NaN counts as 0.

    Returns
    -------
    tensor of shape (..., N)

    Raises
    ------
    InvalidProblem
        For a bad argument.
    Unsupported
        If no kernel can serve the problem.
    """
    given = (input, weight_q, weight_scale, None, bias)
    fields = {"epilogue": epilogue, "output_element": output_element, "nonfinite": nonfinite}
    return called("quantized_linear", given, **fields)


def linear_scaled(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str = "bf16",
) -> torch.Tensor:
    """Return the output of a linear layer for codes with a scale per row, as from `dynamic_range` or a fused norm.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (...), f32 or narrower
        Scale of each row.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    given = (input, weight_q, input_scale, None, weight_scale, None, bias)
    return _scaled(*given, epilogue=epilogue, output_element=output_element)


def linear_static(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str = "bf16",
) -> torch.Tensor:
    """Return the output of a linear layer for codes with a single scale.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (1,), f32 or narrower
        Scale of the codes.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    given = (input, weight_q, input_scale, None, weight_scale, None, bias)
    return _scaled(*given, epilogue=epilogue, output_element=output_element, act_scale_scope="tensor")


def linear_codes(
    input: torch.Tensor,
    input_scale: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    output_scale: torch.Tensor,
    output_zero_point: torch.Tensor,
    *,
    epilogue: str | None = None,
    output_element: str = "s8",
) -> torch.Tensor:
    """Return the output of `linear_static` as codes for the next layer.

    Parameters
    ----------
    input, input_scale, weight_q, weight_scale, bias, epilogue
        As in `linear_static`.
    output_scale : tensor of one element, f32
        Real units per code of the result.
    output_zero_point : tensor of one element, s32
        Code of 0.
    output_element : str
        ``s8`` or ``u8``.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    given = (input, weight_q, input_scale, None, weight_scale, None, bias, output_scale, output_zero_point)
    return _scaled(*given, epilogue=epilogue, output_element=output_element, act_scale_scope="tensor")


def _scaled(*given: torch.Tensor | None, **fields: str | None) -> torch.Tensor:
    return called("scaled_linear", given, **fields)


def called(name: str, given: tuple[torch.Tensor | None, ...], **fields: str | int | None) -> torch.Tensor:
    """Call an op. Of an argument that is no tensor, torch itself would raise an error of its schema."""
    try:
        found: torch.Tensor = getattr(torch.ops.skuda, name).default(*given, **fields)
    except (RuntimeError, TypeError):
        for field, text in fields.items():
            if text is not None and not isinstance(text, str) and field not in ("q_min", "q_max"):
                raise InvalidProblem(name, field, shown(text), "be a string, or left out") from None
        for argument, value in zip(OPS[name].names, given, strict=False):
            if value is not None or argument in OPS[name].always:
                refuse_other(name, argument, value)
        raise
    return found
