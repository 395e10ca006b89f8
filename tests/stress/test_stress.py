"""Random programs from several threads, some failing on purpose: the short form of stress.py."""

import pathlib
import re
import subprocess
import sys

STRESS = pathlib.Path(__file__).with_name("stress.py")


def test_random_programs():
    """Runs in a separate process, so a hang or crash does not end this one."""
    done = subprocess.run(
        [sys.executable, str(STRESS), "--programs=40", "--structures=6", "--hang=600"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    numbers = re.search(r"(\d+) failures provoked, (\d+) seen, (\d+) mismatches", done.stdout)
    assert numbers is not None
    provoked, seen, mismatches = map(int, numbers.groups())
    assert provoked == seen > 0
    assert mismatches == 0
