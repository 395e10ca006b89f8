"""Movement: dispatch and combine of random segments, against XLA's collectives and memcpy."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cp_dispatch._dispatch import combine, dispatch
from jax_cp_dispatch.bench_command.ranks import AXIS, Ranks, Row
from jax_cp_dispatch.metadata import compute_metadata

MEMCPY = "memcpy, one thread"
DONATED, FRESH = "dispatch into a donated window", "dispatch into a fresh window"
COMBINE = "combine, one replica"
ALL_TO_ALL = "all_to_all with padding, then unpacking"
ALL_GATHER = "all_gather, then a gather"
SMALL_DISPATCH = "small dispatch in a loop"
STEPS = 20  # of the loop of small messages
SMALL = (16, 8)


class Exchange:
    """Random segments: each rank sends one segment of random length to every rank.

    Attributes:
      x: rows of all ranks [W * tokens, *feature].
      capacity: rows that the rank with most receives.
      runs: programs by name. All that receive rows give the same ones.
      collectives: the same with XLA.
    """

    def __init__(self, ranks: Ranks, tokens: int, feature: tuple[int, ...], dtype: Any):
        num_ranks, self.ranks = ranks.count, ranks
        rng = np.random.default_rng(0)
        lengths = random_segments(rng, num_ranks, tokens)
        destinations = np.tile(np.arange(num_ranks, dtype=np.int32), (num_ranks, 1))
        plan, _ = compute_metadata(lengths, destinations)
        self.capacity = capacity = int(np.max(plan.num_total_recv_tokens))
        metadata = jax.tree.map(ranks.put, plan)
        self.x = x = ranks.put(rng.integers(0, 99, (num_ranks * tokens, *feature)).astype(dtype))

        fresh = ranks.program(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=capacity))
        reuse = ranks.program(
            lambda x, m, out: dispatch(x, m, axis_name=AXIS, capacity=capacity, out=out),
            donate_argnums=2,
        )
        home = ranks.program(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=tokens))
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
            copy = self.ranks.program(jnp.copy)
            return lambda: copy(self.x)
        if jax.process_index() > 0:
            return lambda: None  # the others wait in the next exchange
        source, destination = np.ones(self.x.nbytes, np.uint8), np.zeros(self.x.nbytes, np.uint8)
        return lambda: np.copyto(destination, source)


def random_segments(rng: np.random.Generator, num_ranks: int, tokens: int) -> np.ndarray:
    """Draws lengths [W, W]: each rank sends all its tokens, a random share to every rank."""
    cuts = np.sort(rng.integers(0, tokens + 1, (num_ranks, num_ranks - 1)), axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=tokens).astype(np.int32)


def _collectives(
    ranks: Ranks, lengths: np.ndarray, capacity: int, x: jax.Array
) -> dict[str, Callable[[], Any]]:
    """The same movement, as one writes it with XLA's collectives."""
    num_ranks, pad = ranks.count, int(lengths.max())
    tokens, feature = x.shape[0] // num_ranks, x.shape[1:]
    source, padded, exists = map(ranks.put, _row_maps(lengths, capacity, tokens))
    first_rows = ranks.put((np.cumsum(lengths, axis=1) - lengths).astype(np.int32))

    def fill(rows, indices, mask):
        return jnp.where(mask[0].reshape(-1, *[1] * len(feature)), rows[indices[0]], 0)

    def all_to_all(x, first_rows, indices, mask):
        x = jnp.pad(x, ((0, pad), *[(0, 0)] * len(feature)))
        parts = [jax.lax.dynamic_slice_in_dim(x, row, pad) for row in first_rows[0]]
        sent = jax.lax.all_to_all(jnp.stack(parts), AXIS, 0, 0)
        return fill(sent.reshape(-1, *feature), indices, mask)

    def all_gather(x, indices, mask):
        return fill(jax.lax.all_gather(x, AXIS, tiled=True), indices, mask)

    by_all_to_all, by_all_gather = ranks.program(all_to_all), ranks.program(all_gather)
    return {
        ALL_TO_ALL: lambda: by_all_to_all(x, first_rows, padded, exists),
        ALL_GATHER: lambda: by_all_gather(x, source, exists),
    }


def _row_maps(lengths: np.ndarray, capacity: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Returns each received row's global source row, row in a padded all-to-all, and a mask."""
    num_ranks = len(lengths)
    source, padded = np.zeros((2, num_ranks, capacity), np.int32)
    exists = np.zeros((num_ranks, capacity), bool)
    sent_before = np.cumsum(lengths, axis=1) - lengths
    for d in range(num_ranks):
        row = 0
        for s in range(num_ranks):
            n = lengths[s, d]
            source[d, row : row + n] = s * tokens + sent_before[s, d] + np.arange(n)
            padded[d, row : row + n] = s * lengths.max() + np.arange(n)
            exists[d, row : row + n] = True
            row += n
    return source, padded, exists


def large(ranks: Ranks, tokens: int, feature: tuple[int, ...], dtype: Any) -> Iterator[Row]:
    """Measures the bandwidth of an exchange."""
    exchange = Exchange(ranks, tokens, feature, dtype)
    exchange.check()
    ours = {MEMCPY: exchange.limit()} | exchange.runs
    # In one process, apart from the collectives: they use so much memory that the next run finds
    # none cached.
    is_apart = jax.process_count() == 1
    together = [ours, exchange.collectives] if is_apart else [ours | exchange.collectives]
    seconds = {name: x for runs in together for name, x in ranks.measure(runs).items()}
    fastest = min(seconds[name] for name in exchange.collectives)
    num_bytes = exchange.x.nbytes
    for what, value in seconds.items():
        if what == MEMCPY:
            continue
        yield Row(
            what,
            f"{num_bytes / 1e6:.0f} MB, {ranks.name}",
            value,
            num_bytes / value,
            "B/s",
            of_limit=seconds[MEMCPY] / value,
            limit="a copy on each GPU" if ranks.is_gpu else "memcpy",
            speedup=fastest / value,
            alternative="the faster XLA collective",
        )


class SmallExchange:
    """One segment of each rank to the next; `combine` moves rows in reverse.

    Attributes:
      x, metadata: operands, over all ranks.
      operations: functions of one rank's rows and metadata, by name.
    """

    def __init__(self, ranks: Ranks):
        num_ranks, (tokens, width) = ranks.count, SMALL
        to_next = (np.arange(num_ranks, dtype=np.int32) + 1) % num_ranks
        plan, _ = compute_metadata(np.full((num_ranks, 1), tokens), to_next[:, None])
        pairs = list(enumerate(to_next.tolist()))
        x = np.random.default_rng(0).standard_normal((num_ranks * tokens, width), np.float32)
        self.x, self.metadata = ranks.put(x), jax.tree.map(ranks.put, plan)
        self.operations: dict[str, Callable[..., Any]] = {
            "dispatch": lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=tokens),
            "combine": lambda x, m: combine(x, m, axis_name=AXIS, num_tokens=tokens),
            "ppermute": lambda x, m: jax.lax.ppermute(x, AXIS, pairs),
        }


def scanned(operation: Callable[..., Any], steps: int) -> Callable[..., Any]:
    """Returns a function that repeats the operation inside `lax.scan`."""
    return lambda x, *more: jax.lax.scan(lambda x, _: (operation(x, *more), None), x, length=steps)[
        0
    ]


def small(ranks: Ranks) -> Iterator[Row]:
    """Measures the time of one small exchange inside `lax.scan`."""
    exchange = SmallExchange(ranks)
    loops = {
        name: ranks.program(scanned(exchange.operations[name], STEPS))
        for name in ("dispatch", "ppermute")
    }
    runs = {name: partial(loop, exchange.x, exchange.metadata) for name, loop in loops.items()}
    seconds = ranks.measure(runs)
    yield Row(
        SMALL_DISPATCH,
        f"{SMALL[0]} × {SMALL[1]} float32, {ranks.name}",
        seconds["dispatch"] / STEPS,
        speedup=seconds["ppermute"] / seconds["dispatch"],
        alternative="ppermute",
    )
