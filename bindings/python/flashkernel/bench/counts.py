"""The least that each op must do, whatever computes it: bytes to read and write, and floating point
operations. Every tensor that the op's declaration names is read or written once, in the dtype that
it has in the benchmark; what a kernel reads again or keeps aside is no part of it.

In the formulas `size` is that of an element of the activations, in bytes, and `p` are the sizes of
the case. Parameters that stay float32 (`frameworks.PARAMETERS`) have 4 bytes.
"""

from dataclasses import dataclass

_F32 = 4


@dataclass(frozen=True)
class Count:
    read: int  # bytes
    written: int
    flops: int = 0  # additions, multiplications, comparisons, exponentials; 0: not counted
    in_place: int = 0  # bytes that are read and then written in the same place
    arithmetic: str = ""  # what is multiplied, where that is not of the activations' type

    @property
    def bytes(self) -> int:
        return self.read + self.written

    @property
    def working_set(self) -> int:
        """Bytes of memory that a call touches."""
        return self.read + self.written - self.in_place


def _norm(forward_flops, backward_flops, vectors, row_statistics):
    """`vectors`: parameters of a row's length."""

    def count(direction, p, size):
        n, more = p["rows"] * p["cols"], bool(p.get("residual"))
        parameters = vectors * p["cols"] * size
        tensors = (1 + more) * n * size
        if direction == "fwd":
            return Count(tensors + parameters, tensors, (forward_flops + more) * n)
        # dy, what was normalised, the weight, the statistics, and the gradient of the sum.
        statistics = row_statistics * p["rows"] * _F32
        read = n * size + tensors + p["cols"] * size + statistics
        return Count(read, n * size + parameters, (backward_flops + more) * n)

    return count


# x x, +, then times 1 / rms and the weight; backward: x / rms, dy w, their product added up, that
# with dy added up for the weight, then subtracted and scaled.
rms_norm = _norm(4, 9, vectors=1, row_statistics=1)
# As much, the mean before it and the bias after it.
layer_norm = _norm(7, 13, vectors=2, row_statistics=2)


def softmax(direction, p, size):
    """Also log_softmax: the largest, x - that, exp, their sum, the quotient (or difference)."""
    n = p["rows"] * p["cols"]
    if direction == "fwd":
        return Count(n * size, n * size, 5 * n)
    return Count(2 * n * size, n * size, 4 * n)  # y and dy


def logsumexp(direction, p, size):
    n, rows = p["rows"] * p["cols"], p["rows"]
    if direction == "fwd":
        return Count(n * size, rows * _F32, 4 * n)
    return Count(n * size + 2 * rows * _F32, n * size, 3 * n)


def sum(direction, p, size):
    n, rows = p["rows"] * p["cols"], p["rows"]
    if direction == "fwd":
        return Count(n * size, rows * size, n)
    return Count(rows * size, 0)  # the gradient is a view, dy repeated: there is nothing to write


def max(direction, p, size):
    n, rows = p["rows"] * p["cols"], p["rows"]
    if direction == "fwd":
        return Count(n * size, rows * size, n)
    return Count(n * size + 2 * rows * size, n * size, 2 * n)


def cross_entropy(direction, p, size):
    n, rows = p["rows"] * p["cols"], p["rows"]
    targets = rows * 4  # where they are 64-bit numbers, half of each would do
    if direction == "fwd":
        return Count(n * size + targets, _F32, 4 * n)
    # And two float32 numbers of each row, which the forward kept.
    return Count(n * size + targets + 2 * rows * _F32, n * size, 3 * n)


def linear(direction, p, size):
    m, k, n = (p[key] for key in "MKN")
    x, weight, y = m * k * size, n * k * size, m * n * size
    bias = n * size if p.get("activation") else 0
    if direction == "fwd":
        return Count(x + weight + bias, y, 2 * m * n * k)
    # dy, what the activation was given where there is one, and a gradient of each input.
    before = y if p.get("activation") else 0
    return Count(x + weight + y + before, x + weight + bias, 4 * m * n * k)


def scaled_linear(direction, p, size):
    """Its result has two bytes an element."""
    m, k, n = (p[key] for key in "MKN")
    return Count((m + n) * k * size, 2 * m * n, 2 * m * n * k)


def gated_linear(direction, p, size):
    m, k, n = (p[key] for key in "MKN")
    x, weights, y = m * k * size, 2 * n * k * size, m * n * size
    if direction == "fwd":
        return Count(x + weights, y, 4 * m * n * k)
    # dy, gate and up, and a gradient of each input.
    return Count(x + weights + 3 * y, x + weights, 8 * m * n * k)


def linear_cross_entropy(direction, p, size):
    n, k, v = (p[key] for key in "NKV")
    tensors, targets = (n + v) * k * size, n * 4
    if direction == "fwd":
        return Count(tensors + targets, _F32, 2 * n * v * k)
    # The gradients are two products; whether the logits were kept or are computed again is open.
    return Count(tensors + targets + 2 * n * _F32, tensors, 4 * n * v * k)


def rope(direction, p, size):
    b, length, h, d = (p[k] for k in "BLHD")
    n = b * length * h * d
    return Count(n * size + length * d * _F32, n * size, 3 * n)


def attention(direction, p, size):
    b, length, heads, d = (p[k] for k in "BLHD")
    kv, e = p.get("G", heads), p.get("E", d)
    # A causal query sees itself and the keys before it.
    pairs = b * heads * (length * (length + 1) // 2 if p["causal"] else length * length)
    tokens = b * length
    # q, k, v, out; 8-bit numbers give bfloat16.
    q, k, v, out = (
        heads * d * size,
        kv * d * size,
        kv * e * size,
        heads * e * (size if size > 1 else 2),
    )
    if direction == "fwd":
        # Per pair a product of D numbers for the score and of E for the sum of values.
        return Count(tokens * (q + k + v), tokens * out, 2 * pairs * (d + e))
    # The scores again, dv and dp (E), dq and dk (D).
    lse = heads * _F32
    read = tokens * (q + k + v + 2 * out + lse)
    return Count(read, tokens * (q + k + v), 2 * pairs * (3 * d + 2 * e))


def selective_scan(direction, p, size):
    b, length, d, n = (p[k] for k in "BLDN")
    activations, states = b * length * d * size, b * length * n * size
    parameters = (d * n + 2 * d) * _F32  # A, D, delta_bias
    steps = b * length * d * n
    if direction == "fwd":
        # A state and step: dt A, its exponential, dt u B, and two multiply-adds.
        return Count(3 * activations + 2 * states + parameters, activations, 7 * steps)
    gradients = 3 * activations + 2 * states + parameters
    return Count(4 * activations + 2 * states + parameters, gradients, 27 * steps)


def ssd(direction, p, size):
    b, length, h, channels, n = (p[k] for k in "BLHPN")
    chunk = min(p.get("chunk", 64), length)
    activations, steps = b * length * h * channels * size, b * length * h * size
    shared, parameters = 2 * b * length * n * size, 3 * h * _F32  # B and C; A, D, dt_bias
    inputs = activations + steps + shared + parameters
    # A step of a head: half a chunk of products with x, and two with the state; of B and C, half a
    # chunk of products for all heads.
    flops = b * length * (h * channels * (chunk + 4 * n) + chunk * n)
    if direction == "fwd":
        return Count(inputs, activations, flops)
    # Two of those with x, and five with the state, of which one is the forward's again.
    backward = b * length * (h * channels * (2 * chunk + 10 * n) + 3 * chunk * n)
    return Count(inputs + activations, inputs, backward)


def causal_conv1d(direction, p, size):
    b, length, d, w = (p[k] for k in "BLDW")
    n, parameters = b * length * d * size, (d * w + d) * size
    flops = 2 * b * length * d * w  # a multiply-add a tap
    if direction == "fwd":
        return Count(n + parameters, n, flops)
    # The sums again for the SiLU's slope, then those for x and those for the weight.
    return Count(2 * n + parameters, n + parameters, 3 * flops)


def selective_state_update(direction, p, size):
    heads = p.get("H")
    channels = (heads or 1) * p["D"]
    state = p["B"] * channels * p["N"]
    # Mamba-2 has one decay for a head, so that its exponential is no work of each state.
    decays, flops = (heads, 5) if heads else (channels * p["N"], 7)
    vectors = p["B"] * channels * size  # x, dt, z, y
    read = state * size + 3 * vectors + 2 * p["B"] * p["N"] * size + (decays + 2 * channels) * _F32
    return Count(read, state * size + vectors, flops * state, in_place=state * size)


def causal_conv1d_update(direction, p, size):
    b, d, w = (p[k] for k in "BDW")
    state, vector = b * (w - 1) * d * size, b * d * size
    parameters = (d * w + d) * size
    return Count(state + vector + parameters, state + vector, 2 * b * d * w, in_place=state)


def mamba_agent(sizes, layers):
    """`sizes`: hidden, inner, state, width, rank."""
    hidden, inner, state, width, rank = sizes
    into, x_to = 2 * inner * hidden, (rank + 2 * state) * inner
    products = into + x_to + inner * rank + hidden * inner
    parameters = products + hidden + inner * (width + 3 + state)

    def count(direction, p, size):
        tokens = p["B"] * p["L"]
        weights = (layers * parameters + hidden) * size
        activations = tokens * hidden * size
        per_token = 2 * products + inner * (2 * width + 7 * state)
        if not p.get("train"):
            return Count(activations + weights, activations, layers * tokens * per_token)
        # Backward each product twice more, but for the gradient of the first layer's input.
        more = layers * (4 * products + inner * (6 * width + 27 * state)) - 2 * into
        flops = tokens * (layers * per_token + more)
        # x and the target; weights and both of AdamW's moments are written anew.
        return Count(2 * activations + weights, 3 * weights, flops, in_place=weights)

    return count


def recurrent(gates):
    """A layer over whole sequences; a step of training has its gradients as well."""

    def count(direction, p, size):
        b, length, inputs, hidden = (p[key] for key in "BLIH")
        weights = gates * hidden * (inputs + hidden + 2)
        x, y = b * length * inputs, b * length * hidden
        flops = 2 * b * length * gates * hidden * (inputs + hidden)
        if not p.get("train"):
            return Count((x + weights) * size, y * size, flops)
        return Count((2 * x + y + 2 * weights) * size, (x + y + weights) * size, 3 * flops)

    return count


def recurrent_step(gates):
    """One frame through all layers, each of which has as many inputs as units."""

    def count(direction, p, size):
        b, hidden, layers = p["B"], p["H"], p["layers"]
        weights = layers * gates * hidden * (2 * hidden + 2)
        return Count((weights + b * hidden) * size, b * hidden * size, 2 * b * weights)

    return count
