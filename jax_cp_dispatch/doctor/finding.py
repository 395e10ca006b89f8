"""What the doctor says of one thing."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      name: what was looked at.
      found: what is there.
      verdict: "ok"; "missing", where the package works without it; "wrong", where it does not.
      remedy: what to do about it, if anything.
    """

    name: str
    found: str
    verdict: Literal["ok", "missing", "wrong"] = "ok"
    remedy: str = ""
