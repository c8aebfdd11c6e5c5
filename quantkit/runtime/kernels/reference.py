"""Plain float32 kernels of a forward pass, except matrix products: the reference implementations for all others.

    rms_norm      y = x / sqrt(mean(x^2) + eps) * weight
    reglu         y = max(gate, 0) * up
    swiglu        y = gate * sigmoid(gate) * up
    geglu         y = gelu(gate) * up, gelu in its tanh form
    swiglu_oai    y = gate * sigmoid(1.702 gate) * (1 + up), both clamped
    xielu         y = p x^2 + b x for x > 0, else n (e^min(x, e) - 1 - x) + b x
    rope          rotates pairs of elements of each head by the angles of their positions
    soft_cap      y = c tanh(x / c)
    softmax_step  one block of keys of the streaming softmax
    softplus      ln(1 + e^x)
    route         which experts a token goes to, and their weights; route_softplus with sqrt(ln(1 + e^logit))
    causal_conv   a causal convolution over the last few tokens, each channel by itself
    short_conv    the same, then x * sigmoid(x)
    l2_norm_heads y = x / sqrt(sum(x^2) + 1e-6), each head
    gate          y = x * sigmoid(gate)
    delta_rule    a head of linear attention, token by token
    state_space   a head of a Mamba-2 mixer, token by token

All are sequential over rows; `runtime/blocks` calls them on slices of rows from several threads.
"""

from __future__ import annotations

import numpy as np

from quantkit.codegen.jit import kernel
from quantkit.codegen.simd import IrBuilder, Value, simd_intrinsic

# Sums may be reordered, and max may assume that no NaN decides it; NaN still spreads through the sums.
_SUMS = {"reassoc", "contract"}


@simd_intrinsic("float32")
def exp(ir: IrBuilder, x: float) -> Value:
    """e^x of a float32, as `IrBuilder.exp` computes it for vectors; no calls, no branches: loops over it vectorise."""
    return ir.exp(x)  # type: ignore[arg-type]  # float is what kernels pass


@simd_intrinsic("float32")
def expm1(ir: IrBuilder, x: float) -> Value:
    """e^x - 1 of a float32, exact near 0 too, as `IrBuilder.expm1` computes it for vectors."""
    return ir.expm1(x)  # type: ignore[arg-type]


@kernel(fastmath=_SUMS)
def rms_norm(x, weight, eps, out):
    """out[t] = x[t] / sqrt(mean(x[t]^2) + eps) * weight; x, out float32[tokens, n]."""
    tokens, n = x.shape
    for t in range(tokens):
        total = np.float64(0)
        for i in range(n):
            total += np.float64(x[t, i]) * np.float64(x[t, i])
        scale = np.float32(1 / np.sqrt(total / n + eps))
        for i in range(n):
            out[t, i] = x[t, i] * scale * weight[i]


@kernel
def swiglu(gate, up):
    """gate / (1 + e^-gate) * up, element by element, in place of `gate`; float32[tokens, n]."""
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            g = gate[t, i]
            gate[t, i] = g / (np.float32(1) + exp(-g)) * up[t, i]


@kernel
def sigmoid(gate, up):
    """up / (1 + e^-gate), element by element, in place of `gate`; float32[tokens, n]."""
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            gate[t, i] = up[t, i] / (np.float32(1) + exp(-gate[t, i]))


@kernel
def swiglu_limited(gate, up, limit):
    """min(gate / (1 + e^-gate), limit) * u with u = up within -limit … limit, in place of `gate`; float32[tokens, n].

    NaN stays NaN.
    """
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            g, u = gate[t, i], up[t, i]
            g = g / (np.float32(1) + exp(-g))
            if g > limit:
                g = limit
            if u > limit:
                u = limit
            if u < -limit:
                u = -limit
            gate[t, i] = g * u


@kernel
def reglu(gate, up):
    """max(gate, 0) * up, element by element, in place of `gate`, which may be `up`; float32[tokens, n]."""
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            gate[t, i] = max(gate[t, i], np.float32(0)) * up[t, i]


@kernel
def relu2(gate, up):
    """max(gate, 0)^2 * up, element by element, in place of `gate`; float32[tokens, n]."""
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            g = max(gate[t, i], np.float32(0))
            gate[t, i] = g * g * up[t, i]


@kernel
def geglu(gate, up):
    """gate / (1 + e^-2u) * up with u = sqrt(2/pi) (gate + 0.044715 gate^3), in place of `gate`; float32[tokens, n].

    That is gate * (1 + tanh u) / 2 * up.
    """
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            g = gate[t, i]
            u = np.float32(0.7978845608) * (g + np.float32(0.044715) * g * g * g)
            gate[t, i] = g / (np.float32(1) + exp(np.float32(-2) * u)) * up[t, i]


@kernel
def swiglu_oai(gate, up):
    """g / (1 + e^(-1.702 g)) * (1 + u) with g = min(gate, 7), u = up within -7 … 7; in place of `gate`.

    float32[tokens, n]; NaN stays NaN.
    """
    tokens, n = gate.shape
    for t in range(tokens):
        for i in range(n):
            g, u = gate[t, i], up[t, i]
            if g > np.float32(7):
                g = np.float32(7)
            if u > np.float32(7):
                u = np.float32(7)
            if u < np.float32(-7):
                u = np.float32(-7)
            gate[t, i] = g / (np.float32(1) + exp(np.float32(-1.702) * g)) * (np.float32(1) + u)


@kernel
def xielu(x, p, n, b, e):
    """p x^2 + b x for x > 0, else n (e^min(x, e) - 1 - x) + b x, element by element, in place; float32[tokens, n].

    p, n, b, e are float32. NaN stays NaN.
    """
    tokens, columns = x.shape
    for t in range(tokens):
        for i in range(columns):
            z = x[t, i]
            if z > np.float32(0):
                x[t, i] = p * z * z + b * z
            else:
                x[t, i] = n * (expm1(e if z > e else z) - z) + b * z


@kernel
def rope(x, head_dim, cos, sin, positions, step, stride):
    """Apply RoPE to the first 2 * cos.shape[1] elements of every head of x float32[tokens, heads * head_dim], in place.

    Pair j of a head is its elements (j * step, j * step + stride): ("norm") 2, 1; ("neox") 1, dim/2.
    (a, b) becomes (a cos - b sin, a sin + b cos) with the angle of cos[position, j].
    """
    tokens, width = x.shape
    pairs = cos.shape[1]
    for t in range(tokens):
        position = positions[t]
        for head in range(0, width, head_dim):
            for j in range(pairs):
                i = head + j * step
                a, b = x[t, i], x[t, i + stride]
                x[t, i] = a * cos[position, j] - b * sin[position, j]
                x[t, i + stride] = a * sin[position, j] + b * cos[position, j]


@kernel
def soft_cap(x, cap):
    """cap * tanh(x / cap), element by element, in place; float32[rows, n]. NaN stays NaN."""
    rows, n = x.shape
    for r in range(rows):
        for i in range(n):
            x[r, i] = cap - np.float32(2) * cap / (exp(x[r, i] * (np.float32(2) / cap)) + np.float32(1))


@kernel(fastmath=True)
def _max(row):
    largest = np.float32(-3.4e38)
    for i in range(row.shape[0]):
        largest = max(largest, row[i])
    return largest


@kernel
def _exp_minus(row, maximum):
    for i in range(row.shape[0]):
        row[i] = exp(row[i] - maximum)


@kernel(fastmath=_SUMS)
def _sum(row):
    total = np.float32(0)
    for i in range(row.shape[0]):
        total += row[i]
    return total


@kernel
def softmax_step(scores, group, position, window, maxima, sums, acc):
    """Online-softmax update: turn the scores of a block of keys into weights, and rescale earlier results to match.

    scores float32[tokens * group, keys]: row r is of token r // group, whose position is `position` + r // group
    counted from the block's first key. It sees the `window` keys up to and including its own position.
    maxima, sums float32[rows]: the running maximum and the denominator; acc float32[rows, dim]: the sum of weighted
    values so far. With the new maximum m: weight = e^(score - m), and earlier sums are multiplied by e^(maximum - m).
    """
    rows, keys = scores.shape
    for r in range(rows):
        last = position + r // group
        stop = max(0, min(keys, last + 1))
        start = min(stop, max(0, last + 1 - window))
        row = scores[r]
        row[:start] = np.float32(0)
        row[stop:] = np.float32(0)
        if start == stop:
            continue
        visible = row[start:stop]
        maximum = max(maxima[r], _max(visible))
        shrink = exp(maxima[r] - maximum) if sums[r] > 0 else np.float32(0)
        _exp_minus(visible, maximum)
        maxima[r] = maximum
        sums[r] = sums[r] * shrink + _sum(visible)
        for i in range(acc.shape[1]):
            acc[r, i] *= shrink


@kernel
def _selection_score(p, bias, e):
    """The score by which expert e is ranked: its probability, plus the bias where there is one."""
    return p[e] + bias[e] if bias.shape[0] else p[e]


@kernel
def _drop_groups(p, bias, groups, groups_used):
    """Set p to -1 except in the `groups_used` best of `groups` groups: by the best expert, with a bias the best two."""
    size = p.shape[0] // groups
    for _ in range(groups - groups_used):
        worst, lowest = -1, np.float32(0)
        for group in range(groups):
            first = group * size
            if p[first] == np.float32(-1):
                continue
            best = second = np.float32(-3.4e38)
            for e in range(first, first + size):
                score = _selection_score(p, bias, e)
                if score > best or score != score:
                    best, second = score, best
                elif score > second:
                    second = score
            group_score = best + second if bias.shape[0] and size > 1 else best
            if group_score == group_score and (worst < 0 or group_score <= lowest):  # NaN has to show in the result
                worst, lowest = group, group_score
        if worst >= 0:
            p[worst * size : (worst + 1) * size] = np.float32(-1)


@kernel
def softplus(x):
    """ln(1 + e^x). With z = e^-|x| and s = z / (2 + z) <= 1/3, ln(1 + z) is 2 artanh(s), here its series."""
    z = exp(-abs(x))
    s = z / (np.float32(2) + z)
    square = s * s
    total = np.float32(1 / 17)
    for n in range(15, -1, -2):
        total = total * square + np.float32(1) / np.float32(n)
    return max(x, np.float32(0)) + np.float32(2) * s * total


@kernel
def _best(p, bias):
    """The expert with the largest score, of equal ones the first, of those whose p is not -1."""
    best, best_score = -1, np.float32(0)
    for e in range(p.shape[0]):  # a NaN wins, so that it shows in the result
        if p[e] != np.float32(-1):
            score = _selection_score(p, bias, e)
            if best < 0 or score > best_score or score != score:
                best, best_score = e, score
    return best


@kernel
def _scale_weights(weights, normalise, scale):
    """weights, divided by their sum with `normalise`, times `scale`."""
    factor = np.float32(scale)
    if normalise:
        factor /= _sum(weights)
    for rank in range(weights.shape[0]):
        weights[rank] *= factor


@kernel
def route(logits, bias, sigmoid, groups, groups_used, used, min_used, min_share, normalise, scale, chosen, weights):
    """Experts of one token, and how many: p = softmax(logits) or sigmoid, the `used` largest, of equal ones the first.

    `bias` float32[experts], or [0] for none, is added to p to rank experts; only experts of the `groups_used` best of
    `groups` groups of neighbours are chosen, see `_drop_groups`.
    logits float32[experts] are overwritten; chosen int64[used] and weights float32[used] come ordered. Those after the
    first `min_used` whose p is not above `min_share` times the first one's are left out (0 leaves none out). weights
    are p, divided by their sum over those that are left with `normalise`, times `scale`.
    """
    experts = logits.shape[0]
    if sigmoid:
        for e in range(experts):
            logits[e] = np.float32(1) / (np.float32(1) + exp(-logits[e]))
    else:
        _exp_minus(logits, _max(logits))
        total = np.float32(0)
        for e in range(experts):  # in this order on every CPU: fast numerics route with this too
            total += logits[e]
        for e in range(experts):
            logits[e] /= total
    if groups_used < groups:
        _drop_groups(logits, bias, groups, groups_used)
    count = 0
    for rank in range(used):
        best = _best(logits, bias)
        p = logits[best]
        logits[best] = np.float32(-1)  # taken
        if rank >= min_used and not p > min_share * weights[0]:
            break
        chosen[rank], weights[rank] = best, p
        count += 1
    _scale_weights(weights[:count], normalise, scale)
    return count


@kernel
def route_softplus(logits, bias, given, used, min_used, min_share, normalise, scale, chosen, weights):
    """As `route`, with p = sqrt(ln(1 + e^logit)) of each expert, and chosen experts ordered by p, without the bias.

    `given` int64[used] are the experts, all different, where they do not follow from scores; int64[0] for none.
    """
    for e in range(logits.shape[0]):
        logits[e] = np.sqrt(softplus(logits[e]))
    for rank in range(used):
        best = given[rank] if given.shape[0] != 0 else _best(logits, bias)
        p = logits[best]
        logits[best] = np.float32(-1)  # taken
        place = rank
        while place > 0 and weights[place - 1] < p:
            chosen[place], weights[place] = chosen[place - 1], weights[place - 1]
            place -= 1
        chosen[place], weights[place] = best, p
    count = 0
    while count < used and (count < min_used or weights[count] > min_share * weights[0]):
        count += 1
    _scale_weights(weights[:count], normalise, scale)
    return count


@kernel(fastmath=_SUMS)
def causal_conv(before, x, taps, bias, out):
    """out[t, c] = bias[c] + sum over j of taps[j, c] * (before then x)[t + j, c], float32.

    before [kernel - 1, channels], x and out [tokens, channels], taps [kernel, channels], bias [channels].
    """
    tokens, channels = x.shape
    kernel_size = taps.shape[0]
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = bias[c]
        for j in range(kernel_size):
            token = t + j - (kernel_size - 1)
            entering = before[t + j] if token < 0 else x[token]
            for c in range(channels):
                row[c] += taps[j, c] * entering[c]


@kernel
def short_conv(before, x, taps, bias, out):
    """As `causal_conv`, then silu of each element."""
    causal_conv(before, x, taps, bias, out)
    tokens, channels = out.shape
    for t in range(tokens):
        row = out[t]
        for c in range(channels):
            row[c] = row[c] / (np.float32(1) + exp(-row[c]))


@kernel(fastmath=_SUMS)
def l2_norm_heads(x, first, heads, dim, scale):
    """L2-normalize `heads` heads of x float32[tokens, n] from element `first` on, times `scale`, in place."""
    for t in range(x.shape[0]):
        for head in range(heads):
            row = x[t, first + head * dim : first + (head + 1) * dim]
            total = np.float64(0)
            for i in range(dim):
                total += np.float64(row[i]) * np.float64(row[i])
            factor = np.float32(scale / np.sqrt(total + 1e-6))
            for i in range(dim):
                row[i] *= factor


@kernel
def gate(x, gates, dim, step, first):
    """x[h * dim + i] *= sigmoid(gates[h * step + first + i]) for each token; x, gates float32[tokens, n]."""
    tokens, n = x.shape
    for t in range(tokens):
        for head in range(n // dim):
            for i in range(dim):
                x[t, head * dim + i] /= np.float32(1) + exp(-gates[t, head * step + first + i])


@kernel(fastmath=_SUMS)
def delta_rule(x, q_at, k_at, v_at, decay, beta, before, after, out, out_at):
    """A head of a gated delta rule (archs.blocks.DeltaNet, KimiDelta), token by token.

    x        float32[tokens, channels]: queries from element q_at on, keys from k_at, values from v_at
    decay    float32[tokens, 1]: e^g, of all rows of the state; or float32[tokens, head_dim_k], of each
    beta     float32[tokens]
    before   float32[head_dim_k, head_dim_v], the state before the first token; after: the one after the last
    out      float32[tokens, n]: the head's own elements are those from out_at on

    delta = beta (v - e^g S^T k), S = e^g S + k delta^T, out = S^T q. These are two passes over the state, of which the
    first only reads it.
    """
    n_k, n_v = before.shape
    step = 1 if decay.shape[1] > 1 else 0
    delta = np.empty(n_v, np.float32)
    state = before
    for t in range(x.shape[0]):
        row = out[t, out_at : out_at + n_v]
        delta[:] = np.float32(0)
        for i in range(n_k):
            factor = x[t, k_at + i] * decay[t, i * step]
            row_before = state[i]
            for j in range(n_v):
                delta[j] += row_before[j] * factor
        for j in range(n_v):
            delta[j] = beta[t] * (x[t, v_at + j] - delta[j])
        row[:] = np.float32(0)
        for i in range(n_k):
            key, query, decay_now = x[t, k_at + i], x[t, q_at + i], decay[t, i * step]
            row_before, row_after = state[i], after[i]
            for j in range(n_v):
                new = row_before[j] * decay_now + key * delta[j]
                row_after[j] = new
                row[j] += new * query
        state = after


@kernel(fastmath=_SUMS)
def state_space(x, u_at, b_at, c_at, decay, dt, skip, before, after, out, out_at):
    """A head of a Mamba-2 mixer (archs.blocks.Mamba2), token by token.

    x        float32[tokens, channels]: u from element u_at on, B from b_at, C from c_at
    decay    float32[tokens]: e^(a dt); dt float32[tokens]; skip float32
    before   float32[head_dim_k, head_dim_v], the state before the first token; after: the one after the last
    out      float32[tokens, n]: the head's own elements are those from out_at on
    """
    n_k, n_v = before.shape
    state = before
    for t in range(x.shape[0]):
        row = out[t, out_at : out_at + n_v]
        for j in range(n_v):
            row[j] = skip * x[t, u_at + j]
        for i in range(n_k):
            entering, leaving = x[t, b_at + i] * dt[t], x[t, c_at + i]
            row_before, row_after = state[i], after[i]
            for j in range(n_v):
                new = row_before[j] * decay[t] + entering * x[t, u_at + j]
                row_after[j] = new
                row[j] += new * leaving
        state = after


_MIN_DECAY = np.float32(1e-34)  # smaller decays count as 0: products with them would be subnormal numbers, and slow


@kernel
def chunk_weights(keys, queries, decay, beta):
    """Turn products of all pairs of a chunk's tokens into the weights of the delta rule, in place, head by head.

    keys[h, i, j] = k_i . k_j becomes beta_i e^(decay_i - decay_j) k_i . k_j for j < i, else 0; queries[h, i, j] =
    q_i . k_j becomes e^(decay_i - decay_j) q_i . k_j for j <= i, else 0. float32[heads, n, n]; beta float32[heads, n];
    decay float64[heads, n] is the running sum of g.
    Decays below 1e-34 count as 0.
    """
    heads, n, _ = keys.shape
    for h in range(heads):
        for i in range(n):
            of_keys, of_queries = keys[h, i], queries[h, i]
            for j in range(i + 1):
                shrink = exp(np.float32(decay[h, i] - decay[h, j]))
                if shrink < _MIN_DECAY:
                    shrink = np.float32(0)
                of_queries[j] *= shrink
                of_keys[j] *= shrink * beta[h, i]
            of_keys[i:] = np.float32(0)
            of_queries[i + 1 :] = np.float32(0)


@kernel(fastmath=_SUMS)
def solve_unit_triangular(weights, x):
    """x = (I + weights)^-1 x, in place, head by head; x float32[heads, n, width].

    weights float32[heads, n, n], of which only the part below the diagonal is read.
    """
    heads, n, width = x.shape
    for h in range(heads):
        for i in range(1, n):
            row = x[h, i]
            for j in range(i):
                factor, solved = weights[h, i, j], x[h, j]
                for c in range(width):
                    row[c] -= factor * solved[c]
