"""Tells transformers and peft that layers of a model have become others, if these packages are in use."""

from __future__ import annotations

import sys
import warnings

from torch import nn

from skuda.torch.models.replaceable_layers import CHANGED, has_adapters, is_of_transformers


def adopt_adapters(model: nn.Module, int8: bool) -> None:  # noqa: FBT001  as `CHANGED` calls it
    """Let the LoRA layers of peft in a model merge into their int8 base."""
    if int8 and "peft" in sys.modules and has_adapters(model):
        from skuda.torch.hf.peft import adopt_

        adopt_(model)


def describe_saving(model: nn.Module, int8: bool) -> None:  # noqa: FBT001  as above
    """Let `save_pretrained` of models of transformers write the scheme of their int8 layers, or floats again.

    Without the scheme, a reader would take the codes for weights in floating point.
    """
    if not int8:
        bridge = sys.modules.get("skuda.torch.hf.transformers")
        if bridge is not None:
            bridge.forget_(model)
        return
    if not any(is_of_transformers(module) for module in model.modules()):
        return
    try:
        from skuda.torch.hf.transformers import describe_
    except ImportError:
        text = "save_pretrained cannot write int8 layers with this version of transformers; use skuda.torch.save"
        warnings.warn(f"{text}, or: pip install 'skuda[transformers]'", stacklevel=4)
    else:
        describe_(model)


CHANGED.update(transformers=describe_saving, peft=adopt_adapters)
