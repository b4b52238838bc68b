"""`Int8Cache`: keys and values of a model of transformers as int8 codes in pages, for `attn_implementation="skuda"`.

`skuda.kernels.attention.cache` says how a layer's pages lie, `skuda.torch.attention.sequences` which page a token is
in.

    cache = Int8Cache(model.config)
    model.generate(**inputs, cache=cache)  # past_key_values=cache in transformers before 5.24
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from skuda.kernels.attention.cache import PAGE
from skuda.registry.errors import InvalidProblem, MissingDependency
from skuda.registry.text import shown
from skuda.registry.value import expect
from skuda.torch.attention.handed import Handed
from skuda.torch.attention.sequences import Sequences
from skuda.torch.models.replaceable_layers import check_count
from skuda.torch.ops.dtypes import element_of
from skuda.torch.ops.tensor_op import launched, run_module

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
except ImportError as error:
    raise MissingDependency("transformers", "pip install 'skuda[transformers]'") from error

_SERVED = ("full_attention", "sliding_attention")
"""Types of layers whose keys and values the cache can hold. It keeps all tokens of a sliding window, too."""


class CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """The pages of one layer.

    Parameters
    ----------
    sequences : Sequences
        Where tokens lie, for all layers.

    Attributes
    ----------
    tensors : tuple of tensor
        Codes of keys, (pages, kv_heads, 128, head_size), and their scales, (pages, kv_heads, 128); codes of values,
        (pages, kv_heads, head_size, 128), and their scales. Nothing before the first call.
    waits : bool
        Whether other layers have the tokens of the present call, and this one does not.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, sequences: Sequences) -> None:
        super().__init__()
        self.sequences = sequences
        self.is_initialized = self.waits = False
        self.tensors: tuple[Tensor, ...] = ()

    @property
    def is_compileable(self) -> bool:
        """Whether a call depends on nothing that tensors hold."""
        return self.sequences.most is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:  # noqa: ARG002  of transformers
        """Make pages for keys of shape (batch, kv_heads, columns, head_size)."""
        batch, heads, _, size = key_states.shape
        if not self.sequences.started:
            self.sequences.start(batch, key_states.device)
        self.reserve(heads, size, key_states.device)

    def reserve(self, heads: int, size: int, device: torch.device) -> None:
        """Have as many pages as the sequences need, for this many heads of this size."""
        pages = self.sequences.pages
        if self.tensors and len(self.tensors[0]) >= pages:
            return
        shapes = ((heads, PAGE, size), (heads, PAGE), (heads, size, PAGE), (heads, PAGE))
        dtypes = (torch.int8, torch.float32) * 2
        with torch.inference_mode(False):  # noqa: FBT003  dynamo takes no keyword; later calls may run without it
            found = [
                torch.empty((pages, *each), dtype=d, device=device) for each, d in zip(shapes, dtypes, strict=True)
            ]
        for new, old in zip(found, self.tensors, strict=False):
            new[: len(old)] = old
        if self.sequences.most is not None and not torch.compiler.is_compiling():
            for tensor in found:
                torch._dynamo.mark_static_address(tensor)  # noqa: SLF001  as in `Sequences.start`
        self.tensors = tuple(found)
        self.is_initialized = True

    def append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        cos_sin: Tensor | None = None,
        norms: tuple[Tensor | None, ...] = (None, None),
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the present call, and return codes and scales of the queries.

        Parameters
        ----------
        q, k, v : tensors of shape (batch * columns, heads * head_size)
            Columns of a sequence one after another.
        heads : int
            Heads of `q`.
        cos_sin, norms, eps
            Arguments of the op `rope_quantize_append`; by default it only quantizes.
        """
        at = self.sequences
        table = at.unturned if cos_sin is None else cos_sin
        tensors = (q, k, v, table, at.block_table, at.ends, at.starts, *self.tensors, *norms, None)
        sizes = (q.shape, table.shape, at.block_table.shape, self.tensors[0].shape)
        key = ("rope_quantize_append", heads, eps, sizes)
        found = launched(key, *tensors)
        if found is None:
            found = run_module("rope_quantize_append", key, tensors, {"heads": heads, "eps": eps})
        codes, scale = found
        return codes, scale

    def attend(
        self, q: tuple[Tensor, Tensor], dtype: torch.dtype, scale: float, window: int | None, *, causal: bool
    ) -> Tensor:
        """Return attention over all tokens so far, of shape (batch * columns, heads, head_size).

        Parameters
        ----------
        q : tuple of tensors
            What `append` returned.
        dtype : torch.dtype
            That of the result.
        scale, window, causal
            Fields of the op `attention`.
        """
        at = self.sequences
        tensors = (*q, *self.tensors, at.block_table, at.ends, at.starts)
        key = ("attention", scale, window, causal, dtype, q[0].shape, at.block_table.shape, self.tensors[0].shape)
        found = launched(key, *tensors)
        if found is None:
            fields = {"scale": scale, "causal": causal, "output_element": element_of(dtype).value}
            found = run_module("attention", key, tensors, fields | ({} if window is None else {"window": window}))
        return cast("Tensor", found[0])

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: the layers of a cache share their sequences, so only the cache's own `update` can add tokens."""
        raise InvalidProblem("CacheLayer", "update", "a call of the layer", "be called on the cache")

    def get_seq_length(self) -> Any:
        """Return the number of columns so far."""
        return self.sequences.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return `max_cache_len`, or -1 without it."""
        return -1 if self.sequences.most is None else self.sequences.most

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the columns of a mask, and the first one."""
        most = self.sequences.most
        return (self.get_seq_length() + query_length if most is None else most), 0

    def offload(self) -> None:
        """Move the pages to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move the pages back to where the model is."""
        if self.tensors:
            self._move(self.sequences.lengths.device)

    def _move(self, device: torch.device) -> None:
        self.tensors = tuple(tensor.to(device, non_blocking=True) for tensor in self.tensors)

    def copy(self, pages: tuple[Tensor, Tensor]) -> None:
        """Copy pages, as `Sequences.select` says."""
        if self.tensors:
            codes = self.tensors[0]
            self.reserve(codes.shape[1], codes.shape[3], codes.device)
            source, target = (each.to(codes.device) for each in pages)
            for tensor in self.tensors:
                tensor[target] = tensor[source]


class NewKeys(Handed):
    """New keys on their way from `Int8Cache.update` to the attention of skuda.

    Attributes
    ----------
    cache : Int8Cache
        Where they belong.
    layer : int
        The number of the layer.
    states : tensor of shape (batch, kv_heads, columns, head_size)
        The keys.
    """

    def __init__(self, cache: Int8Cache, layer: int, states: Tensor) -> None:
        self.cache, self.layer, self.states = cache, layer, states

    def refuse(self) -> NoReturn:
        """Refuse another attention."""
        rule = 'be "skuda" for an Int8Cache: use model.set_attn_implementation("skuda")'
        raise InvalidProblem("Int8Cache", "attn_implementation", "another one", rule)


class Int8Cache(Cache):  # type: ignore[misc]
    """A cache of int8 codes and scales, in pages of 128 tokens, for models with `attn_implementation="skuda"`.

    A token of a head takes 2 * head_size bytes of codes and 8 of scales. Each token is quantized alone, so its codes
    do not depend on the batch, on the other tokens or on how they came.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's config.
    max_cache_len : int, optional
        Columns, padding included, for which there is room. All memory is then taken at the first call, calls can be
        compiled and captured, and more tokens are refused. By default pages are added as they are needed.
    offloading : bool
        Whether the pages of a layer are on the CPU while other layers run. It needs a GPU.

    Raises
    ------
    InvalidProblem
        For a model with other layers than those of full or sliding attention, and for a wrong `max_cache_len`.
    """

    def __init__(self, config: Any, max_cache_len: int | None = None, *, offloading: bool = False) -> None:
        most: object = max_cache_len
        if most is not None and (type(most) is not int or not 0 < most < 2**31 - PAGE):
            raise InvalidProblem("Int8Cache", "max_cache_len", shown(max_cache_len), f"be in [1, {2**31 - PAGE - 1}]")
        expect("Int8Cache", "offloading", offloading, bool, "be True or False")
        if not callable(getattr(config, "get_text_config", None)):
            raise InvalidProblem(
                "Int8Cache", "config", shown(config), "be that of a model of transformers: model.config"
            )
        text = config.get_text_config(decoder=True)
        types = set(getattr(text, "layer_types", None) or _SERVED[:1])
        if getattr(text, "attention_chunk_size", None) is not None:
            types.add("chunked_attention")
        if getattr(text, "num_kv_shared_layers", None):
            types.add("layers that share keys and values")
        for other in sorted(types.difference(_SERVED)):
            raise InvalidProblem("Int8Cache", "layer_types", other, f"be {' or '.join(_SERVED)}")
        self.sequences = Sequences(max_cache_len)
        layers = [CacheLayer(self.sequences) for _ in range(text.num_hidden_layers)]
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=False)

    @classmethod
    def in_place_of(cls, cache: Any, config: Any) -> Any:
        """Make an empty `DynamicCache` an `Int8Cache`, in place, and return it; return anything else as it is.

        transformers makes such a cache where it is given none, and keeps it over calls.
        """
        if type(cache) is DynamicCache and not cache.get_seq_length() and not torch.compiler.is_compiling():
            cache.__class__ = cls
            cache.__init__(config, offloading=cache.offloading)
        return cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[NewKeys, Tensor]:
        """Hand keys and values of a layer, (batch, kv_heads, columns, head_size), on to the attention of skuda.

        It needs the queries, too: see `skuda.torch.attention`. Nothing is written before.
        """
        self._layer("update", layer_idx)
        return NewKeys(self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of columns so far.

        Raises
        ------
        InvalidProblem
            For anything but the number of a layer.
        """
        return self._layer("get_seq_length", layer_idx).get_seq_length()

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return `max_cache_len`, or -1 without it; and raise as `get_seq_length`."""
        return self._layer("get_max_length", 0 if layer_idx is None else layer_idx).get_max_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the columns of a mask for so many new ones, and the first one; and raise as `get_seq_length`."""
        if not isinstance(query_length, torch.SymInt):  # an export's
            check_count("Int8Cache.get_mask_sizes", "query_length", query_length)
        return self._layer("get_mask_sizes", layer_idx).get_mask_sizes(query_length)

    def _layer(self, call: str, number: int) -> CacheLayer:
        """Return a layer. Transformers would take -1 for the last one, and others for layers to come."""
        given: object = number
        if type(given) is not int or not 0 <= given < len(self.layers):
            rule = f"be the number of a layer, in [0, {len(self.layers) - 1}]"
            raise InvalidProblem(f"Int8Cache.{call}", "layer_idx", shown(number), rule)
        found: CacheLayer = self.layers[given]
        return found

    def begin(
        self, number: int, shape: tuple[int, int, int, int], device: torch.device, rows: Tensor | None
    ) -> CacheLayer:
        """Return a layer, ready for the tokens of the present call; the first layer of a call begins it.

        Parameters
        ----------
        number : int
            The number of the layer.
        shape : tuple of int
            Sequences, heads of keys, columns, and head size.
        device, rows
            As in `Sequences.begin`.

        Raises
        ------
        InvalidProblem
            If a layer missed tokens, as after an error within a call; and as `Sequences.begin`.
        """
        layer: CacheLayer = self.layers[number]
        batch, heads, new, size = shape
        if not layer.waits:
            late = [n for n, each in enumerate(self.layers) if each.waits]
            if late:
                rule = "have seen all tokens: an earlier call did not finish, so use reset()"
                raise InvalidProblem("Int8Cache", f"layer {late[0]}", "fewer tokens than others", rule)
            self.sequences.begin(batch, new, device, rows)
            for each in self.layers:
                each.waits = True
        elif (batch, new) != (self.sequences.batch, self.sequences.new):
            rule = f"have {self.sequences.batch} sequences of {self.sequences.new} columns, as in other layers"
            raise InvalidProblem("Int8Cache", f"layer {number}", f"{batch} of {new}", rule)
        layer.waits = False
        if self.offloading:
            if device.type == "cuda":  # the copies of either direction come first
                default = torch.cuda.default_stream(device)
                default.wait_stream(self.prefetch_stream)
                self.prefetch_stream.wait_stream(default)
            layer.prefetch()
            self.prefetch(number + 1, self.only_non_sliding)
        layer.reserve(heads, size, device)
        return layer

    def end(self, number: int) -> None:
        """Note that a layer is done with the present call."""
        if self.offloading:
            self.offload(number, self.only_non_sliding)

    @property
    def is_compileable(self) -> bool:
        """Whether calls can be compiled and captured."""
        return self.sequences.most is not None and not self.offloading

    @property
    def batch_size(self) -> int:
        """Sequences, or -1 before the first call."""
        return self.sequences.batch if self.sequences.started else -1

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, codes and scales."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def reset(self) -> None:
        """Forget all tokens, and keep the memory."""
        self.sequences.reset()
        for layer in self.layers:
            layer.waits = False
        self._own_pages()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Remove the last columns; `tokens_to_remove` is negative, as in transformers.

        Raises
        ------
        InvalidProblem
            For a positive number, or columns with padding between tokens or to the right.
        """
        given: object = tokens_to_remove
        if isinstance(given, Tensor) and not given.ndim:  # assisted decoding of transformers 5.17 passes one
            given = given.item()
        if isinstance(given, bool) or not isinstance(given, int) or given > 0:
            raise InvalidProblem("Int8Cache.crop", "tokens_to_remove", shown(given), "be an integer, negative or 0")
        if given and self.sequences.started:
            self.sequences.crop(-given)
            self._own_pages()

    def _own_pages(self) -> None:
        """Give each sequence pages of its own from its first block on that is not full."""
        if self.sequences.shared:
            self.batch_select_indices(torch.arange(self.sequences.batch))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Let sequence i be what sequence `indices[i]` was. Full pages are shared, the last one is copied.

        Raises
        ------
        InvalidProblem
            For anything but a tensor of one axis: numbers of sequences, or a bool for each.
        """
        if self.sequences.started:
            pages = self.sequences.select(indices)
            for layer in self.layers:
                layer.copy(pages)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do what `batch_select_indices` does, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence; `repeats` is at least 1."""
        check_count("Int8Cache.batch_repeat_interleave", "repeats", repeats, least=1, below=2**31)
        if self.sequences.started:
            self.batch_select_indices(torch.arange(self.sequences.batch).repeat_interleave(repeats))
