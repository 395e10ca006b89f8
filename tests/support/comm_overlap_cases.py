"""A communication buffer to vary in tests, and a registry that is empty before and after each."""

from typing import Any

import pytest

from jax_cp_dispatch.buffers import create_comm_overlap_buffer, destroy_all_comm_overlap_buffers

BASE: dict[str, Any] = {
    "comm_type": "AG",
    "method": "RING_EXCHANGE",
    "buffer_shape": (64, 32),
    "buffer_dtype": "float32",
    "tp_size": 4,
}


@pytest.fixture(autouse=True)
def no_comm_overlap_buffers():
    destroy_all_comm_overlap_buffers()
    yield
    destroy_all_comm_overlap_buffers()


def create(**options):
    return create_comm_overlap_buffer(**{**BASE, **options})
