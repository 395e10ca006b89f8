"""`Documents`: what the tokens of a batch are, and in which order they are."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Integer, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_positive, check_type, is_on_host
from jax_cp_dispatch._text import outline
from jax_cp_dispatch.documents.layouts import PackedMask, zigzag_permutation
from jax_cp_dispatch.documents.segment_ids import (
    check_ids,
    document_starts,
    number_ids,
    read_documents,
)
from jax_cp_dispatch.documents.table import DocumentTable, from_segment_ids
from jax_cp_dispatch.masks import ArrayMask, Mask
from jax_cp_dispatch.masks.mask import (
    PACKED,
    PLACED,
    MaskKind,
    Order,
    check_made_packed,
    zigzag_order,
)
from jax_cp_dispatch.masks.read import (
    check_mask_arrays,
    check_mask_order,
    check_mask_rules,
    read_mask,
)

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
      plans: the plans of attention for these tokens: of a placement, one for each of its masks; of
        `plan_attention`, one. The mask of a call selects it.
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
    mask: Mask | str | None = None
    plans: tuple[Any, ...] = ()
    # `dataclasses.replace` passes them.
    order: Order = dataclasses.field(default=PACKED, kw_only=True)
    columns: int = dataclasses.field(default=0, kw_only=True)
    counted: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        check_made_packed(_OP, self.order)
        check_ids(_OP, self.segment_ids, self.positions, may_be_empty=True)
        if self.counted:
            self._check_counted()
            object.__setattr__(self, "positions", None)
        segment_ids, positions = read_documents(_OP, self.segment_ids, self.positions)
        segment_ids = number_ids(segment_ids)
        mask = self.mask if self.mask is None else read_mask(_OP, self.mask)
        if mask is not None:
            check_mask_arrays(_OP, mask, segment_ids.shape)
            check_mask_order(_OP, mask, PACKED)
        if positions is None:
            positions = _counted(segment_ids)
        for name, value in {
            "segment_ids": segment_ids,
            "positions": positions,
            "mask": mask,
            "plans": tuple(self.plans),
            "columns": segment_ids.shape[1],
            "counted": self.positions is None,
        }.items():
            object.__setattr__(self, name, value)

    __repr__ = outline

    def _check_counted(self) -> None:
        """Refuses known positions that `dataclasses.replace` would drop."""
        known = self.segment_ids, self.positions
        if self.positions is None or not all(map(is_on_host, known)):
            return
        if not np.array_equal(self.positions, _counted(number_ids(np.asarray(self.segment_ids)))):
            raise ValueError(
                f"{_OP}: got counted=True, as by dataclasses.replace, and positions that are not "
                "those counted from these segment_ids. Pass counted=False with positions of your "
                "own, or positions=None to count them again."
            )

    def tree_flatten_with_keys(self):
        names = ("segment_ids", "positions", "mask", "plans")
        keyed = [(jax.tree_util.GetAttrKey(x), getattr(self, x)) for x in names]
        return keyed, (self.order, self.columns, self.counted)

    @classmethod
    def tree_unflatten(cls, static, children) -> Documents:
        return cls._of(*children, *static)

    @classmethod
    def _of(cls, segment_ids, positions, mask, plans, order, columns, counted=False) -> Documents:
        """Returns documents in any order; the arguments are trusted."""
        documents = object.__new__(cls)
        fields = segment_ids, positions, mask, plans, order, columns, counted
        for field, value in zip(dataclasses.fields(cls), fields, strict=True):
            object.__setattr__(documents, field.name, value)
        return documents

    @classmethod
    def in_order(
        cls, segment_ids: Any, positions: Any, plans: Any, *, order: Order, columns: int
    ) -> Documents:
        """Returns documents in another order, for `Placement.documents`; trusted."""
        return cls._of(segment_ids, positions, None, tuple(plans), order, columns)

    @property
    def plan(self) -> Any:
        """The plan, of the first mask if there are several; None without one."""
        return self.plans[0] if self.plans else None

    @property
    def fits(self) -> Any:
        """Whether the plans fit their capacities; see `Plan.fits`. True without plans."""
        return self.plans[0].fits if self.plans else np.bool_(True)

    def with_plan(self, plan: Any) -> Documents:
        """Returns these documents with a plan: of `plan_attention` for packed order.

        Or for placed order with one more plan, of `Placement.plan_for`.
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
        return self._replaced(plans=(*self.plans, plan) if plan.is_placed else (plan,))

    def unplaced(self) -> Documents:
        """Returns the documents of a placement that does not fit, and left all tokens in place.

        For the branch of `jax.lax.cond(documents.fits, ...)` in which a ring attends, with the mask
        of the plan. If tokens were placed, that ring fails on all ranks.
        """
        if self.order != PLACED:
            raise ValueError(
                f"Documents.unplaced: tokens are in {self.order}. Call it on Placement.documents."
            )
        return self._replaced(order=PACKED, mask=permuted(self.mask, None, PACKED))

    def zigzag(self, num_ranks: int) -> Documents:
        """Returns the documents in zigzag order: rank r of n holds blocks r and 2 n - 1 - r of 2 n.

        All ranks then have equal causal work in a ring. See `zigzag_permutation`.

        Raises:
          ValueError: tokens are in another order already, or the ranks do not divide them.
        """
        check_positive("Documents.zigzag", num_ranks=num_ranks)
        self._check_packed("zigzag")
        order = zigzag_order(num_ranks)
        ids, positions, mask = permuted(
            (self.segment_ids, self.positions, self.mask),
            zigzag_permutation(self.columns, num_ranks),
            order,
        )
        return self._replaced(
            segment_ids=ids, positions=positions, mask=mask, plans=(), order=order
        )

    def apply(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays and masks of whole batch rows from packed order into this order.

        Apply it to tokens, labels and masks alike. Shift labels by one token first: neighbours in
        another order need not be neighbours in a document.

        Raises:
          ValueError: an array does not start with [B, T]; tokens are placed, and only the placement
            knows where: call `Placement.apply`.
        """
        return permuted(self._check_arrays("apply", arrays), self._permutation, self.order)

    def restore(self, arrays: PyTree[Shaped[Any, "B T ..."]]) -> PyTree[Shaped[Any, "B T ..."]]:
        """Puts arrays and masks in this order back into packed order; the inverse of `apply`."""
        order = self._permutation
        order = None if order is None else np.argsort(order)
        return permuted(self._check_arrays("restore", arrays, self.order), order, PACKED)

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
        return self._replaced(segment_ids=rows, positions=positions, mask=mask, plans=plans)

    @property
    def _permutation(self) -> Any:
        if self.order == PLACED:
            raise ValueError(
                "Documents: tokens are placed, and only the placement knows where. Call "
                "Placement.apply or Placement.restore."
            )
        if self.order == PACKED:
            return None
        return zigzag_permutation(self.columns, self.order.num_ranks)

    def _check_packed(self, name: str) -> None:
        shape = np.shape(self.segment_ids)
        if self.order != PACKED or shape[1:] != (self.columns,):
            raise ValueError(
                f"Documents.{name}: tokens are in {self.order}, {list(shape)} of {self.columns} "
                "columns. Call it on documents of whole batch rows in packed order."
            )

    def _check_arrays(self, name: str, arrays: Any, order: Order = PACKED) -> Any:
        shape = (*np.shape(self.segment_ids)[:1], self.columns)
        for x in jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, Mask | Documents)):
            if isinstance(x, Documents):
                raise TypeError(
                    f"Documents.{name}: got Documents among the arrays. Pass arrays and masks "
                    "alone: these are the documents in their order."
                )
            if isinstance(x, Mask):
                check_mask_order(f"Documents.{name}", x, order)
        for x in jax.tree.leaves(arrays):
            if np.shape(x)[:2] != shape:
                raise ValueError(
                    f"Documents.{name}: an array has shape {list(np.shape(x))} but the documents "
                    f"are [{shape[0]}, {shape[1]}, ...]. Pass arrays of whole batch rows."
                )
        return arrays

    def _replaced(self, **changes: Any) -> Documents:
        fields = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return self._of(**{**fields, **changes})


def permuted(tree: Any, columns: Any, order: Order) -> Any:
    """Returns arrays [B, T, ...] and masks with these columns, in this order; None: all columns."""

    def one(x: Any) -> Any:
        if isinstance(x, Mask):
            moved = jax.tree.map(take, x)
            return x.reordered(moved, order) if isinstance(x, ArrayMask) else x
        return take(x)

    def take(x: Any) -> Any:
        return x if columns is None else x[:, columns]

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Mask))


def _counted(segment_ids: Integer[HostOrDevice, "B T"]) -> Integer[HostOrDevice, "B T"]:
    """Returns the position of each token in its run of one id; 0 for padding."""
    column = np.arange(segment_ids.shape[1], dtype=np.int32)[None]
    if not isinstance(segment_ids, np.ndarray):
        starts = document_starts(segment_ids, None)
        return jnp.where(starts >= 0, column - starts, 0)
    begins = np.ones(segment_ids.shape, bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    return np.where(segment_ids > 0, column - starts, 0).astype(np.int32)


# ---- The documents of a call: `documents=`, or its short form `segment_ids=` and `positions=`.


class GivenDocuments(NamedTuple):
    """What a call says about its tokens, read.

    Attributes:
      packed: mask, segment ids and positions; with a plan, its mask may be a `MaskKind`.
      order: of the tokens.
      plan: for the mask, or None.
      columns: tokens of a whole batch row; None: not known.
    """

    packed: PackedMask
    order: Order = PACKED
    plan: Any = None
    columns: int | None = None

    def without_plan(self, op: str) -> GivenDocuments:
        """Returns the same without the plan, whose mask needs to be known."""
        if isinstance(self.packed.mask, MaskKind):
            raise ValueError(
                f"{op}: the plan of the documents is for {self.packed.mask}, whose arrays it does "
                "not have. Pass the mask as mask=."
            )
        return self._replace(plan=None)

    def check_ranks(self, op: str, num_tokens: int, num_ranks: int, ranks: str) -> None:
        """Requires the ranks of this order, and whole batch rows.

        Args:
          op: for messages.
          num_tokens: of the call, on all ranks.
          num_ranks: that share the sequence.
          ranks: the same in words.
        """
        if self.order.num_ranks not in (0, num_ranks):
            raise ValueError(
                f"{op}: the documents are in {self.order}, but {ranks}. Pass "
                f"documents.zigzag({num_ranks}) of packed ones, and tokens in that order."
            )
        if self.columns not in (None, num_tokens):
            raise ValueError(
                f"{op}: the documents are of {self.columns} columns, but the ranks hold "
                f"{num_tokens}. Pass the documents of these tokens: whole ones with global arrays, "
                "and inside jax.shard_map through in_specs=documents.specs(axis_name)."
            )


def read_given(
    op: str,
    documents: Any,
    segment_ids: Any,
    positions: Any,
    mask: Any,
    *,
    follows_plan: bool = True,
) -> GivenDocuments:
    """Reads the documents and the mask of a call, and selects its plan.

    Args:
      op: for messages.
      documents, segment_ids, positions, mask: of the call.
      follows_plan: whether the call follows a plan of packed documents; others ignore it, but not
        its mask.
    """
    if documents is None:
        read = read_mask(op, mask)
        check_mask_order(op, read, PACKED)
        return GivenDocuments(PackedMask(read, segment_ids, positions))
    _check(op, documents, segment_ids, positions)
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
    check_mask_order(op, read, order)
    packed = _packed(read, documents)
    given = GivenDocuments(packed, order, plan, documents.columns)
    return given if follows_plan or order == PLACED else given.without_plan(op)


def read_given_tokens(op: str, documents: Any, segment_ids: Any, positions: Any) -> GivenDocuments:
    """Reads the documents of a call without a mask; of a placement, the plan of any mask."""
    if documents is None:
        return GivenDocuments(PackedMask(None, segment_ids, positions))
    _check(op, documents, segment_ids, positions)
    plan = documents.plan if documents.order == PLACED else None
    return GivenDocuments(_packed(None, documents), documents.order, plan, documents.columns)


def _packed(mask: Any, documents: Documents) -> PackedMask:
    # Counted positions start again in each piece of a document, and would hide that there are two.
    positions = None if documents.counted else documents.positions
    return PackedMask(mask, documents.segment_ids, positions)


def _check(op: str, documents: Any, segment_ids: Any, positions: Any) -> None:
    check_type(op, "documents", documents, Documents, "Pass Documents(segment_ids, positions).")
    if segment_ids is not None or positions is not None:
        raise TypeError(
            f"{op}: got documents, and segment_ids or positions, which they have. Omit the latter."
        )


def read_sequences(op: str, segment_ids, positions, *, layout: str, num_ranks: int):
    """`read_documents` of whole sequences, in a layout whose ranks divide the tokens."""
    known = next((x for x in (segment_ids, positions) if x is not None), None)
    order = None
    if layout == "zigzag" and known is not None:
        order = zigzag_permutation(known.shape[1], num_ranks, inverse=True)
    return read_documents(op, segment_ids, positions, order=order)


def check_known_mask(op: str, packed: PackedMask, *, layout: str, num_ranks: int) -> None:
    """Requires a mask of these tokens, if all arrays of whole sequences are known on the host."""
    leaves = jax.tree.leaves(packed)
    if not packed.mask.has_arrays or not all(map(is_on_host, leaves)):
        return
    columns = slice(None)
    if layout == "zigzag":
        columns = zigzag_permutation(leaves[0].shape[1], num_ranks, inverse=True)
    mask, segment_ids, positions = jax.tree.map(lambda x: np.asarray(x)[:, columns], packed)
    if segment_ids is None:
        segment_ids = np.ones(leaves[0].shape, np.int32)
    check_document_mask(op, mask, from_segment_ids(op, segment_ids, positions))


def check_document_mask(op: str, mask: Mask, documents: DocumentTable) -> None:
    """Requires arrays of a mask that are those of the tokens of these documents."""
    if mask.has_arrays:
        check_mask_rules(op, mask, *documents.edges())
