"""One process of races.py: hurried exchanges with the others, every row checked on its device.

The rows of a round are a hash of their rank, place and round, so a row that is missing, of another
round or of another rank is found without a copy on the host. All sums wrap, so they are exact.
"""

import argparse
import functools
import importlib.util
import json
import pathlib
import random
import sys
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parents[1] / "oracles"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("num_processes", type=int)
    parser.add_argument("process", type=int)
    parser.add_argument("--rounds", type=int, default=500, help="at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="at most, for the rounds")
    parser.add_argument("--megabytes", type=int, default=64, help="of rows of each process")
    parser.add_argument("--host-memory", action="store_true", help="channels in pinned memory")
    parser.add_argument("--extension", default="", help="another _cuda, with a fault")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.extension:
        name = "jax_cp_dispatch._cuda"
        spec: Any = importlib.util.spec_from_file_location(name, options.extension)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    import jax

    on_gpus = jax.config.values["jax_platforms"] != "cpu"
    jax.distributed.initialize(
        options.address,
        options.num_processes,
        options.process,
        local_device_ids=[0] if on_gpus else None,
    )
    if options.host_memory:
        from pinned_slabs import use_pinned_memory

        use_pinned_memory()
    import jax_cp_dispatch as cp

    choice = cp.initialize()
    if choice.implementation == "xla":
        sys.exit(f"not connected: {choice.reason}")
    Rounds(options, choice.implementation).run()


class Rounds:
    """The exchanges of one process."""

    def __init__(self, options: argparse.Namespace, implementation: str):
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from movement_oracle import combined, dispatched, random_plan

        self.options, self.rank = options, options.process
        self.jax, self.np = jax, np
        num_ranks, num_columns = options.num_processes, 4096
        num_tokens = (options.megabytes << 20) // (4 * num_columns)
        mesh = Mesh(np.array(jax.devices()), ("cp",))
        self.by_rank = NamedSharding(mesh, P("cp"))
        plan = random_plan(np.random.default_rng(0), num_ranks, 16, num_tokens)
        capacity = int(plan["num_total_recv_tokens"].max()) + 1
        ids = np.arange(1, num_ranks * num_tokens + 1, dtype=np.int64)
        ids = ids.reshape(num_ranks, num_tokens, 1)
        arrived = dispatched(plan, ids, capacity)[..., 0]
        num_copies = combined(plan, np.ones_like(dispatched(plan, ids, capacity)), num_tokens)
        fields = {k: v for k, v in plan.items() if k != "world_size"}
        self.fixed = {
            "ids": self.global_array(ids[..., 0].astype(np.int32)),
            "arrived": self.global_array(arrived.astype(np.int32)),
            "copies": self.global_array(num_copies[..., 0].astype(np.int32)),
            "plan": {k: self.global_array(np.asarray(v)[:, None]) for k, v in fields.items()},
        }
        common: dict[str, Any] = {"axis_name": "cp", "implementation": implementation}
        common["deadline"] = 5.0 if options.extension else 30.0
        steps = functools.partial(_steps, num_ranks, num_columns, capacity, num_tokens, common)
        on_ranks = lambda fn: jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=P("cp"), out_specs=P("cp"), check_vma=False)
        )
        self.send, self.back = map(on_ranks, steps())

    def global_array(self, per_rank: Any) -> Any:
        """Returns [W * rows, ...] of [W, rows, ...], with this process's part on its device."""
        mine = self.jax.device_put(per_rank[self.rank], self.jax.local_devices()[0])
        shape = (per_rank.shape[0] * per_rank.shape[1], *per_rank.shape[2:])
        return self.jax.make_array_from_single_device_arrays(shape, self.by_rank, [mine])

    def one_each(self, *values: int) -> Any:
        row = self.np.array([values], self.np.int32)
        return self.global_array(self.np.repeat(row[None], self.options.num_processes, axis=0))

    def run(self) -> None:
        from jax_cp_dispatch.gpu import raise_gpu_errors

        draw = random.Random(self.rank)
        num_errors, error, bad = 0, "", self.one_each(0)
        num_rounds, began, number = self.options.rounds, 0.0, 0
        while number < num_rounds:
            if number == 10:  # compiled, connected, and measured
                self.jax.block_until_ready(bad)
                began = time.monotonic()
            elif number == 30:
                self.jax.block_until_ready(bad)
                each = (time.monotonic() - began) / 20
                num_rounds = self.agreed(min(num_rounds, int(self.options.seconds / each)))
            time.sleep(draw.choice([0, 0, 0, 0.0005, 0.002]))
            # What a GPU spins before it sends, and before it returns.
            spins = [draw.choice([0, 0, 5, 30]) for _ in range(2)]
            try:
                rows, bad = self.send(self.one_each(number, spins[0]), bad, self.fixed)
                if not self.options.extension:
                    bad = self.back(self.one_each(number, spins[1]), bad, self.fixed, rows)
                if self.options.extension or number % 50 == 49:
                    self.jax.block_until_ready(bad)
                    raise_gpu_errors()
            except Exception as raised:  # of a fault: it moved the rows all the same
                num_errors, error = num_errors + 1, str(raised).splitlines()[0]
                bad = self.one_each(1)
                if not self.options.extension:
                    break
            number += 1
        self.jax.block_until_ready(bad)
        seconds = time.monotonic() - began
        mismatches = int(self.np.asarray(bad.addressable_data(0))[0, 0])
        found = {"process": self.rank, "rounds": number, "seconds": round(seconds, 1)}
        found |= {"mismatches": mismatches, "errors": num_errors, "error": error}
        print(f"result {json.dumps(found)}", flush=True)

    def agreed(self, num_rounds: int) -> int:
        from jax_cp_dispatch._ranks.job import publish_and_read_all

        return min(publish_and_read_all("races", "rounds", num_rounds, 60.0))


def _steps(num_ranks: int, num_columns: int, capacity: int, num_tokens: int, common: Any) -> Any:
    """Returns the two programs of a round, on the arrays of one rank."""
    import jax
    import jax.numpy as jnp

    from jax_cp_dispatch import Metadata, combine, dispatch

    def rows_of(ids, number):
        """Returns the rows with these ids, from 1, in a round; zeros for id 0."""
        word = ids.astype(jnp.uint32)[:, None] * jnp.uint32(2654435761)
        word += jnp.arange(num_columns, dtype=jnp.uint32)[None] * jnp.uint32(40503)
        word ^= number.astype(jnp.uint32) * jnp.uint32(2246822519)
        word = (word ^ (word >> 15)) * jnp.uint32(3266489917)
        word = jax.lax.bitcast_convert_type(word ^ (word >> 13), jnp.int32)
        return jnp.where(ids[:, None] > 0, word, 0)

    def spin(num, x):
        """Returns x after some time of the device."""
        step = lambda i, m: jnp.tanh(m @ m)
        matrix = jax.lax.fori_loop(0, num, step, jnp.full((512, 512), 0.01))
        return x + (matrix[0, 0] > 2).astype(x.dtype)  # never

    def metadata_of(fixed):
        return Metadata(**fixed["plan"], world_size=num_ranks)

    def send(now, bad, fixed):
        number, num_spins = now[0]
        x = spin(num_spins, rows_of(fixed["ids"], number))
        rows = dispatch(x, metadata_of(fixed), capacity=capacity, **common)
        wrong = jnp.sum(rows != rows_of(fixed["arrived"], number), dtype=jnp.int32)
        return rows, bad + wrong

    def back(now, bad, fixed, rows):
        number, num_spins = now[0]
        y = spin(num_spins, rows)
        home = combine(y, metadata_of(fixed), num_tokens=num_tokens, **common)
        expected = fixed["copies"][:, None] * rows_of(fixed["ids"], number)
        return bad + jnp.sum(home != expected, dtype=jnp.int32)

    return send, back


if __name__ == "__main__":
    main()
