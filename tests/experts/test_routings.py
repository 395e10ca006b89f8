"""Properties of any routing: rows, groups and sums, their adjoints, and what moves."""

import functools

import jax
import numpy as np
from experts_oracle import evenly, grouped_rows, num_moved, summed_rows
from hypothesis import given, strategies as st
from on_mesh import AXIS, mesh_of, on_ranks
from properties import examples

from jax_cp_dispatch import experts

W, T, K, E, F = 4, 5, 3, 12, 2  # more experts than a rank has tokens
CAPACITY = W * T * K
RNG = np.random.default_rng(0)
X = RNG.integers(-8, 9, (W, T, F)).astype(np.float32)
WEIGHTS = RNG.integers(-4, 5, (W, T, K)).astype(np.float32)


@functools.cache
def program(has_map):
    """Everything that a routing determines; integers, so sums are exact."""

    def run(index, held):
        held = {"physical_to_logical": held} if has_map else {}
        routing = experts.route(index, num_experts=E, axis_name=AXIS, capacity=CAPACITY, **held)
        rows, pull_rows = jax.vjp(lambda x: experts.dispatch_tokens(x, routing), *local(X))
        sums = lambda y: experts.combine_tokens(y, *local(WEIGHTS), routing)
        out, pull_sums = jax.vjp(sums, rows)
        pulled = pull_rows(3 * rows)[0], pull_sums(2 * out)[0]
        return rows, out, pulled, (routing.group_sizes, routing.num_recv_tokens, routing.num_rows)

    local = lambda x: (jax.numpy.asarray(x)[jax.lax.axis_index(AXIS)],)
    return on_ranks(run, mesh_of(W))


def check(index, held, *, has_map):
    everywhere = np.broadcast_to(held, (W, *held.shape))
    rows, out, pulled, (sizes, received, num_rows) = program(has_map)(index, everywhere)
    want, want_sizes = grouped_rows(X, index, held, CAPACITY)
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(sizes, want_sizes)
    np.testing.assert_array_equal(num_rows[:, 0], want_sizes.sum(1))
    np.testing.assert_array_equal(received[:, 0, :-1], num_moved(index, held).T)
    np.testing.assert_array_equal(received[:, 0, -1], num_moved(index, held).sum(0))
    np.testing.assert_array_equal(out, summed_rows(want, WEIGHTS, index, held))
    # <dispatch(x), 3 rows> = <x, its adjoint>; the sums' adjoint is that of <., 2 out>.
    np.testing.assert_array_equal(pulled[0], 3 * summed_rows(want, None, index, held))
    np.testing.assert_array_equal((pulled[1] * want).sum(), (2 * np.asarray(out) ** 2).sum())


def an_index(most=E - 1):
    """Any experts; often few, so that choices repeat, or none."""
    few = st.integers(-1, most).flatmap(lambda e: st.sampled_from([-1, e, e, (e + 1) % E]))
    return st.one_of(
        st.lists(st.integers(-1, most), min_size=W * T * K, max_size=W * T * K),
        st.lists(few, min_size=W * T * K, max_size=W * T * K),
        st.integers(-1, most).map(lambda e: [e] * (W * T * K)),
    ).map(lambda x: np.array(x, np.int32).reshape(W, T, K))


@examples(12)
@given(an_index())
def test_experts_spread_evenly(index):
    check(index, evenly(E, W), has_map=False)


@examples(12)
@given(an_index(), st.permutations(range(E)), st.tuples(*[st.integers(-1, E - 1)] * 4))
def test_a_map_with_replicas(index, order, more):
    """Each expert has a place, and some have several; -1 is a place without one."""
    held = np.array([*order, *more], np.int32).reshape(W, -1)
    check(index, held, has_map=True)
