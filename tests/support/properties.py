"""With how many random examples a property is tried: few in the suite, more on request.

TEST_EXAMPLES=20 .venv/bin/python -m pytest -q tests/planning   # 20 times as many
"""

import os

from hypothesis import settings


def examples(number: int) -> settings:
    """Settings of a property that the suite tries with `number` examples."""
    times = int(os.environ.get("TEST_EXAMPLES", "1"))
    return settings(max_examples=number * times, deadline=None)
