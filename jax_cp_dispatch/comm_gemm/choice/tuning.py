"""Measured times of methods: a table to save, load and use for `method="auto"`."""

import json
import os
import pathlib
from typing import Any, NamedTuple

from jax_cp_dispatch._arguments import check_type
from jax_cp_dispatch.cost import CommGemmMethod, CommGemmShape

_VARIABLE = "JAX_CP_DISPATCH_TUNING"


class TuningTable(NamedTuple):
    """Seconds of matmuls by method.

    Attributes:
      machine: where they were measured: platform, device kind, versions.
      seconds: of each shape and label of `cost.comm_gemm_methods`.
    """

    machine: dict[str, str]
    seconds: dict[CommGemmShape, dict[str, float]]

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Writes the table as JSON."""
        path = pathlib.Path(path)
        entries = [
            {**shape.__dict__, "seconds": seconds} for shape, seconds in self.seconds.items()
        ]
        path.write_text(json.dumps({"machine": self.machine, "entries": entries}, indent=1) + "\n")
        return path

    @staticmethod
    def load(path: str | os.PathLike) -> "TuningTable":
        """Reads a table that `save` wrote.

        Raises:
          ValueError: the file is not such a table.
        """
        text = pathlib.Path(path).read_text()
        try:
            return _from_json(text)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"TuningTable.load: {path} is not a table that tune saved ({error!r}). Tune again."
            ) from error


def _from_json(text: str) -> TuningTable:
    content = json.loads(text)
    seconds = {}
    for entry in content["entries"]:
        times = {str(label): float(t) for label, t in entry.pop("seconds").items()}
        seconds[CommGemmShape(**entry)] = times
    return TuningTable(dict(content["machine"]), seconds)


def check_table(op: str, table: Any) -> None:
    """Requires a table."""
    remedy = "Pass the result of tune or TuningTable.load."
    check_type(op, "table", table, TuningTable, remedy)


_table: TuningTable | None = None
_is_read = False


def use_tuning(table: TuningTable | None) -> None:
    """Makes `method="auto"` in this process use a table; None selects the cost model alone.

    Programs that are already traced keep their choice. Every process of a program must use the same
    table.

    Raises:
      TypeError: `table` is not a `TuningTable`.
    """
    global _table, _is_read
    if table is not None:
        check_table("use_tuning", table)
    _table, _is_read = table, True


def current_tuning() -> TuningTable | None:
    """Returns the table in use: of `use_tuning`, or from the file in JAX_CP_DISPATCH_TUNING."""
    global _table, _is_read
    if not _is_read:
        path = os.environ.get(_VARIABLE)
        _table, _is_read = TuningTable.load(path) if path else None, True
    return _table


def method_options(label: str, method: CommGemmMethod) -> dict[str, Any]:
    """Returns the keywords of a matmul for a method of `cost.comm_gemm_methods`."""
    options: dict[str, Any] = {"method": method.name}
    if method.name == "PIPELINE":
        options["num_splits"] = method.num_chunks
    if method.name == "RING_EXCHANGE":
        options["use_ce"] = method.copies
        if label == "ring pairs":
            options["aggregate"] = True
    return options
