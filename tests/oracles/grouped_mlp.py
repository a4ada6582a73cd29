"""Routed experts in float64 NumPy: outputs and gradients, expert by expert."""

from __future__ import annotations

import numpy as np


def activate(name, a, b):
    """SiTU or SwiGLU of gate a and up b."""
    sigmoid = 1 / (1 + np.exp(-a))
    return (
        a * sigmoid * b if name == 'swiglu' else 4 * np.tanh(a / 4) * sigmoid * 25 * np.tanh(b / 25)
    )


def activate_vjp(name, a, b, d):
    """Gradients of a and b."""
    sigmoid = 1 / (1 + np.exp(-a))
    if name == 'swiglu':
        return d * b * sigmoid * (1 + a * (1 - sigmoid)), d * a * sigmoid
    ta, tb = np.tanh(a / 4), np.tanh(b / 25)
    gate, up = 4 * ta * sigmoid, 25 * tb
    d_gate = (1 - ta**2) * sigmoid + 4 * ta * sigmoid * (1 - sigmoid)
    return d * up * d_gate, d * gate * (1 - tb**2)


def oracle(x, experts, sizes, name, dy, rounding=lambda values: values):
    """Outputs [M, L] of rows sorted by expert, and gradients of the rows and of the weights.

    x, dy: [M, L]. experts: w1, w3 [E, F, L], w2 [E, L, F]. sizes: rows of each expert. rounding: of
    x and of the hidden values, [m, n] -> [m, n], with the identity as its gradient.
    """
    w1, w3, w2 = (np.asarray(w, np.float64) for w in experts)
    x, dy = rounding(np.asarray(x, np.float64)), np.asarray(dy, np.float64)
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    d1, d3, d2 = np.zeros(w1.shape), np.zeros(w3.shape), np.zeros(w2.shape)
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        a, b = x[rows] @ w1[e].T, x[rows] @ w3[e].T
        hidden = rounding(activate(name, a, b))
        y[rows] = hidden @ w2[e].T
        d2[e] = dy[rows].T @ hidden
        da, db = activate_vjp(name, a, b, dy[rows] @ w2[e])
        d1[e], d3[e] = da.T @ x[rows], db.T @ x[rows]
        dx[rows] = da @ w1[e] + db @ w3[e]
        start += size
    return {'y': y, 'x': dx, 'w1': d1, 'w3': d3, 'w2': d2}


def token_oracle(x, experts, ids, weights):
    """Outputs [T, L] with SiTU. x: [T, L]. ids, weights: [T, k]."""
    total = np.zeros(x.shape)
    for i in range(ids.shape[1]):
        order = np.argsort(ids[:, i], kind='stable')
        sizes = np.bincount(ids[:, i], minlength=experts.w1.shape[0])
        rows = np.asarray(x, np.float64)[order]
        found = oracle(rows, experts, sizes, 'situ', rows)['y']
        total[order] += np.asarray(weights, np.float64)[order, i : i + 1] * found
    return total
