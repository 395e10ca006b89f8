"""What a run reports: a progress bar, a line of JSON per step, and a picture."""

import json
import pathlib
import sys
import time
from typing import Any

import jax

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX records it for each compilation


class Compilations:
    """Counts how often JAX compiles a function, by JAX's own events."""

    def __init__(self, name: str):
        self.name = name
        self.seconds: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILED and self.name in str(details.get("fun_name")):
            self.seconds.append(duration_secs)


class Run:
    """Records steps in `history.jsonl`. A resumed run keeps those before its checkpoint.

    Of several processes, only the first records.
    """

    def __init__(self, folder: pathlib.Path, num_steps: int, first: int = 0):
        self.path, self.num_steps = folder / "history.jsonl", num_steps
        self._records = jax.process_index() == 0
        self._is_compiled = False  # the first step includes compilation, so it has no speed
        if not self._records:
            return
        self.history = read_history(self.path)[:first] if first else []
        if len(self.history) < first:
            raise ValueError(
                f"{self.path} has {len(self.history)} steps but the checkpoint is of step {first}. "
                "Resume with the folder of the run that wrote the checkpoint."
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.history))

    def record(self, metrics: dict[str, Any], began: float) -> None:
        """Waits for the step that began then, writes its line, and moves the progress bar."""
        line: dict[str, Any] = {
            name: float(value) for name, value in jax.device_get(metrics).items()
        }
        if not self._records:
            return
        speed = line.pop("labels") / (time.perf_counter() - began)
        line["tokens_per_second"] = speed if self._is_compiled else None
        self._is_compiled = True
        self.history.append({"step": len(self.history) + 1, **line})
        with self.path.open("a") as file:
            file.write(json.dumps(self.history[-1]) + "\n")
        self._draw_bar(self.history[-1])

    def _draw_bar(self, line: dict[str, Any]) -> None:
        step, speed = line["step"], line["tokens_per_second"] or 0
        bar = ("#" * (24 * step // self.num_steps)).ljust(24, ".")
        text = f"[{bar}] {step}/{self.num_steps}  loss {line['loss']:.3f}  {speed:6,.0f} tokens/s"
        if sys.stdout.isatty():
            print(f"\r{text}", end="\n" if step == self.num_steps else "", flush=True)
        elif step in (1, self.num_steps) or step % 10 == 0:
            print(text, flush=True)


def read_history(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a history; ignores a last line that a killed run did not finish."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def draw(history: list[dict[str, Any]], algorithm: str, path: pathlib.Path) -> None:
    """Draws loss, balance of work and speed by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    loss, balance, speed = figure.subplots(1, 3)
    column = lambda name: [line[name] for line in history]
    steps = column("step")
    loss.plot(steps, column("loss"))
    loss.set_title("loss, nats per byte")
    balance.plot(steps, column("imbalance_in_order"), label="tokens in order")
    balance.plot(steps, column("imbalance"), label=algorithm)
    balance.set_title("attention: largest work / mean")
    balance.legend()
    speed.plot(steps, [x if x is not None else float("nan") for x in column("tokens_per_second")])
    speed.set_title("tokens per second")
    for axes in (loss, balance, speed):
        axes.set_xlabel("step")
    speed.set_ylim(bottom=0)
    figure.savefig(path)
