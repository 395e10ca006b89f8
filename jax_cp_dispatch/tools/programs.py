"""The programs that the bench command and the benchmarks measure, and the ranks that run them.

Movement: random segments, and small messages. Attention: gradients over packed documents. GEMMs:
each method of this package, and XLA's collective and GEMM. Everything has an alternative to compare
with, which gives the same results.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._dispatch.movement import combine, dispatch
from jax_cp_dispatch._ranks.runtime import raise_gpu_errors
from jax_cp_dispatch.attention import context_parallel_attention
from jax_cp_dispatch.comm_gemm import all_gather_matmul, matmul_reduce_scatter
from jax_cp_dispatch.documents import Documents
from jax_cp_dispatch.metadata import compute_metadata
from jax_cp_dispatch.planning import place_tokens
from jax_cp_dispatch.tools import interleaved

AXIS = "cp"
BY_RANK, BY_COLUMN = P(AXIS), P(None, AXIS)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A mesh of one axis over all devices of all processes; `repeats` is the number of rounds."""

    mesh: Mesh
    repeats: int

    @classmethod
    def of_devices(cls, num_ranks: int, repeats: int) -> "Ranks":
        return cls(Mesh(np.array(jax.devices()[:num_ranks]), (AXIS,)), repeats)

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def is_gpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "gpu"

    @property
    def name(self) -> str:
        """Such as "8 devices"; of processes with one device each "2 processes"."""
        processes = f"{jax.process_count()} processes"
        if 1 < jax.process_count() == self.count:
            return processes
        devices = f"{self.count} {'GPU' if self.is_gpu else 'device'}{'s' * (self.count > 1)}"
        return devices if jax.process_count() == 1 else f"{devices} of {processes}"

    def put(self, x: Any, spec: P = BY_RANK) -> jax.Array:
        """Shards an array that every process holds."""
        x = np.asarray(x)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def put_documents(self, documents: Documents) -> Documents:
        """Shards documents that every process holds, with their plans."""
        put = lambda spec, part: jax.tree.map(lambda x: self.put(x, spec), part)
        return jax.tree.map(put, documents.specs(AXIS), documents)

    def program(
        self,
        fn: Callable[..., Any],
        in_specs: Any = BY_RANK,
        out_specs: Any = BY_RANK,
        **options: Any,
    ) -> Any:
        """Returns a jitted function of global arrays that runs `fn` on every rank."""
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.jit(jax.shard_map(fn, mesh=self.mesh, check_vma=False, **specs), **options)

    def measure(
        self, runs: Mapping[str, Callable[[], Any]], *, longest: float = 5.0
    ) -> dict[str, float]:
        limit = longest if jax.process_count() == 1 else None
        calls = 10 if self.is_gpu else 1
        seconds = interleaved(runs, self.repeats, longest=limit, calls=calls)
        if self.is_gpu:
            raise_gpu_errors()
        return seconds

    def check_equal(self, what: str, got: jax.Array, want: jax.Array, tolerance: float) -> None:
        """Compares the parts of this process on their devices, relative to the largest entry.

        Raises:
          ValueError: they differ by more than the tolerance; if it is 0, in any entry.
        """
        for shard, expected in zip(got.addressable_shards, want.addressable_shards, strict=True):
            other = jax.device_put(expected.data, shard.device)  # in general it is there
            num_unequal, difference = map(float, _compare(shard.data, other))
            if not (difference <= tolerance if tolerance else num_unequal == 0):
                raise ValueError(
                    f"bench: {what} differs from its alternative in {num_unequal:.0f} entries, by "
                    f"{difference:.1e} of the largest one; {tolerance:.0e} is allowed. Report this "
                    "with the output."
                )


@jax.jit
def _compare(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how many entries differ, and by how much of the largest entry.

    Hosts have no room for wide copies of all ranks' arrays; XLA fuses these.
    """
    wide = jnp.promote_types(got.dtype, jnp.float32)
    a, b = got.astype(wide), want.astype(wide)
    largest = jnp.abs(b).max()
    return jnp.sum(got != want), jnp.abs(a - b).max() / jnp.where(largest == 0, 1, largest)


# ---- Movement.

MEMCPY = "memcpy, one thread"
DONATED, FRESH = "dispatch into a donated window", "dispatch into a fresh window"
COMBINE = "combine, one replica"
ALL_TO_ALL = "all_to_all with padding, then unpacking"
ALL_GATHER = "all_gather, then a gather"


class ExchangeProgram:
    """Random segments: each rank sends one segment of random length to every rank.

    Attributes:
      x: rows of all ranks [W * tokens, *feature].
      runs: programs by name. All that receive rows give the same ones.
      collectives: the same with XLA.
    """

    def __init__(self, ranks: Ranks, tokens: int, feature: tuple[int, ...], dtype: Any):
        num_ranks, self.ranks = ranks.count, ranks
        rng = np.random.default_rng(0)
        # Each rank sends all its tokens, a random share to every rank.
        cuts = np.sort(rng.integers(0, tokens + 1, (num_ranks, num_ranks - 1)), axis=1)
        lengths = np.diff(cuts, axis=1, prepend=0, append=tokens).astype(np.int32)
        destinations = np.tile(np.arange(num_ranks, dtype=np.int32), (num_ranks, 1))
        plan, _ = compute_metadata(lengths, destinations)
        capacity = int(np.max(plan.num_total_recv_tokens))
        metadata = jax.tree.map(ranks.put, plan)
        self.x = x = ranks.put(rng.integers(0, 99, (num_ranks * tokens, *feature)).astype(dtype))

        send = partial(dispatch, axis_name=AXIS, capacity=capacity)
        fresh = ranks.program(send)
        reuse = ranks.program(lambda x, m, out: send(x, m, out=out), donate_argnums=2)
        home = ranks.program(partial(combine, axis_name=AXIS, num_tokens=tokens))
        self.received = received = fresh(x, metadata)
        self._window = jnp.copy(received)

        def into_donated_window() -> jax.Array:
            self._window = reuse(x, metadata, self._window)
            return self._window

        self.runs: dict[str, Callable[[], Any]] = {
            DONATED: into_donated_window,
            FRESH: lambda: fresh(x, metadata),
            COMBINE: lambda: home(received, metadata),
        }
        self.collectives = _collectives(ranks, lengths, capacity, x)

    def check(self) -> None:
        """Raises ValueError if a program receives other rows."""
        for name, run in (self.runs | self.collectives).items():
            want = self.x if name == COMBINE else self.received
            self.ranks.check_equal(name, run(), want, tolerance=0.0)

    def limit(self) -> Callable[[], Any]:
        """Returns a copy of all rows: by the host, or on each GPU."""
        if self.ranks.is_gpu:
            return partial(self.ranks.program(jnp.copy), self.x)
        if jax.process_index() > 0:
            return lambda: None  # the others wait in the next exchange
        source, destination = np.ones(self.x.nbytes, np.uint8), np.zeros(self.x.nbytes, np.uint8)
        return lambda: np.copyto(destination, source)


def _collectives(
    ranks: Ranks, lengths: np.ndarray, capacity: int, x: jax.Array
) -> dict[str, Callable[[], Any]]:
    """The same movement, as one writes it with XLA's collectives."""
    pad, tokens, feature = int(lengths.max()), x.shape[0] // ranks.count, x.shape[1:]
    first_rows = (np.cumsum(lengths, axis=1) - lengths).astype(np.int32)

    def received(starts: np.ndarray) -> jax.Array:
        """Returns where each received row is, from the starts [W, W] of segments; else -1."""
        rows = np.full((ranks.count, capacity), -1, np.int32)
        for row, begin, counts in zip(rows, starts.T, lengths.T, strict=True):
            first = np.repeat(begin + counts - np.cumsum(counts), counts)
            row[: len(first)] = first + np.arange(len(first))
        return ranks.put(rows)

    def fill(rows, indices):
        is_row = (indices[0] >= 0).reshape(-1, *[1] * len(feature))
        return jnp.where(is_row, rows[indices[0]], 0)

    def all_to_all(x, first_rows, indices):
        x = jnp.pad(x, ((0, pad), *[(0, 0)] * len(feature)))
        parts = [lax.dynamic_slice_in_dim(x, row, pad) for row in first_rows[0]]
        sent = lax.all_to_all(jnp.stack(parts), AXIS, 0, 0)
        return fill(sent.reshape(-1, *feature), indices)

    def all_gather(x, indices):
        return fill(lax.all_gather(x, AXIS, tiled=True), indices)

    rank = np.arange(ranks.count)[:, None]
    padded = received(np.tile(rank * pad, ranks.count))
    gathered = received(rank * tokens + first_rows)
    return {
        ALL_TO_ALL: partial(ranks.program(all_to_all), x, ranks.put(first_rows), padded),
        ALL_GATHER: partial(ranks.program(all_gather), x, gathered),
    }


SMALL = (16, 8)


def small_exchange(ranks: Ranks) -> tuple[jax.Array, Any, dict[str, Callable[..., Any]]]:
    """Returns rows of all ranks, the plan that sends those of each to the next, and operations.

    These are functions of one rank's rows and plan, by name; `combine` moves rows in reverse.
    """
    num_ranks, (tokens, width) = ranks.count, SMALL
    to_next = (np.arange(num_ranks, dtype=np.int32) + 1) % num_ranks
    plan, _ = compute_metadata(np.full((num_ranks, 1), tokens), to_next[:, None])
    pairs = list(enumerate(to_next.tolist()))
    x = np.random.default_rng(0).standard_normal((num_ranks * tokens, width), np.float32)
    operations: dict[str, Callable[..., Any]] = {
        "dispatch": partial(dispatch, axis_name=AXIS, capacity=tokens),
        "combine": partial(combine, axis_name=AXIS, num_tokens=tokens),
        "ppermute": lambda x, m: lax.ppermute(x, AXIS, pairs),
    }
    return ranks.put(x), jax.tree.map(ranks.put, plan), operations


def scanned(operation: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """Returns a function that repeats the operation inside `lax.scan`."""
    step = lambda more, x: (operation(x, *more), None)
    return lambda x, *more: lax.scan(lambda x, _: step(more, x), x, length=steps)[0]


# ---- Attention.

DENSE = "jax.nn, sharded by XLA"
MEDIAN, SIGMA = 2048, 1.2  # tokens of a document, log-normal
# Sums in another order; relative to the largest entry.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def drawn_lengths(num_tokens: int, *, seed: int, median: int | float = MEDIAN) -> list[int]:
    """Returns log-normal lengths of documents that fill `num_tokens`; the last one is cut."""
    normal = np.random.default_rng(0).standard_normal(100_000)
    lengths = np.ceil(median * np.exp(SIGMA * normal)).astype(int)
    count = 1
    while (drawn := np.random.default_rng(seed).choice(lengths, count)).sum() < num_tokens:
        count *= 2  # the first ones stay the same
    return lengths_in(drawn, num_tokens).tolist()


def lengths_in(lengths: Any, num_tokens: int) -> np.ndarray:
    """Returns the lengths of documents that `num_tokens` hold, without empty ones."""
    counts = np.diff(np.minimum(np.cumsum(lengths), num_tokens), prepend=0)
    return counts[counts > 0]


def make_segment_ids(lengths: Iterable[int], num_tokens: int | None = None) -> np.ndarray:
    """Returns segment ids [1, T] of documents that follow each other, cut to `num_tokens`."""
    lengths = list(lengths)
    counts = lengths_in(lengths, num_tokens or sum(lengths))
    return np.repeat(np.arange(1, len(counts) + 1, dtype=np.int32), counts)[None]


def square_product(size: int, dtype: str) -> Callable[[], jax.Array]:
    """Returns a run of a square matrix product, in float32."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((size, size)), dtype)
    return partial(jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32)), x)


def random_operands(
    tokens: int, heads: int, head_size: int, dtype: str, *, kv_heads: int | None = None
) -> list[np.ndarray]:
    """Draws q, k, v and the cotangent of the output; k and v have `kv_heads`, or as many heads."""
    rng = np.random.default_rng(tokens)
    kv_heads = kv_heads or heads
    return [
        rng.standard_normal((1, tokens, n, head_size), np.float32).astype(jnp.dtype(dtype))
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of q, k, v and the cotangent of the output: the gradients."""

    def of(q, k, v, cotangent):
        out, pull_back = jax.vjp(attend, q, k, v)
        return pull_back(cotangent.astype(out.dtype))

    return of


def attention_run(
    ranks: Ranks, method: str, lengths: Sequence[int], arrays: Sequence[np.ndarray]
) -> Callable[[], Any]:
    """Returns a run of the compiled gradients of causal attention: an algorithm, or `DENSE`."""
    ids = make_segment_ids(lengths) if len(lengths) > 1 else None
    documents: dict[str, Any] = {"segment_ids": ids}
    if method == "placed":
        documents = {"documents": place_tokens(lengths, world_size=ranks.count).documents}

    def dense(q, k, v):
        of = None if ids is None else jnp.asarray(ids[0])
        mask = None if of is None else (of[:, None] == of)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    over = {"mesh": ranks.mesh, "axis_name": AXIS, "algorithm": method}
    attend = partial(context_parallel_attention, **over, **documents)
    operands = [ranks.put(x, BY_COLUMN) for x in arrays]
    sharding = NamedSharding(ranks.mesh, BY_COLUMN)
    program = jax.jit(gradients(dense if method == DENSE else attend), out_shardings=sharding)
    return partial(program.lower(*operands).compile(), *operands)


# ---- Tensor-parallel GEMMs.

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
XLA, GEMM = "XLA's collective and GEMM", "GEMM"
METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "none": {"method": "none"},
    "ring": {"method": "ring"},
    "ring direct": {"method": "ring", "use_ce": False},
    "ring pairs": {"method": "ring", "aggregate": True},
    "ring atomic": {"method": "ring", "atomic": True},
    "pipeline 2": {"method": "pipeline", "num_splits": 2},
    "pipeline 4": {"method": "pipeline"},
    "pipeline atomic": {"method": "pipeline", "atomic": True},
}
PRODUCT_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}  # sums over K in another order
Shape = tuple[str, int, int, int]  # op, M, K, N of global size


class Product:
    """One GEMM over all ranks.

    Attributes:
      x, w: its operands.
      programs: functions of the operands by name, first XLA's; all give the same result.
      alone: a run of the GEMM without communication.
    """

    def __init__(self, ranks: Ranks, shape: Shape, dtype: str, methods: Sequence[str]):
        op, m, k, n = shape
        self.op, self._ranks, self._dtype = op, ranks, dtype
        rng = np.random.default_rng(0)
        draw = lambda *s: rng.standard_normal(s, np.float32).astype(jnp.dtype(dtype))
        x, w = draw(m, k), draw(k, n)
        specs, out, function = (BY_COLUMN, BY_RANK), BY_RANK, matmul_reduce_scatter
        by_xla = lambda x, w: lax.psum_scatter(x @ w, AXIS, tiled=True)
        if gathers := op == GATHER:
            specs, out, function = (BY_RANK, BY_COLUMN), BY_COLUMN, all_gather_matmul
            by_xla = lambda x, w: lax.all_gather(x, AXIS, tiled=True) @ w
        self.x, self.w = (ranks.put(a, spec) for a, spec in zip((x, w), specs, strict=True))
        self.programs = {XLA: ranks.program(by_xla, specs, out)} | {
            name: ranks.program(partial(function, axis_name=AXIS, **METHODS[name]), specs, out)
            for name in methods
        }
        # The product of gathered operands, or partial sums of all ranks, not added.
        whole = ranks.put(x, P()) if gathers else self.x
        multiply = ranks.program(jnp.matmul, (P() if gathers else specs[0], specs[1]), out)
        self.alone = partial(multiply, whole, self.w)

    @property
    def runs(self) -> dict[str, Any]:
        return {name: partial(run, self.x, self.w) for name, run in self.programs.items()}

    def check(self) -> None:
        """Raises ValueError if a program gives another result than XLA's."""
        want, *_ = (run() for run in self.runs.values())
        for name, run in self.runs.items():
            tolerance = PRODUCT_TOLERANCE[self._dtype]
            self._ranks.check_equal(f"{self.op}, {name}", run(), want, tolerance)
