"""`balance_profile`: times the attention of each rank alone, on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import DTypeLike

from jax_cp_dispatch._arguments import check_positive
from jax_cp_dispatch._rank_times import BalanceProfile, time_ranks
from jax_cp_dispatch._ranks.options import read_options
from jax_cp_dispatch.attention.algorithms import ALGORITHMS, Algorithm, Balanced, Placed
from jax_cp_dispatch.attention.algorithms.by_plan import Batch, RankProgram, Shape
from jax_cp_dispatch.attention.choose import Auto, read_algorithm
from jax_cp_dispatch.attention.operands import AttentionOptions
from jax_cp_dispatch.documents.documents import trusted
from jax_cp_dispatch.documents.table import Row, document_table
from jax_cp_dispatch.masks import Mask
from jax_cp_dispatch.masks.read import read_mask_on_host
from jax_cp_dispatch.planning import Plan

_OP = "balance_profile"
_MEASURED = tuple(x.name for x in ALGORITHMS if x.rank_program is not Algorithm.rank_program)


def balance_profile(
    lengths: Iterable[Row] | Row,
    *,
    world_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: DTypeLike = "bfloat16",
    columns: int | None = None,
    mask: Mask | str | None = None,
    algorithms: Sequence[Algorithm | Plan | str] = _MEASURED,
    backward: bool = True,
    repeats: int = 3,
) -> tuple[BalanceProfile, ...]:
    """Times attention of each rank of a batch, one rank after the other, on one device.

    A step over many devices takes as long as its busiest rank. This measures the busiest rank, and
    the balance in seconds, of any number of ranks on one device, without a mesh: each rank's
    queries, with the number of keys that it would receive. Exchanges are not run. Ranks and
    algorithms are interleaved over the rounds. The values of q, k and v are random.

    Call outside `jit`. The device needs memory for one rank. On CPU, seconds are processor time,
    so other processes do not count.

    Args:
      lengths, columns, mask: the documents of one batch; see `plan_attention`.
      world_size: number of ranks W.
      num_heads, num_kv_heads, head_size: of the model, on one rank.
      dtype: of q, k and v.
      algorithms: names or objects, as for `context_parallel_attention`, or plans of these
        documents, of all ranks. "zigzag" and "hamilton" compute in zigzag layout, "placed" with the
        placement of `place_tokens`.
      backward: the gradients of q, k and v as well.
      repeats: rounds.
    Returns:
      One profile per algorithm.
    Raises:
      TypeError, ValueError: as `plan_attention`; or the heads do not match, an algorithm is "auto",
        or a plan is for other sizes.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    check_positive(_OP, repeats=repeats, **sizes)
    documents = document_table(_OP, world_size=world_size, lengths=lengths, columns=columns)
    mask = read_mask_on_host(_OP, mask, (documents.batch, documents.columns))
    rows = documents.batch, documents.columns // world_size
    heads = num_heads, num_kv_heads, num_kv_heads
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    qkv = [Shape((*rows, n, head_size), dtype) for n in heads]
    options = AttentionOptions(read_options(_OP, "ranks"))
    batch = Batch(world_size, trusted(documents.numbers(), mask=mask), qkv)
    chosen = [_read(x, batch) for x in algorithms]
    programs = []
    for algorithm, its_batch in chosen:
        program = algorithm.rank_program(options, its_batch, backward=backward)
        if program is None:
            raise _not_measured(algorithm.name)
        programs.append(program)
    runs = [_run_ranks(program) for program in programs]
    seconds = time_ranks(runs, [len(program.ranges) for program in programs], repeats)
    return tuple(
        BalanceProfile(x.name, times, tuple(program.num_pairs.tolist()), "pairs")
        for (x, _), program, times in zip(chosen, programs, seconds, strict=True)
    )


def _read(given: Any, batch: Batch) -> tuple[Algorithm, Batch]:
    """Returns an algorithm, and the batch with its plan, if a plan was given."""
    if not isinstance(given, Plan):
        algorithm = read_algorithm(_OP, given)
        if isinstance(algorithm, Auto):
            raise _not_measured(algorithm.name)
        return algorithm, batch
    rows, world_size = batch.qkv[0].shape[:2], batch.num_ranks
    held = given.batch, given.num_tokens // given.batch
    if given.fingerprint.shape[:-1] != (world_size,) or held != rows:
        ranks = list(given.fingerprint.shape[:-1])
        raise ValueError(
            f"{_OP}: got a plan of {ranks} ranks with {held[0]} x {held[1]} rows, but the "
            f"documents need one of [{world_size}] with {rows[0]} x {rows[1]}. Pass the "
            "plan of all ranks for these documents."
        )
    algorithm = Placed() if given.is_placed else Balanced()
    return algorithm, batch._replace(plan=given)


def _not_measured(name: str) -> ValueError:
    return ValueError(
        f"{_OP}: got algorithm {name!r}. Name algorithms that can be measured: "
        f"{', '.join(map(repr, _MEASURED))}."
    )


def _run_ranks(program: RankProgram) -> Callable[[int], Any]:
    rng = np.random.default_rng(0)
    random = lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype)
    arrays = jax.device_put([random(x) for x in program.shapes])
    ranges = jax.device_put(program.ranges)
    compiled = jax.jit(program.run)
    return lambda rank: compiled(np.int32(rank), *arrays, ranges[rank])
