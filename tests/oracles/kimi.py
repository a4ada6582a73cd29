"""The Kimi text models in float64 NumPy: plain loops over layers, heads, tokens and experts.

Written from the equations of the model, for one document at a time, sharing no code with the
library. Parameters: the per-layer tree with the release's names and [out, in] matrices.
"""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def wide(x):
    return np.asarray(x, np.float64)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * wide(weight)


def times(x, weight):
    return x @ wide(weight).T


def softmax(scores):
    e = np.exp(scores - scores.max())
    return e / e.sum()


def residual_read(bank, prefix, norm, proj, eps):
    """The mixture of raw candidates, token by token."""
    out = np.zeros_like(prefix)
    for t in range(len(prefix)):
        candidates = [snapshot[t] for snapshot in bank] + [prefix[t]]
        scores = [np.sum(rms(c, norm, eps) * wide(proj)) for c in candidates]
        for p, candidate in zip(softmax(np.array(scores)), candidates, strict=True):
            out[t] += p * candidate
    return out


def short_conv(z, weight):
    weight, out = wide(weight), np.zeros_like(z)
    taps = weight.shape[1]
    for t in range(len(z)):
        for j in range(taps):
            source = t - taps + 1 + j
            if source >= 0:
                out[t] += weight[:, j] * z[source]
    return silu(out)


def kda_mixer(p, x, config):
    """[T, D] -> [T, D], and the final state [H, K, V]."""
    c = config.linear_attn_config
    heads, d = c.num_heads, c.head_dim
    split = (len(x), heads, d)
    q, k, v = (
        short_conv(times(x, p[f'{n}_proj']), p[f'{n}_conv1d']).reshape(split)
        for n in ('q', 'k', 'v')
    )
    q = q / np.sqrt(np.sum(q * q, -1, keepdims=True) + 1e-6) * d**-0.5
    k = k / np.sqrt(np.sum(k * k, -1, keepdims=True) + 1e-6)
    f = (times(times(x, p['f_a_proj']), p['f_b_proj']) + wide(p['dt_bias'])).reshape(split)
    rate = np.exp(wide(p['A_log']))[:, None]
    if c.gate_lower_bound is None:
        g = -rate * np.log1p(np.exp(f))
    else:
        g = c.gate_lower_bound * sigmoid(rate * f)
    beta = sigmoid(times(x, p['b_proj']))
    state, o = np.zeros((heads, d, d)), np.zeros(split)
    for t in range(len(x)):
        for h in range(heads):
            decayed = np.exp(g[t, h])[:, None] * state[h]
            u = beta[t, h] * (v[t, h] - decayed.T @ k[t, h])
            state[h] = decayed + np.outer(k[t, h], u)
            o[t, h] = state[h].T @ q[t, h]
    if c.use_full_rank_gate:
        z = times(x, p['g_proj'])
    else:
        z = times(times(x, p['g_a_proj']), p['g_b_proj'])
    y = rms(o, p['o_norm'], config.rms_norm_eps) * sigmoid(z.reshape(split))
    return times(y.reshape(len(x), -1), p['o_proj']), state


def mla_mixer(p, x, config):
    nope, rope, v_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    heads, rank, eps = config.num_attention_heads, config.kv_lora_rank, config.mla_latent_norm_eps
    if config.q_lora_rank is None:
        q = times(x, p['q_proj'])
    else:
        q = times(rms(times(x, p['q_a_proj']), p['q_a_layernorm'], eps), p['q_b_proj'])
    q = q.reshape(len(x), heads, nope + rope)
    compressed = times(x, p['kv_a_proj_with_mqa'])
    latent, shared = rms(compressed[:, :rank], p['kv_a_layernorm'], eps), compressed[:, rank:]
    kv = times(latent, p['kv_b_proj']).reshape(len(x), heads, nope + v_dim)
    o = np.zeros((len(x), heads, v_dim))
    for h in range(heads):
        keys = np.concatenate([kv[:, h, :nope], shared], -1)
        for t in range(len(x)):
            weights = softmax(keys[: t + 1] @ q[t, h] / np.sqrt(nope + rope))
            o[t, h] = weights @ kv[: t + 1, h, nope:]
    o = o.reshape(len(x), -1)
    if config.mla_use_output_gate:
        o = o * sigmoid(times(x, p['g_proj']))
    return times(o, p['o_proj'])


def activate(a, b, config):
    if config.hidden_act == 'silu':
        return silu(a) * b
    beta = 1.0 if config.activation_situ_beta is None else config.activation_situ_beta
    if config.activation_situ_linear_beta is not None:
        b = config.activation_situ_linear_beta * np.tanh(b / config.activation_situ_linear_beta)
    return beta * np.tanh(a / beta) * sigmoid(a) * b


def gated_mlp(p, x, config):
    hidden = activate(times(x, p['gate_proj']), times(x, p['up_proj']), config)
    return times(hidden, p['down_proj'])


def decode_mxfp4(packed, scale):
    """[out, in / 2] bytes and [out, in / 32] scales -> [out, in]."""
    rows, half = packed.shape
    out = np.zeros((rows, 2 * half))
    for i in range(rows):
        for j in range(half):
            for k, code in enumerate((int(packed[i, j]) & 15, int(packed[i, j]) >> 4)):
                column = 2 * j + k
                sign = -1.0 if code & 8 else 1.0
                factor = 2.0 ** (int(scale[i, column // 32]) - 127)
                out[i, column] = sign * E2M1[code & 7] * factor
    return out


def expert_weights(p, e):
    if 'w1' in p:
        return [wide(p[name][e]) for name in ('w1', 'w3', 'w2')]
    return [decode_mxfp4(p[f'{n}_packed'][e], p[f'{n}_scale'][e]) for n in ('w1', 'w3', 'w2')]


def moe(p, x, config):
    scores = sigmoid(times(x, p['gate']))
    latent = config.routed_expert_hidden_size is not None
    z = times(x, p['routed_expert_down_proj']) if latent else x
    experts = [expert_weights(p['experts'], e) for e in range(config.num_experts)]
    mixed = np.zeros_like(z)
    for t in range(len(x)):
        biased = scores[t] + wide(p['e_score_correction_bias'])
        chosen = np.argsort(-biased, kind='stable')[: config.num_experts_per_token]
        weights = scores[t, chosen]
        if config.moe_renormalize:
            weights = weights / (weights.sum() + 1e-20)
        for e, weight in zip(chosen, weights * config.routed_scaling_factor, strict=True):
            w1, w3, w2 = experts[e]
            mixed[t] += weight * (w2 @ activate(w1 @ z[t], w3 @ z[t], config))
    if latent:
        if config.latent_moe_use_norm:
            mixed = rms(mixed, p['routed_expert_norm'], config.rms_norm_eps)
        mixed = times(mixed, p['routed_expert_up_proj'])
    if config.num_shared_experts:
        mixed = mixed + gated_mlp(p['shared_experts'], x, config)
    return mixed


def attention(p, x, config, layer):
    if layer + 1 in config.linear_attn_config.kda_layers:
        return kda_mixer(p['self_attn'], x, config)[0]
    return mla_mixer(p['self_attn'], x, config)


def feed_forward(p, x, config, layer):
    if layer >= config.first_k_dense_replace and layer % config.moe_layer_freq == 0:
        return moe(p['block_sparse_moe'], x, config)
    return gated_mlp(p['mlp'], x, config)


def hidden_states(config, params, tokens):
    """Of one document: final hidden states [T, D], snapshots taken on the way, the last sum."""
    eps = config.rms_norm_eps
    prefix = wide(params['embed_tokens'])[np.asarray(tokens)]
    bank = []
    for layer in range(config.num_hidden_layers):
        p = params[f'layers_{layer}']
        if config.attn_res_block_size is None:
            x = rms(prefix, p['input_layernorm'], eps)
            prefix = prefix + attention(p, x, config, layer)
            y = rms(prefix, p['post_attention_layernorm'], eps)
            prefix = prefix + feed_forward(p, y, config, layer)
            continue
        x = prefix
        if bank:
            norm, proj = p['self_attention_res_norm'], p['self_attention_res_proj']
            x = residual_read(bank, prefix, norm, proj, eps)
        start = layer % config.attn_res_block_size == 0
        if start:
            bank.append(prefix.copy())
        a = attention(p, rms(x, p['input_layernorm'], eps), config, layer)
        prefix = a if start else prefix + a
        y = residual_read(bank, prefix, p['mlp_res_norm'], p['mlp_res_proj'], eps)
        prefix = prefix + feed_forward(p, rms(y, p['post_attention_layernorm'], eps), config, layer)
    h = prefix
    if bank:
        norm, proj = params['output_attn_res_norm'], params['output_attn_res_proj']
        h = residual_read(bank, prefix, norm, proj, eps)
    return rms(h, params['norm'], eps), bank, prefix


def mtp_logits(config, params, tokens):
    """[T - 1, Z], of each token after next, of one document; `config` has an MLA layer for it."""
    eps, p = config.rms_norm_eps, params['mtp']
    hidden = hidden_states(config, params, tokens)[2][:-1]
    embedded = wide(params['embed_tokens'])[np.asarray(tokens)][1:]
    pair = [rms(embedded, p['enorm'], eps), rms(hidden, p['hnorm'], eps)]
    x = times(np.concatenate(pair, -1), p['eh_proj'])
    layer = p['layer']
    x = x + mla_mixer(layer['self_attn'], rms(x, layer['input_layernorm'], eps), config)
    y = rms(x, layer['post_attention_layernorm'], eps)
    x = x + moe(layer['block_sparse_moe'], y, config)
    return times(rms(x, p['norm'], eps), params['lm_head'])


def logits(config, params, tokens):
    """[T, Z] of one document."""
    return times(hidden_states(config, params, tokens)[0], params['lm_head'])
