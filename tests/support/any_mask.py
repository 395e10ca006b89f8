"""Draws masks for properties."""

from hypothesis import strategies as st

from jax_cp_dispatch.masks import BlockCausal, Causal, Chunked, Full, SlidingWindow


def causal_mask(most):
    """Draws a causal mask, with numbers of at most `most` tokens."""
    size = st.integers(1, most)
    return st.just(Causal()) | st.builds(SlidingWindow, size) | st.builds(Chunked, size)


def any_mask(most):
    """Draws any mask of numbers."""
    left, right = (st.none() | st.integers(lowest, most) for lowest in (1, 0))
    more = st.builds(SlidingWindow, left, right) | st.builds(BlockCausal, st.integers(1, most))
    return causal_mask(most) | st.just(Full()) | more
