"""Hooks into the package that several files of tests need, and that no public function offers."""

from jax_cp_dispatch._ranks import partitioned  # inner: a TPU is pretended
from jax_cp_dispatch._text import say_once  # inner: a warning comes once in a process


def warn_again() -> None:
    """Forgets which warnings were given."""
    say_once.cache_clear()


def pretend_tpus(monkeypatch) -> None:
    """Lowers global arrays as for TPUs, whose XLA cannot partition custom calls."""
    monkeypatch.setattr(partitioned, "can_partition", lambda ctx: False)
