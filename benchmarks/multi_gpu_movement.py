"""Movement between GPUs: equal parts of every rank to every rank, beside the limit of the links.

The limit is measured: an all-to-all of the same parts by XLA (NCCL), and a copy of the same bytes
to the next GPU. Payload counts all rows of a GPU, bus bandwidth those that leave it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from multi_gpu_programs import Program, Sizes, failing, symmetric_bytes, timed

from jax_cp_dispatch import combine, compute_metadata, dispatch
from jax_cp_dispatch.tools.programs import AXIS, BY_RANK, Ranks

ROW_BYTES = 4096  # keys and values of a token: 2 x 8 heads of 128 in 16 bits
SMS = (16, 32, 64)
LIMITS = ("all_to_all of equal parts", "copy to the next GPU")
PEER = "dispatch by XLA"  # ragged_all_to_all, where it serves; the path says


class Movement:
    """The section: every size, alone and beside a GEMM."""

    def __init__(self, ranks: Ranks, sizes: Sizes):
        self._rounds = sizes.rounds
        self._cases = [_Case(ranks, n, n in sizes.beside, sizes.square) for n in sizes.moved]

    @property
    def symmetric_bytes(self) -> int:
        return sum(symmetric_bytes(case.programs.values()) for case in self._cases)

    def rows(self) -> Iterator[dict[str, Any]]:
        for case in self._cases:
            yield from case.rows(self._rounds)


class _Case:
    """Exchanges of one size.

    Attributes:
      programs: by name; `operands` has the names of their arguments.
    """

    def __init__(self, ranks: Ranks, num_bytes: int, is_beside: bool, square: int):
        W = ranks.count
        row_bytes = min(ROW_BYTES, max(2, num_bytes // W))
        part = max(1, num_bytes // (W * row_bytes))
        self.ranks, self.square, self.row_bytes, self.tokens = ranks, square, row_bytes, W * part
        self.num_bytes = self.tokens * row_bytes
        plan, _ = compute_metadata(
            np.full((W, W), part, np.int32), np.tile(np.arange(W, dtype=np.int32), (W, 1))
        )
        x = _shape(ranks, (W * self.tokens, row_bytes // 2))
        self.plan, self.shapes = (
            plan,
            {
                "x": x,
                "y": x,
                "m": jax.tree.map(lambda a: _shape(ranks, np.shape(a), a.dtype), plan),
                "a": _shape(ranks, (W * square, square)),
            },
        )
        self.programs: dict[str, Program] = {}
        self.operands: dict[str, str] = {}
        send = partial(dispatch, axis_name=AXIS, capacity=self.tokens)
        home = partial(combine, axis_name=AXIS, num_tokens=self.tokens)
        xla: dict[str, Any] = {"implementation": "xla"}

        def all_to_all(x):
            return lax.all_to_all(x.reshape(W, part, -1), AXIS, 0, 0).reshape(x.shape)

        self._add("dispatch", send, "xm")
        self._add("combine", home, "ym")
        self._add(PEER, partial(send, **xla), "xm")
        self._add(LIMITS[0], all_to_all, "x")
        if jax.process_count() > 1:
            self._add(LIMITS[1], lambda x: lax.ppermute(x, AXIS, _to_next(W)), "x")
        if is_beside:
            self._add("GEMM", lambda a: a @ a, "a")
            self._add("dispatch beside a GEMM", _beside(send), "xma")
            self._add(f"{PEER} beside a GEMM", _beside(partial(send, **xla)), "xma")
            self._add(f"{LIMITS[0]} beside a GEMM", _beside(all_to_all), "xa")
            for sms in SMS if ranks.is_gpu else ():
                with_sms = partial(send, **{"num_comm_sm": sms})
                self._add(f"dispatch, {sms} SMs", with_sms, "xm")
                self._add(f"dispatch, {sms} SMs beside a GEMM", _beside(with_sms), "xma")

    def _add(self, name: str, fn: Any, operands: str) -> None:
        out = (BY_RANK, BY_RANK) if name.endswith("beside a GEMM") else BY_RANK
        program = self.ranks.program(fn, out_specs=out)
        self.programs[name] = Program(program, *(self.shapes[x] for x in operands))
        self.operands[name] = operands

    def rows(self, rounds: int) -> Iterator[dict[str, Any]]:
        draw = lambda shape: jax.jit(
            lambda key: jax.random.randint(key, shape.shape, -9, 9).astype(shape.dtype),
            out_shardings=shape.sharding,
        )(jax.random.key(0))
        given: dict[str, Any] = {name: draw(self.shapes[name]) for name in "xa"}
        given["m"] = jax.tree.map(self.ranks.put, self.plan)
        given["y"] = self.programs["dispatch"](given["x"], given["m"])
        runs: dict[str, Any] = {
            name: partial(program, *(given[x] for x in self.operands[name]))
            for name, program in self.programs.items()
        }
        for what, error in failing(runs).items():
            yield {"what": what, "bytes_per_gpu": self.num_bytes, "error": error}
            del runs[what]
        self._check(runs, given["x"])
        paths = {name: self.programs[name].path for name in runs}
        if LIMITS[1] not in runs:
            devices = np.roll(self.ranks.mesh.devices, -1)
            to = NamedSharding(Mesh(devices, (AXIS,)), BY_RANK)
            runs[LIMITS[1]] = lambda: jax.device_put(given["x"], to)
            paths[LIMITS[1]] = "copies between devices of one process"
        found = timed(runs, rounds)
        bus = {name: self._bus(name, times["us"]) for name, times in found.items()}
        for name, times in found.items():
            row: dict[str, Any] = {"what": name, "bytes_per_gpu": self.num_bytes} | times
            alone = name.removesuffix(" beside a GEMM")
            if name == "GEMM":
                row["TFLOP_per_s_per_gpu"] = 2e-6 * self.square**3 / times["us"]
            elif name != alone and {alone, "GEMM"} <= found.keys():
                row["alone_us"], row["gemm_us"] = found[alone]["us"], found["GEMM"]["us"]
                shorter = min(row["alone_us"], row["gemm_us"])
                row["hidden"] = (row["alone_us"] + row["gemm_us"] - times["us"]) / shorter
            elif name == alone:
                row["row_bytes"] = self.row_bytes
                row["payload_GB_per_s"] = 1e-3 * self.num_bytes / times["us"]
                row["bus_GB_per_s"] = bus[name]
                row["of_limit"] = bus[name] / max(bus.get(limit, 0.0) for limit in LIMITS)
            yield row | {"path": paths[name]}

    def _bus(self, name: str, us: float) -> float:
        """GB/s of the rows that leave a GPU; all of a copy's do."""
        W = self.ranks.count
        return 1e-3 * self.num_bytes / us * (1 if name == LIMITS[1] else (W - 1) / W)

    def _check(self, runs: dict[str, Any], x: jax.Array) -> None:
        """Raises ValueError if an exchange gives other rows than XLA's all-to-all."""
        want = runs[LIMITS[0]]()
        for name, run in runs.items():
            if "m" in self.operands[name]:
                got = run()
                got = got[0] if isinstance(got, tuple) else got
                expected = x if name == "combine" else want
                self.ranks.check_equal(name, got, expected, tolerance=0.0)


def _shape(ranks: Ranks, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(ranks.mesh, BY_RANK))


def _beside(move: Any) -> Any:
    return lambda x, *rest: (move(x, *rest[:-1]), rest[-1] @ rest[-1])


def _to_next(num_ranks: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
