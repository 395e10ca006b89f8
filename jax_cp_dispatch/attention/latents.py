"""Latent rows, from which each rank computes keys and values where they arrive: `expand=`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from jax_cp_dispatch._arguments import check_array
from jax_cp_dispatch._arrays import sum_dtype
from jax_cp_dispatch.attention.local.check_operands import check_arrays
from jax_cp_dispatch.attention.operands import Operands, is_float
from jax_cp_dispatch.global_call.kv_heads import OwnHeads, kv_copies

Rows = Sequence[Shaped[Array, "R _"]]
KeysAndValues = tuple[Float[Array, "R K H"], Float[Array, "R K Hv"]]
Shape = jax.ShapeDtypeStruct
# Of latent rows that no query reads: `expand` of zeros may be NaN, and 0 times it in a gradient.
UNUSED_ROW = 1


@dataclasses.dataclass(frozen=True)
class Expansion:
    """How rows become keys and values; static.

    Attributes:
      function: `(weights, rows) -> (k, v)`.
      weights, rows: the structures of its arguments.
      features: the shape of one row, for each array of rows.
      specs: how each array of weights is sharded over the heads.
      own_heads: those of the device, of the heads that several expand alike: each of those before.
    """

    function: Callable[..., Any]
    weights: Any
    rows: Any
    features: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    own_heads: tuple[OwnHeads, ...] = ()

    def __call__(self, weights: Sequence[Array], rows: Rows) -> Any:
        """Returns the keys and values of rows, `[R, K, H]` and `[R, K, Hv]`."""
        shaped = [x.reshape(-1, *shape) for x, shape in zip(rows, self.features, strict=True)]
        made = self.function(self.weights.unflatten(weights), self.rows.unflatten(shaped))
        for own in self.own_heads:
            made = tuple(map(own.of, made))
        return made

    def sharing(self, names: tuple[str, ...], num_heads: int, operands: Operands) -> Expansion:
        """Returns the expansion of ranks that share the query heads over these axes.

        Weights that are sharded over the first of them give a part of the KV heads. Over the
        others, each rank keeps its own.

        Args:
          names: the axes, major axis first; manual here.
          num_heads: query heads that they share.
          operands: of this rank.
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


def read_operands(
    op: str, q: Any, k: Any, v: Any, sink: Any, expanding: tuple[Any, Any, Any]
) -> tuple[Operands, Expansion | None]:
    """Checks the arrays of a call with `expand`, `weights` and `weight_specs`."""
    if expanding[0] is None:
        if v is None:
            raise TypeError(f"{op}: v is missing. Pass k and v, or latent rows with expand=.")
        if any(x is not None for x in expanding):
            raise TypeError(f"{op}: got weights or weight_specs without expand. Pass it too.")
        check_arrays(op, q=q, k=k, v=v)
        return Operands(q, k, v, sink), None
    if v is not None:
        raise TypeError(f"{op}: got v with expand. Pass latent rows in place of k, and no v.")
    operands, expansion = _read_latents(op, q, k, *expanding)
    return operands._replace(sink=sink), expansion


def _read_latents(
    op: str, q: Any, latents: Any, expand: Any, weights: Any, weight_specs: Any
) -> tuple[Operands, Expansion]:
    """Checks latent rows and their expansion, for queries `[B, T, N, H]`.

    Rows become `[B, T, 1, F]` each: as keys of one head, for whatever moves or orders rows.
    """
    if not callable(expand):
        raise TypeError(
            f"{op}: expand is of type {type(expand).__name__}. Pass a function (weights, rows) -> "
            "(k, v)."
        )
    check_array(op, "q", q)
    if q.ndim != 4:
        raise ValueError(f"{op}: q has shape {list(q.shape)}; it needs [B, T, heads, features].")
    B, T = q.shape[:2]
    rows, rows_tree = jax.tree.flatten(latents)
    for x in rows:
        check_array(op, "an array of latents", x)
        if x.shape[:2] != (B, T):
            raise ValueError(
                f"{op}: an array of latents has shape {list(x.shape)}, but q has B, T = {(B, T)}. "
                "Pass rows [B, T, ...] of the same tokens."
            )
    held, weights_tree = jax.tree.flatten(weights)
    specs = _specs(op, weights, weight_specs)
    expansion = Expansion(expand, weights_tree, rows_tree, tuple(x.shape[2:] for x in rows), specs)
    one_head = tuple(x.reshape(B, T, 1, math.prod(x.shape[2:])) for x in rows)
    operands = Operands(q, one_head, None, weights=tuple(held))
    _check_expanded(op, q, expansion, operands)
    return operands, expansion


def _specs(op: str, weights: Any, weight_specs: Any) -> tuple[P, ...]:
    is_spec = lambda x: isinstance(x, P)
    if weight_specs is None:
        return (P(),) * len(jax.tree.leaves(weights))
    if not all(is_spec(x) for x in jax.tree.leaves(weight_specs, is_leaf=is_spec)):
        raise TypeError(f"{op}: weight_specs needs to be a pytree of PartitionSpec.")
    try:
        spread = lambda spec, part: [spec] * len(jax.tree.leaves(part))
        specs = jax.tree.map(spread, weight_specs, weights, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"{op}: weight_specs does not match weights: {error}. Pass one PartitionSpec for each "
            "array of weights, or for each part of the pytree."
        ) from error
    return tuple(jax.tree.leaves(specs, is_leaf=is_spec))


def _check_expanded(op: str, q: Any, expansion: Expansion, operands: Operands) -> None:
    """Requires keys and values of the queries, one for each row."""
    num_rows, (N, H) = q.shape[0] * q.shape[1], q.shape[2:]
    found = _traced(op, expansion, operands)
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


def _traced(op: str, expansion: Expansion, operands: Operands) -> Any:
    """Returns `expanded_shapes`; requires that `expand` reads no traced array but its arguments."""
    program, found = jax.make_jaxpr(expansion, return_shape=True)(*_arguments(operands))
    for x in program.consts:
        if isinstance(x, Tracer):
            raise ValueError(
                f"{op}: expand closes over a traced array of shape {list(x.shape)}. Pass it as "
                "weights=, and read it from the first argument of expand."
            )
    return found


def _arguments(operands: Operands) -> tuple[list[Any], list[Any]]:
    """Returns shapes and dtypes of weights and rows."""
    B, T = operands.q.shape[:2]
    weights = [Shape(x.shape, x.dtype) for x in operands.weights]
    return weights, [Shape((B * T, x.shape[3]), x.dtype) for x in operands.k]


def expanded_shapes(expansion: Expansion, operands: Operands) -> Any:
    """Returns shapes and dtypes of what `expand` returns."""
    return jax.eval_shape(expansion, *_arguments(operands))


def key_shapes(expansion: Expansion | None, operands: Operands) -> tuple[Any, Any]:
    """Returns keys and values `[B, T, K, _]`, or their shapes and dtypes if they are expanded."""
    if expansion is None:
        return operands.k, operands.v
    B, T = operands.q.shape[:2]
    k, v = expanded_shapes(expansion, operands)
    return Shape((B, T, *k.shape[1:]), k.dtype), Shape((B, T, *v.shape[1:]), v.dtype)
