"""What an algorithm takes and returns: the `Call`, `Operands` (keys or latents), `Outputs`."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from jax_cp_dispatch._arguments import HostOrDevice, check_positive
from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch._door import check_annotated
from jax_cp_dispatch._ranks.options import CollectiveOptions, vary_alike
from jax_cp_dispatch.attention.local.passes import forbid_second_derivative, in_reverse_only
from jax_cp_dispatch.attention.local.ranges import SoftmaxGradients, check_heads
from jax_cp_dispatch.documents.segment_ids import check_documents
from jax_cp_dispatch.global_call import MeshAxes, OwnHeads, kv_copies
from jax_cp_dispatch.masks.mask import PACKED, Order


class Operands(NamedTuple):
    # Queries, keys and values. With an expansion, k are the arrays of latent rows, `[B, T, 1, F]`
    # each, and v is None.
    q: Any
    k: Any
    v: Any
    sink: Any = None  # a logit `[N]` for each query head, or None
    weights: Any = None  # of the expansion, or None
    picks: Any = None  # of `masks.Selected`, `[B, T, G, k]`, or None

    @property
    def moved(self) -> tuple[Any, ...]:
        """What moves to the queries: keys and values, or latent rows."""
        return self.k if self.v is None else (self.k, self.v)

    def varying(self, exchange: CollectiveOptions) -> Operands:
        """Returns arrays that vary over the ranks and are differentiable in reverse mode only.

        A sink and weights are the same on all ranks: their gradients are summed over them, in
        float32, and those of latent rows over ranks of other heads.
        """
        to_sums = lambda x: x.astype(sum_dtype(x.dtype)) if is_float(x) else x
        widen = lambda tree: jax.tree.map(to_sums, tree)
        wide = self._replace(sink=widen(self.sink), weights=widen(self.weights))
        if self.v is None:
            wide = wide._replace(k=widen(self.k))
        wide = jax.tree.map(lambda x: in_reverse_only(exchange.op, x), wide)
        varying: Operands = vary_alike(wide, also=exchange.axis_names)
        narrow = lambda x, like: x.astype(like.dtype)
        k = jax.tree.map(narrow, varying.k, self.k)
        return varying._replace(k=k, weights=jax.tree.map(narrow, varying.weights, self.weights))


class Outputs(NamedTuple):
    """What attention returns; None for what the caller did not ask for."""

    out: Any  # `[B, T, N, Hv]`
    lse: Any = None  # `[B, T, N]`; -inf for rows without keys
    max_logits: Any = None  # `[N]`, of all ranks


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def rounded(gradients: Any, arrays: Any) -> tuple[Any, ...]:
    """Returns the gradients of arrays in their dtypes; None for those without derivative."""
    pairs = zip(gradients, arrays, strict=True)
    return tuple(None if x is None else x.astype(like.dtype) for x, like in pairs)


def softmax_gradients(op: str, out: Any, lse: Any, cotangents: Outputs) -> SoftmaxGradients:
    """Returns the whole softmax, lse `[B, N, T]`, and its cotangents, those of `Outputs`."""
    dout, dlse, _ = forbid_second_derivative(op, cotangents)
    return SoftmaxGradients(out, lse, dout, None if dlse is None else jnp.swapaxes(dlse, 1, 2))


def check_operand_rows(op: str, operands: Operands, segment_ids: Any, positions: Any) -> None:
    """Requires that arrays of one rank, or of all ranks, match."""
    q, k, v, *_ = operands
    if v is not None:  # not latent rows, which `read_operands` checks
        check_heads(op, q, k, v)
    check_documents(op, segment_ids, positions, q.shape[:2], "q has B, T =")


# ---- Latent rows, from which each rank computes keys and values where they arrive: `expand=`.

Rows = Sequence[Shaped[Array, "R _"]]
KeysAndValues = tuple[Float[Array, "R K H"], Float[Array, "R K Hv"]]
Shape = jax.ShapeDtypeStruct
# Latent rows that no query reads have this value: `expand` of zeros may be NaN, as is 0 times NaN.
UNUSED_ROW = 1


@dataclasses.dataclass(frozen=True)
class Expansion:
    """How rows become keys and values; static."""

    function: Callable[..., Any]  # `(weights, rows) -> (k, v)`
    # The structures of its arguments
    weights: Any
    rows: Any
    features: tuple[tuple[int, ...], ...]  # the shape of one row, for each array of rows
    specs: tuple[P, ...]  # how each array of weights is sharded over the heads
    # Those of the device, of the heads that several expand alike: each of those before
    own_heads: tuple[OwnHeads, ...] = ()
    # Of values that are the first features of the keys; 0: `function` makes them
    value_size: int = 0

    def __call__(self, weights: Sequence[Array], rows: Rows) -> Any:
        """Returns the keys and values of rows, `[R, K, H]` and `[R, K, Hv]`."""
        shaped = [x.reshape(-1, *shape) for x, shape in zip(rows, self.features, strict=True)]
        made = self.function(self.weights.unflatten(weights), self.rows.unflatten(shaped))
        for own in self.own_heads:
            made = tuple(map(own.of, made))
        return made

    def sharing(self, names: tuple[str, ...], num_heads: int, operands: Operands) -> Expansion:
        """Returns the expansion of ranks that share `num_heads` query heads over these manual axes.

        Weights that are sharded over the first of them give a part of the KV heads. Over the
        others, each rank keeps its own.
        """
        named = {x for spec in self.specs for x in jax.tree.leaves(tuple(spec))}
        kept = {x for own in self.own_heads for x in own.axes}
        sharded = tuple(x for x in names if x in named)
        others = tuple(x for x in names if x not in named | kept)
        if not others:
            return self
        num_ranks, K = jax.lax.axis_size(others), key_shapes(self, operands)[0].shape[2]
        copies = kv_copies(num_heads // jax.lax.axis_size(sharded), K, num_ranks)
        own = OwnHeads(others, copies, K * copies // num_ranks)
        return dataclasses.replace(self, own_heads=(*self.own_heads, own))

    def with_transpose(
        self, weights: Sequence[Array], rows: Rows
    ) -> tuple[KeysAndValues, Callable[[Array, Array], tuple[Any, Any]]]:
        """Also returns a function from gradients of keys and values to those of weights and rows.

        These have the dtypes of sums, and None for arrays of integers, which have no derivative.
        """
        leaves, tree = jax.tree.flatten((tuple(weights), tuple(rows)))
        floats = [x for x in leaves if is_float(x)]

        def of_floats(floats):
            moving = iter(floats)
            return self(*tree.unflatten([next(moving) if is_float(x) else x for x in leaves]))

        (k, v), transpose = jax.vjp(of_floats, floats)

        def gradients(dk, dv):
            (moving,) = transpose((dk.astype(k.dtype), dv.astype(v.dtype)))
            moving = iter([x.astype(sum_dtype(x.dtype)) for x in moving])
            return tree.unflatten([next(moving) if is_float(x) else None for x in leaves])

        return (k, v), gradients


OP = "context_parallel_attention"


# The arrays of a call: keys and values, or latent rows.


class _Keys(NamedTuple):
    q: Float[HostOrDevice, "B T N H"]
    k: Float[HostOrDevice, "B T K H"]
    v: Float[HostOrDevice, "B T K Hv"] | None


class _Latents(NamedTuple):
    q: Float[HostOrDevice, "B T N H"]
    k: PyTree[Shaped[HostOrDevice, "B T ..."]]


@dataclasses.dataclass(frozen=True)
class _FirstFeatures:
    """The `expand` of keys whose first features are the values; equal ones share a program."""

    size: int

    def __call__(self, weights: Any, rows: Float[Array, "R K H"]) -> KeysAndValues:
        return rows, rows[..., : self.size]


def _as_one_head(k: Any) -> Any:
    """Returns keys `[B, T, K, H]` as `[B, T, 1, K H]`; explicit axes may shard them."""
    shape, sharding = (*k.shape[:2], 1, math.prod(k.shape[2:])), jax.typeof(k).sharding
    if all(entry is None for entry in sharding.spec):
        return k.reshape(shape)
    whole = NamedSharding(sharding.mesh, P(*sharding.spec[:2], None, None))
    return jax.lax.reshape(jax.sharding.reshard(k, whole), shape, out_sharding=whole)


def read_operands(
    q: Any,
    k: Any,
    v: Any,
    sink: Any,
    expanding: tuple[Any, Any, Any],
    value_size: Any = None,
    op: str = OP,
) -> tuple[Operands, Expansion | None]:
    """Checks the arrays of a call with `expand`, `weights` and `weight_specs`, or `value_size`.

    Latent rows become keys of one head, `[B, T, 1, F]` each. Keys that contain the values are such
    rows.
    """
    expand, weights, weight_specs = expanding
    if expand is None and (weights is not None or weight_specs is not None):
        raise TypeError(f"{op}: got weights or weight_specs without expand. Pass it too.")
    if value_size is not None:
        if v is not None or expand is not None:
            raise TypeError(
                f"{op}: got value_size with v or expand. Pass it with k alone, whose first "
                "features are the values."
            )
        check_annotated(op, _Keys, {"q": q, "k": k})
        check_positive(op, value_size=value_size)
        if value_size > k.shape[3]:
            raise ValueError(
                f"{op}: value_size is {value_size} but the keys have {k.shape[3]} features, of "
                "which the first are the values. Pass at most that."
            )
        check_heads(op, q, k, k)
        rows, features = _as_one_head(k), k.shape[2:]
        trees = jax.tree.structure(None), jax.tree.structure(0)
        expansion = Expansion(_FirstFeatures(int(value_size)), *trees, (features,), ())
        operands = Operands(q, (rows,), None, sink, ())
        return operands, dataclasses.replace(expansion, value_size=int(value_size))
    if expand is None:
        if v is None:
            raise TypeError(
                f"{op}: v is missing. Pass k and v, latent rows with expand=, or value_size= if "
                "the values are the first features of the keys."
            )
        step = "For queries and keys of different lengths, use local_attention on one device."
        check_annotated(op, _Keys, {"q": q, "k": k, "v": v}, {"k": step})
        return Operands(q, k, v, sink), None
    if v is not None:
        raise TypeError(f"{op}: got v with expand. Pass latent rows in place of k, and no v.")
    step = "Pass rows [B, T, ...] of the same tokens."
    check_annotated(op, _Latents, {"q": q, "k": k}, {"k": step})
    if not callable(expand):
        raise TypeError(
            f"{op}: expand is of type {type(expand).__name__}. Pass a function (weights, rows) -> "
            "(k, v)."
        )
    rows, rows_tree = jax.tree.flatten(k)
    held, weights_tree = jax.tree.flatten(weights)
    specs = _specs(op, weights, weight_specs)
    expansion = Expansion(expand, weights_tree, rows_tree, tuple(x.shape[2:] for x in rows), specs)
    one_head = tuple(x.reshape(*x.shape[:2], 1, math.prod(x.shape[2:])) for x in rows)
    operands = Operands(q, one_head, None, sink, tuple(held))
    _check_expanded(op, expansion, operands)
    return operands, expansion


def _specs(op: str, weights: Any, weight_specs: Any) -> tuple[P, ...]:
    is_spec = lambda x: isinstance(x, P)
    specs = P() if weight_specs is None else weight_specs
    if not all(map(is_spec, jax.tree.leaves(specs, is_leaf=is_spec))):
        raise TypeError(f"{op}: weight_specs needs to be a pytree of PartitionSpec.")
    try:
        spread = lambda spec, part: [spec] * len(jax.tree.leaves(part))
        specs = jax.tree.map(spread, specs, weights, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"{op}: weight_specs does not match weights: {error}. Pass one PartitionSpec for each "
            "array of weights, or for each part of the pytree."
        ) from error
    return tuple(jax.tree.leaves(specs, is_leaf=is_spec))


def _check_expanded(op: str, expansion: Expansion, operands: Operands) -> None:
    """Requires keys and values of the queries, one for each row, and no traced constants."""
    q = operands.q
    num_rows, (N, H) = q.shape[0] * q.shape[1], q.shape[2:]
    program, found = jax.make_jaxpr(expansion, return_shape=True)(*_arguments(operands))
    for x in program.consts:
        if isinstance(x, Tracer):
            raise ValueError(
                f"{op}: expand closes over a traced array of shape {list(x.shape)}. Pass it as "
                "weights=, and read it from the first argument of expand."
            )
    needs = f"(k, v), [R, K, {H}] and [R, K, Hv] in {q.dtype}, of R = {num_rows} rows"
    if not (isinstance(found, tuple | list) and len(found) == 2):
        raise TypeError(
            f"{op}: expand returned {type(found).__name__}; it needs to return {needs}."
        )
    k, v = found
    described = (
        f"{op}: expand returned k and v of shapes {k.shape} and {v.shape} in {k.dtype} and "
        f"{v.dtype}; it needs to return {needs}"
    )
    is_right = k.ndim == v.ndim == 3 and k.shape[:2] == v.shape[:2] and k.shape[0] == num_rows
    if not is_right or k.shape[2] != H or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(f"{described}. Each row is expanded alone.")
    if not k.shape[1] or N % k.shape[1]:
        raise ValueError(f"{described}, and K needs to divide the {N} query heads.")


def _arguments(operands: Operands) -> tuple[list[Any], list[Any]]:
    B, T = operands.q.shape[:2]
    weights = [Shape(x.shape, x.dtype) for x in operands.weights]
    return weights, [Shape((B * T, x.shape[3]), x.dtype) for x in operands.k]


def key_shapes(expansion: Expansion | None, operands: Operands) -> tuple[Any, Any]:
    """Returns keys and values `[B, T, K, _]`, or their shapes and dtypes if they are expanded."""
    if expansion is None:
        return operands.k, operands.v
    k, v = jax.eval_shape(expansion, *_arguments(operands))
    rows = operands.q.shape[:2]
    return Shape((*rows, *k.shape[1:]), k.dtype), Shape((*rows, *v.shape[1:]), v.dtype)


# ---- One call of attention over a mesh axis, made at its door.


class LocalWork(abc.ABC):
    """What a rank computes in place of attention; a frozen dataclass."""

    op: ClassVar[str]  # the function that was called

    @abc.abstractmethod
    def __call__(self, movement: Any, operands: Operands, gathered: Any) -> Outputs:
        """Moves rows to the ranks that read them, and back; see `exchange_once`."""

    @abc.abstractmethod
    def shape(self, operands: Operands) -> Any:
        """Returns shape and dtype of the output, of operands without tokens."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call without its arrays: checked, static, and passed whole to all that serve it."""

    exchange: CollectiveOptions  # the checked options of the exchanges, with the op and the axes
    axis_sizes: tuple[int, ...]  # devices of each axis that shares the sequence
    num_heads: int  # query heads of one device
    order: Order = PACKED  # of the tokens
    # See `context_parallel_attention`
    scale: float | None = None
    logit_soft_cap: float | None = None
    return_lse: bool = False
    return_max_logits: bool = False
    expansion: Expansion | None = None  # of latent rows, or None
    # Tokens of each key that a query has picked; 0: queries see all keys of the mask
    pick_block: int = 0
    # What a rank computes of its queries and all their keys; None: attention. With it, or with
    # picks, a rank needs all keys of its queries at once, and their places in documents.
    local: LocalWork | None = None
    # Whether ranks check that documents are in the order of the layout; not if that was checked on
    # the host
    checks_order: bool = True

    @property
    def op(self) -> str:
        return self.exchange.op

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def softmax(self) -> dict[str, Any]:
        names = ("scale", "logit_soft_cap", "return_max_logits")
        return {name: getattr(self, name) for name in names}


# ---- The KV heads that each device expands from latent rows, if the heads are sharded.


def check_specs(
    expansion: Expansion, weights: tuple[Any, ...], axes: MeshAxes, sharing: tuple[str, ...]
) -> None:
    """Requires weights sharded evenly over the axes of the heads, or the first of these.

    The axes of the sequence over which the algorithm shares heads, `sharing`, come after those of
    the mesh for heads.
    """
    all_heads = (*axes.heads, *sharing)
    axes = _with_shared_heads(expansion, axes, sharing)
    for spec, x in zip(expansion.specs, weights, strict=True):
        names = _names(spec)
        for name in names:
            if name not in axes.heads:
                step = "Pass it as head_axis, or remove it"
                if name in (*axes.sequence, *axes.batch):  # which cannot be head_axis
                    step = "Remove it"
                raise ValueError(
                    f"{OP}: weight_specs shard weights over axis {name!r}, but heads are sharded "
                    f"over {all_heads}. {step} from weight_specs; weights are gathered over "
                    "other axes."
                )
        if names != axes.heads[: len(names)]:
            raise ValueError(
                f"{OP}: weight_specs shard weights over {names}, but q is sharded by heads over "
                f"{axes.heads}, so a device would expand the heads of others. Shard weights over "
                "the same axes in the same order, or over the first of them."
            )
        if len(spec) > x.ndim:
            raise ValueError(
                f"{OP}: weight_specs has {spec} for weights of shape {list(x.shape)}. Pass at most "
                "one entry for each dimension."
            )
        for size, part in zip(x.shape, spec, strict=False):
            devices = axes.num_devices(_names(part))
            if size % devices:
                raise ValueError(
                    f"{OP}: weight_specs shard a dimension of {size} of weights over {devices} "
                    f"devices, which must divide it. Omit {part!r} there: each device then expands "
                    "all heads, and keeps those of its query heads."
                )


def with_own_heads(
    expansion: Expansion, operands: Operands, axes: MeshAxes, sharing: tuple[str, ...]
) -> Expansion:
    """Returns the expansion of each device, for its query heads, from whole weights and operands.

    Weights that are whole give all KV heads, of which each device keeps its own.
    """
    axes = _with_shared_heads(expansion, axes, sharing)
    shared = max((_names(spec) for spec in expansion.specs), key=len, default=())
    others = axes.heads[len(shared) :]
    N, K = operands.q.shape[2], key_shapes(expansion, operands)[0].shape[2]
    num_parts, devices = axes.num_devices(shared), axes.num_devices(others)

    def part(spec: Any, x: Any):
        entries = (*spec, *(None,) * (x.ndim - len(spec)))
        sizes = (n // axes.num_devices(_names(e)) for n, e in zip(x.shape, entries, strict=True))
        return Shape(tuple(sizes), x.dtype)

    parts = tuple(map(part, expansion.specs, operands.weights))
    found = [x.shape[2] for x in key_shapes(expansion, operands._replace(weights=parts))]
    if found != [K / num_parts] * 2:
        raise ValueError(
            f"{OP}: expand returns {found[0]} heads of k and {found[1]} of v from a device's part "
            f"of the weights, but that part needs to give {K / num_parts:g} of the KV heads of "
            "all. Pass weight_specs that shard the dimension of the heads, in all weights that "
            "have one."
        )
    K //= num_parts
    if devices == 1 or K == 1:
        return expansion
    copies = kv_copies(N // num_parts, K, devices)
    own = OwnHeads(others, copies, K * copies // devices)
    return dataclasses.replace(expansion, own_heads=(own,))


def _with_shared_heads(expansion: Expansion, axes: MeshAxes, sharing: tuple[str, ...]) -> MeshAxes:
    """Returns the axes of the heads, with those that also share them if weights name one."""
    named = {x for spec in expansion.specs for x in _names(spec)}
    also = sharing if named.intersection(sharing) else ()
    return dataclasses.replace(axes, heads=(*axes.heads, *also))


def _names(entries: Any) -> tuple[str, ...]:
    """Returns the axes of a `PartitionSpec`, or of one of its entries."""
    return tuple(jax.tree.leaves(tuple(entries) if isinstance(entries, P) else entries))
