"""Reads the mask of the plan command from text."""

from jax_cp_dispatch._command import InputError
from jax_cp_dispatch.masks import Causal, Chunked, SlidingWindow, StaticMask

_WITH_TOKENS = {"sliding_window": SlidingWindow, "chunked": Chunked}
FORMS = "causal, " + ", ".join(f"{name}:TOKENS" for name in _WITH_TOKENS)


def read_mask_text(text: str) -> StaticMask:
    """Returns the causal mask that `--mask` names."""
    if text == "causal":
        return Causal()
    name, _, tokens = text.partition(":")
    if name not in _WITH_TOKENS or not tokens.isdecimal() or not 0 < int(tokens) < 2**31:
        raise InputError(
            f"--mask is {text!r}; pass one of {FORMS}, for example --mask sliding_window:4096."
        )
    return _WITH_TOKENS[name](int(tokens))
