"""Every op of the registry that takes a tensor, as an op of torch: ``torch.ops.skuda.<name>``.

The schemas are generated from the registry. An op's inputs come first, as tensors; then, by keyword, the fields of its
descriptor that do not follow from the tensors of every call; those that are left out have a default, or follow from the
tensors of this one, as in `skuda.ops`. Nothing is mutated: outputs are new tensors. An op whose number of outputs
depends on the problem returns a list, in the order of its result.

Where an argument has one row per token, it may have any number of leading axes instead; outputs get the same ones. A
tensor whose rows are not dense is copied first, as torch does. Where an op takes one scale or zero point for
everything, it takes a tensor of one element, or with the overload ``number`` plain numbers, which do not have to be
read from the device.

CUDA tensors are served by what the dispatcher selects, CPU tensors by the ``numpy`` backend, with the same bits. There
is no gradient here: see `skuda.torch.autograd`. A tensor that requires grad is refused where gradients are recorded;
derivatives that `torch.func` or forward mode take do not show in it and are 0.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from skuda.functional import default_dispatcher
from skuda.kernels.catalog import built_in_registry
from skuda.registry.descriptor import Role
from skuda.registry.errors import InvalidProblem
from skuda.registry.op import Op
from skuda.registry.text import one_line, shown
from skuda.torch.op import TensorOp, refuse_gradient

NAMESPACE = "skuda"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
"""What the ops are registered in; it lives as long as the process."""

# Values and layout of every result follow from the values of the inputs, not from their strides, and results are always
# contiguous. So Inductor may pass inputs as they lie in memory: with torch's default for the ops of others,
# `needs_exact_strides`, it would copy those that it lays out differently from eager execution. Nothing is mutated and
# nothing aliased, so an op whose result is not used may be left out.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

OPS: dict[str, TensorOp] = {}
"""The ops by name."""


def _takes_a_tensor(op: Op) -> bool:
    return any(argument.role is Role.INPUT for case in op.cases for argument in case.problem.arguments())


def _register(op: Op) -> None:
    """Make an op known to torch."""
    made = TensorOp(op)
    for schema in made.schemas.values():
        torch._C.parse_schema(f"{NAMESPACE}::{schema}")  # noqa: SLF001  all overloads or none are defined
    for name, schema in made.schemas.items():
        LIBRARY.define(schema, tags=TAGS)
        for key in ("CPU", "CUDA"):
            LIBRARY.impl(name, made.run, key)
        torch.library.register_fake(f"{NAMESPACE}::{name}", made.fake, lib=LIBRARY)
    OPS[op.name] = made


for _op in built_in_registry().ops.values():
    if _takes_a_tensor(_op):
        _register(_op)


def register(name: str) -> Any:
    """Make an op of another package an op of torch; the built-in ones are.

    Parameters
    ----------
    name : str
        Name of an op that an installed package registers (entry-point group ``skuda.kernels``).

    Returns
    -------
    torch.ops.OpOverloadPacket
        ``torch.ops.skuda.<name>``. If it is registered already, the same one.

    Raises
    ------
    InvalidProblem
        For an unknown op, and for one that torch cannot have: one without cases, from which the schema follows, or
        without a tensor among its inputs, or whose names are none in torch.
    """
    known = default_dispatcher().registry.ops
    named: object = name
    op = known.get(named) if isinstance(named, str) else None
    if op is None:
        raise InvalidProblem("skuda.torch.register", "name", shown(name), f"be one of {', '.join(known)}")
    if name not in OPS:
        if not op.cases:
            _refuse(name, "have cases: its schema follows from their arguments")
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
    raise InvalidProblem("skuda.torch.register", "name", shown(name), f"name an op of torch, which must {rule}")


def _smooth(input: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    for name, tensor in (("input", input), ("factors", factors)):
        if tensor.requires_grad:
            refuse_gradient("smooth", name)
    # Contiguous, so that its layout does not depend on the input's; see `TAGS`.
    return (input.to(torch.promote_types(input.dtype, torch.float32)) / factors).contiguous()


# An op, because compilers of torch may replace a division by something that is not correctly rounded.
LIBRARY.define("smooth(Tensor input, Tensor factors) -> Tensor", tags=TAGS)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("smooth", _smooth, _key)
torch.library.register_fake(f"{NAMESPACE}::smooth", _smooth, lib=LIBRARY)


def linear_dynamic(
    input: torch.Tensor,
    weight_q: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    epilogue: str | None = None,
    output_element: str | None = None,
) -> torch.Tensor:
    """Return a linear layer of real activations: each row is quantized with its own scale, then multiplied in int8.

    Parameters
    ----------
    input : tensor of shape (..., K), f16, bf16, f32 or f64
    weight_q : tensor of shape (N, K), s8 or u8
    weight_scale : tensor of shape (N,), f32 or narrower
    bias : tensor of shape (N,), f32 or narrower, optional
    epilogue : str, optional
        ``bias_relu``, ``bias_gelu`` or ``bias_silu`` on what a given bias was added to; by default nothing more.
    output_element : str, optional
        Element of the result; by default the input's.

    Returns
    -------
    tensor of shape (..., N)

    Raises
    ------
    InvalidProblem
        For a bad argument.
    Unsupported
        If no kernel can serve it.
    """
    op = torch.ops.skuda.quantized_linear.default
    found: torch.Tensor = op(
        input, weight_q, weight_scale, None, bias, epilogue=epilogue, output_element=output_element
    )
    return found


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
    """Return a linear layer of given codes with a scale per row, such as `dynamic_range` or a fused norm returns.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (...), f32 or narrower
        Their scale, one per row.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        epilogue=epilogue,
        output_element=output_element,
    )
    return found


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
    """Return a linear layer of given codes with one scale for all.

    Parameters
    ----------
    input : tensor of shape (..., K), s8 or u8
        Codes.
    input_scale : tensor of shape (1,), f32 or narrower
        Their scale.
    weight_q, weight_scale, bias, epilogue
        As in `linear_dynamic`.
    output_element : str
        Element of the result.

    Returns, Raises
    ---------------
    As in `linear_dynamic`.
    """
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        epilogue=epilogue,
        output_element=output_element,
        act_scale_scope="tensor",
    )
    return found


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
    """Return the codes of `linear_static`, which the next layer takes as they are.

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
    op = torch.ops.skuda.scaled_linear.default
    found: torch.Tensor = op(
        input,
        weight_q,
        act_scale=input_scale,
        weight_scale=weight_scale,
        bias=bias,
        output_scale=output_scale,
        output_zero_point=output_zero_point,
        epilogue=epilogue,
        output_element=output_element,
        act_scale_scope="tensor",
    )
    return found
