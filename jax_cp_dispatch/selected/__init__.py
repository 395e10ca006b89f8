"""A learned index that decides which keys a query sees.

`select`: `select_keys` picks keys; attention over them is that of the mask `masks.Selected`.
`pick`: the scores and the picks of one rank. `loss`: `index_loss` trains the index. `call`: both
run over a mesh axis as attention does, by the same algorithms and plans.
"""

from jax_cp_dispatch.selected.loss import index_loss
from jax_cp_dispatch.selected.select import select_keys

__all__ = ["index_loss", "select_keys"]
