"""Kernels of local attention: for GPUs and TPUs, without any of these, and the blocks of a CPU.

Programs are lowered for CUDA; those that run have plain JAX in place of the kernels. On a GPU,
`gpu/test_gpu_attention.py` compares results; `native/test_attention_kernels.cc` runs this
package's kernels on the host. Kernels for TPUs run in Pallas's interpreter, which has a TPU's
memories and copies: it finds races, reads out of bounds, and fills memory with NaN before it is
written.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import Call, check, check_qkv, draw_qkv, with_gradients
from inner import pretend_cuda, warn_again
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec as P
from local_cases import RANGES, assert_close, inputs
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import context_parallel_attention, local_attention, masks, place_tokens
from jax_cp_dispatch.attention import rotating  # inner: for these
from jax_cp_dispatch.attention.local import (  # inner: kernels that cannot run here
    gpu,
    local_attention as local,
    passes,
    tpu,
)


def text_of(fn, *arguments, platform="cuda"):
    return jax.jit(fn).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


# ---- cuDNN's flash attention.

SHAPES: Any = {"B": 1, "T": 256, "S": 256, "N": 4, "K": 2, "H": 64, "Hv": 64}


def cudnn_calls(fn, *arguments, platform="cuda"):
    """Returns (target, mask) of each call, in program order."""
    text = text_of(fn, *arguments, platform=platform)
    calls = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    found = [re.search(r"@__cudnn\$(\w+)\(.*mask_type[^A-Z]+([A-Z_]+)", call) for call in calls]
    return [match.groups() for match in found if match]


def lower_both(shapes=None, dtype=jnp.bfloat16, platform="cuda", use_lse=False, **options: Any):
    """Returns the calls of the forward pass, and those of both passes."""
    q, k, v, *_ = inputs(5, **(SHAPES | (shapes or {})), dtype=dtype)
    attend = lambda q, k, v: local_attention(q, k, v, **options)
    loss = lambda *x: sum(jnp.sum(jnp.where(y > -9, y, 0)) for y in attend(*x)[: 1 + use_lse])
    return tuple(
        cudnn_calls(fn, q, k, v, platform=platform)
        for fn in (attend, jax.grad(loss, argnums=(0, 1, 2)))
    )


def test_cudnn_reads_and_writes_the_callers_arrays():
    q, k, v, *_ = inputs(5, **SHAPES, dtype=jnp.bfloat16)
    text = text_of(lambda *x: local_attention(*x, scale=0.375, out_dtype=q.dtype), q, k, v)
    (call,) = (line for line in text.splitlines() if "custom_call @__cudnn$" in line)
    query, key = "tensor<1x256x4x64xbf16>", "tensor<1x256x2x64xbf16>"
    assert f"({query}, {key}, {key}) -> (tensor<1x4x256x64xbf16>, tensor<1x4x256xf32>" in call
    assert r"fmha_scale\22: 0.375" in call
    assert "stablehlo.case" not in text


RANGES_OF_256 = dict(zip(("kv_start", "kv_end"), RANGES["causal"](1, 256, 256), strict=True))


@pytest.mark.parametrize(
    "case, mask",
    [
        ({}, "CAUSAL"),
        ({"dtype": jnp.float16, "mask": "full"}, "NO_MASK"),
        ({"dtype": jnp.float32}, None),
        ({"logit_soft_cap": 30.0}, None),
        ({"shapes": {"H": 60, "Hv": 60}}, None),
        ({"shapes": {"H": 256, "Hv": 256}}, None),
        ({"shapes": {"Hv": 32}}, None),
        ({"shapes": {"T": 128}}, None),  # the last queries
        ({"segment_ids": np.ones((1, 256), np.int32)}, None),
        (RANGES_OF_256, None),  # of data
        ({"platform": "cpu"}, None),
    ],
    ids=lambda case: str(case)[:40],
)
def test_one_dense_document_goes_to_cudnn(case, mask):
    forward, backward = ("fmhaSoftmax", mask), ("fmhaSoftmaxBackward", mask)
    wanted = ([forward], [forward, backward]) if mask else ([], [])
    assert lower_both(**case) == wanted


@pytest.mark.parametrize(
    "capability, version, size, forward, backward",
    [
        (0, 91800, 256, "kernels", "kernels"),  # a program for another machine
        (80, 91800, 256, "kernels", "kernels"),
        (90, 91800, 256, "cudnn", "cudnn"),
        (90, 91800, 264, "blockwise", "blockwise"),
        (100, 91800, 128, "cudnn", "cudnn"),
        (103, 91800, 256, "cudnn", "kernels"),
        (100, 90800, 256, "kernels", "kernels"),
        (120, 91800, 128, "cudnn", "cudnn"),
        (120, 91800, 256, "kernels", "kernels"),
    ],
)
def test_gpus_take_the_fastest_that_serves(
    capability, version, size, forward, backward, monkeypatch
):
    """Dense documents by cuDNN where it has such heads, ranges by this package's kernels."""
    has_memory(monkeypatch, 0)
    monkeypatch.setattr(gpu, "compute_capability", lambda: capability)
    monkeypatch.setattr(gpu, "cudnn_version", lambda: version)
    seen, take = [], gpu.take

    def observed(*arguments, **options):
        seen.append(take(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(gpu, "take", observed)
    sizes: Any = {"shapes": {"H": size, "Hv": size}}
    both = lower_both(**sizes)[1]
    assert [one.name for one in seen] == [forward, forward, backward]
    assert len(both) == [forward, backward].count("cudnn")
    assert not lower_both(**sizes, **RANGES_OF_256)[1]
    ranges = "blockwise" if size > 256 else "kernels"
    assert [one.name for one in seen[3:]] == [ranges] * 3
    if ranges == "kernels":
        assert seen[3].reason == "not cuDNN: it has no ranges, and these are not known to be dense"
    if forward == "kernels":
        assert seen[0].reason.endswith(f"a multiple of 8 and at most 128, not {size} and {size}")


def test_results_that_cudnn_does_not_have():
    """A cotangent of the lse, and the largest logits."""
    forward, both = lower_both(use_lse=True)
    assert forward == both != []
    assert lower_both(return_max_logits=True) == ([], [("fmhaSoftmaxBackward", "CAUSAL")])


# ---- This package's kernels.


def emulation(target, shapes, operands, in_place, *, scale, soft_cap, has_queries, has_delta=False):
    """The kernels' results, in plain JAX."""
    q, k, v, start, end, *others = operands
    of_rows = []
    if target == gpu.GRADIENTS_TARGET:
        of_rows, others = others[:2], others[2:]
    queries, others = others[: 3 * has_queries], others[3 * has_queries :]
    at = len(operands) - len(others)
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    key = jnp.arange(k.shape[1])
    sees = (key >= start[..., None]) & (key < end[..., None])
    if has_queries:
        index, first, last = queries
        index = index[..., None]
        sees &= (index >= first[:, None]) & (index < last[:, None])
    logits, slope = scale * jnp.einsum("btnh,bsnh->bnts", q, k), 1
    if soft_cap:
        ratio = jnp.tanh(logits / soft_cap)
        logits, slope = soft_cap * ratio, 1 - ratio**2
    logits = jnp.where(sees[:, None], logits, -jnp.inf)
    by_rows = lambda x: jnp.swapaxes(x, 1, 2)[..., None]
    if target != gpu.GRADIENTS_TARGET:
        seen = others if target == gpu.ATTEND_MORE_TARGET else []
        assert in_place == {at + i: i for i in range(len(seen))}
        nothing = jnp.zeros(logits.shape[:3])
        peak, total, acc = seen or [nothing - 1e30, nothing, jnp.zeros((*q.shape[:3], v.shape[3]))]
        new_peak = jnp.maximum(peak, logits.max(3))
        p, keep = jnp.exp(logits - new_peak[..., None]), jnp.exp(peak - new_peak)
        acc = acc * by_rows(keep) + jnp.einsum("bnts,bsnh->btnh", p, v)
        total = total * keep + p.sum(3)
        results = [new_peak, total, acc]
        if target == gpu.ATTEND_TARGET:
            if others:
                total += jnp.where(total > 0, jnp.exp(others[0][..., None] - new_peak), 0)
            is_empty = total == 0
            lse = jnp.where(is_empty, -jnp.inf, new_peak + jnp.log(total))
            out = acc / by_rows(jnp.where(is_empty, 1, total))
            results = [out, lse, jnp.where(is_empty, -jnp.inf, new_peak)][: len(shapes)]
    else:
        dout, lse = of_rows
        dq = 0
        if has_delta:
            delta, dq = others
            assert in_place == {at + 1: 0}
        else:
            out, *more = others
            delta = jnp.einsum("btnh,btnh->bnt", dout, out) - (more[0] if more else 0)
        p = jnp.exp(logits - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
        ds = scale * slope * p * (jnp.einsum("btnh,bsnh->bnts", dout, v) - delta[..., None])
        of_keys = lambda x: x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3)
        results = [
            dq + jnp.einsum("bnts,bsnh->btnh", ds, k),
            of_keys(jnp.einsum("bnts,btnh->bsnh", ds, q)),
            of_keys(jnp.einsum("bnts,btnh->bsnh", p, dout)),
            *(jnp.zeros(x.shape, x.dtype) for x in shapes[3:]),
        ]
    assert [x.shape for x in results] == [x.shape for x in shapes]
    return [x.astype(shape.dtype) for x, shape in zip(results, shapes, strict=True)]


@pytest.fixture
def only_kernels(monkeypatch):
    """Makes CPU programs take the path of the kernels."""
    monkeypatch.setattr(gpu, "_call", emulation)
    monkeypatch.setattr(local, "fused_attention", gpu.fused_attention)
    monkeypatch.setattr(local, "fused_gradients", gpu.fused_gradients)
    monkeypatch.setattr(rotating, "attend_blocks", gpu.attend_blocks)
    monkeypatch.setattr(rotating, "block_gradients", gpu.block_gradients)
    for name in ("attend_ranges", "range_gradients"):  # cached traces would bypass the patch
        monkeypatch.setattr(local, name, getattr(local, name).__wrapped__)


TREE = masks.Ranges(
    np.zeros((2, 45), np.int32),
    np.tile(np.arange(1, 46, dtype=np.int32), (2, 1)),
    np.zeros((2, 45), np.int32),
    np.tile(np.random.default_rng(0).integers(0, 46, 45, dtype=np.int32), (2, 1)),
)


@pytest.mark.usefixtures("only_kernels")
@pytest.mark.parametrize(
    "options",
    [
        {"sink": jnp.linspace(-1, 2, 4), "return_max_logits": True},
        {"logit_soft_cap": 0.7, "scale": -0.3},
        {"mask": TREE},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_by_kernels(options):
    """As the blockwise passes have them."""
    q, k, v, dout, dlse = inputs(1)
    ranges = () if "mask" in options else RANGES["packed"](2, 37, 45)

    def results():
        attend = lambda *x: local_attention(*x, *ranges, **options)
        (*outs,), vjp = jax.vjp(attend, q, k, v)
        return *outs, *vjp((dout, jnp.where(jnp.isinf(outs[1]), 0, dlse), *outs[2:]))

    by_kernels = results()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fused_attention", "fused_gradients"):
            patch.setattr(local, name, getattr(passes, name).__wrapped__)
        by_blocks = results()
    for actual, expected in zip(by_kernels, by_blocks, strict=True):
        assert_close(actual, expected, 1e-5)


@pytest.mark.usefixtures("only_kernels")
def test_rings_by_kernels():
    """All rings call the same passes."""
    *arrays, segment_ids = operands = draw_qkv(0, 1, 24)
    where: dict[str, Any] = {"mesh": mesh_of(3), "axis_name": AXIS, "segment_ids": segment_ids}
    attend = lambda *qkv: context_parallel_attention(*qkv, algorithm="ring", **where)
    check_qkv(jax.jit(with_gradients(attend))(*arrays), operands)


def has_memory(monkeypatch, available: int, image: str = ""):
    """Pretends GPUs with this memory, and maybe a reason why they have no image of the kernels."""
    memory = lambda size, value_size: ((size + value_size) << 9, available)
    there = {"device_count": lambda: (8, ""), "why_no_kernels": lambda _: image} if image else {}
    pretend_cuda(monkeypatch, attention_memory=memory, **there)


@pytest.fixture
def extension(monkeypatch):
    """Pretends that the extension exists, built or not, without GPUs."""
    has_memory(monkeypatch, 0)
    warn_again()


def kernel_calls(q, k, v, **options):
    """Returns the operand and result types of the kernels' calls in a program with gradients."""
    start, end = RANGES["packed"](1, q.shape[1], k.shape[1])

    def both(q, k, v):
        attend = lambda q, k, v: local_attention(q, k, v, start, end, out_dtype=q.dtype, **options)[
            0
        ]
        out, vjp = jax.vjp(attend, q, k, v)
        return vjp(out)

    text = text_of(both, q, k, v)
    assert ("stablehlo.while" in text) == ("jax_cp_dispatch.att" not in text)
    assert ("stablehlo.case" in text) == ("jax_cp_dispatch.att" not in text)
    found = re.findall(r"@jax_cp_dispatch\.(att\w+)\(.*(scale = \S+ : f32).* : (\(.*)", text)
    return [tuple(call) for call in found]


@pytest.mark.usefixtures("extension")
def test_the_calls_read_and_write_the_callers_arrays():
    q, k, v, *_ = inputs(0, B=1, T=200, S=128, N=4, K=2, H=64, Hv=64, dtype=jnp.bfloat16)
    forward, backward = kernel_calls(q, k, v, scale=0.375)
    query, key = "tensor<1x200x4x64xbf16>", "tensor<1x128x2x64xbf16>"
    row, ids = "tensor<1x4x200xf32>", "tensor<1x200xi32>"
    operands = [query, key, key, ids, ids]
    types_of = lambda operands, results: f"({', '.join(operands)}) -> ({', '.join(results)})"
    assert forward == ("attend", "scale = 3.750000e-01 : f32", types_of(operands, [query, row]))
    assert backward[0] == "attention_gradients"
    scratch = ["tensor<1x4x8xi32>", "tensor<1x4x200x2xf32>"]
    operands += [query, row, query]
    assert backward[2] == types_of(operands, [query, key, key, *scratch])


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("sizes, heads", [((80, 80), (96, 96)), ((192, 64), (192, 128))], ids=str)
def test_other_heads_are_padded(sizes, heads):
    shapes: Any = {"B": 1, "T": 64, "S": 64, "N": 2, "K": 1, "H": sizes[0], "Hv": sizes[1]}
    forward, backward = kernel_calls(
        *inputs(0, **shapes, dtype=jnp.float16)[:3], logit_soft_cap=30.0
    )
    for _, _, types_of in (forward, backward):
        for size in heads:
            assert f"x{size}xf16>" in types_of


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    "case, reason",
    [
        ({"dtype": jnp.float32}, "bfloat16 or float16, not float32"),
        ({"H": 320, "Hv": 64}, "at most 256, not 320"),
        ({"H": 120, "Hv": 8, "memory": 99}, "heads of 128 need 128 KB .*, and this GPU has 99"),
        ({"off": "0"}, "ATTENTION_KERNEL=0 is set"),
        ({"image": "no kernel image is available"}, r"no kernel image is available \(its compute"),
    ],
    ids=str,
)
def test_others_are_not_by_the_kernels(case, reason, monkeypatch):
    """And a warning says so once, with the reason."""
    case = dict(case)
    monkeypatch.setenv("JAX_CP_DISPATCH_ATTENTION_KERNEL", case.pop("off", "1"))
    has_memory(monkeypatch, case.pop("memory", 0) << 10, case.pop("image", ""))
    shapes: Any = {"B": 1, "T": 64, "S": 64, "H": 64, "Hv": 64, "dtype": jnp.bfloat16}
    with pytest.warns(UserWarning, match=f"slow passes on this GPU, because .*{reason}") as seen:
        assert kernel_calls(*inputs(0, **(shapes | case))[:3]) == []
    assert len([x for x in seen if "slow passes" in str(x.message)]) == 1


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_and_vmap(check_vma):
    q, k, v, *_ = inputs(0, B=4, T=64, S=64, H=64, Hv=64, dtype=jnp.bfloat16)
    start, end = RANGES["packed"](4, 64, 64)
    rows = P("cp")

    def loss(q, k, v):
        of_one = lambda *x: local_attention(*(y[None] for y in x), sink=jnp.ones(4))[0]
        return jnp.sum(jax.vmap(of_one)(q, k, v, start[: q.shape[0]], end[: q.shape[0]]), (1, 2, 3))

    fn = jax.shard_map(
        lambda *x: jax.grad(lambda *x: loss(*x).sum(), (0, 1, 2))(*x),
        **{"mesh": mesh_of(2), "in_specs": (rows,) * 3, "out_specs": rows, "check_vma": check_vma},
    )
    found = re.findall(r"@jax_cp_dispatch\.(att\w+)\(.*: \((tensor<\S+>)", text_of(fn, q, k, v))
    assert found == [(name, "tensor<2x64x4x64xbf16>") for name in ("attend", "attention_gradients")]


# ---- Kernels for TPUs.


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets kernels, and fails if two accesses race."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place of `races`

    monkeypatch.setattr(rotating, "attend_blocks", tpu.attend_blocks)
    monkeypatch.setattr(rotating, "block_gradients", tpu.block_gradients)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


# Rings, in which keys come in parts; `sweep.py attention --tpu` draws others.
CALLS = [
    Call("ring", 2, "tree", rows=24, batch=2, heads=(2, 1), features=(128, 128)),
    Call("ring", 1, rows=300, documents="none", heads=(2, 1), features=(192, 128),
         dtype="bfloat16", scale=-0.1, logit_soft_cap=0.7, sink=True,
         returns=("lse", "max_logits")),
]  # fmt: skip


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_kernels(call):
    """Padding is NaN. One draw: in others, dq by products of bfloat16 has 1.2 of the tolerance."""
    check(call, np.random.default_rng(0))


@pytest.mark.usefixtures("interpreted")
def test_a_block_of_padding_between_others():
    """Its walk has no pairs, and the next block is copied during its step."""
    ids = np.repeat(np.array([1, 0, 2], np.int32), 128)[None]
    q, k, v = np.random.default_rng().normal(size=(3, 1, 384, 1, 128)).astype(np.float32)

    def gradients(rows):
        def loss(*qkv):
            options: Any = {"mesh": mesh_of(1), "axis_name": AXIS, "segment_ids": ids[:, rows]}
            out = context_parallel_attention(*qkv, algorithm="ring", **options)
            return (out**2).sum(), out

        (_, out), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            *(x[:, rows] for x in (q, k, v))
        )
        return out, *found

    last = slice(256, None)
    for x, alone in zip(gradients(slice(None)), gradients(last), strict=True):
        assert not np.any(x[:, 128:256])
        np.testing.assert_array_equal(x[:, last], alone)


# ---- Lowered for TPUs: kernels, and rows that move by XLA's collectives; nothing runs.

W, ROWS = 4, 32


def lowered(**options):
    def loss(q, k, v):
        out = context_parallel_attention(q, k, v, mesh=mesh_of(W), axis_name=AXIS, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    q = jnp.zeros((1, W * ROWS, 2, 8), jnp.bfloat16)
    warn_again()
    with pytest.warns(UserWarning, match="XLA's collectives .* platform is 'tpu'"):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, q, q)
        return program.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("algorithm, num_moved", [("balanced", 6), ("placed", 4)])
def test_rows_move_by_xla(algorithm, num_moved):
    """Balanced: q, k, v there and out back, then their gradients. Placed: k and v, then theirs."""
    lengths = [60, 28, 40]
    if algorithm == "balanced":
        text = lowered(algorithm=algorithm, segment_ids=np.repeat([[1, 2, 3]], lengths, axis=1))
    else:
        placement = place_tokens([lengths], world_size=W, columns=W * ROWS)
        text = lowered(algorithm=algorithm, documents=placement.documents)
    assert "custom_call @jax_cp_dispatch" not in text
    assert text.count("custom_call @ragged_all_to_all(") >= num_moved
    assert text.count("custom_call @tpu_custom_call(") == 3  # the output, dq, and dk with dv


@pytest.mark.parametrize(
    "dtype, heads, automatic_axes, num_kernels",
    [("float32", 16, 0, 3), ("float32", 17, 0, 0), ("float16", 2, 0, 0), ("float32", 2, 1, 0)],
)
def test_local_attention_has_kernels(dtype, heads, automatic_axes, num_kernels):
    """Where they are known to compile: for at most 16 heads that share keys; not for float16, nor
    where XLA partitions the program.
    """
    shardings = [NamedSharding(mesh_of(2), P()), None]
    q = jax.ShapeDtypeStruct((1, 64, heads, 8), dtype, sharding=shardings[not automatic_axes])
    loss = lambda q: local_attention(q, q[:, :, :1], q[:, :, 1:2])[0].sum()
    text = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("custom_call @tpu_custom_call(") == num_kernels


# ---- Blocks of a CPU.


def test_hidden_blocks_are_not_computed(monkeypatch):
    """A prompt and its completions: the products of blocks whose queries see no key are skipped."""
    counted: list[int] = []
    matmul = passes.block_matmul

    def counting(x, y, contract):
        jax.debug.callback(lambda: counted.append(1))
        return matmul(x, y, contract)

    monkeypatch.setattr(passes, "block_matmul", counting)
    ids = np.repeat([0, 0, 1, 2, 3, 4, 5, 6], 8)[None]  # a prompt of 2 blocks, 6 completions of one
    x = jnp.asarray(np.random.default_rng().normal(size=(1, 64, 1, 8)), jnp.float32)
    blocks: Any = {"block_q": 8, "block_kv": 8, "block_heads": 1}
    jax.clear_caches()
    jax.block_until_ready(local_attention(x, x, x, mask=masks.SharedPrefix(ids), **blocks))
    jax.effects_barrier()
    jax.clear_caches()
    assert len(counted) == 2 * (1 + 2 + 6 * 3)  # two products for each pair of blocks
