"""Lower bounds of what a placement moves, and of its work with a capacity; causal attention."""

import math

import numpy as np


def least_keys(lengths, world_size, tokens, tolerance):
    """Returns the larger of two bounds."""
    arguments = lengths, world_size, tokens, tolerance
    return max(keys_if_fillers_were_free(*arguments), keys_of_the_longest_document(*arguments))


def keys_if_fillers_were_free(lengths, world_size, tokens, tolerance):
    """Each document alone, as if the other tokens of its ranks had no work.

    Sort the ranks by the last token of the document that they hold. Then the first i of them hold
    it from some a_i to its end, and the document moves the sum of all a_i keys. These tokens have
    to fit into i * tokens places and i limits of work.
    """
    work = lambda end: end * (end + 1) // 2
    limit = int((1 + tolerance) * sum(work(int(n)) for n in lengths) / world_size)
    keys = 0
    for length in map(int, lengths):
        for ranks in range(1, world_size):
            left = max(0, work(length) - ranks * limit)  # work of the tokens before a_i, at least
            start = (math.isqrt(8 * left + 1) - 1) // 2
            start = max(start + (work(start) < left), length - ranks * tokens)
            if start <= 0:
                break
            keys += start
    return keys


def keys_of_the_longest_document(lengths, world_size, tokens, tolerance):
    """The longest document, while its ranks get the cheapest other tokens of the batch.

    With a_i as above, the first i ranks have i * tokens places and i limits of work for all that
    they hold. Give each token a price. Their other tokens then have no less work than their price,
    minus what each document saves below it: at most a shorter one held whole, and the head of the
    longest, which moves no more keys.

    A document of which k keys move saves at most k prices more. If these ranks lack its last token,
    they hold at most k of its tokens. If they have it, they lack at most k, and each of these saves
    at most the price if the document is worth holding. So the result is the least sum, over all k,
    of k and of the a_i that it allows.
    """
    work = lambda end: end * (end + 1) / 2
    *others, longest = map(int, sorted(lengths))
    others = np.array(others, float)
    limit = (1 + tolerance) * (work(others).sum() + work(longest)) / world_size
    padding = world_size * tokens - others.sum() - longest
    prices = np.unique(np.append((others + 1) / 2, longest))
    saved = np.array([np.maximum(x * others - work(others), 0).sum() for x in prices])
    saved += prices * np.floor(prices) - work(np.floor(prices))

    def least_start(ranks, price, saved, cut):
        """The least a with work(longest) - work(a) + work of the others <= ranks * limit."""
        others = price * (ranks * tokens - longest - padding - cut) - saved  # and price * a
        excess = work(longest) + others - ranks * limit  # at most work(a) - price * a
        root = price - 0.5 + np.sqrt((price - 0.5) ** 2 + 2 * np.maximum(excess, 0))
        return np.where(excess > 0, root, 0)

    cuts = []
    for ranks in range(1, world_size):
        best = least_start(ranks, prices, saved, 0).argmax()
        cuts.append((ranks, prices[best], saved[best]))

    def sum_of_starts(cut):
        return sum(least_start(ranks, price, saved, cut) for ranks, price, saved in cuts)

    most = float(sum_of_starts(0))
    moved = np.append(0, np.geomspace(1, most + 1, 512))  # from each to the next
    return float((moved[:-1] + sum_of_starts(moved[1:])).min())


def least_received_by_the_busiest(lengths, tokens, pairs):
    """Keys that some rank receives if no rank holds more tokens or computes more pairs than these.

    The rank with the last token of a document of L tokens needs all L keys. Of these it holds n at
    most, with n <= tokens; and n - 1 others with the least pairs, which are the first ones, so that
    n * (n - 1) / 2 + L <= pairs. It receives at least L - n. With the tokens and pairs of a whole
    node, that is what this rank receives from other nodes.
    """
    lengths = np.asarray(lengths, np.int64)
    roots = (1 + np.sqrt(1 + 8.0 * np.maximum(pairs - lengths, 0))) / 2
    own = np.minimum(np.floor(roots), tokens)
    return max(0, int((lengths - own).max()))


def least_imbalance_of_capacity(lengths, world_size, tokens, kv_capacity):
    """Max/mean of the work if a rank receives at most this many rows, and there is no padding.

    The rank with the last token of a document receives all of it, so the rest of the capacity is
    the most that it holds of others. What it holds of this document has the least work at its head.
    """
    lengths = np.asarray(lengths, np.int64)
    own = np.clip(tokens + lengths - kv_capacity, 0, np.minimum(lengths, tokens))
    return max(1.0, (own * (own + 1)).max() * world_size / (lengths * (lengths + 1)).sum())
