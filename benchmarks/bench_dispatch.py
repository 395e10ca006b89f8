"""Measures the bandwidth of dispatch and combine on 8 virtual devices, memcpy and XLA.

4096 tokens per rank, 16 heads x 128, bfloat16, random segments: each exchange moves 134 MB. All
methods must give the same result, which is checked first.
"""

import common
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jax_cp_dispatch import combine, compute_metadata, dispatch
from jax_cp_dispatch.cpu_devices import start_cpu_devices

W, FEATURE = 8, (16, 128)
AXIS = "cp"


def random_segments(rng, num_tokens):
    """Draws lengths: each rank sends one segment of random length to every rank."""
    cuts = np.sort(rng.integers(0, num_tokens + 1, (W, W - 1)), axis=1)
    return np.diff(cuts, axis=1, prepend=0, append=num_tokens).astype(np.int32)


def row_maps(seq_len, capacity, tokens):
    """Returns each received row's global source row, row in a padded all-to-all, and a mask."""
    W = len(seq_len)
    source, padded = np.zeros((2, W, capacity), np.int32)
    exists = np.zeros((W, capacity), bool)
    sent_before = np.cumsum(seq_len, axis=1) - seq_len
    for d in range(W):
        row = 0
        for s in range(W):
            n = seq_len[s, d]
            source[d, row : row + n] = s * tokens + sent_before[s, d] + np.arange(n)
            padded[d, row : row + n] = s * seq_len.max() + np.arange(n)
            exists[d, row : row + n] = True
            row += n
    return source, padded, exists


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    arguments = common.options(parser, tokens=256)
    T = arguments.tokens
    start_cpu_devices(W)
    rng = np.random.default_rng(0)
    seq_len = random_segments(rng, T)
    metadata, _ = compute_metadata(seq_len, np.tile(np.arange(W, dtype=np.int32), (W, 1)))
    capacity = int(np.max(metadata.num_total_recv_tokens))
    source, padded, exists = row_maps(seq_len, capacity, T)
    pad = int(seq_len.max())

    mesh = Mesh(np.array(jax.devices()), (AXIS,))

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, P(AXIS)))

    def on_ranks(fn, **options):
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False),
            **options,
        )

    def fill(rows, indices, mask):
        return jnp.where(mask[0][:, None, None], rows[indices[0]], 0)

    def all_to_all(x, first_rows, indices, mask):
        x = jnp.pad(x, ((0, pad), (0, 0), (0, 0)))
        sent = jnp.stack([jax.lax.dynamic_slice_in_dim(x, first_rows[0, d], pad) for d in range(W)])
        return fill(jax.lax.all_to_all(sent, AXIS, 0, 0).reshape(-1, *FEATURE), indices, mask)

    def all_gather(x, indices, mask):
        return fill(jax.lax.all_gather(x, AXIS, tiled=True), indices, mask)

    bits = rng.integers(0, 2**14, (W * T, *FEATURE)).astype(np.uint16)
    x = put(bits.view(ml_dtypes.bfloat16))
    metadata = jax.tree.map(put, metadata)
    first_rows = put((np.cumsum(seq_len, axis=1) - seq_len).astype(np.int32))
    source, padded, exists = map(put, (source, padded, exists))

    fresh = on_ranks(lambda x, m: dispatch(x, m, axis_name=AXIS, capacity=capacity))
    reuse = on_ranks(
        lambda x, m, out: dispatch(x, m, axis_name=AXIS, capacity=capacity, out=out),
        donate_argnums=2,
    )
    home = on_ranks(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T))
    by_all_to_all, by_all_gather = on_ranks(all_to_all), on_ranks(all_gather)
    received = fresh(x, metadata)
    window = jnp.copy(received)

    def into_donated_window():
        nonlocal window
        window = reuse(x, metadata, window)
        return window

    # The same total of received rows, but as four copies of a quarter of the tokens.
    copies, _ = compute_metadata(
        np.full((W, 1), T // 4, np.int32), (np.arange(W)[:, None, None] + np.arange(4)) % W
    )
    copies = jax.tree.map(put, copies)
    sum_copies = on_ranks(lambda y, m: combine(y, m, axis_name=AXIS, num_tokens=T // 4))

    num_bytes = x.nbytes
    destination, origin = np.zeros(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    alone = {
        "memcpy, one thread": lambda: np.copyto(destination, origin),
        "dispatch into a donated window": into_donated_window,
        "dispatch into a fresh window": lambda: fresh(x, metadata),
        "combine, one replica": lambda: home(received, metadata),
        "combine, four replicas (bytes read)": lambda: sum_copies(x, copies),
    }
    # The collectives allocate so much memory that runs between them find none cached.
    among_collectives = {
        "dispatch, interleaved with the next two": lambda: fresh(x, metadata),
        "all_to_all with padding, then unpacking": lambda: by_all_to_all(
            x, first_rows, padded, exists
        ),
        "all_gather, then a gather": lambda: by_all_gather(x, source, exists),
    }
    for name, run in (alone | among_collectives).items():
        if name.startswith(("dispatch", "all")):
            np.testing.assert_array_equal(
                np.asarray(run()).view(np.uint16), np.asarray(received).view(np.uint16), name
            )
    seconds = common.interleaved(alone, arguments.repeats)
    seconds |= common.interleaved(among_collectives, arguments.repeats)
    limit = seconds["memcpy, one thread"]
    rows = [
        {
            "what": name,
            "ms": round(1e3 * value, 2),
            "GB_per_s": round(num_bytes / value / 1e9, 2),
            "of_memcpy": round(limit / value, 3),
        }
        for name, value in seconds.items()
    ]
    for row in rows:
        print("{what:<42}{ms:9.2f} ms{GB_per_s:8.2f} GB/s{of_memcpy:8.3f} of memcpy".format(**row))
    heads, size = FEATURE
    sizes = f"{T} tokens per rank, {heads} heads × {size}, {x.dtype}, random segments"
    title = f"dispatch of {num_bytes / 1e6:.0f} MB over {W} devices ({sizes})"
    common.write(arguments.output, title, rows)


if __name__ == "__main__":
    main()
