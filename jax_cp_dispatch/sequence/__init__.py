"""Layers beside attention that mix the tokens of a document, whichever ranks hold them.

`pieces`: the pieces of documents on a rank: from segment ids (`document_pieces`), or from the plan
  of a placement. `call_layer`: runs a layer on every rank, with the state that documents take from
  one call to the next.
`shift`: layers that need the rows next to a cut.
`recurrences`: states that pass along documents; `chains`: the exchange of maps. Kernels whose
  states are matrices compute in `chunks` of matrix products.
`check_tokens`: whether arrays are in the order of their documents.
"""

from jax_cp_dispatch.sequence.check_tokens import check_tokens, token_checksums
from jax_cp_dispatch.sequence.pieces import Pieces, document_pieces
from jax_cp_dispatch.sequence.recurrences import (
    gated_delta_rule,
    linear_attention,
    linear_recurrence,
    recurrence,
)
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
