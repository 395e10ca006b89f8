"""What attention on one GPU is measured with: documents, a rank of a placement, a shared prefix.

Each workload says twice which keys each query sees: as this package's arguments, and as a boolean
matrix, from which the expected results are computed by plain products in float32.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch.masks import SharedPrefix
from jax_cp_dispatch.planning import place_tokens
from jax_cp_dispatch.tools.programs import drawn_lengths

RANKS = 8  # of the placement
COMPLETIONS = 6  # of each prompt


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of queries, keys and values, and their dtype."""

    queries: int
    keys: int
    size: int = 128
    value_size: int = 128
    dtype: str = "bfloat16"

    def name(self) -> str:
        sizes = {self.size: None, self.value_size: None}
        return f"{self.queries}/{self.keys} of {'/'.join(map(str, sizes))}, {self.dtype}"


@dataclasses.dataclass(frozen=True)
class Workload:
    """Queries and the keys that they see.

    Attributes:
      name: for rows of results.
      visible: `[T, S]`.
      given: keywords of `local_attention`.
      segments: (queries, keys) of each segment, if segments follow each other in both, and the last
        query of each sees all its keys, the one before it one key less, and so on; else None.
      heads: of the operands.
    """

    name: str
    visible: np.ndarray
    given: dict[str, Any]
    segments: list[tuple[int, int]] | None
    heads: Heads

    @property
    def num_pairs(self) -> int:
        return int(np.count_nonzero(self.visible))

    def operands(self) -> list[jax.Array]:
        """Draws q, k, v, and the cotangent of the output."""
        (T, S), of = self.visible.shape, self.heads
        shapes = [(T, of.queries, of.size), (S, of.keys, of.size), (S, of.keys, of.value_size),
                  (T, of.queries, of.value_size)]  # fmt: skip
        keys = jax.random.split(jax.random.key(T), len(shapes))
        draw = lambda key, shape: jax.random.normal(key, (1, *shape), of.dtype)
        return [draw(*each) for each in zip(keys, shapes, strict=True)]


def documents(num_tokens: int, length: int, heads: Heads) -> Workload:
    """Documents of equal length, of which the last may be cut; each is causal."""
    position = np.arange(num_tokens)
    ids = position // length
    visible = (ids[:, None] == ids) & (position <= position[:, None])
    lengths = np.bincount(ids).tolist()
    given = {"segment_ids": jnp.asarray(1 + ids[None], jnp.int32)}
    segments = [(n, n) for n in lengths]
    return Workload(f"documents of {length}", visible, given, segments, heads)


def placed(num_tokens: int, heads: Heads) -> Workload:
    """The queries of a rank of a placement, and the keys that it receives.

    All ranks have nearly as many pairs. The rank is one whose documents have keys of their own, if
    there is one, so that others can compute it; of these the one with most pairs.
    """
    lengths = drawn_lengths(RANKS * num_tokens, seed=0, median=num_tokens / 4)
    plan = place_tokens(lengths, world_size=RANKS).plan
    ranges = [[np.asarray(x) for x in plan.local_ranges(rank)] for rank in range(RANKS)]
    num_pairs = [int(np.maximum(end - start, 0).sum()) for start, end in ranges]
    segments = [_segments(*each) for each in ranges]
    rank = max(range(RANKS), key=lambda rank: (segments[rank] is not None, num_pairs[rank]))
    start, end = ranges[rank]
    key = np.arange(plan.kv_capacity)
    visible = (start[:, None] <= key) & (key < end[:, None])
    given = {"kv_start": jnp.asarray(start[None]), "kv_end": jnp.asarray(end[None])}
    name = f"rank {rank} of {RANKS}, placed"
    return Workload(name, visible, given, segments[rank], heads)


def _segments(start: np.ndarray, end: np.ndarray) -> list[tuple[int, int]] | None:
    """Returns the segments of key ranges, if each has keys of its own and none lies between."""
    is_cut = (np.diff(start) != 0) | (np.diff(end) != 1)
    edges = [0, *np.flatnonzero(is_cut) + 1, len(start)]
    pieces = [(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    starts, ends = [int(start[a]) for a, _ in pieces], [int(end[b - 1]) for _, b in pieces]
    if starts != [0, *ends[:-1]]:
        return None
    return [(b - a, e - s) for (a, b), s, e in zip(pieces, starts, ends, strict=True)]


def shared_prefix(num_tokens: int, heads: Heads) -> Workload:
    """Two prompts of an eighth of the tokens, each with completions of equal length."""
    half, prompt = num_tokens // 2, num_tokens // 8
    completion = np.maximum(0, np.arange(half) - prompt) * COMPLETIONS // (half - prompt) + 1
    completion = np.tile(np.where(np.arange(half) < prompt, 0, completion), 2)
    ids = np.repeat(np.arange(1, 3), half)
    position = np.arange(2 * half)
    visible = (ids[:, None] == ids) & (position <= position[:, None])
    visible &= (completion == 0) | (completion[:, None] == completion)
    given = {"mask": SharedPrefix(jnp.asarray(completion[None], jnp.int32)),
             "segment_ids": jnp.asarray(ids[None], jnp.int32)}  # fmt: skip
    return Workload(f"2 prompts, {COMPLETIONS} completions each", visible, given, None, heads)


@jax.jit
def expected(q, k, v, dout, visible) -> dict[str, jax.Array]:
    """Returns the output and the gradients of attention, in float32, some queries at a time."""
    (_, T, N, H), K = q.shape, k.shape[2]
    q, k, v, dout = (x[0].astype(jnp.float32) for x in (q, k, v, dout))
    num_rows = math.gcd(T, 256)
    multiply = functools.partial(jnp.einsum, precision="highest")

    def attend(q, k, v, visible):
        logits = multiply("tkgh,skh->kgts", q.reshape(-1, K, N // K, H), k) * H**-0.5
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e30), axis=-1)
        weights = jnp.where(visible.any(-1)[:, None], weights, 0)
        return multiply("kgts,skh->tkgh", weights, v).reshape(-1, N, v.shape[-1])

    def step(sums, rows):
        q, dout, visible = rows
        out, pull_back = jax.vjp(functools.partial(attend, visible=visible), q, k, v)
        dq, *dkv = pull_back(dout)
        return jax.tree.map(jnp.add, sums, dkv), (out, dq)

    split = lambda x: x.reshape(-1, num_rows, *x.shape[1:])
    rows = [split(x) for x in (q, dout, visible)]
    (dk, dv), (out, dq) = jax.lax.scan(step, [jnp.zeros_like(k), jnp.zeros_like(v)], rows)
    join = lambda x: x.reshape(1, T, N, -1)
    return {"out": join(out), "dq": join(dq), "dk": dk[None], "dv": dv[None]}


@jax.jit
def relative_errors(results: dict, wanted: dict, visible) -> dict[str, jax.Array]:
    """Returns ||x - expected|| / ||expected|| of each result, of the keys that a query sees."""
    used = {"dk": visible.any(0), "dv": visible.any(0)}

    def error(name, x):
        y = wanted[name]
        if name in used:  # what gradients of other keys are differs between libraries
            x = jnp.where(used[name][:, None, None], x, 0)
        return jnp.linalg.norm((x.astype(y.dtype) - y).ravel()) / jnp.linalg.norm(y.ravel())

    return {name: error(name, x) for name, x in results.items()}
