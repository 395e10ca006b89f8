"""The parameters of a communication buffer: ids, defaults, bytes, and invalid values."""

import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from comm_overlap_cases import BASE, create, no_comm_overlap_buffers  # noqa: F401

from jax_cp_dispatch.buffers import (
    CommOverlapMethod,
    CommOverlapType,
    comm_overlap_buffer_bytes,
    create_comm_overlap_buffer,
    destroy_comm_overlap_buffer,
    list_comm_overlap_buffers,
)

pytestmark = pytest.mark.usefixtures("unchecked_types")

RING = CommOverlapMethod.RING_EXCHANGE


def id_of(**options):
    """Returns the id alone; no buffer remains."""
    buffer = create(**options)
    destroy_comm_overlap_buffer(buffer)
    return buffer


# ---- Ids.

OTHER: list[dict[str, Any]] = [
    {"comm_type": "RS"},
    {"method": "BULK"},
    {"buffer_shape": (65, 32)},
    {"buffer_shape": (64, 33)},
    {"buffer_shape": (32, 64)},
    {"buffer_dtype": "bfloat16"},
    {"buffer_dtype": "float16"},
    {"buffer_dtype": "float64"},
    {"tp_size": 2},
    {"num_splits": 5},
    {"num_max_streams": 4},
    {"comm_cga_size": 2},
    {"gemm_priority": 1},
    {"gemm_priority": -1},
    {"comm_priority": 1},
    {"num_comm_sm": 2},
    {"set_sm_margin": True},
    {"use_ce": False},
    {"atomic_gemm": True},
    {"aggregate_ag": True},
]


def test_every_parameter_is_part_of_the_id():
    ids = [id_of(), *(id_of(**other) for other in OTHER)]
    assert len(set(ids)) == len(ids)
    pipeline = {"comm_type": "RS", "method": "PIPELINE"}
    assert id_of(**pipeline) != id_of(**pipeline, rs_overlap_first_gemm=True)
    named = {name for other in OTHER for name in other} | {"rs_overlap_first_gemm"}
    (buffer,) = [create()]
    assert named == set(vars(list_comm_overlap_buffers()[buffer].config))


@pytest.mark.parametrize(
    "options",
    [
        {"comm_type": CommOverlapType.AG, "method": "ring_exchange", "buffer_shape": [64, 32]},
        {"buffer_dtype": jnp.float32, "tp_size": np.int8(4), "num_splits": np.int64(4)},
        {"buffer_dtype": np.dtype("float32"), "method": RING, "comm_cga_size": 1},
        {"num_comm_sm": 1, "set_sm_margin": False, "use_ce": True},  # the defaults of the ring
    ],
)
def test_equal_arguments_may_be_written_in_different_ways(options):
    assert id_of(**options) == id_of()


def test_defaults_depend_on_the_method():
    parameters = ("comm_cga_size", "num_comm_sm", "set_sm_margin", "use_ce")
    defaults = {}
    for method in ("RING_EXCHANGE", "PIPELINE", "BULK"):
        buffer = create(comm_type="RS", method=method)
        config = list_comm_overlap_buffers()[buffer].config
        defaults[method] = tuple(getattr(config, name) for name in parameters)
        assert (config.num_splits, config.num_max_streams) == (4, 3)
        assert (config.gemm_priority, config.comm_priority) == (0, 0)
    collective = (2, 16, True, False)
    assert defaults == {
        "RING_EXCHANGE": (1, 1, False, True),
        "PIPELINE": collective,
        "BULK": collective,
    }


IDS = """
from jax_cp_dispatch.buffers import create_comm_overlap_buffer
print(create_comm_overlap_buffer("AG", "RING_EXCHANGE", (64, 32), "float32", 4))
print(create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7))
"""


def test_ids_are_the_same_in_every_process():
    there = subprocess.run(
        [sys.executable, "-c", IDS],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    ).stdout
    other = create_comm_overlap_buffer("RS", "PIPELINE", (8, 2), "bfloat16", 2, num_splits=7)
    assert there.split() == [str(create()), str(other)]


# ---- Bytes.


@pytest.mark.parametrize(
    "kind, method, options, num_elements",
    [
        ("AG", "RING_EXCHANGE", {}, 64 * 32),
        ("AG", "BULK", {}, 64 * 32),
        ("RS", "PIPELINE", {"num_splits": 9}, 64 * 32),
        ("RS", "RING_EXCHANGE", {}, 7 * 16 * 32),  # 2 * 4 - 1 blocks of rows
        ("RS", "RING_EXCHANGE", {"use_ce": False}, 0),  # nothing is copied
        ("AG", "RING_EXCHANGE", {"use_ce": False}, 0),
        ("RS", "RING_EXCHANGE", {"tp_size": 3}, 5 * 22 * 32),  # blocks of rows rounded up
        ("NONE", "NONE", {}, 0),
    ],
)
def test_comm_overlap_buffer_bytes_before_a_buffer_exists(kind, method, options, num_elements):
    for dtype, size in ("bfloat16", 2), ("float32", 4), ("float64", 8):
        arguments = {**BASE, "comm_type": kind, "method": method, "buffer_dtype": dtype, **options}
        assert comm_overlap_buffer_bytes(**arguments) == num_elements * size
    assert list_comm_overlap_buffers() == {}


@pytest.mark.parametrize(
    "shape, options, num_bytes",
    [
        ((64, 32), {}, 64 * 32 + 64 * 4),  # rows, and 4 block scales for each
        ((64, 129), {}, 64 * 129 + 64 * 8),
        ((3, 33), {}, 128 + 16),  # rows padded to 64 bytes; the scales of 4 ranks are 4 floats
        ((64, 32), {"use_ce": False}, 64 * 4),  # scales alone
        ((64, 32), {"method": "BULK"}, 64 * 32),  # whose array has no rows
    ],
)
def test_comm_overlap_buffer_bytes_with_scales(shape, options, num_bytes):
    arguments = {**BASE, "comm_type": "AG", "method": "RING_EXCHANGE", "buffer_shape": shape}
    arguments |= {"buffer_dtype": "float8_e4m3fn", **options}
    assert comm_overlap_buffer_bytes(**arguments) == num_bytes


# ---- Parameters.


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"comm_type": "GATHER"}, ValueError, "comm_type is 'GATHER'; .* 'RS', 'AG', or that"),
        ({"comm_type": 2}, ValueError, "comm_type is 2; .* or that member of CommOverlapT"),
        ({"method": CommOverlapType.AG}, ValueError, "method is .* 'BULK', 'PIPELINE', .*, or"),
        ({"method": "PIPELINE"}, ValueError, r"got CommOverlapMethod\.PIPELINE with CommOverlapType"
         r"\.AG; .* Use CommOverlapMethod\.RING_EXCHANGE"),
        ({"method": "NONE"}, ValueError, r"got CommOverlapType\.AG with CommOverlapMethod\.NONE; ei"
         "ther both are NONE"),
        ({"comm_type": "NONE"}, ValueError, "either both are NONE.* Pass both"),
        ({"buffer_shape": (4,)}, ValueError, r"buffer_shape is \(4,\); it needs two sizes"),
        ({"buffer_shape": (4, 4, 4)}, ValueError, r"buffer_shape is \(4, 4, 4\); it needs two siz"),
        ({"buffer_shape": 4}, ValueError, "buffer_shape is 4; it needs two sizes"),
        ({"buffer_shape": (0, 4)}, ValueError, "buffer_shape is 0; it needs to be an integer of a"),
        ({"buffer_shape": (4, 1.5)}, TypeError, "buffer_shape is 1.5; it needs to be an integer"),
        ({"buffer_dtype": "int32"}, ValueError, r"int32 with .*'bfloat16', 'float16'"),
        ({"buffer_dtype": "float8_e4m3fn", "comm_type": "RS"}, ValueError, "float8_e4m3fn with "),
        ({"buffer_dtype": "nonsense"}, ValueError, r"'nonsense' with .*; it needs to"),
        ({"tp_size": 0}, ValueError, "tp_size is 0; it needs to be an integer of at least 1"),
        ({"tp_size": True}, TypeError, "tp_size is True; it needs to be an integer of at least 1"),
        ({"num_splits": -1}, ValueError, "num_splits is -1; it needs to be an integer of at least"),
        ({"num_splits": "4"}, TypeError, "num_splits is '4'; it needs to be an integer"),
        ({"num_splits": 2**40}, ValueError, "num_splits is 1099511627776; .* at most 1048576"),
        ({"buffer_shape": (2**31, 2**31)}, ValueError, r"buffer_shape is \(2147483648, 2147483648\)"
         r", 18446744073709551616 bytes for each of 4 ranks; a process can address less than 2"),
        ({"gemm_priority": 2**62}, ValueError, "gemm_priority is 4611686018427387904; it needs"),
        ({"buffer_shape": (2**45, 1)}, ValueError, r"a process can address less than 2\*\*47 b"),
        ({"buffer_shape": (2**40, 2**40), "use_ce": False, "buffer_dtype": "float8_e5m2"},
         ValueError, r"a process can address less than 2\*\*47 b"),
        ({"buffer_shape": (2**62, 1)}, ValueError, "4611686018427387904; .* of at least 1 and at"),
        ({"method": "rings"}, ValueError, "method is 'rings'; it needs to be one of 'NONE', 'BULK',"
         " 'PIPELINE', 'RING_EXCHANGE', or that member of CommOverlapMethod"),
        ({"use_ce": 1}, TypeError, "use_ce is 1; it needs to be True or False"),
        ({"method": "BULK", "atomic_gemm": True}, ValueError,
         r"got atomic_gemm with CommOverlapMethod\.BULK; chunk counters need chunks: CommOverlapM"),
        ({"rs_overlap_first_gemm": True}, ValueError, "got rs_overlap_first_gemm with .* Omit it"),
        ({"aggregate_ag": True, "tp_size": 3}, ValueError,
         r"got aggregate_ag with tp_size=3; pairs need an even number of ranks\. Omit it"),
        ({"aggregate_ag": True, "comm_type": "RS"}, ValueError, "got aggregate_ag with CommOverla"),
        ({"aggregate_ag": True, "method": "BULK"}, ValueError, "got aggregate_ag with .*BULK"),
        ({"aggregate_ag": True, "use_ce": False}, ValueError,
         "got aggregate_ag with use_ce=False; pairs of chunks are copied"),
        ({"rs_overlap_first_gemm": True, "method": "PIPELINE", "comm_type": "RS",
          "atomic_gemm": True}, ValueError, "got rs_overlap_first_gemm with atomic_gemm; all prod"),
        ({"aggregate_ag": True, "atomic_gemm": True}, ValueError, "aggregate_ag with .*=True; it "),
    ],
)  # fmt: skip
def test_invalid_parameters_are_rejected(options, error, message):
    """The byte count and the buffer reject them alike; nothing is created."""
    for function in (create_comm_overlap_buffer, comm_overlap_buffer_bytes):
        with pytest.raises(error, match=f"^{function.__name__}: .*{message}"):
            function(**{**BASE, **options})
    assert list_comm_overlap_buffers() == {}
