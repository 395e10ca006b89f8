"""The predictions of all algorithms for a workload, by label."""

from jax_cp_dispatch.attention.choose import candidates


def predict(workload, *, hardware, **options):
    """Those that need no placement; balanced attention by an estimate of its plan."""
    found = candidates(workload, hardware)
    return {x.label: x.predict(workload, hardware=hardware, **options) for x in found}
