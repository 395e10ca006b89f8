"""Layers beside attention that mix the tokens of a document, whichever ranks hold them.

`pieces`: the options of a call, and the pieces of documents on a rank: from segment ids
  (`document_pieces`), or from the plan of a placement. `call_layer`: runs a layer on every rank.
`row_ends`, `carried`: documents that continue in another call, and what they take along.
`halo`: the rows next to a cut. `shift`, `conv`: the layers that need them.
`check_tokens`: whether arrays are in the order of their documents.
`recurrence`: states that pass along documents; `chains`: the exchange of maps. `delta_rule`,
  `linear_attention`, `linear_recurrence`: kernels. `chunks`, `decays`, `states`: their matrix
  products.
"""

from jax_cp_dispatch.sequence.check_tokens import check_tokens, token_checksums
from jax_cp_dispatch.sequence.delta_rule import gated_delta_rule
from jax_cp_dispatch.sequence.linear_attention import linear_attention
from jax_cp_dispatch.sequence.linear_recurrence import linear_recurrence
from jax_cp_dispatch.sequence.pieces import Pieces, document_pieces
from jax_cp_dispatch.sequence.recurrence import recurrence
from jax_cp_dispatch.sequence.shift import causal_conv, shift, shift_documents

__all__ = [
    "Pieces",
    "causal_conv",
    "check_tokens",
    "document_pieces",
    "gated_delta_rule",
    "linear_attention",
    "linear_recurrence",
    "recurrence",
    "shift",
    "shift_documents",
    "token_checksums",
]
