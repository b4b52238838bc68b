"""SmoothQuant checkpoints: int8 layers in one safetensors file, with metadata that lists every layer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    """The description of one layer in the metadata of a checkpoint."""

    shape: tuple[int, int]
    act_scale: float
    alpha: float | None
    bias: bool

    @property
    def parts(self) -> dict[str, str]:
        """Element kind and shape of each tensor, as text."""
        n, k = self.shape
        kinds = {"weight_q": f"I8 [{n}, {k}]", "weight_scale": f"F32 [{n}]", "smooth": f"F32 [{k}]"}
        return {**kinds, "bias": f"F32 [{n}]"} if self.bias else kinds


_HEADERS = TypeAdapter(dict[str, _Header])


def save_layers(path: str | os.PathLike[str], layers: Mapping[str, SmoothQuantLayer]) -> None:
    """Write the layers of a model, by name, into one safetensors file, which is replaced when the new one is complete.

    Raise `InvalidProblem` if an argument is something else, `MissingDependency` if the package safetensors is not
    installed, and `OSError` if the file cannot be written.
    """
    path = _path("save_layers", path)
    if not isinstance(layers, Mapping):
        raise InvalidProblem("save_layers", "layers", shown(layers), "be a mapping of names to SmoothQuantLayers")
    for name, layer in layers.items():
        if not all((isinstance(name, str), isinstance(layer, SmoothQuantLayer))):
            rule = "map names to SmoothQuantLayers"
            raise InvalidProblem("save_layers", "layers", f"{shown(name)} to {shown(layer)}", rule)
    safetensors = _safetensors()
    headers: dict[str, _Header] = {}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, layer in layers.items():
        facts = {"act_scale": layer.act_scale, "alpha": layer.alpha, "bias": layer.bias is not None}
        headers[name] = _Header(shape=layer.shape, **facts)
        tensors |= {f"{name}.{part}": np.ascontiguousarray(array) for part, array in layer.tensors().items()}
    metadata = {"format": FORMAT, "version": FORMAT_VERSION, "layers": _HEADERS.dump_json(headers).decode()}
    with replacing(path) as fresh:
        try:
            safetensors.numpy.save_file(tensors, fresh, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


def load_layers(path: str | os.PathLike[str]) -> dict[str, SmoothQuantLayer]:
    """Read the layers that `save_layers` wrote, by name in the order in which they were saved, bit for bit.

    Raise `InvalidProblem` if `path` is no path, `MissingDependency` if the package safetensors is not installed,
    `OSError` if the file cannot be read, and `InvalidRecord` if it is not such a checkpoint: another format or version,
    a tensor that is missing, unexpected, or of another element kind or shape than in the metadata, or a value out of
    range.
    """
    path = _path("load_layers", path)
    safetensors = _safetensors()
    try:
        with path.open("rb"), safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            for field, expected in (("format", FORMAT), ("version", FORMAT_VERSION)):
                if metadata.get(field) != expected:
                    raise InvalidRecord(str(path), field, repr(metadata.get(field)), f"be {expected!r}{REMEDY}")
            try:
                headers = _HEADERS.validate_json(metadata.get("layers", ""))
            except (ValidationError, InvalidRecord) as error:
                rule = f"list every layer's shape, act_scale, alpha and bias{REMEDY}"
                raise InvalidRecord(str(path), "metadata", str(error), rule) from error
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  safe_open is no mapping
            _check_tensors(path, {key: f"{one.get_dtype()} {one.get_shape()}" for key, one in slices.items()}, headers)
            return {name: _read_layer(path, name, header, file) for name, header in headers.items()}
    except safetensors.SafetensorError as error:
        raise InvalidRecord(str(path), "file", str(error), f"be a whole safetensors file{REMEDY}") from error


def _check_tensors(path: Path, found: Mapping[str, str], headers: Mapping[str, _Header]) -> None:
    """Refuse a file whose tensors differ from those in its metadata."""
    wanted = {f"{name}.{part}": kind for name, header in headers.items() for part, kind in header.parts.items()}
    for key in sorted(wanted.keys() | found.keys()):
        if found.get(key) != wanted.get(key):
            rule = f"be {wanted.get(key, 'absent')}, as the metadata says{REMEDY}"
            raise InvalidRecord(str(path), f"tensor {key}", found.get(key, "nothing"), rule)


def _read_layer(path: Path, name: str, header: _Header, file: Any) -> SmoothQuantLayer:
    tensors: dict[str, Any] = {part: file.get_tensor(f"{name}.{part}") for part in header.parts}
    try:
        return SmoothQuantLayer(act_scale=header.act_scale, alpha=header.alpha, **tensors)
    except InvalidProblem as error:
        raise InvalidRecord(str(path), f"layer {name}", str(error), f"be a valid layer{REMEDY}") from error


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
