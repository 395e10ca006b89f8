"""The sources can raise every message that docs/errors.md quotes."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
GAP = ".{0,200}?"  # names and numbers, and the code that inserts them


def sources():
    """Returns all sources as one text, with adjacent string literals joined."""
    files = [*(ROOT / "jax_cp_dispatch").rglob("*.py"), *(ROOT / "csrc").rglob("*.cc")]
    return re.sub(r'"\s*f?"', "", "\n".join(path.read_text() for path in files))


def test_quoted_messages_are_raised():
    page = (ROOT / "docs" / "errors.md").read_text()
    messages = re.findall(r"^\| `([^`]*)` \|", page, flags=re.M)
    assert len(messages) > 40
    text = sources()
    for message in messages:
        parts = [re.escape(part.strip()) for part in message.strip("… ").split("…")]
        assert re.search(GAP.join(parts), text, flags=re.S), message
