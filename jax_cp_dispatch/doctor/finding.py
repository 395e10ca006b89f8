"""One finding of the doctor."""

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      name: what was checked.
      found: what was found.
      verdict: "ok"; "missing" if the package works without it; "wrong" if it does not.
      remedy: what to do, if anything.
    """

    name: str
    found: str
    verdict: Literal["ok", "missing", "wrong"] = "ok"
    remedy: str = ""
