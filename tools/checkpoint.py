"""SmoothQuant checkpoints: int8 layers in one safetensors file, with metadata that lists every tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from skuda.registry.errors import InvalidProblem, InvalidRecord, MissingDependency
from skuda.registry.text import path_of, shown
from skuda.registry.value import Value
from skuda.tools.files import replacing
from skuda.tools.smoothquant import SmoothQuantLayer

FORMAT = "skuda.smoothquant"
FORMAT_VERSION = "1"
REMEDY = "; write it again with skuda.tools.checkpoint.save_layers"


class _Header(Value):
    """The description of one layer in a checkpoint's metadata."""

    shape: tuple[int, int]
    act_scale: float
    alpha: float | None
    bias: bool

    def tensors(self) -> dict[str, str]:
        """Return element kind and shape of each tensor, as text."""
        n, k = self.shape
        kinds = {"weight_q": f"I8 [{n}, {k}]", "weight_scale": f"F32 [{n}]", "smooth": f"F32 [{k}]"}
        return {**kinds, "bias": f"F32 [{n}]"} if self.bias else kinds


_HEADERS = TypeAdapter(dict[str, _Header])


def save_layers(path: str | os.PathLike[str], layers: Mapping[str, SmoothQuantLayer]) -> None:
    """Write a model's layers into one safetensors file, which is replaced only when the new one is complete.

    Parameters
    ----------
    path : path
        The file.
    layers : mapping of str to SmoothQuantLayer
        Layers by name.

    Raises
    ------
    InvalidProblem
        If an argument is something else.
    MissingDependency
        If the package safetensors is not installed.
    OSError
        If the file cannot be written.
    """
    path = _path("save_layers", path)
    if not isinstance(layers, Mapping):
        raise InvalidProblem("save_layers", "layers", shown(layers), "be a mapping of names to SmoothQuantLayers")
    for name, layer in layers.items():
        if not all((isinstance(name, str), isinstance(layer, SmoothQuantLayer))):
            rule = "map names to SmoothQuantLayers"
            raise InvalidProblem("save_layers", "layers", f"{shown(name)} to {shown(layer)}", rule)
    safetensors = _safetensors()
    headers = {
        name: _Header(shape=layer.shape, act_scale=layer.act_scale, alpha=layer.alpha, bias=layer.bias is not None)
        for name, layer in layers.items()
    }
    tensors = {
        f"{name}.{part}": np.ascontiguousarray(array)
        for name, layer in layers.items()
        for part, array in layer.tensors().items()
    }
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "layers": _HEADERS.dump_json(headers).decode()}
    with replacing(path) as fresh:
        try:
            safetensors.numpy.save_file(tensors, fresh, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


def load_layers(path: str | os.PathLike[str]) -> dict[str, SmoothQuantLayer]:
    """Read the layers that `save_layers` wrote, every value bit for bit.

    Returns
    -------
    dict of str to SmoothQuantLayer
        Layers by name, in the order in which they were saved.

    Raises
    ------
    InvalidProblem
        If `path` is no path.
    InvalidRecord
        If the file is not such a checkpoint: another format or version, a tensor that is missing, unexpected, or of
        another element kind or shape than in the metadata, or a value out of range.
    MissingDependency
        If the package safetensors is not installed.
    OSError
        If the file cannot be read.
    """
    path = _path("load_layers", path)
    safetensors = _safetensors()
    try:
        with path.open("rb"), safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            for field, expected in (("format", FORMAT), ("version", FORMAT_VERSION)):
                if metadata.get(field) != expected:
                    raise InvalidRecord(str(path), field, repr(metadata.get(field)), f"be {expected!r}{REMEDY}")
            headers = _headers(path, metadata)
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  safe_open is no mapping
            found = {key: f"{tensor.get_dtype()} {tensor.get_shape()}" for key, tensor in slices.items()}
            _check_tensors(path, found, headers)
            return {name: _read_layer(path, name, header, file.get_tensor) for name, header in headers.items()}
    except safetensors.SafetensorError as error:
        raise InvalidRecord(str(path), "file", str(error), f"be a whole safetensors file{REMEDY}") from error


def _read_layer(
    path: Path, name: str, header: _Header, get_tensor: Callable[[str], npt.NDArray[Any]]
) -> SmoothQuantLayer:
    tensors: dict[str, Any] = {part: get_tensor(f"{name}.{part}") for part in header.tensors()}
    try:
        return SmoothQuantLayer(act_scale=header.act_scale, alpha=header.alpha, **tensors)
    except InvalidProblem as error:
        raise InvalidRecord(str(path), f"layer {name}", str(error), f"be a valid layer{REMEDY}") from error


def _headers(path: Path, metadata: Mapping[str, str]) -> dict[str, _Header]:
    try:
        return _HEADERS.validate_json(metadata.get("layers", ""))
    except (ValidationError, InvalidRecord) as error:
        rule = f"list every layer's shape, act_scale, alpha and bias{REMEDY}"
        raise InvalidRecord(str(path), "metadata", str(error), rule) from error


def _check_tensors(path: Path, found: Mapping[str, str], headers: Mapping[str, _Header]) -> None:
    """Refuse a file whose tensors differ from those in its metadata."""
    wanted = {f"{name}.{part}": kind for name, header in headers.items() for part, kind in header.tensors().items()}
    for key in sorted(wanted.keys() | found.keys()):
        if found.get(key) != wanted.get(key):
            rule = f"be {wanted.get(key, 'absent')}, as the metadata says{REMEDY}"
            raise InvalidRecord(str(path), f"tensor {key}", found.get(key, "nothing"), rule)


def _path(subject: str, path: object) -> Path:
    found = path_of(path)
    if found is None:
        raise InvalidProblem(subject, "path", shown(path), "be the path of a file")
    return found


def _safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise MissingDependency("safetensors", "pip install 'safetensors>=0.4'") from error
    return safetensors
