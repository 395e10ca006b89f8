"""Calls of attention with any of its options, and the same by dense attention in NumPy."""

import contextlib
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from array_masks import ALL_KINDS, pack_for, random_mask
from attention_oracle import masked_attention, masked_attention_gradients
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from mask_oracle import batch_pairs, batch_visible
from on_mesh import AXIS, mesh_of
from packed_batches import pack

from jax_cp_dispatch import Documents, context_parallel_attention, place_tokens

LATENT = 5
# float32: relative to the largest entry or 1, and to it or 0.1: gradients of one key are 0.
TOLERANCE = {"float32": (3e-6, 1e-5), "bfloat16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call with random operands; every field but the first two has a default."""

    algorithm: Any  # a name, or an object
    num_ranks: int
    mask: Any = "causal"  # a mask, or a kind of masks of arrays
    order: str = "packed"  # or "zigzag", "placed"
    rows: int = 6  # of one rank
    more: int = 0  # tokens that the ranks do not divide
    documents: str = "segments"  # told by; or "none", "positions", "both"
    batch: int = 1
    heads: tuple[int, int] = (2, 2)  # of queries, of keys
    features: tuple[int, int] = (8, 4)  # of keys, of values
    dtype: str = "float32"
    scale: float | None = None
    logit_soft_cap: float | None = None
    sink: bool = False
    latents: bool = False  # in place of keys
    returns: tuple[str, ...] = ()  # "lse", "max_logits"
    implementation: str | None = None
    check_vma: bool | None = None  # inside `shard_map`; None: on global arrays
    traced: bool = True  # documents and mask are arguments of the program
    inner: int = 1  # ranks of the last of two axes; 1: there is one axis
    num_groups: int = 1  # of batch rows that are placed on ranks of their own

    def __str__(self):
        fields = (f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return " ".join(f"{name}={getattr(self, name)}" for name in fields)

    @property
    def axis_name(self):
        return AXIS if self.inner == 1 else ("outer", "inner")


def expand(weights, rows):
    """As in DeepSeek, latent rows are normalised, then projected: NaN for zeros; rounded once."""
    wide = rows.astype(jnp.float32)
    wide = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True))
    project = lambda w: jnp.einsum("rl,lnh->rnh", wide, w.astype(jnp.float32)).astype(rows.dtype)
    return project(weights["k"]), project(weights["v"])


def _normalise(rows):
    """Returns what `expand` projects, and its pull back."""
    size = np.sqrt(np.mean(rows**2, axis=-1, keepdims=True))
    normal = rows / size
    return normal, lambda g: (g - normal * np.mean(normal * g, axis=-1, keepdims=True)) / size


def _project(rows, weights):
    return tuple(np.einsum("btl,lnh->btnh", rows, weights[name]) for name in "kv")


def draw_documents(call, rng):
    """Returns segment ids and positions as dense attention reads them, and those of the call."""
    shape = call.batch, call.num_ranks * call.rows + call.more
    padding = 0.2 if call.documents in ("segments", "both") else 0.0
    longest = max(2, shape[1] // 2)
    ids, positions = pack_for(call.mask, rng, *shape, max_length=longest, padding=padding)
    if call.documents != "segments":
        ids = np.minimum(ids, 1)
    given = {"segment_ids": ids} if padding else {}
    if call.documents in ("positions", "both"):
        return ids, positions, given | {"positions": positions}
    return (np.ones_like(ids), None, {}) if not padding else (ids, None, given)


def draw_mask(call, rng, ids, positions):
    """Returns the mask in packed order, and the pairs that it admits."""
    if call.mask in ALL_KINDS:
        constructor, arrays, pairs = random_mask(call.mask, rng, ids)
        return constructor(*arrays), batch_visible(ids, pairs)
    return call.mask, batch_pairs(call.mask, ids, positions)


def draw_operands(call, rng, shape):
    """Returns the operands by name, and cotangents of out and lse."""
    (N, K), (H, Hv) = call.heads, call.features
    draw = lambda *size: rng.normal(size=size).astype(jnp.dtype(call.dtype))
    operands: dict[str, Any] = {"q": draw(*shape, N, H)}
    if call.latents:
        operands["keys"] = draw(*shape, LATENT)
        operands["weights"] = {"k": draw(LATENT, K, H) / 2, "v": draw(LATENT, K, Hv)}
    else:
        operands["keys"] = draw(*shape, K, H), draw(*shape, K, Hv)
    if call.sink:
        operands["sink"] = (2 * rng.normal(size=N)).astype(np.float32)
    return operands, (draw(*shape, N, Hv), rng.normal(size=(*shape, N)).astype(np.float32))


def dense(call, operands, allowed, cotangents):
    """Returns out, lse, the largest logits, and gradients of all operands, in float64."""
    operands, (g, dlse) = jax.tree.map(lambda x: np.asarray(x, np.float64), (operands, cotangents))
    q, keys, sink = operands["q"], operands["keys"], operands.get("sink")
    normal: Any = None
    pull_rows: Any = None
    if call.latents:
        normal, pull_rows = _normalise(keys)
        rounded = lambda x: x.astype(jnp.dtype(call.dtype)).astype(np.float64)  # by `expand`
        keys = map(rounded, _project(normal, operands["weights"]))
    k, v = keys
    options = {"scale": call.scale, "logit_soft_cap": call.logit_soft_cap}
    out, lse = masked_attention(q, k, v, allowed, **options)
    dlse = np.where(np.isfinite(lse) & ("lse" in call.returns), np.swapaxes(dlse, 1, 2), 0)
    share, gradients = np.ones(lse.shape), {}  # of keys, not of the sink
    if sink is not None:
        with np.errstate(over="ignore"):
            share = np.where(np.isfinite(lse), 1 / (1 + np.exp(sink[:, None] - lse)), 0)
        moved = np.swapaxes((g * out).sum(-1), 1, 2) * share * (1 - share)
        gradients["sink"] = (dlse * (1 - share) - moved).sum((0, 2))
        lse, dlse = np.where(share > 0, np.logaddexp(lse, sink[:, None]), lse), dlse * share + moved
    weight = np.swapaxes(share, 1, 2)[..., None]
    dq, dk, dv = masked_attention_gradients(q, k, v, allowed, g * weight, dlse, **options)
    gradients |= {"q": dq, "keys": (dk, dv)}
    if call.latents:
        w, of = operands["weights"], {"k": dk, "v": dv}
        gradients["keys"] = pull_rows(sum(np.einsum("btnh,lnh->btl", of[x], w[x]) for x in of))
        gradients["weights"] = {x: np.einsum("btl,btnh->lnh", normal, of[x]) for x in of}
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = (q.shape[3] ** -0.5 if call.scale is None else call.scale) * np.einsum(
        "btnh,bsnh->bnts", q, k
    )
    if call.logit_soft_cap is not None:
        logits = call.logit_soft_cap * np.tanh(logits / call.logit_soft_cap)
    largest = np.where(allowed[:, None], logits, -np.inf).max((0, 2, 3))
    return out * weight, np.swapaxes(lse, 1, 2), largest, gradients


def attend(call, operands, given, mask, **where) -> Any:
    """Returns a tuple of what the call returns."""
    keys, latents = operands["keys"], {}
    if call.latents:
        keys, latents = (keys,), {"expand": expand, "weights": operands["weights"]}
    results = context_parallel_attention(
        operands["q"], *keys, axis_name=call.axis_name, algorithm=call.algorithm, mask=mask,
        sink=operands.get("sink"), scale=call.scale, logit_soft_cap=call.logit_soft_cap,
        implementation=call.implementation, return_lse="lse" in call.returns,
        return_max_logits="max_logits" in call.returns, **given, **latents, **where,
    )  # fmt: skip
    return results if isinstance(results, tuple) else (results,)


def program(call, mesh, given, mask, **where: Any) -> Any:
    """Returns `(operands, cotangents, given, mask) -> (results, gradients)`, jitted."""
    rows = P(None, call.axis_name)
    of_arrays = call.mask in ALL_KINDS

    def run(operands, given, mask):
        mask = mask if of_arrays else call.mask
        if call.check_vma is None:
            whole = {"mesh": mesh, "batch_axis": (), "head_axis": ()}
            return attend(call, operands, given, mask, **whole | where)
        specs = {
            name: x.specs(call.axis_name) if name == "documents" else rows
            for name, x in given.items()
        }
        split = {"weights": where.get("weight_specs", P()), "sink": P()}
        split = {name: split.get(name, rows) for name in operands}
        of_each = {"max_logits": P(), "lse": rows}
        mapped = jax.shard_map(
            lambda operands, given, *masks: attend(
                call, operands, given, *(masks or (mask,)), **where
            ),
            mesh=mesh, check_vma=call.check_vma,
            in_specs=(split, specs, *([rows] if of_arrays else [])),
            out_specs=(rows, *(of_each[x] for x in ("lse", "max_logits") if x in call.returns)),
        )  # fmt: skip
        return mapped(operands, given, *([mask] if of_arrays else []))

    @jax.jit
    def both(operands, cotangents, *traced):
        results, pull = jax.vjp(lambda x: run(x, *(traced or (given, mask))), operands)
        g, dlse = cotangents
        of_results = [g, *(jnp.zeros_like(x) for x in results[1:])]
        if "lse" in call.returns:
            of_results[1] = jnp.where(jnp.isfinite(results[1]), dlse, 0)
        return results, pull(jax.tree.map(sharded_alike, tuple(of_results), results))[0]

    return both


def sharded_alike(x, result):
    """Returns `x`, sharded over the explicit axes of the result."""
    sharding = jax.typeof(result).sharding
    is_explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(x, sharding) if is_explicit else x


def allowed_error(dtype, largest):
    allowed = TOLERANCE[dtype]
    if isinstance(allowed, tuple):
        return min(allowed[0] * max(largest, 1), allowed[1] * max(largest, 0.1))
    return allowed * max(largest, 0.1)


def errors(call, got, want):
    """Returns the error of each array, as a part of what is allowed."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    found = {}
    for (path, y), x in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        name, x = jax.tree_util.keystr(path), np.asarray(x, np.float64)
        assert x.shape == y.shape and np.array_equal(np.isfinite(x), np.isfinite(y)), name
        finite = np.isfinite(y)
        difference = np.abs(x[finite] - y[finite]).max(initial=0)
        allowed = allowed_error(call.dtype, np.abs(y[finite]).max(initial=0))
        # Algorithms by plans keep out for the backward pass in the dtype of q.
        by_plan = call.dtype == "bfloat16" and "rotates" not in _kind(call.algorithm)
        found[name] = difference / (allowed * (4 if by_plan else 1))
    return found


def _kind(algorithm):
    name = algorithm if isinstance(algorithm, str) else type(algorithm).__name__.lower()
    return "by plan" if name in ("balanced", "placed", "halo", "auto") else "rotates"


def check(call, rng, mesh=None, *, num_batches=1, **where: Any):
    """Requires results and gradients of dense attention; NaN in padding reaches none of them.

    `where`: further options of the call, such as axes of a mesh beside the ranks.

    One program serves all batches if the documents are its arguments. JAX promotes neither ranks
    nor dtypes, as in its own tests; of two batch rows also with 64-bit types, which would mix.
    """
    mesh, compiled = mesh or mesh_of(call.num_ranks), None
    if call.inner > 1:
        mesh = Mesh(mesh.devices.reshape(-1, call.inner), call.axis_name)
    with contextlib.ExitStack() as modes:
        if call.batch == 2:
            modes.enter_context(jax.enable_x64(True))
        modes.enter_context(jax.numpy_dtype_promotion("strict"))
        modes.enter_context(jax.numpy_rank_promotion("raise"))
        for _ in range(num_batches):
            compiled = _check_batch(call, rng, mesh, compiled, where)


def _check_batch(call, rng, mesh, compiled, where):
    """Returns the program, which is compiled once."""
    ids, positions, given = draw_documents(call, rng)
    mask, allowed = draw_mask(call, rng, ids, positions)
    operands, cotangents = draw_operands(call, rng, ids.shape)
    out, lse, largest, of_operands = dense(call, operands, allowed, cotangents)
    moves = Documents(ids, positions)
    if call.order == "zigzag":
        moves = moves.zigzag(call.num_ranks)
    if call.order == "placed":
        of_documents = {"segment_ids": ids, "positions": positions, "mask": mask}
        sizes = {"world_size": call.num_ranks, "num_groups": call.num_groups}
        moves = place_tokens(**of_documents, **sizes)
    if call.order != "packed":
        given = {"documents": getattr(moves, "documents", moves)}
    mask = moves.apply(mask) if call.mask in ALL_KINDS else None

    def stored(x):
        hide = lambda x: np.where(of_rows(ids > 0, x), x, np.array(np.nan, x.dtype))
        return moves.apply(x if call.latents else jax.tree.map(hide, x))

    back = partial(jax.tree.map, lambda x: moves.restore(np.asarray(x)))
    arrays = operands | {name: stored(operands[name]) for name in ("q", "keys")}
    g, dlse = stored(cotangents[0]), moves.apply(cotangents[1])
    compiled = compiled or program(call, mesh, given, mask, **where)
    got, gradients = compiled(arrays, (g, dlse), *((given, mask) if call.traced else ()))
    assert compiled._cache_size() == 1
    gradients |= {name: back(gradients[name]) for name in ("q", "keys")}
    named = dict(zip(("out", *call.returns), got, strict=True))
    wanted = {"out": out, "lse": lse, "max_logits": largest}
    named |= {name: back(named[name]) for name in ("out", "lse") if name in named}
    found = errors(call, (named, gradients), ({x: wanted[x] for x in named}, of_operands))
    assert max(found.values()) <= 1, found
    assert named["out"].dtype == gradients["q"].dtype == call.dtype
    assert named.get("lse", np.float32()).dtype == np.float32
    for x in jax.tree.leaves((named["out"], gradients["q"], gradients["keys"])):
        assert not x[ids == 0].any()
    return compiled


def of_rows(x, like):
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


# ---- Of tests with programs of their own: q, k, v, a cotangent of the output, and segment ids.


def draw_qkv(seed, batch, num_tokens, *, heads=(4, 2)) -> Any:
    """Returns these five, of random documents with padding."""
    rng, (N, K) = np.random.default_rng(seed), heads
    shapes = ((batch, num_tokens, *size) for size in ((N, 8), (K, 8), (K, 4), (N, 4)))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return *arrays, pack(rng, batch, num_tokens, max_length=max(2, num_tokens // 2))[0]


def with_gradients(attend):
    """`(q, k, v, g, *others) -> (out, dq, dk, dv)` of `attend(q, k, v, *others)`"""

    def run(q, k, v, g, *others):
        out, pull_back = jax.vjp(lambda *x: attend(*x, *others), q, k, v)
        return out, *pull_back(g)

    return run


def dense_qkv(operands, mask: Any = "causal", *, pairs=None):
    """Returns the output and gradients in float64; `pairs` may replace the mask."""
    q, k, v, g, segment_ids = operands
    pairs = batch_pairs(mask, segment_ids) if pairs is None else pairs
    out, lse = masked_attention(q, k, v, pairs)
    return out, *masked_attention_gradients(q, k, v, pairs, g, np.zeros(lse.shape))


def check_qkv(results, operands, mask: Any = "causal", *, pairs=None):
    """Requires the output, or the output and gradients, of dense attention."""
    wanted = dense_qkv(operands, mask, pairs=pairs)
    assert len(results) in (1, 4)
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, wanted, strict=False):
        assert x.shape == y.shape and x.dtype == np.float32, name
        error = np.abs(np.asarray(x, np.float64) - y).max()
        assert error <= allowed_error("float32", np.abs(y).max()), f"{name}: {error}"
