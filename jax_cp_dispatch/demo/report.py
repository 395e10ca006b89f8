"""Output of the demonstration: its results."""

import statistics
from functools import partial

from jax_cp_dispatch.cost import attention_flops, rows_bytes
from jax_cp_dispatch.demo.packing import PackedDocuments
from jax_cp_dispatch.demo.programs import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from jax_cp_dispatch.planner import Plan


def moved_bytes(plan: Plan) -> int:
    """Returns the bytes that move between ranks, forward and backward, in float32."""
    row = partial(rows_bytes, head_size=HEAD_DIM, itemsize=4)
    # Forward: q there, out back, k and v there. Backward: dout there, dq back, dk and dv back.
    q_like = 4 * row(int(plan.num_q_tokens_moved), num_heads=NUM_HEADS)
    kv_like = 4 * row(int(plan.num_kv_tokens_moved), num_heads=NUM_KV_HEADS)
    return q_like + kv_like


def report(
    packed: PackedDocuments,
    plan: Plan,
    seconds: dict[str, float],
    differences: dict[str, float],
    tolerance: float,
) -> bool:
    """Prints sizes, times and differences; returns whether the results are correct."""
    lengths = [stop - start for _, start, stop in packed.spans]
    num_tokens = packed.tokens.size

    def work(pairs) -> str:
        flops = [attention_flops(float(x), num_heads=NUM_HEADS, head_size=HEAD_DIM) for x in pairs]
        each = " ".join(f"{x / 1e9:.1f}" for x in flops)
        return f"max/mean {max(flops) / statistics.mean(flops):.3f}   [{each}] GFLOP"

    def moved(tokens) -> str:
        return f"{int(tokens)} ({int(tokens) / num_tokens:.2f} of all)"

    print()
    print(f"documents             {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens")
    print(
        f"tokens                {num_tokens}, of these {num_tokens - sum(lengths)} padding; "
        f"{plan.world_size} ranks"
    )
    print(f"work before planning  {work(plan.pairs_before)}")
    print(f"work after planning   {work(plan.pairs)}")
    print(f"queries moved         {moved(plan.num_q_tokens_moved)}")
    print(f"keys, values moved    {moved(plan.num_kv_tokens_moved)}, copies counted")
    print(f"bytes moved           {moved_bytes(plan) / 1e6:.1f} MB, forward and backward")
    for name, value in seconds.items():
        suffix = "" if name == "planning" else ", forward and backward"
        print(f"time of {name:<14}{1e3 * value:.1f} ms{suffix}")
    each = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(f"largest difference    {each} (relative to dense attention)")
    is_right = all(value <= tolerance for value in differences.values())  # false for NaN
    verdict = "correct" if is_right else "WRONG"
    print(f"                      {verdict}: the tolerance is {tolerance:.0e}")
    return is_right
