"""The door: what annotations say about arrays is checked, with errors that say what to do."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inner import door
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, PyTree, Shaped, UInt32
from on_mesh import AXIS, mesh_of

from jax_cp_dispatch import Documents

Both = Array | np.ndarray
X = np.zeros((2, 3, 4), np.float32)


@door("mix", log="Pass one number for each row.")
def mix(
    q: Float[Both, "B T H"],
    log: Float[Both, "B T *H"] | None = None,
    *tokens: int,
    weight: Float[Both, "W *F"] | None = None,
    bias: Float[Array, " W-1"] | Float[np.ndarray, " W-1"] | None = None,
    tree: PyTree[Shaped[Both, "B ..."]] | None = None,
    key: UInt32[Both, "... 2"] | None = None,
    ids: Integer[Both, "B _"] | Documents | None = None,
) -> Float[Array, "..."]:
    return jnp.asarray(q)


REFUSED = [
    ({"q": X[0]}, r"q is float32\[3, 4\]; it needs floats \[B, T, H\]\."),
    ({"q": "no"}, r"q is of type str; it needs to be an array. Pass numpy.asarray\(q\)"),
    ({"q": None}, "q is of type NoneType; it needs to be an array. Pass it."),
    ({"q": X.astype(int)}, r"q is int64\[2, 3, 4\]; it needs floats \[B, T, H\]. Cast it."),
    (
        {"log": X[..., :2]},
        r"log is float32\[2, 3, 2\]; it needs floats \[B, T, \*H\] with B = 2, T = 3, H = 4 as in "
        "q. Pass one number for each row",
    ),
    ({"log": X[..., None]}, r"log is float32\[2, 3, 4, 1\]; it"),
    ({"weight": X[0, 0, 0, None], "bias": X[0, 0]}, r"bias is .*\[W-1\] with W = 1 as in weight"),
    ({"tree": {}}, r"tree has no arrays; it needs at least one of \[B, ...\]\.$"),
    (
        {"tree": [X, {"a": X[0]}]},
        r"tree\[1\]\['a'\] is float32\[3, 4\]; it needs \[B, ...\] with B",
    ),
    ({"tree": [1]}, r"tree\[0\] is of type int"),
    ({"key": X[0, :, :2]}, r"key is float32\[3, 2\]; it needs uint32 \[..., 2\]. Cast it"),
    ({"key": np.zeros(3, np.uint32)}, r"key is uint32\[3\]"),
    ({"key": np.zeros((), np.uint32)}, r"key is uint32\[\]"),
]


@pytest.mark.parametrize("wrong, says", REFUSED)
def test_refused(wrong: dict[str, Any], says):
    error = TypeError if any(x in says for x in ("of type", "Cast")) else ValueError
    with pytest.raises(error, match=f"^mix: {says}"):
        mix(**{"q": X, **wrong})
    if any(isinstance(x, np.ndarray) for x in jax.tree.leaves(wrong)):
        with pytest.raises(error, match=f"^mix: {says}".replace("int64", "int32")):
            jax.jit(mix)(**{"q": X, **wrong})


def test_accepted():
    """Arguments by position or name, and what annotations leave open."""
    assert mix(X, X).shape == mix(q=X, log=X[..., 0]).shape == X.shape
    mix(X, None, 1, 2, weight=X, bias=X[0, 0, :1], key=np.zeros((5, 2), np.uint32))
    mix(
        X,
        weight=X[0],
        bias=X[0, 0, :2],
        tree=(X, X[:, 0, 0] > 0, jax.random.split(jax.random.key(0))),
    )
    mix(X, ids=Documents(np.ones((1, 2), int)))
    jax.eval_shape(mix, jax.ShapeDtypeStruct(X.shape, jnp.bfloat16))
    jax.vmap(mix)(X[None])
    jax.jit(jax.shard_map(mix, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P(AXIS)))(X)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no'"):
        cast(Any, mix)(1, no=1)
