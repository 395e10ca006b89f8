"""What docs/benchmarks.md shows of each result file: a table and one line, in order of the page."""

import shown
from view import View

VIEWS = {
    "balance": View(
        "**Balance of attention in time.** The attention of each rank alone on one device, forward "
        "and backward, without exchanges; {tokens_per_rank} tokens per rank, {num_heads} query and "
        "{num_kv_heads} KV heads of {head_size}, documents of published lengths. Cells: processor "
        "time of the busiest rank in ms, and its ratio to the mean rank, in time and in "
        "query-key pairs.",
        {"": "{algorithm}"},
        {
            "{lengths}, {world_size} ranks": "{busiest_ms:.0f} ({imbalance:.2f}; "
            "{pair_imbalance:.2f})"
        },
        picture="balance.svg",
    ),
    "attention": View(
        "**Attention**: {title}, {tokens} tokens, float32. Cells: ms, and FLOP/s of unmasked pairs "
        "over those of a matrix product. **Bold** marks the choice of `choose_algorithm`.",
        {"": "{method}"},
        {"{case}": "{mark}{ms:.0f} ({of_matmul:.2f}){mark}"},
        shown.attention,
    ),
    "attention_growth": View(
        "**Growth of attention**: {title}.", {}, {}, lambda _: [], "attention_growth.svg"
    ),
    "local_attention": View(
        "**Local attention**: {title}, forward and backward, float32. Rate: as above. Speedup: "
        "over `jax.nn.dot_product_attention` with a mask.",
        {"": "{case}"},
        {
            "s": "{seconds}",
            "rate": "{share_of_float32_matmul:.2f}",
            "speedup": "{times_faster}",
        },
        shown.local_attention,
    ),
    "models": View(
        "**What models ask of attention**: {title}. Cells: ms, and the time over that of the call "
        "beside it.",
        {"": "{what}", "beside": "{beside}"},
        {"{passes}": "{ms:.0f} ({of:.2f})"},
    ),
    "selected": View(
        "**Selected attention**: {title}, of one causal document over 8 virtual devices, forward "
        "and backward, beside dense attention under an additive mask of all scores, as MaxText "
        "computes it; and the index with its top-k, forward. MB: temporary, of one device, by "
        "XLA's analysis, with the mask. Moved: latents that a rank receives, forward. A mask costs "
        "tokens / picked times the FLOPs. Dense attention of more than 8,192 tokens was compiled "
        "only.",
        {"tokens": "{tokens}", "picked": "{picked}"},
        {
            "ms": "{attention_ms:.0f}",
            "under a mask": "{mask_attention_ms:.0f}",
            "times faster": "{times_faster}",
            "MB": "{attention_MB:.0f}",
            "MB under a mask": "{mask_attention_MB:.0f}",
            "index ms": "{index_ms:.0f}",
            "all scores": "{mask_index_ms:.0f}",
            "index MB": "{index_MB:.0f}",
            "moved MB": "{moved_MB}",
        },
    ),
    "windows": View(
        "**Windows**: counted for {title}, forward and backward, documents of published lengths: "
        "one layer with a window over 8 ranks, and 8 layers without and 40 with one of 512 over 4, "
        "64K tokens per rank. Cells: MB that a rank sends, on average; the busiest rank's over "
        "that; largest work of a rank over the mean; steps with an exchange. Last, measured: ms of "
        "`halo` with {tokens} tokens of each of 8 virtual devices, and of a ring, in zigzag order.",
        {"": "{what}"},
        {"{way}": "{cell}"},
        shown.windows,
    ),
    "two_levels": View(
        "**Two levels**: {title}, one causal document in zigzag order. Cells: ms, the time over "
        "that of the ring, and predicted MB that a rank sends, and between processes.",
        {"": "{way}"},
        {"{passes}": "{ms:.0f} ({of_ring:.2f}; {MB:.1f}, {MB_between:.1f})"},
    ),
    "sequence": View(
        "**Recurrences**: {title}, forward and backward, float32. Beside a `lax.scan` over tokens, "
        "and causal `local_attention`. Memory: temporary, by XLA's analysis. Exchange: its share "
        "of the layer's time.",
        {"": "{layer}"},
        {
            "ms": "{ms:.0f}",
            "of the scan": "{of_scan:.2f}",
            "of attention": "{of_attention:.2f}",
            "MB": "{temp_MB}",
            "of the scan's": "{memory_of_scan:.2f}",
            "exchange": "{exchange_share:.1%}",
        },
        shown.sequence,
    ),
    "training": View(
        "**Training step**: {title}. Speedup: over dense attention sharded by XLA. Memory: "
        "temporary, of one device, by XLA's analysis. The picture shows the time by named scope.",
        {"attention": "{method}"},
        {
            "ms": "{ms}",
            "tokens/s": "{tokens_per_s}",
            "speedup": "{of_dense}",
            "MB": "{temp_MB}",
        },
        picture="training.svg",
    ),
    "dispatch": View(
        "**Movement**: {title}.",
        {"": "{what}"},
        {"ms": "{ms}", "GB/s": "{GB_per_s}", "of memcpy": "{of_memcpy:.2f}"},
    ),
    "experts": View(
        "**Experts**: {title}, without the products of the experts. Of memcpy: by the bytes that a "
        "call writes.",
        {"": "{what}"},
        {
            "ms": "{ms:.0f}",
            "of all three": "{of_all:.3f}",
            "GB/s": "{GB_per_s}",
            "of memcpy": "{of_memcpy:.2f}",
        },
    ),
    "latency": View(
        "**Latency**: {title}, µs of one operation inside `lax.scan`.",
        {"": "{what}"},
        {"{devices} devices": "{loop_us}"},
    ),
    "processes": View(
        "**Between processes of one host**: {title}, one device per process. Cells: ms, and the "
        "speedup over the faster gloo collective.",
        {"": "{what}"},
        {"{processes} processes, {MB} MB": "{ms:.1f} ({times_gloo:.2f})"},
        shown.with_most("MB"),
    ),
    "comm_gemm": View(
        '**Overlapped GEMMs**: {title} of a Llama-like layer, M × K × N, `method="auto"`. Cells: '
        "the speedup over XLA's collective and GEMM, and the chosen method.",
        {"": "{layer}, {M} × {K} × {N}"},
        {"{devices} devices, {dtype}": "{of_xla:.2f} ({chosen})"},
        shown.comm_gemm,
    ),
    "gemm_processes": View(
        "**Overlapped GEMMs between processes**: {title}. Cells: ms, and the speedup over gloo and "
        "XLA's GEMM.",
        {"": "{op}", "method": "{what}"},
        {"{processes} processes": "{ms:.0f} ({times_gloo:.2f})"},
    ),
    "scaling": View(
        "**Scaling modes**: {title}, on {devices} virtual devices, forward and backward. A CPU "
        "widens narrow operands before it multiplies. Errors: relative to float64, per token; then "
        "of tokens of different magnitudes.",
        {"mode": "{mode}"},
        {
            "speedup over bfloat16": "{of_bfloat16:.2f}",
            "of bfloat16's bytes": "{of_bfloat16_bytes:.3f}",
            "error": "{error:.1e}",
            "spread tokens": "{error_of_spread_tokens:.1e}",
        },
        shown.scaling,
    ),
    "compile": View(
        "**Compile time**: {title}, {tokens} tokens, in CPU seconds; all: also over the first row, "
        "or the scan; and of a further call of the layer in the program.",
        {"": "{layer}"},
        {
            "trace": "{trace_s:.2f}",
            "lower": "{lower_s:.2f}",
            "compile": "{compile_s:.2f}",
            "all": "{total_s:.2f} ({of_peer:.1f})",
            "further": "{further_s:.2f}",
        },
    ),
    "planner": View(
        "**Balanced plans**: {tokens_per_rank} tokens per rank, {num_heads} query heads of "
        "{head_size} and fewer KV heads, bfloat16. Work: most pairs of a rank over "
        "the mean. Bytes: per token and layer, forward; also of plans made inside `jit`, and of a "
        "published planner (`benchmarks/peer_placements.py`).",
        {"lengths, ranks": "{lengths}, {world_size}"},
        {
            "ms": "{plan_ms}",
            "MB": "{plan_MB:.2f}",
            "before": "{imbalance_before:.2f}",
            "after": "{imbalance:.3f}",
            "bytes": "{bytes_per_token:,}",
            "inside jit": "{inside_jit[bytes_per_token]:,}",
            "greedy": "{greedy[bytes_per_token]:,}",
        },
        shown.planner,
    ),
    "placement": View(
        "**Placement**: {tokens_per_rank} tokens per rank, {num_heads} query and {num_kv_heads} KV "
        "heads of {head_size} in bfloat16. ms: on the host, also for nodes of GPUs and in blocks. "
        "Keys: moved per token, and a [lower bound](planner_internals.md#a-lower-bound). "
        "Bytes: as above, also of two published planners. Layers: one placement for {layers}, "
        "windows of {windows}: keys moved by all, over those in the global mask's placement.",
        {"lengths, ranks": "{lengths}, {world_size}"},
        {
            "ms": "{plan_ms}",
            "nodes": "{nodes_plan_ms}",
            "blocks": "{block_plan_ms}",
            "work": "{imbalance:.3f}",
            "keys": "{kv_moved_share:.3f}",
            "bound": "{least_kv_moved_share:.3f}",
            "bytes": "{bytes_per_token:,}",
            "greedy": "{greedy[bytes_per_token]:,}",
            "min-heap": "{min_heap[bytes_per_token]:,}",
            "layers": "{layers_kv_moved_of_global_placement[0]:.2f}, "
            "{layers_kv_moved_of_global_placement[1]:.2f}",
        },
        shown.placement,
    ),
    "published": View(
        "**Published rules beside placement, counted.** The step of {model[name]} by a rule, "
        "divided by that of `place_tokens` with the hardware of an H100 node; in parentheses, most "
        "pairs of a rank over the mean, and kB per token and layer, inside a node + between nodes: "
        "of the mean rank, then the most that one sends or receives. Busiest exchange: its time "
        "over the mean, and a bound of that; equal work: the same step if ranks had equal work and "
        "no exchange; ms: to plan; fewest bytes: `place_tokens` without hardware. "
        "{model[tokens_per_rank]} tokens per rank, medians of {batches} batches of published "
        "lengths. "
        "`benchmarks/published_rules.py` has the rules and their sources; `bench_published.py` "
        "states the model of the step.",
        {"lengths, ranks, attention's share of FLOPs": "{lengths}, {world_size}, {share}"},
        {"{rule}": "{cell}"},
        shown.published,
    ),
    "choice": View(
        "**Choice of an algorithm**: `choose_algorithm` for attention, forward and backward, "
        "float32, virtual devices; and the time of its choice over that of the fastest of ring, "
        "zigzag, balanced and placed.",
        {
            "ranks × tokens": "{num_ranks} × {tokens_per_rank}",
            "heads of q, k": "{num_heads}, {num_kv_heads} of {head_size}",
            "documents": "{documents}",
        },
        {"choice": "{chosen}", "over the fastest": "{of_best:.2f}"},
        shown.choice,
    ),
    "tpu_blocks": View(
        "**Local attention on TPUs, counted**: {tokens_per_rank} tokens per rank. Query-key pairs "
        "of the blocks that are computed, over those of the mask; and steps over blocks computed. "
        "Nothing has run on a TPU.",
        {"": "{mask}"},
        {
            "pairs": "{pairs:.2f}",
            "steps, output and dq": "{forward_and_dq:.3f}",
            "steps, dk and dv": "{dk_and_dv:.3f}",
            "pairs, splash attention": "{splash_pairs:.2f}",
        },
    ),
}  # by the name of the result file
