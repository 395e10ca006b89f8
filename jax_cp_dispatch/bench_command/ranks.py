"""The ranks of a measurement, the rows that it returns, and how programs are timed on them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch._measuring import interleaved
from jax_cp_dispatch._ranks.gpu import raise_gpu_errors
from jax_cp_dispatch.documents import Documents

AXIS = "cp"
BY_RANK = P(AXIS)


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured operation.

    Attributes:
      what: the operation.
      size: of the operation, with the number of ranks.
      seconds: median of one operation.
      rate: bytes or FLOPs per second over all ranks, by `unit`; None: only a time.
      unit: of `rate`: "B/s" or "FLOP/s".
      of_limit: speed as a fraction of the limit that was measured in the same run.
      limit: what the limit is.
      speedup: how many times as fast as the alternative; above 1 it is faster.
      alternative: what the alternative is.
    """

    what: str
    size: str
    seconds: float
    rate: float | None = None
    unit: str = ""
    of_limit: float | None = None
    limit: str = ""
    speedup: float | None = None
    alternative: str = ""


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
        kind = "GPU" if self.is_gpu else "device"
        if jax.process_count() > 1:
            kind = "process" if jax.process_count() == self.count else f"{kind} of processes"
        plural = {"process": "processes"}.get(kind, f"{kind}s")
        return f"{self.count} {kind if self.count == 1 else plural}"

    def put(self, x: Any, spec: P = BY_RANK) -> jax.Array:
        """Shards an array that every process holds."""
        x = np.asarray(x)
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def put_documents(self, documents: Documents) -> Documents:
        """Shards documents that every process holds, with their plans."""

        def put(spec: P, part: Any) -> Any:
            return jax.tree.map(lambda x: self.put(x, spec), part)

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
        """Returns the median seconds of each run, interleaved."""
        one_process = jax.process_count() == 1
        seconds = interleaved(
            runs,
            self.repeats,
            longest=longest if one_process else None,
            calls=10 if self.is_gpu else 1,
        )
        if self.is_gpu:
            raise_gpu_errors()
        return seconds

    def check_equal(self, what: str, got: jax.Array, want: jax.Array, tolerance: float) -> None:
        """Compares the parts of this process, relative to the largest entry.

        Raises:
          ValueError: they differ by more than the tolerance.
        """
        for shard, expected in zip(got.addressable_shards, want.addressable_shards, strict=True):
            a, b = (np.asarray(x.data, np.float64) for x in (shard, expected))
            difference = np.abs(a - b).max() / (np.abs(b).max() or 1)
            if not difference <= tolerance:
                raise ValueError(
                    f"bench: {what} differs from its alternative by {difference:.1e} of the "
                    f"largest entry; {tolerance:.0e} is allowed. Report this with the output."
                )
