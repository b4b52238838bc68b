"""What exists, as pure data: elements, guarantees, devices, kernels, ops. No array library, driver or compiler."""

from skuda.registry.arch import ArchSku
from skuda.registry.argument import Argument, ArgumentSpec, Role
from skuda.registry.backend import BackendSpec
from skuda.registry.constraints import Between, Constraint, MultipleOf, OneOf, ProductAtMost
from skuda.registry.descriptor import Descriptor, FunctionalKey, storage_shape
from skuda.registry.device import HOST, KNOWN_DEVICES, Device, device_named
from skuda.registry.elements import ElementKind
from skuda.registry.errors import (
    BundleError,
    CompileError,
    DriverError,
    FloatModeError,
    FrozenRecord,
    InvalidProblem,
    InvalidRecord,
    KernelFailed,
    MissingDependency,
    NotPrepared,
    OutOfMemory,
    RegistrationError,
    SkudaError,
    Unaligned,
    Unsupported,
)
from skuda.registry.guarantee import PrecisionGuarantee, PrecisionRequirement
from skuda.registry.op import Case, Op
from skuda.registry.reason import Reason
from skuda.registry.registry import Registry
from skuda.registry.sku import KernelSku, SkuIdentity, WorkspaceTerm
from skuda.registry.source import resolve
from skuda.registry.value import Extent, Int32, Integer, Real, Size
from skuda.registry.vocabulary import (
    ActivationKind,
    BackendKind,
    DynamicRangeMode,
    DynamicRangeScope,
    ElementwiseKind,
    EpilogueKind,
    LayoutSku,
    MathPrecision,
    OpCategory,
    QuantizeKind,
    Scaling,
)

__all__ = [
    "HOST",
    "KNOWN_DEVICES",
    "ActivationKind",
    "ArchSku",
    "Argument",
    "ArgumentSpec",
    "BackendKind",
    "BackendSpec",
    "Between",
    "BundleError",
    "Case",
    "CompileError",
    "Constraint",
    "Descriptor",
    "Device",
    "DriverError",
    "DynamicRangeMode",
    "DynamicRangeScope",
    "ElementKind",
    "ElementwiseKind",
    "EpilogueKind",
    "Extent",
    "FloatModeError",
    "FrozenRecord",
    "FunctionalKey",
    "Int32",
    "Integer",
    "InvalidProblem",
    "InvalidRecord",
    "KernelFailed",
    "KernelSku",
    "LayoutSku",
    "MathPrecision",
    "MissingDependency",
    "MultipleOf",
    "NotPrepared",
    "OneOf",
    "Op",
    "OpCategory",
    "OutOfMemory",
    "PrecisionGuarantee",
    "PrecisionRequirement",
    "ProductAtMost",
    "QuantizeKind",
    "Real",
    "Reason",
    "RegistrationError",
    "Registry",
    "Role",
    "Scaling",
    "Size",
    "SkuIdentity",
    "SkudaError",
    "Unaligned",
    "Unsupported",
    "WorkspaceTerm",
    "device_named",
    "resolve",
    "storage_shape",
]
