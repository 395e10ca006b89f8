"""Packed documents: what the tokens of a batch are, and in which order they are on the ranks.

`documents`: the object of a batch, and of a call, and what its tokens see. `segment_ids`: the
meaning of ids and positions, where documents begin, and whether tokens are in order. `table`: the
same on the host. `layouts`: orders on the ranks. `fingerprint`: checksums.
"""

from jax_cp_dispatch.documents.documents import Documents
from jax_cp_dispatch.documents.layouts import zigzag_permutation
from jax_cp_dispatch.documents.table import document_lengths

__all__ = ["Documents", "document_lengths", "zigzag_permutation"]
