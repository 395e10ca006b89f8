"""Output of the command: tables."""

from collections.abc import Mapping, Sequence

from jax_cp_dispatch._text import byte_count, count, duration, paragraph, table
from jax_cp_dispatch.attention.choose import Choice
from jax_cp_dispatch.cost import StepCost, Workload
from jax_cp_dispatch.plan_command.batch import Batch


def batch_lines(batch: Batch, workload: Workload, num_nodes: int) -> list[str]:
    """Describes the ranks and their documents."""
    lengths = [length for row in workload.rows for length in row]
    num_tokens = workload.num_ranks * workload.rows_per_rank
    lines = [
        f"{workload.num_ranks} ranks of {count(workload.rows_per_rank)} tokens; nodes: {num_nodes}",
        f"  documents  {count(len(lengths))} of {count(min(lengths))} to {count(max(lengths))} "
        f"tokens; batch rows: {count(len(workload.rows))}",
        f"  tokens     {count(num_tokens)}; {count(num_tokens - sum(lengths))} of them padding",
    ]
    if batch.num_cut or batch.num_left_out:
        lines.append(
            f"  too long   documents that exceed the ranks: {count(batch.num_cut)} cut, "
            f"{count(batch.num_left_out)} left out"
        )
    return lines


def comparison(
    choice: Choice,
    seconds: Mapping[str, float],
    steps: Mapping[str, Sequence[StepCost]],
    *,
    passes: str,
    num_nodes: int,
) -> str:
    """Returns times and bytes of every algorithm, the fastest first, and the reason of the choice.

    Args:
      choice: of `choose_algorithm`.
      seconds: predicted times with the rearrangement of tokens.
      steps: predicted steps of each algorithm, without it.
      passes: of the predictions.
      num_nodes: with one, there are no columns for bytes between nodes.
    """
    times = "predicted", "compute", "exchange", "waiting", "work"
    moved = ("inside", "busiest", "between", "busiest") if num_nodes > 1 else ("bytes", "busiest")
    rows = []
    for name in sorted(seconds, key=seconds.__getitem__):
        x, costs = choice.predictions[name], steps[name]
        parts = seconds[name], x.compute, x.communication, x.exposed_communication
        total, between, inside_most, between_most = (
            sum(cost[i] for cost in costs) for i in range(2, 6)
        )
        sent = total - between, inside_most, between, between_most
        mark = "* " if name == choice.algorithm.label else "  "
        rows.append(
            [mark + name, *map(duration, parts), f"{x.imbalance:.2f}"]
            + [byte_count(value) for value in sent[: len(moved)]]
        )
    caption = (
        f"One layer, {passes}: predicted, not measured. Times of zigzag and hamilton include the "
        "rearrangement of contiguous tokens. Waiting is the part of exchanges that is not hidden. "
        "Work: query-key pairs of the slowest ranks of all steps, divided by those of equal work. "
        "Bytes that a rank sends: the mean, and those of the busiest rank, which decides the time."
    )
    header = "  algorithm", *times, *moved
    reason = paragraph("Choice: " + choice.reason)
    return f"{table(header, rows)}\n{paragraph(caption)}\n\n{reason}"
