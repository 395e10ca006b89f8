"""Schedules: which rank holds which chunks of keys and values at each step, and their routes.

Every rank cuts its keys and values into C chunks. At step 0 it holds its own chunks; after n - 1
exchanges it has held every chunk of every rank once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jax_cp_dispatch._arrays import divided, known_inside
from jax_cp_dispatch._ranks.options import CollectiveOptions
from jax_cp_dispatch.attention.rotating.communication import (
    Routes,
    cycle_routes,
    move_chunks,
    reverse,
)


class HeldChunks(NamedTuple):
    """The content of the C slots of a rank: chunk `chunk[slot]` of rank `source[slot]`."""

    source: Int[Array, " C"]
    chunk: Int[Array, " C"]


@runtime_checkable
class Schedule(Protocol):
    """`num_ranks` steps; all methods trace, with `step` and `rank` integers or traced ones."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_chunks(self) -> int: ...

    def held(self, rank, step) -> HeldChunks:
        """Returns the chunks that `rank` holds at `step`."""
        ...

    def fetch_keys(self, exchange: CollectiveOptions, own, held, step, fingerprint=None):
        """Fetches the chunks of step + 1, given a rank's own and those that it holds at `step`."""
        ...

    def begin(self, gradients) -> tuple[Any, Any]:
        """Returns `travelling` and `home` after step 0, given the gradients of own chunks."""
        ...

    def return_gradients(
        self, exchange: CollectiveOptions, travelling, home, step
    ) -> tuple[Any, Any]:
        """Moves the gradients of step - 1 while those of `step` are computed.

        Returns the gradients to add to those of `step` before they move on, or None; and `home`.
        After the last step the first is complete, or, if it is None, `home`.
        """
        ...


class CycleSchedule(NamedTuple):
    """Chunk c moves along cycle c, and its gradient one step later. One cycle is a ring.

    Rows are arc-disjoint Hamiltonian cycles, so each link carries one chunk per step.
    """

    rows: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.rows[0])

    @property
    def num_chunks(self) -> int:
        return len(self.rows)

    def held(self, rank, step):
        rows, n = np.array(self.rows, np.int32), self.num_ranks
        place = known_inside(np.argsort(rows, axis=1).astype(np.int32).T, rank)
        _, source = divided(place + n - step, n)
        chunk = np.arange(self.num_chunks, dtype=np.int32)
        return HeldChunks(known_inside(rows.reshape(-1), source + n * chunk), jnp.asarray(chunk))

    def fetch_keys(self, exchange, own, held, step, fingerprint=None):
        return move_chunks(exchange, held, cycle_routes(self.rows), fingerprint)

    def begin(self, gradients):
        return gradients, ()

    def return_gradients(self, exchange, travelling, home, step):
        return move_chunks(exchange, travelling, cycle_routes(self.rows)), home


class DirectSchedule(NamedTuple):
    """At step t, slot s gets a chunk directly from rank r - 1 - s; its gradient returns directly.

    Chunk c uses slot (c + t - 1) mod (n - 1). Needs no cycles, but a third set of chunks, because
    each rank keeps its own for sending.
    """

    num_ranks: int

    @property
    def num_chunks(self) -> int:
        return self.num_ranks - 1

    @property
    def _routes(self) -> Routes:
        n = self.num_ranks
        return tuple(tuple((rank + 1 + slot) % n for rank in range(n)) for slot in range(n - 1))

    def _chunks(self, step):
        """Returns the chunk in each slot at `step` >= 1."""
        first = np.arange(self.num_chunks, dtype=np.int32) + 1 + self.num_chunks
        return divided(jnp.asarray(first) - step, self.num_chunks)[1]

    def held(self, rank, step):
        slot = jnp.arange(self.num_chunks, dtype=jnp.int32)
        is_own = jnp.asarray(step) == 0
        _, peer = divided(rank + self.num_ranks - 1 - slot, self.num_ranks)
        source = jnp.where(is_own, rank, peer)
        return HeldChunks(source, jnp.where(is_own, slot, self._chunks(step)))

    def fetch_keys(self, exchange, own, held, step, fingerprint=None):
        chunks = jax.tree.map(lambda x: x[self._chunks(step + 1)], own)
        return move_chunks(exchange, chunks, self._routes, fingerprint)

    def begin(self, gradients):
        return jax.tree.map(jnp.zeros_like, gradients), gradients

    def return_gradients(self, exchange, travelling, home, step):
        back = move_chunks(exchange, travelling, reverse(self._routes))
        slots = jnp.argsort(self._chunks(step - 1))
        return None, jax.tree.map(lambda h, x: h + x[slots], home, back)


class OneRank(NamedTuple):
    """A schedule whose exchanges move nothing: what a rank computes, with its own chunks."""

    schedule: Schedule

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def num_chunks(self) -> int:
        return self.schedule.num_chunks

    def held(self, rank, step):
        return self.schedule.held(rank, step)

    def fetch_keys(self, exchange, own, held, step, fingerprint=None):
        return held

    def begin(self, gradients):
        return gradients, ()

    def return_gradients(self, exchange, travelling, home, step):
        return travelling, home
