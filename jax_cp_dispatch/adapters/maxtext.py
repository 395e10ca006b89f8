"""MaxText's attention, indexers and tensor-parallel dense layers, computed by this package."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_cp_dispatch._text import warn_caller
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.comm_gemm import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import attended_tokens, permuted, take_columns, trusted
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.masks import (
    BlockCausal,
    Blocks,
    Causal,
    Chunked,
    Full,
    Mask,
    Ranges,
    Selected,
    SlidingWindow,
)
from jax_cp_dispatch.masks.mask import PACKED, Order, zigzag_order
from jax_cp_dispatch.selected import index_loss, select_keys

# ---- Reads the arguments of MaxText's `AttentionOp.apply_attention`, and its mask.


def call_mask(self, segment_ids, is_image, batch: tuple[str, ...], order: Order) -> Mask:
    """Returns the mask of a call of an `AttentionOp`, of tokens in this order.

    Chunks count as in MaxText: from the start of a document with load balance, of the row without.
    Tokens `is_image` (`bidirectional_mask`) see all tokens of their run; it is `[B, T]`, or None.
    """
    mask = _kind_mask(self)
    counts_from_row = order == PACKED and isinstance(mask, Chunked | BlockCausal)
    if is_image is None and not (counts_from_row and segment_ids is not None):
        return mask
    shape = (segment_ids if is_image is None else is_image).shape
    # Ranges are computed from whole rows in order.
    whole = [self._maybe_shard_with_pspec(x, PartitionSpec(batch)) for x in (segment_ids, is_image)]
    columns = None
    if order != PACKED:
        columns = zigzag_permutation(shape[1], order.num_ranks)
        whole = [x if x is None else x[:, np.argsort(columns)] for x in whole]
    segment_ids, is_image = whole
    packed = trusted(None if counts_from_row else segment_ids, mask=mask)
    start, end, *_ = attended_tokens(packed, shape)
    if is_image is not None:
        first = is_image.shape[1] - _ends(is_image[:, ::-1])[:, ::-1]  # column of its run, or T
        start, end = jnp.minimum(start, first), jnp.maximum(end, _ends(is_image))
    seen = Ranges(start, end)
    return permuted(seen, take_columns(columns), order)


def _kind_mask(self) -> Mask:
    kind = self.attention_type.value
    if kind == "local_sliding" and self.sliding_window_size:
        return SlidingWindow(self.sliding_window_size)
    if kind == "chunk":
        return Chunked(self.chunk_attn_window_size)
    if kind == "block_diffusion":
        return BlockCausal(self.causal_block_size)
    return Full() if kind == "full" else Causal()


def _ends(is_image) -> jax.Array:
    """Returns one past the last column of the run of each image token; 0 for others."""
    return jnp.asarray(Blocks(is_image.astype(jnp.int32)).block_end)


_LACKING = ("previous_chunk", "indexer_mask", "compressed_mask", "decoder_segment_ids_kv")


def attention_keywords(
    self, query, key, value, decoder_segment_ids, sinks=None, **given
) -> dict[str, Any]:
    """Returns keywords of `context_parallel_attention`; none if the sequence is not sharded."""
    dims = ("activation_batch_attn", "activation_q_length", "activation_heads")
    names = lambda axes: (axes,) if isinstance(axes, str) else tuple(axes or ())
    batch, sequence, heads = map(names, self._logical_to_mesh_axes(dims))
    if not sequence:
        return {}
    size = lambda axes: math.prod(self.mesh.shape[name] for name in axes)
    batch = batch if query.shape[0] % size(batch) == 0 else ()
    is_reordered = self._load_balanced_context_parallel()
    order = zigzag_order(size(sequence)) if is_reordered else PACKED
    tokens = decoder_segment_ids, given.get("bidirectional_mask")
    documents = None
    if decoder_segment_ids is not None or is_reordered:  # the tokens are in this order already
        ids = decoder_segment_ids
        ids = jnp.ones(query.shape[:2], jnp.int32) if ids is None else ids
        documents = Documents.in_order(ids, None, (), order=order, columns=query.shape[1])
    mask = call_mask(self, *tokens, batch, order)
    if has_picks(given.get("indexer_mask")):
        mask = Selected(given["indexer_mask"], mask, order=order)
    return {
        **{"q": query, "k": key, "v": value, "documents": documents},
        **{"mesh": self.mesh, "axis_name": sequence, "head_axis": heads, "batch_axis": batch},
        "mask": mask,
        "sink": None if sinks is None else jnp.asarray(sinks),  # of a Param
        "return_max_logits": bool(given.get("record_max_logits")),
        "scale": 1.0,  # queries are scaled already
        "logit_soft_cap": self.attn_logits_soft_cap or None,
    }


def what_is_missing(self, query, key, **given) -> str:
    """Names what `context_parallel_attention` lacks for a call; empty if nothing."""
    config, kind = self.config, self.attention_type.value
    found = [name for name in _LACKING if given.get(name) is not None]
    if has_picks(given.get("indexer_mask")):
        found.remove("indexer_mask")
    found += ["moba"] * config.moba + ["compressed attention"] * (kind == "compressed")
    found += ["keys of another length"] * (query.shape[1] != key.shape[1])
    order = config.context_parallel_reorder_strategy.value
    is_ring = config.context_parallel_strategy == "ring" and "gpu" in config.hardware
    is_striped = order == "striped" or (order == "auto" and config.packing and is_ring)
    found += ["tokens in stripes"] * (self._load_balanced_context_parallel() and is_striped)
    return " and ".join(found)


# ---- Indexers of latent attention (DeepSeek-V3.2): picks in place of MaxText's additive mask.


def has_picks(indexer_mask: Any) -> bool:
    """Whether these are the picks of `indexed`, and not MaxText's additive mask."""
    return indexer_mask is not None and jnp.issubdtype(indexer_mask.dtype, jnp.integer)


def index_keywords(op, like, segment_ids, options: dict[str, Any]) -> dict[str, Any]:
    """Returns keywords of `select_keys` and `index_loss`; none if MaxText computes attention."""
    if what_is_missing(op, like, like):
        return {}
    found = attention_keywords(op, like, like, like, segment_ids)
    names = "documents", "mask", "mesh", "axis_name", "batch_axis"
    return {**{name: found[name] for name in names}, **options} if found else {}


def index_arrays(self, inputs_q, low_rank_q, inputs_kv, positions) -> tuple[Any, Any, Any]:
    """Returns q_index, k_index and weights of an `Indexer`; nothing flows into its inputs."""
    inputs = jax.lax.stop_gradient((inputs_q, low_rank_q, inputs_kv))
    inputs_q, low_rank_q, inputs_kv = inputs
    q = self.wq_b(low_rank_q).reshape(*inputs_q.shape[:2], self.n_heads, self.head_dim)
    k = self.k_norm(self.wk(inputs_kv))[:, :, None]
    q, k = (self.apply_partial_rope(x, inputs_positions=positions) for x in (q, k))
    weights = self.weights_proj(inputs_q) * (self.n_heads**-0.5 * self.softmax_scale)
    return q, k[:, :, 0], weights


@contextlib.contextmanager
def _indexers(**options: Any) -> Iterator[None]:
    """Computes the index of the MLA layers that are traced in this block, and its loss."""
    from maxtext.layers.attention_mla import MLA, Indexer  # pyright: ignore[reportMissingImports]

    layer, dense, dense_loss = MLA.__call__, Indexer.__call__, MLA.calculate_indexer_loss
    ops: list[Any] = []  # `AttentionOp` of the layer that is traced
    signature = inspect.signature(dense)

    @functools.wraps(layer)
    def call(self, *arguments: Any, **named: Any) -> Any:
        ops.append(self.attention_op)
        try:
            return layer(self, *arguments, **named)
        finally:
            ops.pop()

    @functools.wraps(dense)
    def indexed(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        self, x, ids = given["self"], given["inputs_q"], given["decoder_segment_ids"]
        is_served = bool(ops) and given["model_mode"] == "train"
        where = index_keywords(ops[-1], x[:, :, None], ids, options) if is_served else {}
        if not where:
            return dense(*arguments, **named)
        if x.shape[1] <= self.indexer_topk:  # all keys are picked
            return None, None, None
        names = "inputs_q", "low_rank_q", "inputs_kv", "inputs_positions"
        index = index_arrays(self, *(given[name] for name in names))
        picks = select_keys(*index, num_keys=self.indexer_topk, **where)
        return picks, picks, (index, where)

    @functools.wraps(dense_loss)
    def loss(self, indexer_score, query, key, attention_mask, indexer_mask, **given: Any) -> Any:
        if not has_picks(indexer_mask):
            scores = indexer_score, query, key, attention_mask, indexer_mask
            return dense_loss(self, *scores, **given)
        index, where = indexer_score
        if given["sparse_loss"]:
            order = getattr(where["documents"], "order", PACKED)
            where = where | {"mask": Selected(indexer_mask, where["mask"], order=order)}
        of_tokens = index_loss(*index, q=query, k=key, scale=1.0, **where)
        return of_tokens.mean() * given["scaling_factor"]

    MLA.__call__, Indexer.__call__, MLA.calculate_indexer_loss = call, indexed, loss
    try:
        yield
    finally:
        MLA.__call__, Indexer.__call__, MLA.calculate_indexer_loss = layer, dense, dense_loss


@contextlib.contextmanager
def maxtext_attention(*, algorithm: Any = "zigzag", **options: Any) -> Iterator[None]:
    """Computes the attention of MaxText models that are traced in this block, in training.

    Applies to calls whose queries are sharded over several devices by MaxText's logical rules:
    global, sliding, chunked, block-diffusion, full and latent (MLA) attention, with attention
    sinks, masks of images and the largest logits, of packed documents or not, with MaxText's load
    balance (its reordering of tokens) or without. The results are MaxText's, except that padding is
    zero, and that blocks of image tokens never cross documents. With algorithm="halo", or
    "balanced" without load balance, also the indexers of latent attention (DeepSeek-V3.2) and their
    loss, to which padding adds zeros.

    MaxText computes all other calls: those on one context device, decoding and prefill, and with a
    warning those that need what `context_parallel_attention` lacks: masks of compressed keys, MoBA,
    striped tokens.

    Args:
      algorithm: as in `context_parallel_attention`; "balanced" without load balance only.
      options: `implementation`, `deadline` and `num_comm_sm` of `context_parallel_attention`.
    Raises:
      TypeError, ValueError: while a model is traced; see `context_parallel_attention`.
    """
    from flax import nnx
    from maxtext.layers.attention_op import AttentionOp  # pyright: ignore[reportMissingImports]

    dense = AttentionOp.apply_attention
    signature = inspect.signature(dense)

    @functools.wraps(dense)
    def apply_attention(*arguments: Any, **named: Any) -> Any:
        call = signature.bind(*arguments, **named).arguments
        keywords = attention_keywords(**call) if call["model_mode"] == "train" else None
        if keywords and (missing := what_is_missing(**call)):
            warn_caller(f"maxtext_attention: got {missing}; MaxText computes it.")
            keywords = None
        if not keywords:
            return dense(*arguments, **named)
        out = context_parallel_attention(algorithm=algorithm, **keywords, **options)
        if keywords["return_max_logits"]:
            out, largest = out
            # MaxText's have an axis of batch rows, over which it takes the largest.
            call["self"].max_logits = nnx.Intermediate(largest[None])
        return out, None, None

    AttentionOp.apply_attention = apply_attention
    try:
        with _indexers(algorithm=algorithm, **options):
            yield
    finally:
        AttentionOp.apply_attention = dense


# ---- Tensor-parallel products of MaxText's dense layers, overlapped with their communication.

RANKS = "tensor_sequence"  # MaxText's axis for tensor and sequence parallelism


def shared_dimension(spec: Any) -> int | None:
    """Returns the dimension of a kernel that is sharded over the ranks and nothing else, if any."""
    names = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in spec]
    return names.index((RANKS,)) if (RANKS,) in names else None


def multiply(x, kernel, dims, split: int | None, **options: Any) -> jax.Array:
    """Returns the product by ranks that share dimension `split` of the kernel; None: they do not.

    `dims` are dimension numbers as in `jax.lax.dot_general`.
    """
    contracted = len(dims[0][1])
    if split == 0 and kernel.ndim == contracted + 1:
        return matmul_reduce_scatter(x, kernel, axis_name=RANKS, **options)
    if split == 1 and contracted == 1:
        return all_gather_matmul(x, kernel, axis_name=RANKS, **options)
    if split == 2 and contracted == 1:  # several kernels of the same x
        kernels = tuple(jnp.moveaxis(kernel, 1, 0))
        products = all_gather_matmul(x, kernels, axis_name=RANKS, **options)
        return jnp.stack(products, axis=-2)
    return jax.lax.dot_general(x, kernel, dims)


@contextlib.contextmanager
def maxtext_gemms(**options: Any) -> Iterator[None]:
    """Overlaps products of MaxText models that are created in this block.

    Products with kernels that are sharded over the mesh axis "tensor_sequence" only (MLP and
    projections, with `ici_tensor_sequence_parallelism`) become `all_gather_matmul` or
    `matmul_reduce_scatter`. Others stay as they are. With `fused_qkv` and `fused_mlp`, the tokens
    of several kernels are gathered once. Installed in place of MaxText's quantization.

    Args:
      options: of both functions: `method`, `implementation`, `deadline`.
    Raises:
      NotImplementedError: when the model is created: it is quantized, or has experts.
    """
    from flax import linen
    from maxtext.layers import quantizations  # pyright: ignore[reportMissingImports]
    from maxtext.utils import sharding  # pyright: ignore[reportMissingImports]

    class OverlappedDotGeneral(linen.Module):
        kernel_axes: tuple[str | None, ...]

        def __call__(self, x, kernel, dims, **_) -> jax.Array:
            mesh, rules = jax.sharding.get_abstract_mesh(), sharding.get_logical_axis_rules()
            spec = sharding.logical_to_mesh_axes(self.kernel_axes, mesh, rules=rules)
            split = shared_dimension(spec) if x.ndim > 2 else None
            return multiply(x, kernel, dims, split, **options)

    class Overlapped(quantizations.Quantization):
        needs_apply_rngs, quant_mode = False, "train"

        def dot_general_cls(self, mesh_axes=()):
            return functools.partial(OverlappedDotGeneral, kernel_axes=tuple(mesh_axes))

    def configure(config, quant_mode_str="train"):
        for name, usual in (("quantization", ""), ("num_experts", 1)):
            if (value := getattr(config, name)) != usual:
                value = getattr(value, "value", value)  # of an enumeration
                raise NotImplementedError(f"maxtext_gemms: got {name}={value!r}; omit one of them.")
        return Overlapped()

    usual, quantizations.configure_quantization = quantizations.configure_quantization, configure
    try:
        yield
    finally:
        quantizations.configure_quantization = usual
