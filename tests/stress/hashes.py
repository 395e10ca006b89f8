"""Hashes of the results and gradients of every case of the contract, in three dtypes.

A change of structure leaves all bits as they are: print the hashes before and after it.

    python tests/stress/hashes.py > before; ...; python tests/stress/hashes.py | diff before -

Arguments choose cases by the beginnings of their names.
"""

import hashlib
import sys
import zlib
from pathlib import Path

for name in ("contract", "oracles", "support"):
    sys.path.append(str(Path(__file__).parents[1] / name))

from jax_cp_dispatch.cpu_devices import start_cpu_devices  # noqa: E402

start_cpu_devices(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from contract import mesh_of, on_global_arrays, on_ranks, placed, split, with_gradients  # noqa: E402
from operations import CASES  # noqa: E402


def hashed(case, dtype: str) -> str:
    """Runs a case inside `shard_map` or as a global call, in turn by its name."""
    arrays, mesh = case.arrays(dtype), mesh_of(4)
    *_, cotangents = case.expected(arrays)
    floats, others = split(arrays)
    is_global = zlib.crc32((case.name + dtype).encode()) % 2 and not case.only_on_ranks
    run = on_global_arrays(case, mesh) if is_global else on_ranks(case, mesh, check_vma=False)
    places = (case.specs, floats), (case.specs, others), (case.results, cotangents)
    results = jax.jit(with_gradients(run))(*(placed(mesh, *place) for place in places))
    total = hashlib.sha256()
    for path, x in jax.tree.leaves_with_path(results):
        total.update(f"{path} {x.dtype} {x.shape}".encode() + np.asarray(x).tobytes())
    return total.hexdigest()[:16]


def main() -> None:
    chosen = [case for case in CASES if str(case).startswith(tuple(sys.argv[1:]) or "")]
    for case in chosen:
        for dtype in ("float32", "bfloat16", "float64"):
            with jax.enable_x64(dtype == "float64"):
                print(f"{hashed(case, dtype)} {case} {dtype}", flush=True)


if __name__ == "__main__":
    main()
