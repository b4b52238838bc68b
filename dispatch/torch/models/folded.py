"""What folding has done to a model: the factors that modules took over, and a digest of them for files.

The digest is in `config.json`, also of a folded checkpoint in floating point, and in the files of adapters that were
trained on such a model. Other projects ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from os.path import commonprefix
from typing import Any

from torch import Tensor, nn

from skuda.registry.errors import InvalidProblem
from skuda.registry.text import shown
from skuda.torch.models.replaceable_layers import is_of_transformers

FOLDED = "skuda_folded"
"""The digest: a field of configs, and an attribute of models, for the checkpoint that their tensors came from."""
_FACTORS = "skuda_factors"
"""Factors by the names of layers inside, each with whether they are of its output: an attribute of modules."""


class _Here(str):
    """The digest in the config of a model that was folded in this process. Other models may share the config."""

    __slots__ = ()


def record(model: nn.Module, folded: Mapping[str, tuple[str, ...]], taken: Mapping[str, Tensor]) -> None:
    """Note the layers whose factors modules took over, each in the smallest module that holds all of them."""
    for source, names in folded.items():
        paths = [name.split(".") for name in (source, *names)]
        depth = len(commonprefix([path[:-1] for path in paths]))  # noqa: RUF071  of lists
        held = vars(model.get_submodule(".".join(paths[0][:depth]))).setdefault(_FACTORS, {})
        for path in paths:
            key = ".".join(path[depth:]), path is paths[0]
            held[key] = taken[source].cpu() * held.get(key, 1)
    describe(model)


def factors_of(model: nn.Module) -> dict[tuple[str, bool], Tensor]:
    """Return by what inputs and outputs were divided in this process, by layer and whether it is the output."""
    return {
        (f"{name}.{layer}" if name else layer, output): factors
        for name, module in model.named_modules()
        for (layer, output), factors in vars(module).get(_FACTORS, {}).items()
    }


def loaded_as(model: nn.Module) -> str:
    """Return the digest of the checkpoint that a model came from, or nothing if that was not folded."""
    said = (vars(each).get(FOLDED, getattr(vars(each).get("config"), FOLDED, None)) for each in model.modules())
    return next((str(each) for each in said if each is not None and not isinstance(each, _Here)), "")


def folding_of(model: nn.Module) -> str:
    """Return a digest of all factors that modules of a model took over, or nothing."""
    before, factors = loaded_as(model), factors_of(model)
    parts = (before.encode(), *(each.numpy().tobytes() for each in factors.values()))
    return sha256(b"".join(parts)).hexdigest()[:16] if factors else before


def describe(model: nn.Module, loaded: str | None = None) -> str:
    """Let the configs of transformers in a model say how it is folded, and return the digest.

    With `loaded`, its tensors are now those of a checkpoint with this digest.
    """
    if loaded is not None:
        for module in model.modules():
            vars(module).pop(_FACTORS, None)
            vars(module).pop(FOLDED, None)
        vars(model)[FOLDED] = loaded
    digest, before = folding_of(model), loaded_as(model)
    for module in filter(is_of_transformers, model.modules()):
        if digest or hasattr(module.config, FOLDED):
            setattr(module.config, FOLDED, _Here(digest))
            vars(module).setdefault(FOLDED, before)
    return digest


def digest_in(config: Mapping[str, Any]) -> str:
    """Return the digest in the fields of a `config.json`, or of a config inside, or nothing."""
    inside = (each for each in config.values() if isinstance(each, Mapping))
    return next((str(each[FOLDED]) for each in (config, *inside) if each.get(FOLDED)), "")


def check_adapter(subject: str, name: str, config: Mapping[str, Any], folding: str) -> None:
    """Raise `InvalidProblem` for an adapter, by the fields of its file, of a model that is folded otherwise than this.

    A file without a digest is of the base that it names, whose config says it if it is on this machine.
    """
    base, trained = config.get("base_model_name_or_path"), digest_in(config)
    if base and not trained:
        from transformers import PretrainedConfig

        try:
            trained = digest_in(PretrainedConfig.get_config_dict(base, local_files_only=True)[0])
        except (OSError, ValueError):
            trained = ""
    if trained != folding:
        state = "folded otherwise" if trained else "not known to be folded"
        had = f"{name}, trained on {shown(base)}, which is {state}"
        rule = "be trained on the folded checkpoint of this model, or be merged into the original before it is folded"
        if not folding:
            rule = "be trained on this model, which is not folded: load it onto the folded one"
        raise InvalidProblem(subject, "adapter", had, rule)
