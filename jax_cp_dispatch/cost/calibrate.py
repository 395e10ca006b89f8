"""Finds the constants of hardware for which predictions agree with measured times."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_cp_dispatch.cost.hardware import Hardware

_TIE = 1e-3  # weight of the distance from the start, which decides if measurements do not


class Measurement(NamedTuple):
    """A measured time, and its prediction.

    Attributes:
      seconds: measured.
      predict: returns the predicted seconds for given hardware, for example
        `lambda hardware: predict(workload, hardware=hardware)["ring"].total`.
    """

    seconds: float
    predict: Callable[[Hardware], float]


def calibrate(
    hardware: Hardware, measurements: Sequence[Measurement], *, constants: Sequence[str]
) -> Hardware:
    """Returns the hardware with the constants for which the relative errors are smallest.

    Minimizes the sum of squares of log(predicted / measured) over the logarithms of the constants,
    so all stay positive. Measure different sizes, so that each constant decides some of the times;
    a constant that decides none stays near its start. To learn how accurate the result is, predict
    other measurements with it. Call on the host.

    Args:
      hardware: the constants to start from, and those that stay as they are.
      measurements: at least one for each constant.
      constants: names of fields of `Hardware`, or of its attention: "attention.flops".
    Raises:
      ValueError: there are too few measurements, a time is not positive, or a constant is unknown,
        zero or infinite at the start.
    """
    from scipy.optimize import least_squares  # a dependency of JAX; slow to import

    if len(measurements) < len(constants):
        raise ValueError(
            f"calibrate: got {len(measurements)} measurements for {len(constants)} constants. "
            "Measure at least one time for each constant."
        )
    if not all(x.seconds > 0 for x in measurements):
        raise ValueError("calibrate: a measured time is not positive. Pass seconds.")
    start = np.array([_constant(hardware, name) for name in constants], np.float64)

    def changed(logarithms):
        values = dict(zip(constants, np.exp(logarithms).tolist(), strict=True))
        return _replaced(hardware, values)

    def errors(logarithms):
        candidate = changed(logarithms)
        relative = [np.log(x.predict(candidate) / x.seconds) for x in measurements]
        return [*relative, *(_TIE * (logarithms - np.log(start)))]

    return changed(least_squares(errors, np.log(start)).x)


def _constant(hardware: Hardware, name: str) -> float:
    where, _, field = name.rpartition(".")
    owner: Any = hardware.attention_rate if where == "attention" else hardware
    names = {x.name for x in dataclasses.fields(owner)}
    value = getattr(owner, field) if field in names and where in ("", "attention") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"calibrate: {name!r} is not a number of the hardware. Pass names of numeric fields of "
            "Hardware, such as 'link_bandwidth', or of its AttentionRate, such as "
            "'attention.flops'."
        )
    if not 0 < value < np.inf:
        raise ValueError(
            f"calibrate: {name} is {value} at the start; it needs a positive, finite value. Pass "
            "hardware with an estimate of it."
        )
    return value


def _replaced(hardware: Hardware, values: dict[str, float]) -> Hardware:
    attention = {k.removeprefix("attention."): v for k, v in values.items() if "." in k}
    own: dict[str, Any] = {k: v for k, v in values.items() if "." not in k}
    if attention:
        own["attention"] = dataclasses.replace(hardware.attention_rate, **attention)
    return dataclasses.replace(hardware, **own)
