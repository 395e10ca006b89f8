"""Arguments that other libraries' attention takes: an error says what to pass here instead."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

_NO_BIAS = "a bias of the logits is not supported. Omit it, or call jax.nn.dot_product_attention"
_NO_DROPOUT = "attention weights are never stored, so they cannot be dropped. Omit it"
_MASK = "pass mask='causal' or 'full', or an object of jax_cp_dispatch.masks"
_WINDOW = "pass mask=masks.SlidingWindow(left, right), where left counts the query's own key"
_DOCUMENTS = "documents are named by segment_ids, one for each token"
_SCALE = "pass scale="
_SOFT_CAP = "pass logit_soft_cap="
_SINK = "pass sink=, one logit for each query head"
_LSE = "pass return_lse=True, return_max_logits=True"

# By jax.nn, PyTorch, flash-attn, Flax, Transformer Engine, MaxText, splash attention and tokamax.
PEER_ARGUMENTS = {
    **dict.fromkeys(("bias", "attn_bias", "score_mod", "relative_bias"), _NO_BIAS),
    **dict.fromkeys(("alibi", "alibi_slopes", "use_alibi"), _NO_BIAS),
    **dict.fromkeys(("dropout", "dropout_rate", "dropout_p", "dropout_rng", "dropout_prob"),
                    _NO_DROPOUT),
    **dict.fromkeys(("deterministic", "dropout_mask", "attention_dropout"), _NO_DROPOUT),
    **dict.fromkeys(("causal", "is_causal", "attn_mask", "attention_mask", "attn_mask_type",
                     "mask_type", "mask_value"), _MASK),
    **dict.fromkeys(("window", "window_size", "sliding_window", "sliding_window_size",
                     "local_window_size"), _WINDOW),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_k", "seqlens",
                     "decoder_segment_ids", "q_segment_ids", "kv_segment_ids", "sequence_ids",
                     "query_seq_lengths", "key_value_seq_lengths"), _DOCUMENTS),
    **dict.fromkeys(("sm_scale", "softmax_scale", "scale_factor", "scaling", "logits_scale"),
                    _SCALE),
    **dict.fromkeys(("softcap", "soft_cap", "attn_logits_soft_cap", "logits_soft_cap",
                     "attn_logit_softcapping"), _SOFT_CAP),
    **dict.fromkeys(("sinks", "softmax_offset", "s_aux", "attention_sink", "softmax_type"), _SINK),
    **dict.fromkeys(("return_attn_probs", "return_residual", "return_residuals",
                     "return_softmax_lse", "return_lse_and_max", "save_residuals"), _LSE),
}  # fmt: skip


def explains_peer_arguments(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Returns the function, with errors that explain arguments of other libraries."""
    known = frozenset(inspect.signature(function).parameters)
    foreign = {name: advice for name, advice in PEER_ARGUMENTS.items() if name not in known}

    @functools.wraps(function)
    def explained(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        for name in kwargs.keys() - known:
            if name in foreign:
                raise TypeError(
                    f"{function.__name__}: {name} is not an argument here: {foreign[name]}. "
                    "See docs/limits.md."
                )
        return function(*args, **kwargs)

    return explained
