"""Whether the limit on open files is enough for a job, before gloo runs into it."""

import os
import resource

from jax_cp_dispatch._warning import warn_caller

# Counted on jax 0.10.2: JAX's client and its coordination, and gloo's device.
_OF_JAX, _OF_GLOO = 7, 4
_PER_NEIGHBOUR = 4  # its socket, its segment, and its process, watched twice
_SPARE = 1


def check_open_files(num_processes: int, num_devices: int) -> None:
    """Refuses a limit with which JAX cannot start; warns of one too small for XLA's collectives.

    Args:
      num_processes: of this job, on this host.
      num_devices: of each.
    Raises:
      RuntimeError: this process may open too few files.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    others = num_processes - 1
    need = len(os.listdir("/proc/self/fd")) + _OF_JAX + _OF_GLOO + _PER_NEIGHBOUR * others + _SPARE
    if limit < need:
        raise RuntimeError(
            f"initialize: this process may open {limit} files; with {num_processes} processes it "
            f"needs {need} or more. Raise the limit: ulimit -n 1024."
        )
    # Each device connects to all others.
    need += num_devices * (num_devices * num_processes - 1)
    if limit < need:
        warn_caller(
            f"initialize: this process may open {limit} files. XLA's collectives over all devices "
            f"of {num_processes} processes need about {need}, and fail with fewer. Raise the "
            f"limit: ulimit -n {max(1024, 2 * need)}.",
            RuntimeWarning,
        )
