"""Plans an exchange, simulates it, and runs it on devices with the same result.

Four virtual CPU devices hold eight tokens each, in shards of one document. Every shard is sent to a
rank and returns.
"""

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import jax_cp_dispatch as cpd
from jax_cp_dispatch.cpu_devices import start_cpu_devices

start_cpu_devices(4)  # virtual ones, before JAX starts

W, T, AXIS = 4, 8, "cp"

# Row r: the lengths of rank r's shards, in order, and their destinations; -1 means not sent.
SEQ_LEN = np.array([[5, 3], [2, 6], [8, 0], [4, 4]])
DESTINATION = np.array([[1, 2], [0, 1], [3, -1], [0, 2]])


def show(title: str, metadata: cpd.Metadata) -> None:
    print(f"\n{title}")
    for name in ("dst_rank", "dst_offset", "seq_len", "num_recv_tokens"):
        rows = np.asarray(getattr(metadata, name)).tolist()
        print(f"  {name:<16} {rows}")


def main() -> None:
    forward, reverse = cpd.compute_metadata(SEQ_LEN, DESTINATION)
    forward.validate()
    show("forward: from the tokens' own ranks to the ranks of attention", forward)
    show("reverse: one slot per received shard, back to its first row", reverse)

    capacity = int(np.max(forward.num_total_recv_tokens))
    x = np.arange(W * T * 2, dtype=np.float32).reshape(W, T, 2)

    # The exchange on a perfect network. Rows that no rank writes keep their value, here zero.
    perfect = cpd.scenarios.orchestrate_simulate(x, np.zeros((W, capacity, 2), np.float32), forward)

    def there_and_back(x, forward, reverse):
        received = cpd.dispatch(x[0], forward, axis_name=AXIS, capacity=capacity)
        home = cpd.dispatch(received, reverse, axis_name=AXIS, capacity=T)
        return received[None], home[None]

    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    received, home = run(x, forward, reverse)

    print("\nfirst feature of what each rank received")
    for rank in range(W):
        print(f"  rank {rank}: {np.asarray(received[rank, :, 0]).astype(int).tolist()}")
    np.testing.assert_array_equal(received, perfect)
    np.testing.assert_array_equal(home, x)  # every token was sent, so every token returned
    print("\nverified: the devices moved the rows as planned, and all rows returned")


if __name__ == "__main__":
    main()
