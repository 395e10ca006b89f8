"""`Documents`: what the tokens of a batch are, and in which order; and those of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32, PyTree, Shaped

from jax_cp_dispatch._arguments import check_positive, check_type, is_on_host
from jax_cp_dispatch._arrays import run_ends
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch._text import outline
from jax_cp_dispatch.documents.fingerprint import order_error_code
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.segment_ids import (
    check_ids,
    document_starts,
    gather_sequence,
    normalize_segment_ids,
    number_ids,
    starts_in_order,
)
from jax_cp_dispatch.documents.table import DocumentTable, list_documents
from jax_cp_dispatch.masks import ArrayMask, Mask, MaskRanges
from jax_cp_dispatch.masks.mask import (
    PACKED,
    PLACED,
    MaskKind,
    Order,
    check_made_packed,
    zigzag_order,
)
from jax_cp_dispatch.masks.read import check_mask_arrays, check_mask_order, read_mask
from jax_cp_dispatch.masks.selected import refuse_picks

_OP = "Documents"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a packed batch, and the order of its tokens; a frozen pytree.

    Make it once per batch, in the data loader or in the step, from whole batch rows in packed
    order: one document after another. `zigzag` and `Placement.documents` are the ways to another
    order; both permute arrays and masks with `apply`. Every function that mixes tokens takes it,
    as `documents=`. Inside `jax.shard_map`, pass it through `in_specs=documents.specs(axis_name)`:
    the order stays known, and a call in which two orders meet is refused while it is traced.

    Made of NumPy arrays, it is NumPy, and does not start JAX.

    Attributes:
      segment_ids: integers [B, T]; the document of each token, 0 = padding. A document is a run of
        one id in one batch row; it also ends where `positions` do not increase.
      positions: integers [B, T]; the position of each token in its document, for example for RoPE.
        None: counted from 0; of padding, 0.
      mask: which keys a token sees, in calls without `mask=`; its arrays are in this order.
      plans: plans of attention for these tokens, a tuple of `Plan`; set by `with_plan` (one; in
        placed order one more), or by `Placement.documents`, with one for each mask of the
        placement. A call follows the plan for its mask. Without plans, a call that needs one makes
        it.
      order: of the tokens (static). Do not pass it, nor `columns`.
      columns: tokens T of a whole batch row (static).
      counted: whether positions were counted, and so say no more than the ids (static). Pass False
        to `dataclasses.replace` with positions of your own.
    Raises:
      TypeError, ValueError: an array is invalid; or a document has several pieces in its batch row,
        if it is known on the host.
    """

    segment_ids: Any
    positions: Any = None
    mask: Any = None
    plans: tuple[Any, ...] = ()
    # `dataclasses.replace` passes them.
    order: Order = dataclasses.field(default=PACKED, kw_only=True)
    columns: int = dataclasses.field(default=0, kw_only=True)
    counted: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_made_packed(_OP, self.order)
        check_ids(_OP, self.segment_ids, self.positions, may_be_empty=True)
        given = None if self.counted else self.positions
        segment_ids, positions = normalize_segment_ids(_OP, self.segment_ids, given)
        segment_ids = number_ids(segment_ids)
        if positions is None:  # they count the tokens of each run of one id; 0 for padding
            starts = document_starts(segment_ids, None)
            column = np.arange(segment_ids.shape[1], dtype=np.int32)[None]
            xp: Any = np if isinstance(segment_ids, np.ndarray) else jnp
            positions = xp.where(starts >= 0, column - starts, 0)
        dropped = self.positions if self.counted else None
        known = isinstance(positions, np.ndarray) and is_on_host(dropped)
        if dropped is not None and known and not np.array_equal(dropped, positions):
            raise ValueError(
                f"{_OP}: got counted=True, as by dataclasses.replace, and positions that are not "
                "those counted from these segment_ids. Pass counted=False with positions of your "
                "own, or positions=None to count them again."
            )
        refuse_picks(_OP, self.mask)
        mask = self.mask if self.mask is None else read_mask(_OP, self.mask)
        if mask is not None:
            check_mask_arrays(_OP, mask, segment_ids.shape)
            check_mask_order(_OP, mask, PACKED)
        vars(self).update(
            segment_ids=segment_ids,
            positions=positions,
            mask=mask,
            plans=tuple(self.plans),
            columns=segment_ids.shape[1],
            counted=given is None,
        )

    __repr__ = outline

    def tree_flatten_with_keys(self):
        names = ("segment_ids", "positions", "mask", "plans")
        keyed = [(jax.tree_util.GetAttrKey(x), getattr(self, x)) for x in names]
        return keyed, (self.order, self.columns, self.counted)

    @classmethod
    def tree_unflatten(cls, static, children) -> Documents:
        order, columns, counted = static
        return trusted(*children, order=order, columns=columns, counted=counted)

    @classmethod
    def in_order(
        cls, segment_ids: Any, positions: Any, plans: Any, *, order: Order, columns: int
    ) -> Documents:
        """Returns documents in another order, for `Placement.documents`; trusted."""
        plans = tuple(plans)
        return trusted(segment_ids, positions, plans=plans, order=order, columns=columns)

    @property
    def plan(self) -> Any:
        """The plan, of the first mask if there are several; None without one."""
        return self.plans[0] if self.plans else None

    @property
    def fits(self) -> Any:
        """Whether the plans fit their capacities; see `Plan.fits`. True without plans."""
        return self.plans[0].fits if self.plans else np.bool_(True)

    def with_plan(self, plan: Any) -> Documents:
        """Returns these documents with a plan of `plan_attention`, if they are in packed order.

        In placed order, returns them with one more plan, of `Placement.plan_for`.
        """
        if not hasattr(plan, "fingerprint"):
            raise TypeError(
                f"Documents.with_plan: plan is of type {type(plan).__name__}; it needs to be a "
                "Plan. Pass plan_attention(...)."
            )
        if plan.is_placed != (self.order == PLACED) or self.order.name == "zigzag":
            kind = "placed" if plan.is_placed else "packed"
            raise ValueError(
                f"Documents.with_plan: tokens are in {self.order}, but this plan is for {kind} "
                "order. Pass plan_attention(...) for packed order; a placement has its own "
                "documents: Placement.documents."
            )
        return replaced(self, plans=(*self.plans, plan) if plan.is_placed else (plan,))

    def unplaced(self) -> Documents:
        """Returns the documents of a placement that does not fit, and left all tokens in place.

        For the branch of `jax.lax.cond(documents.fits, ...)` in which a ring attends, with the mask
        of the plan. If tokens were placed, that ring fails on all ranks.
        """
        if self.order != PLACED:
            raise ValueError(
                f"Documents.unplaced: tokens are in {self.order}. Call it on Placement.documents."
            )
        return replaced(self, order=PACKED, mask=permuted(self.mask, take_columns(None), PACKED))

    def zigzag(self, num_ranks: int) -> Documents:
        """Returns the documents in zigzag order: rank r of n holds blocks r and 2 n - 1 - r of 2 n.

        All ranks then have equal causal work in a ring. See `zigzag_permutation`.

        Raises:
          ValueError: tokens are in another order already, or the ranks do not divide them.
        """
        check_positive("Documents.zigzag", num_ranks=num_ranks)
        shape = np.shape(self.segment_ids)
        if self.order != PACKED or shape[1:] != (self.columns,):
            raise ValueError(
                f"Documents.zigzag: tokens are in {self.order}, {list(shape)} of {self.columns} "
                "columns. Call it on documents of whole batch rows in packed order."
            )
        order = zigzag_order(num_ranks)
        ids, positions, mask = permuted(
            (self.segment_ids, self.positions, self.mask),
            take_columns(zigzag_permutation(self.columns, num_ranks)),
            order,
        )
        return replaced(
            self, segment_ids=ids, positions=positions, mask=mask, plans=(), order=order
        )

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays and masks of whole batch rows from packed order into this order.

        Apply it to tokens, labels and masks alike. Shift labels by one token first: neighbours in
        another order need not be neighbours in a document.

        Raises:
          ValueError: an array does not start with [B, T]; tokens are placed, and only the placement
            knows where: call `Placement.apply`.
        """
        return self._moved("apply", arrays, PACKED, self.order)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays and masks in this order back into packed order; the inverse of `apply`."""
        return self._moved("restore", arrays, self.order, PACKED)

    def specs(self, axis_name: Any, batch_axis: Any = None) -> Documents:
        """Returns the `PartitionSpec`s of this object, for `jax.shard_map` or `jax.device_put`.

        Args:
          axis_name: the mesh axis of the sequence, or several, major axis first.
          batch_axis: the mesh axis over which B is sharded, or several.
        Returns:
          A tree prefix of this object: `jax.tree.map(partial(NamedSharding, mesh), specs)` are its
          shardings.
        """
        rows = P(batch_axis, axis_name)
        positions = None if self.positions is None else rows
        mask = rows if jax.tree.leaves(self.mask) else self.mask
        plans = tuple(rows if np.ndim(x.fingerprint) > 2 else P(axis_name) for x in self.plans)
        return replaced(self, segment_ids=rows, positions=positions, mask=mask, plans=plans)

    def _moved(self, name: str, arrays: Any, order: Order, into: Order) -> Any:
        """Puts arrays and masks of whole batch rows from one order into another."""
        shape = np.shape(self.segment_ids)[0], self.columns
        check_moved(f"Documents.{name}", arrays, shape, order)
        if self.order == PLACED:
            raise ValueError(
                "Documents: tokens are placed, and only the placement knows where. Call "
                "Placement.apply or Placement.restore."
            )
        columns = None
        if self.order != PACKED:
            ranks, inverse = self.order.num_ranks, into == PACKED
            columns = zigzag_permutation(self.columns, ranks, inverse=inverse)
        return permuted(arrays, take_columns(columns), into)


def trusted(
    segment_ids: Any = None,
    positions: Any = None,
    mask: Any = None,
    plans: tuple[Any, ...] = (),
    *,
    order: Order = PACKED,
    columns: Any = None,
    counted: bool = False,
) -> Documents:
    """Returns documents in any order, of arguments that need no check.

    The documents of a call may have no ids; `columns` is None if the whole batch row is not known.
    With a plan that knows the rest, the mask may be its `MaskKind`.
    """
    documents = object.__new__(Documents)
    fields = segment_ids, positions, mask, plans, order, columns, counted
    vars(documents).update(
        zip((x.name for x in dataclasses.fields(Documents)), fields, strict=True)
    )
    return documents


def replaced(documents: Documents, **changes: Any) -> Documents:
    """Returns `documents` with other fields, which need no check."""
    return trusted(**{**vars(documents), **changes})


def check_moved(op: str, arrays: Any, shape: tuple[int, int], order: Order) -> None:
    """Requires arrays of whole batch rows, [B, T, ...], and masks in this order."""
    for x in jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, Mask | Documents)):
        if isinstance(x, Documents):
            raise TypeError(
                f"{op}: got Documents among the arrays. Pass arrays and masks alone: documents "
                "have an order of their own, as those of Placement.documents."
            )
        if isinstance(x, Mask):
            check_mask_order(op, x, order)
    for x in jax.tree.leaves(arrays):
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"{op}: got a value of type {type(x).__name__}; all leaves need to be arrays of "
                "NumPy or JAX. Pass numpy.asarray of each list."
            )
        if x.shape[:2] != shape:
            raise ValueError(
                f"{op}: an array has shape {list(x.shape)} but the documents are [{shape[0]}, "
                f"{shape[1]}, ...]. Pass arrays of whole batch rows, whose columns are padded as "
                "the documents are, with segment 0."
            )


def permuted(tree: Any, take: Callable[[Any], Any], order: Order) -> Any:
    """Returns arrays [B, T, ...] and masks, whose arrays `take` has put in this order."""

    def one(x: Any) -> Any:
        if isinstance(x, Mask):
            moved = jax.tree.map(take, x)
            return x.reordered(moved, order) if isinstance(x, ArrayMask) else x
        return take(x)

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Mask))


def take_columns(order: Any) -> Callable[[Any], Any]:
    """Returns the function that takes these columns of an array; None: all."""
    return lambda x: x if order is None else x[:, order]


# ---- The documents of a call: `documents=`, or its short form `segment_ids=` and `positions=`.


def read_given(
    op: str,
    documents: Any,
    segment_ids: Any,
    positions: Any,
    mask: Any,
    *,
    follows_plan: bool = True,
) -> Documents:
    """Reads the documents and the mask of a call, and selects its plan.

    Calls that do not follow a plan of packed documents ignore it, but not its mask.
    """
    if documents is None:
        read = read_mask(op, mask)
        check_mask_order(op, mask, PACKED)
        return trusted(segment_ids, positions, read)
    given = read_given_tokens(op, documents, segment_ids, positions)
    mask = documents.mask if mask is None else mask
    plans, order = documents.plans, documents.order
    if mask is None and len(plans) == 1:
        plan, read = plans[0], plans[0].mask
    else:
        read = read_mask(op, mask)
        plan = next((plan for plan in plans if plan.mask == read.kind), None)
        needs_plan = follows_plan or order == PLACED or mask is None
        if plans and plan is None and needs_plan:
            raise ValueError(
                f"{op}: mask is {read.kind}, but the documents have a plan for "
                f"{', '.join(str(x.mask) for x in plans)}. Pass one of these as mask, or plan for "
                f"this one: place_tokens and plan_attention take mask=."
            )
    check_mask_order(op, mask, order)  # also that of picks, which `read` does not have
    given = replaced(given, mask=read, plans=() if plan is None else (plan,))
    return given if follows_plan or order == PLACED else without_plan(op, given)


def read_given_tokens(op: str, documents: Any, segment_ids: Any, positions: Any) -> Documents:
    """Reads the documents of a call without a mask; of a placement, the plan of any mask.

    Counted positions are dropped: they start again in each piece of a document, and would hide that
    there are two.
    """
    if documents is None:
        return trusted(segment_ids, positions)
    check_type(op, "documents", documents, Documents, "Pass Documents(segment_ids, positions).")
    if segment_ids is not None or positions is not None:
        raise TypeError(
            f"{op}: got documents, and segment_ids or positions, which they have. Omit the latter."
        )
    plans = documents.plans[:1] if documents.order == PLACED else ()
    positions = None if documents.counted else documents.positions
    return replaced(documents, positions=positions, mask=None, plans=plans)


def without_plan(op: str, documents: Documents) -> Documents:
    """Returns the same without the plan, whose mask needs to be known."""
    if isinstance(documents.mask, MaskKind):
        raise ValueError(
            f"{op}: the plan of the documents is for {documents.mask}, whose arrays it does "
            "not have. Pass the mask as mask=."
        )
    return replaced(documents, plans=())


def with_segment_ids(documents: Documents, shape: tuple[int, int]) -> Documents:
    """Returns the same with segment ids; without them, each batch row is one document."""
    if documents.segment_ids is not None:
        return documents
    return replaced(documents, segment_ids=np.ones(shape, np.int32))


def check_call_ranks(
    op: str, documents: Documents, num_tokens: int, num_ranks: int, ranks: str
) -> None:
    """Requires the ranks of this order, in words `ranks`, and the tokens of whole batch rows."""
    order, columns = documents.order, documents.columns
    if order.num_ranks not in (0, num_ranks):
        raise ValueError(
            f"{op}: the documents are in {order}, but {ranks}. Pass "
            f"documents.zigzag({num_ranks}) of packed ones, and tokens in that order."
        )
    if columns not in (None, num_tokens):
        raise ValueError(
            f"{op}: the documents are of {columns} columns, but the ranks hold {num_tokens}. Pass "
            "the documents of these tokens: whole ones with global arrays, and inside "
            "jax.shard_map through in_specs=documents.specs(axis_name)."
        )


def read_whole(op: str, documents: Documents, num_ranks: int) -> Documents:
    """Checks ids, positions and masks of whole sequences that are known on the host."""
    leaves, mask, order = jax.tree.leaves(documents), documents.mask, None
    if leaves and documents.order.layout == "zigzag":
        order = zigzag_permutation(leaves[0].shape[1], num_ranks, inverse=True)
    ids, positions = normalize_segment_ids(
        op, documents.segment_ids, documents.positions, order=order
    )
    documents = replaced(documents, segment_ids=ids, positions=positions)
    if mask is not None and mask.has_arrays and all(map(is_on_host, jax.tree.leaves(documents))):
        known = with_segment_ids(documents, leaves[0].shape)
        if order is not None:
            known = jax.tree.map(lambda x: np.asarray(x)[:, order], known)
        table = list_documents(known.segment_ids, known.positions)
        check_document_mask(op, jax.tree.map(np.asarray, known.mask), table)
    return documents


def check_document_mask(op: str, mask: Mask, documents: DocumentTable) -> None:
    """Requires arrays of a mask, if any, that are those of the tokens of these documents."""
    if not mask.has_arrays:
        return
    start, end, live = documents.edges()
    for rule, what in mask.rules(np.arange(documents.columns)[None], start, end):
        if not (rule | ~live).all():
            row, column = np.argwhere(~rule & live)[0]
            kind = type(mask).__name__
            raise ValueError(f"{op}: in batch row {row}, at column {column}, {kind} {what}")


# ---- What each token sees, as ranges of columns.


def attended_tokens(documents: Documents, shape: tuple[int, int]) -> MaskRanges:
    """Returns what each token sees, in columns of its batch row; empty ranges for padding.

    The documents, of `shape` `[B, T]`, are of the whole sequence, in order. Without segment ids,
    each batch row is one document.
    """
    return _attended_in_order(documents, shape, False)[0]


def _attended_in_order(
    documents: Documents, shape: tuple[int, int], checks_order: bool
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns `attended_tokens`, and the `order_error_code` of the tokens if it is asked for."""
    mask, in_order = documents.mask, True
    if documents.segment_ids is None:
        start, end = jnp.zeros(shape, jnp.int32), jnp.full(shape, shape[1], jnp.int32)
    else:
        of_tokens = documents.segment_ids, documents.positions
        if checks_order:
            start, in_order = starts_in_order(*of_tokens)
        else:
            start = document_starts(*of_tokens)
        end = run_ends(start)
    token = jnp.arange(shape[1], dtype=jnp.int32)
    is_token = start >= 0
    ranges = mask.clipped(shape[1]).ranges(token[None], start, end)
    ranges = jax.tree.map(lambda x: jnp.where(is_token, x, 0), ranges)
    if not checks_order:
        return ranges, None
    return ranges, order_error_code(in_order, mask, start, end)


def gathered_ranges(
    exchange: CollectiveOptions,
    documents: Documents,
    shape: tuple[int, int],
    *,
    layout: str,
    checks_order: bool,
) -> tuple[MaskRanges, Int32[Array, ""] | None]:
    """Returns what each token of the sequence sees, from the columns of all ranks.

    Documents, of `shape` `[B, T]`, are of this rank's columns, without a plan. If it is asked for,
    also returns the `order_error_code` of arrays that are given.
    """
    num_ranks = jax.lax.axis_size(exchange.axis_name)
    if documents.positions is not None:
        documents = jax.tree.map(jnp.asarray, with_segment_ids(documents, shape))
    documents = gather_sequence(exchange, documents, num_ranks, layout == "zigzag")
    checks_order = checks_order and bool(jax.tree.leaves(documents))
    return _attended_in_order(documents, (shape[0], shape[1] * num_ranks), checks_order)
