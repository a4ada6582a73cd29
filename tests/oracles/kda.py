"""KDA in float64 NumPy: the recurrence and its adjoint, written from the equations."""

from __future__ import annotations

import numpy as np


def _runs(segment_ids):
    """Run number of each token (padding: of the run it interrupts) and whether it is real."""
    number = np.zeros(segment_ids.shape, int)
    for row, ids in enumerate(segment_ids):
        current, last = 0, None
        for t, value in enumerate(ids):
            if value > 0:
                if last is not None and value != last:
                    current += 1
                last = value
            number[row, t] = current
    return number, segment_ids > 0


def kda(q, k, v, g, beta, initial_state=None, segment_ids=None, do=None, d_final=None):
    """Outputs, final state and, for given cotangents, gradients.

    Args:
      q, k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H]; segment_ids: [B, T].
      do: [B, T, H, V]; d_final: [B, H, K, V].

    Returns:
      (o, state, grads), grads a dict over q k v g beta initial_state, or None.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    batch, length, heads, width = q.shape
    if initial_state is None:
        initial_state = np.zeros((batch, heads, width, v.shape[-1]))
    if segment_ids is None:
        segment_ids = np.ones((batch, length), int)
    number, real = _runs(np.asarray(segment_ids))
    state, previous = np.asarray(initial_state, np.float64), np.zeros(batch, int)
    o, trace = np.zeros(v.shape), []
    for t in range(length):
        goes_on = (number[:, t] == previous)[:, None, None, None]
        live = real[:, t][:, None, None, None]
        decayed = np.exp(g[:, t])[..., None] * np.where(goes_on, state, 0.0)
        error = v[:, t] - np.einsum('bhkv,bhk->bhv', decayed, k[:, t])
        u = beta[:, t][..., None] * error
        after = decayed + k[:, t][..., None] * u[..., None, :]
        o[:, t] = np.einsum('bhkv,bhk->bhv', after, q[:, t]) * live[..., 0]
        trace.append((goes_on, live, decayed, error, u, after))
        state = np.where(live, after, state)
        previous = np.where(real[:, t], number[:, t], previous)
    if do is None:
        return o, state, None

    do = np.asarray(do, np.float64)
    d_state = np.zeros_like(state) if d_final is None else np.asarray(d_final, np.float64)
    grads = {name: np.zeros(x.shape) for name, x in dict(q=q, k=k, v=v, g=g, beta=beta).items()}
    for t in reversed(range(length)):
        goes_on, live, decayed, error, u, after = trace[t]
        row = live[..., 0]
        do_t = do[:, t] * row
        d_after = np.where(live, d_state, 0.0) + q[:, t][..., None] * do_t[..., None, :]
        grads['q'][:, t] = np.einsum('bhkv,bhv->bhk', after, do_t)
        du = np.einsum('bhkv,bhk->bhv', d_after, k[:, t])
        de = beta[:, t][..., None] * du
        grads['k'][:, t] = np.einsum('bhkv,bhv->bhk', d_after, u)
        grads['k'][:, t] -= np.einsum('bhkv,bhv->bhk', decayed, de)
        grads['v'][:, t] = de
        grads['beta'][:, t] = np.sum(du * error, -1)
        d_decayed = d_after - k[:, t][..., None] * de[..., None, :]
        grads['g'][:, t] = np.sum(d_decayed * decayed, -1)
        for name in ('k', 'v', 'g'):
            grads[name][:, t] *= row
        grads['beta'][:, t] *= row[..., 0]
        before = np.where(goes_on, np.exp(g[:, t])[..., None] * d_decayed, 0.0)
        d_state = np.where(live, before, d_state)
    grads['initial_state'] = d_state
    return o, state, grads
