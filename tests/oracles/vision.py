"""The vision tower of one medium in float64 NumPy, patch by patch."""

import math

import numpy as np


def norm(x, p, eps):
    x = np.asarray(x, np.float64)
    if 'bias' in p:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * p['weight']
    return y + p['bias'] if 'bias' in p else y


def linear(x, p):
    y = x @ np.asarray(p['weight'], np.float64).T
    return y + p['bias'] if 'bias' in p else y


def cubic(x, a=-0.75):
    x = abs(x)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def resampled(table, rows, columns, mode):
    """[rows, columns, D]: one axis after the other, half-pixel centres."""

    def along(table, n):
        size = len(table)
        out = np.zeros((n, *table.shape[1:]))
        for i in range(n):
            s = (i + 0.5) * size / n - 0.5
            if mode == 'bilinear':
                s = min(max(s, 0), size - 1)
                low = min(int(s), size - 1)
                high = min(low + 1, size - 1)
                out[i] = (1 - (s - low)) * table[low] + (s - low) * table[high]
            else:
                low = math.floor(s)
                for j in range(low - 1, low + 3):
                    out[i] += cubic(s - j) * table[min(max(j, 0), size - 1)]
        return out

    return along(along(table, rows).swapaxes(0, 1), columns).swapaxes(0, 1)


def turned(x, row, column):
    """One head's channels [K] at a place: complex pairs, columns and rows by turns."""
    pairs = x[0::2] + 1j * x[1::2]
    for c in range(len(pairs)):
        angle = (row if c % 2 else column) * 10000.0 ** (-4 * (c // 2) / len(x))
        pairs[c] *= np.exp(1j * angle)
    out = np.zeros(len(x))
    out[0::2], out[1::2] = pairs.real, pairs.imag
    return out


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def tower(params, pixels, grid, config):
    """[h / 2 * w / 2, 4, D] of one medium; pixels [t * h * w, 3, size, size]."""
    t, h, w = grid
    own = params['patch_embed']
    x = linear(np.asarray(pixels, np.float64).reshape(len(pixels), -1), own['proj'])
    x = x.reshape(t, h, w, -1)
    table = np.asarray(own['pos_emb'], np.float64)
    x = x + resampled(table, h, w, config.pos_emb_interpolation_mode)
    d = x.shape[-1]
    if t > 1:
        omega = 10000.0 ** (-np.arange(d // 2) / (d // 2))
        for k in range(t):
            x[k] += np.concatenate([np.sin(k * omega), np.cos(k * omega)])
    x = x.reshape(-1, d)
    places = [(r, c) for _ in range(t) for r in range(h) for c in range(w)]
    heads, wide = config.num_attention_heads, config.qkv_hidden_size
    k_dim = wide // heads
    for layer in range(config.num_hidden_layers):
        p = take(params['blocks'], layer)
        qkv = linear(norm(x, p['norm0'], config.norm_eps), p['wqkv'])
        q, k, v = (qkv[:, i * wide : (i + 1) * wide].reshape(-1, heads, k_dim) for i in range(3))
        out = np.zeros((len(x), heads, k_dim))
        for head in range(heads):
            qs = np.array([turned(q[i, head], *places[i]) for i in range(len(x))])
            ks = np.array([turned(k[i, head], *places[i]) for i in range(len(x))])
            scores = qs @ ks.T / np.sqrt(k_dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head]
        x = x + linear(out.reshape(len(x), -1), p['wo'])
        hidden = gelu_tanh(linear(norm(x, p['norm1'], config.norm_eps), p['mlp']['fc0']))
        x = x + linear(hidden, p['mlp']['fc1'])
    x = norm(x, params['final_layernorm'], config.norm_eps).reshape(t, h, w, d).mean(0)
    rows = []
    for r in range(0, h, 2):
        for c in range(0, w, 2):
            rows.append([x[r, c], x[r, c + 1], x[r + 1, c], x[r + 1, c + 1]])
    return np.array(rows)


def take(tree, layer):
    if isinstance(tree, dict):
        return {name: take(child, layer) for name, child in tree.items()}
    return np.asarray(tree, np.float64)[layer]


def projector(params, corners, config):
    eps = config.projector_eps
    if 'pre_norm' in params:
        corners = norm(corners, params['pre_norm'], eps)
    y = gelu(linear(corners.reshape(len(corners), -1), params['proj_0']))
    y = linear(y, params['proj_2'])
    return norm(y, params['post_norm'], eps) if 'post_norm' in params else y
