"""Log probabilities of rows of logits in compiled code: ``kernels/logprobs.py`` is the definition.

For compiled code, on one thread, with a workspace of one's own (``row_draw.Workspace``)::

    logprobs(row, vocab, token, k, out_ids, out_values, x, weights, values, maxima, ids, ones) -> rank

``out_ids`` and ``out_values`` get the token and then the ``min(k, vocab)`` most likely in descending order, ties in
ascending id. Values that are not finite are left for the caller to replace. The exponentials are float32 (relative
error below 1e-6), their sum and the logarithm float64.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np

from ringserve.kernels.cpu.compiled import compiled
from ringserve.kernels.cpu.row_draw import largest
from ringserve.kernels.cpu.row_select import (
    LOG2_E,
    MINUS_INFINITY,
    clean_row,
    exponentials,
    following,
    total_weight,
    weight_from,
)


@compiled
def logprobs(
    row: int,
    vocab: int,
    token: int,
    k: int,
    out_ids: Any,
    out_values: Any,
    x: Any,
    weights: Any,
    values: Any,
    maxima: Any,
    ids: Any,
    ones: Any,
) -> int:
    """See the top of this file."""
    top = clean_row(row, vocab, x, maxima)
    k = min(k, vocab)
    chosen = x[token]
    out_ids[0] = token
    log_sum = np.inf
    if top > MINUS_INFINITY:
        exponentials(x, vocab, top, LOG2_E, weights)
        log_sum = log(total_weight(weights, vocab))
    out_values[0] = (np.float64(chosen) - np.float64(top)) - log_sum
    if k > 0:
        count = largest(x, maxima, vocab, top, k, values, ids, weights, ones)
        for i in range(count):
            value, at = values[i], i
            while at > 0 and out_values[at] < value:
                out_ids[at + 1], out_values[at + 1] = out_ids[at], out_values[at]
                at -= 1
            out_ids[at + 1], out_values[at + 1] = ids[i], np.float64(value)
        for i in range(1, count + 1):
            out_values[i] = (out_values[i] - np.float64(top)) - log_sum
    _, above = weight_from(x, ones, vocab, following(chosen))
    return int(1 + above)


@compiled
def logprob_rows(
    rows: Any,
    vocab: int,
    tokens: Any,
    ks: Any,
    out_ids: Any,
    out_values: Any,
    ranks: Any,
    x: Any,
    weights: Any,
    values: Any,
    maxima: Any,
    ids: Any,
    ones: Any,
) -> None:
    """``logprobs`` of each address of ``rows``; ``out_ids`` and ``out_values`` are ``[rows, 1 + most]``."""
    for i in range(len(rows)):
        ranks[i] = logprobs(
            rows[i], vocab, tokens[i], ks[i], out_ids[i], out_values[i], x, weights, values, maxima, ids, ones
        )
