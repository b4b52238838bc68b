"""`attn_implementation="skuda"`, which this import registers; see `skuda.torch.attention.interface`."""

from __future__ import annotations

from skuda.torch.attention.interface import attention, mask_of_call
from skuda.torch.attention.kv_cache import Int8Cache
from skuda.torch.attention.rope_attention import forms
from skuda.torch.fuse.fuse import ATTENTION_FORMS

ATTENTION_FORMS["skuda"] = forms

__all__ = ["Int8Cache", "attention", "mask_of_call"]
