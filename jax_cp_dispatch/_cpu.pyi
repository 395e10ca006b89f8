from collections.abc import Sequence

import numpy as np

def registrations() -> dict[str, dict[str, object]]: ...
def ffi_api_version() -> tuple[int, int]: ...
def create_buffer() -> int: ...
def destroy_buffer(op: str, id: int) -> None: ...
def destroy_all_buffers(op: str) -> None: ...
def find_buffer(op: str, id: int) -> int: ...

_Span = tuple[str, int, int, bool, str, int, int]

def create_overlap_buffer(
    op: str,
    id: int,
    comm_type: int,
    method: int,
    num_splits: int,
    atomic: bool,
    overlap_first_gemm: bool,
    aggregate: bool,
    copies: bool,
    num_ranks: int,
    rank_bytes: int,
    dtype: str,
    parameters: str,
) -> None: ...
def destroy_overlap_buffer(op: str, id: int) -> None: ...
def destroy_all_overlap_buffers(op: str) -> None: ...
def find_overlap_buffer(op: str, id: int) -> None: ...
def list_overlap_buffers() -> dict[int, tuple[int, int, int, int]]: ...
def overlap_buffer_bytes(
    comm_type: int,
    method: int,
    copies: bool,
    num_ranks: int,
    rows: int,
    slot_rows: int,
    columns: int,
    dtype: str,
    has_scales: bool,
    gathers_to_aux: bool,
) -> int: ...
def gemm_scratch_bytes(
    m: int,
    n: int,
    k: int,
    output_dtype: str,
    has_scales: bool,
    lhs_transposed: bool,
    rhs_transposed: bool,
    fuse_gelu: bool,
) -> int: ...
def load_blas(sgemm: object, dgemm: object) -> str: ...
def start_spans() -> None: ...
def stop_spans() -> list[_Span]: ...

_Neighbour = tuple[int, int, int, int, int, int]

def start_shared_memory(
    process: int, segment_fd: int, segment_bytes: int, others: Sequence[_Neighbour]
) -> None: ...
def end_programs() -> None: ...
def count_pairs(pairs: tuple[int, int, int], start: int, end: int, length: int) -> int: ...

class _Problem:
    lengths: Sequence[int]
    num_ranks: int
    tolerance_ppm: int
    speeds: Sequence[int]
    ranks_per_node: int
    block: int
    pairs: tuple[int, int, int]
    def set_table(
        self, pairs_before: np.ndarray, first_key: np.ndarray, last_key: np.ndarray
    ) -> None: ...

class PlacementProblem(_Problem):
    tokens_per_rank: int
    max_received: int
    def set_layers(self, masks: Sequence[tuple[tuple[int, int, int], int]]) -> None: ...

class QueryProblem(_Problem):
    columns: Sequence[int]
    columns_per_rank: int
    query_cost: int
    key_cost: int
    max_queries: int
    max_keys: int
    wanted_piece: int

def place_documents(problem: PlacementProblem) -> np.ndarray: ...
def move_queries(problem: QueryProblem) -> np.ndarray: ...
