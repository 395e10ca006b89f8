"""Output of the command for people: tables."""

from collections.abc import Sequence

from jax_cp_dispatch._text import byte_count, count, duration, paragraph, table
from jax_cp_dispatch.plan_command.batch import Batch
from jax_cp_dispatch.plan_command.compare import Comparison, Layout


def report(comparison: Comparison, batch: Batch, hardware_name: str) -> str:
    """Returns the tables of one number of ranks."""
    passes = "forward and backward" if comparison.with_backward else "forward"
    times = paragraph(
        f"Times of one layer, {passes}: predicted, not measured. Those of zigzag and hamilton "
        "include the rearrangement of contiguous tokens. Waiting is communication that is not "
        "hidden."
    )
    return "\n".join(
        [
            *_head(comparison, batch, hardware_name),
            "",
            _work_and_bytes(comparison),
            "",
            _times(comparison),
            times,
            "",
            paragraph("Choice: " + comparison.choice.reason),
        ]
    )


def _head(comparison: Comparison, batch: Batch, hardware_name: str) -> list[str]:
    workload, nodes = comparison.workload, comparison.num_nodes
    lengths = [length for row in workload.rows for length in row]
    head = [
        f"{workload.num_ranks} ranks of {count(workload.rows_per_rank)} tokens in {nodes} "
        f"node{'s' if nodes > 1 else ''} ({hardware_name})",
        f"  documents  {count(len(lengths))} of {count(min(lengths))} to {count(max(lengths))} "
        f"tokens in {count(len(workload.rows))} batch row{'s' if len(workload.rows) > 1 else ''}",
        f"  tokens     {count(comparison.num_tokens)}; "
        f"{count(comparison.num_tokens - sum(lengths))} of them padding",
    ]
    if batch.num_cut or batch.num_left_out:
        head.append(
            f"  too long   documents that exceed the ranks: {count(batch.num_cut)} cut, "
            f"{count(batch.num_left_out)} left out"
        )
    slowest = comparison.slowest
    return [
        *head,
        f"  slowest    rank {slowest.rank} before planning: {slowest.imbalance:.2f} times the mean "
        f"work; {slowest.share:.0%} of it from {count(slowest.queries)} tokens of",
        f"             {batch.name(slowest.batch_row, slowest.document)} "
        f"({count(slowest.length)} tokens)",
    ]


def _work_and_bytes(comparison: Comparison) -> str:
    header = ("", "work", "rank", "queries", "keys", "inside", "busiest", "between", "busiest")
    caption = (
        "Work: the most of a rank, divided by the mean, and that rank. Queries and keys that move, "
        "per token; a row that two ranks receive counts twice. "
    )
    if comparison.num_nodes == 1:
        header = (*header[:5], "bytes", "busiest")
        caption += "Bytes that a rank sends in one layer, forward"
    else:
        caption += "Bytes that a rank sends in one layer, forward, inside nodes and between them"
    caption += (
        ": the mean of all ranks, and those of the busiest rank, which sends or receives most and "
        "decides the time. Outputs return with the queries."
    )
    rows = (_row(layout, comparison.num_tokens) for layout in comparison.layouts)
    return f"{table(header, [row[: len(header)] for row in rows])}\n{paragraph(caption)}"


def _row(layout: Layout, num_tokens: int) -> list[str]:
    return [
        layout.name,
        f"{layout.imbalance:.3f}",
        str(layout.slowest),
        f"{layout.queries / num_tokens:.3f}",
        f"{layout.keys / num_tokens:.3f}",
        *(byte_count(x) for x in (*layout.inside, *layout.between)),
    ]


def _times(comparison: Comparison) -> str:
    rows = []
    for name in sorted(comparison.seconds, key=comparison.seconds.__getitem__):
        prediction = comparison.choice.predictions[name]
        seconds = (
            comparison.seconds[name],
            prediction.compute,
            prediction.communication,
            prediction.exposed_communication,
        )
        star = "* " if name == comparison.chosen else "  "
        rows.append([star + name, *map(duration, seconds)])
    return table(("  algorithm", "predicted", "compute", "communication", "waiting"), rows)


def summary(comparisons: Sequence[Comparison]) -> str:
    """Returns one line for each number of ranks."""
    rows = []
    for comparison in comparisons:
        layouts = {layout.algorithm: layout for layout in comparison.layouts}
        chosen = comparison.chosen
        rows.append(
            [
                str(comparison.workload.num_ranks),
                *(
                    f"{layouts[name].imbalance:.3f}"
                    for name in ("ring", "zigzag", "balanced", "placed")
                ),
                f"{layouts['placed'].keys / comparison.num_tokens:.3f}",
                chosen,
                duration(comparison.seconds[chosen]),
            ]
        )
    header = (
        *("ranks", "contiguous", "zigzag", "balanced", "placed", "keys placed"),
        *("choice", "time"),
    )
    caption = (
        "Work max/mean of four layouts, keys that move per token if tokens are placed, and the "
        "predicted time of the choice."
    )
    return f"All numbers of ranks\n{table(header, rows)}\n{paragraph(caption)}"
