"""Progress of commands on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator


class Progress:
    """Prints numbered steps with their time on standard error, and the progress of long ones."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._step = 0

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Callable[[float], None]]:
        self._step += 1
        label = f"[{self._step}/{self._num_steps}] {what} "
        start = time.perf_counter()

        def show(fraction: float) -> None:
            if sys.stderr.isatty():
                bar = "#" * round(20 * fraction)
                print(f"\r{label:<60}|{bar:<20}|", end="", file=sys.stderr, flush=True)

        show(0.0)
        yield show
        again = "\r" if sys.stderr.isatty() else ""
        seconds = time.perf_counter() - start
        print(f"{again}{label:<60}{seconds:6.1f} s{'':<14}", file=sys.stderr, flush=True)
