"""4-bit weights of GPTQ and AWQ checkpoints, whose activations are floats.

A weight is (level - zero point) scale. Levels and zero points are 0 to 15. A word, s32, has eight of them, in bits 4 i
to 4 i + 3. A layer has `scales`, floats of shape (groups, N), and

- GPTQ: `qweight` of shape (K / 8, N), with consecutive elements of K in a word; `qzeros` of shape (groups, N / 8), one
  less than the zero points, unless the format is "gptq_v2"; `g_idx`, s32 of shape (K,), the group of each element.
- AWQ, version "gemm": `qweight` of shape (K, N / 8) and `qzeros` of shape (groups, N / 8), with the columns 0, 2, 4, 6,
  1, 3, 5 and 7 of eight in a word.

Sources: AutoGPTQ and AutoAWQ, as vLLM 0.26 packs and reads their tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import torch

from skuda.kernels.linear.packed import GROUP_SIZES
from skuda.torch.formats.grouped import Grouped, GroupedWeight, values_of
from skuda.torch.formats.reading import SCALES, ConfigFields, Tensors

_COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of AWQ the columns 0 to 7 are."""
_FREE = """act_group_aware backend batch_size block_name_to_quantize cache_block_outputs checkpoint_format
damp_auto_increment damp_percent dataset desc_act disable_exllama do_fuse exllama_config fuse_max_seq_len lm_head
max_input_length meta model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
modules_in_block_to_quantize modules_to_fuse modules_to_not_convert mse pad_token_id quantizer static_groups sym
tokenizer true_sequential use_cuda_fp16 use_exllama"""
"""Fields that do not change what tensors mean. The tensors show which layers have codes, and the order of groups."""


class _OfMethod(GroupedWeight):
    """How a file holds weights whose config has a ``quant_method`` of their own."""

    names = "scales", "qzeros"

    @classmethod
    def parse(cls, weights: ConfigFields, file_format: str) -> Self | None:
        """Take the fields of a config; see `StoredWeight.parse`."""
        return cls.of(weights) if file_format == cls.method else None

    @classmethod
    @abstractmethod
    def of(cls, weights: ConfigFields) -> Self:
        """Take the fields of a config of this method."""


@dataclass(frozen=True)
class GptqFormat(_OfMethod):
    """How GPTQ holds 4-bit weights. `symmetric`: all zero points are 8. `lacks`: by how much the file's are less."""

    group_size: int = 0
    symmetric: bool = True
    lacks: int = 1

    method = "gptq"
    file_formats = (method,)

    @classmethod
    def of(cls, weights: ConfigFields) -> Self:
        """Take the fields of a config of GPTQ."""
        symmetric = weights.one_of("sym", [True, False])
        form = weights.one_of("format", ["gptq", "gptq_v2"], default="gptq")
        form = weights.one_of("checkpoint_format", ["gptq", "gptq_v2"], default=form)
        weights.one_of("pack_dtype", ["int32"], default="int32")
        weights.one_of("is_marlin_format", [False], default=False)
        weights.absent("dynamic")
        return cls(_size(weights), symmetric, int(form == "gptq"))

    def grouped(self, found: Tensors, n: int, k: int, groups: int) -> Grouped:
        """Take the tensors of a layer."""
        levels = values_of(found.take("qweight", torch.int32, (-(-k // 8), n)).T, k)
        zeros = values_of(found.take("qzeros", torch.int32, (groups, -(-n // 8))), n).T.contiguous() + self.lacks
        if self.symmetric and bool(zeros.any()):
            found.refuse("qzeros", "other zero points", f"be {8 - self.lacks}: the config says that this is symmetric")
        if bool((zeros > 7).any()):
            rule = "be 0 to 14, as readers differ in what 15 means: convert the checkpoint to gptq_v2"
            found.refuse("qzeros", "15, for a zero point of 0 or 16", rule)
        order = found.take("g_idx", torch.int32, (k,))
        if bool(((order < 0) | (order >= groups)).any()):
            found.refuse("g_idx", "other numbers", f"be 0 to {groups - 1}")
        runs = torch.equal(order, torch.arange(k, dtype=order.dtype, device=order.device) // (self.group_size or k))
        return levels, found.take("scales", SCALES, (groups, n)).T.contiguous(), zeros, None if runs else order


@dataclass(frozen=True)
class AwqFormat(_OfMethod):
    """How AWQ holds 4-bit weights."""

    group_size: int = 0

    symmetric = False
    method = "awq"
    file_formats = (method,)

    @classmethod
    def of(cls, weights: ConfigFields) -> Self:
        """Take the fields of a config of AWQ."""
        weights.one_of("version", ["gemm", "GEMM"], default="gemm")
        weights.one_of("format", ["gemm"], default="gemm")
        weights.one_of("zero_point", [True], default=True)
        if weights.fields.get("backend") == "llm-awq":
            weights.refuse("backend", "llm-awq", "be another one, whose tensors have the version gemm")
        return cls(_size(weights))

    def grouped(self, found: Tensors, n: int, k: int, groups: int) -> Grouped:
        """Take the tensors of a layer."""
        rows = {"qweight": k, "qzeros": groups}
        words = [found.take(name, torch.int32, (count, -(-n // 8))) for name, count in rows.items()]
        values = (values_of(each, 8 * each.shape[1]).view(*each.shape, 8)[:, :, _COLUMNS] for each in words)
        levels, zeros = (each.reshape(len(each), -1)[:, :n].T.contiguous() for each in values)
        return levels, found.take("scales", SCALES, (groups, n)).T.contiguous(), zeros, None


def _size(weights: ConfigFields) -> int:
    """Return the size of groups, or 0, from the fields that GPTQ and AWQ have both. No other may be left."""
    weights.one_of("bits", [4])
    size: int = weights.one_of("group_size", [*GROUP_SIZES, -1])
    weights.free(*_FREE.split())
    weights.finish()
    return max(size, 0)
