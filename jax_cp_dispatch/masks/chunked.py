"""`Chunked` and `BlockCausal`: documents are cut into chunks of equal size."""

import dataclasses

import jax

from jax_cp_dispatch.masks.mask import StaticMask, check_tokens, no_limit_if_large
from jax_cp_dispatch.masks.windows import Causal, Full


@dataclasses.dataclass(frozen=True)
class _OfChunks(StaticMask):
    """A mask of chunks of `size` tokens."""

    size: int

    def __post_init__(self) -> None:
        check_tokens(self, "size", self.size, minimum=1)

    def clipped(self, num_tokens: int) -> StaticMask:
        return dataclasses.replace(self, size=max(1, min(self.size, num_tokens)))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Chunked(_OfChunks):
    """A query sees the keys up to its own in its chunk of the document (local layers of Llama 4).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, 0, self.size

    def simplified(self) -> StaticMask:
        return Causal() if no_limit_if_large(self.size) is None else self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BlockCausal(_OfChunks):
    """A query sees the keys of its document up to the end of its chunk (block diffusion).

    Chunks count from the start of the document, whatever the layout.

    Attributes:
      size: tokens of a chunk.
    """

    @property
    def pair_count(self) -> tuple[int, int, int]:
        return -1, -1, self.size

    def simplified(self) -> StaticMask:
        if self.size == 1:
            return Causal()
        return Full() if no_limit_if_large(self.size) is None else self
