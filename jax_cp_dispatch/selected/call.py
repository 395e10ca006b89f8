"""A call with an index over a mesh axis: its keywords, and how it runs as attention does."""

from __future__ import annotations

from collections.abc import Sequence as Names
from typing import Any, Required, TypedDict

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Integer

from jax_cp_dispatch._arguments import HostOrDevice
from jax_cp_dispatch._ranks.communicator import AxisName
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention import Algorithm, Auto
from jax_cp_dispatch.attention.choose import read_algorithm
from jax_cp_dispatch.attention.context_parallel import run_call
from jax_cp_dispatch.attention.operands import Call, LocalWork, Operands
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.documents.documents import read_given, without_plan
from jax_cp_dispatch.documents.segment_ids import check_documents
from jax_cp_dispatch.global_call import find_axes
from jax_cp_dispatch.masks import Mask, StaticMask
from jax_cp_dispatch.masks.mask import PACKED
from jax_cp_dispatch.planning.plan import check_plan


class IndexOptions(TypedDict, total=False):
    """Keywords of every call with an index, as its caller passed them; see `select_keys`."""

    axis_name: Required[AxisName]
    algorithm: Required[Algorithm | Auto | str]
    mesh: Mesh | AbstractMesh | None
    mask: Mask | str | None
    documents: Documents | None
    segment_ids: Integer[HostOrDevice, "B T"] | None
    positions: Integer[HostOrDevice, "B T"] | None
    batch_axis: str | Names[str] | None
    implementation: str | None
    deadline: float | None
    num_comm_sm: int | None


def read_index(
    op: str, q_index: Any, k_index: Any, weights: Any, relu: Any
) -> tuple[Any, Any, Any]:
    """Returns the arrays of an index with their groups; 1 if it has none.

    q_index `[B, T, G, J, d]`, k_index `[B, T, G or 1, d]` and weights `[B, T, G, J]`, or None.
    """
    if not isinstance(relu, bool):
        raise TypeError(f"{op}: relu is {relu!r}; it needs to be a bool. Pass True or False.")
    groups = q_index.shape[2:-2]
    if k_index.shape[2:-1] not in ((), groups) or 0 in q_index.shape[2:]:
        raise ValueError(
            f"{op}: q_index is {list(q_index.shape)} and k_index {list(k_index.shape)}. Pass heads "
            "that are not empty, and one key for each token, or one for each token and group."
        )
    if q_index.ndim == 4:
        q_index = q_index[:, :, None]
        weights = None if weights is None else weights[:, :, None]
    k_index = k_index[:, :, None] if k_index.ndim == 3 else k_index
    return q_index, k_index, weights


def run_index(
    local: LocalWork,
    operands: Operands,
    options: IndexOptions,
    expansion: Any = None,
    head_axis: Any = (),
) -> Array:
    """Returns `[B, T, ...]`, what `local` computes of the rows of each rank.

    Args:
      local: see `Call`.
      operands: q is a tuple of arrays, the first of which has the groups of heads on axis 2.
      options: the keywords of the caller.
      expansion: of the latent rows among the keys.
      head_axis: mesh axes over which the groups are sharded.
    """
    op, first = local.op, operands.q[0]
    names = "mesh", "implementation", "deadline", "num_comm_sm"
    exchange = read_options(op, options["axis_name"], *map(options.get, names))
    chosen = read_algorithm(op, options["algorithm"])
    given = (options.get(x) for x in ("documents", "segment_ids", "positions", "mask"))
    documents = read_given(op, *given, follows_plan=chosen.follows_plan)
    if not isinstance(documents.mask, StaticMask):
        raise ValueError(
            f"{op}: mask is {documents.mask}; an index needs a mask of numbers that sees one range "
            "of keys. Pass mask='causal', or SlidingWindow, Chunked, BlockCausal or 'full'."
        )
    if documents.plan is not None:
        check_plan(op, documents.plan)
        if documents.order == PACKED and documents.plan.is_placed:
            documents = without_plan(op, documents)
    axes = find_axes(
        *(exchange, first, *jax.tree.leaves((operands.q[1:], operands.k))),
        batch_axis=options.get("batch_axis"),
        head_axis=head_axis,
        others=(operands, documents),
        plan=documents.plan,
    )
    shape = first.shape[:2]
    check_documents(op, documents.segment_ids, documents.positions, shape, "the index has B, T =")
    sizes = tuple(axes.mesh.shape[name] for name in axes.ranks)
    num_groups = first.shape[2] // axes.num_devices(axes.heads)
    call = Call(exchange, sizes, num_groups, documents.order, expansion=expansion, local=local)
    return run_call(chosen, call, operands, documents, axes).out
