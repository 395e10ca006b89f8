"""What every process tells all others, through JAX's coordination service."""

import json
from typing import Any

import jax
from jax._src import distributed


class Told:
    """The words of one process to all, and theirs to it; `timeout` is in seconds."""

    def __init__(self, timeout: float):
        client: Any = distributed.global_state.client
        if client is None:
            raise RuntimeError(
                "connect_gpus: jax.distributed.initialize has not been called in this process."
            )
        self._client = client
        self._milliseconds = round(1000 * timeout)

    def to_all(self, what: str, mine: Any) -> list[Any]:
        """Everybody's value, by process."""
        key = f"jax_cp_dispatch/gpu/{what}"
        self._client.key_value_set_bytes(f"{key}/{jax.process_index()}", json.dumps(mine).encode())
        values = []
        for process in range(jax.process_count()):
            try:
                value = self._client.blocking_key_value_get_bytes(
                    f"{key}/{process}", self._milliseconds
                )
            except Exception as error:
                raise RuntimeError(
                    f"connect_gpus: process {process} of {jax.process_count()} did not tell "
                    f"{what!r} within {self._milliseconds} ms, for which process "
                    f"{jax.process_index()} waited ({error}). All processes have to call "
                    "connect_gpus()."
                ) from error
            values.append(json.loads(value))
        return values
