"""Packed documents: what the tokens of a batch are, and in which order they are on the ranks.

`documents`: the object of a batch. `given`: the documents of a call. `packed_mask`: its mask and
  documents, as they are passed on. `segment_ids`: the meaning of ids and positions.
`starts`, `ranges`: where documents begin, and what tokens see. `table`: the same on the host.
`order`, `on_host`: whether tokens are in order. `layouts`: orders on the ranks. `gather`: the ids
  of all ranks. `fingerprint`: checksums.
"""

from jax_cp_dispatch.documents.documents import Documents

__all__ = ["Documents"]
