"""Attention of one sequence over all of its keys, in float64, without a cache."""

import numpy as np


def dense_attention(
    query, keys, values, *, scale=None, window=None, chunk=None, sink_tokens=0, softcap=0.0, sinks=None
):
    """Causal attention of the last ``len(query)`` positions of a sequence.

    query [q, Hq, D], keys [n, Hkv, D], values [n, Hkv, Dv] -> [q, Hq, Dv]
    """
    query, keys, values = (np.asarray(array, np.float64) for array in (query, keys, values))
    heads, group = query.shape[1], query.shape[1] // keys.shape[1]
    scale = query.shape[2] ** -0.5 if scale is None else scale
    out = np.zeros((len(query), heads, values.shape[2]))
    for i in range(len(query)):
        position = len(keys) - len(query) + i
        first = 0 if window is None else max(0, position - window + 1)
        first = first if chunk is None else position // chunk * chunk
        seen = [*range(min(sink_tokens, first)), *range(first, position + 1)]
        for head in range(heads):
            scores = scale * keys[seen, head // group] @ query[i, head]
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            logits = scores if sinks is None else np.append(scores, sinks[head])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[i, head] = weights[: len(scores)] @ values[seen, head // group]
    return out


def limits_of(spec):
    """Return the arguments of `dense_attention` that limit the keys, from an AttentionSpec."""
    return {"window": spec.window, "chunk": spec.chunk, "sink_tokens": spec.sink_tokens}
