"""Networks under torch.autocast: every op beside the same formula in torch's own ops, and every
module beside the same network in them, forward and gradients."""

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
import sampling
import test_causal_conv1d
import test_gated_ssm
import test_linear
import test_linear_cross_entropy
import test_merge_attention_states
import test_rope
import test_selective_scan
import test_selective_state_update
import test_ssd
from flashkernel.bench.agent_in_torch import PlainBackbone
from flashkernel.compat import causal_conv1d, flash_attn, mamba_ssm
from flashkernel.torch import backbones
from torch_samples import FLOATS, cuda_autocast, loss_of, on_a_gpu


def conv(x, w):
    length = x.shape[1]
    y = F.conv1d(x.transpose(1, 2), w[:, None], padding=w.shape[1] - 1, groups=w.shape[0])
    return y[..., :length].transpose(1, 2)


def sdpa(*qkv, **options):
    q, k, v = (t.transpose(1, 2) for t in qkv)
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


LAST = (16,)
# Ours, torch's, and the shapes of what both take: activations, then parameters.
TORCHS_OWN = {
    "rms_norm": (fk.rms_norm, lambda x, w: F.rms_norm(x, LAST, w, 1e-6), [(3, 16)], [LAST]),
    "layer_norm": (fk.layer_norm, lambda x, *p: F.layer_norm(x, LAST, *p), [(3, 16)], [LAST, LAST]),
    "softmax": (fk.softmax, lambda x: F.softmax(x, -1), [(3, 16)], []),
    "log_softmax": (fk.log_softmax, lambda x: F.log_softmax(x, -1), [(3, 16)], []),
    "logsumexp": (fk.logsumexp, lambda x: x.logsumexp(-1), [(3, 16)], []),
    "sum": (lambda x: fk.sum(x, -1), lambda x: x.sum(-1), [(3, 16)], []),
    "max": (lambda x: fk.max(x, -1), lambda x: x.amax(-1), [(3, 16)], []),
    "cross_entropy": (
        lambda x: fk.cross_entropy(x, torch.arange(3, device=x.device)),
        lambda x: F.cross_entropy(x, torch.arange(3, device=x.device)),
        [(3, 16)],
        [],
    ),
    "attention": (
        lambda q, k, v: fk.attention(q, k, v, causal=True),
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        [(2, 5, 3, 16)] * 3,
        [],
    ),
    "causal_conv1d": (fk.causal_conv1d, conv, [(2, 7, 6)], [(6, 4)]),
    "linear": (fk.linear, F.linear, [(2, 3, 16)], [(5, 16), (5,)]),
    "linear_cross_entropy": (
        lambda x, w, b: fk.linear_cross_entropy(x, w, torch.arange(3, device=x.device), bias=b),
        lambda *p: F.cross_entropy(F.linear(*p), torch.arange(3, device=p[0].device)),
        [(3, 16)],
        [(5, 16), (5,)],
    ),
}
EACH = pytest.mark.parametrize("name", TORCHS_OWN)


def inputs_of(activations, parameters, dtype):
    """Activations of a dtype, and float32 parameters, as a module has them."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=generator) for s in (*activations, *parameters)]
    return [t.to(dtype) if i < len(activations) else t for i, t in enumerate(drawn)]


@EACH
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_beside_torchs_own_op(name, dtype):
    ours, theirs, *shapes = TORCHS_OWN[name]
    results = []
    for function in (ours, theirs):
        leaves = [t.requires_grad_() for t in inputs_of(*shapes, dtype)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(*leaves)
        results.append((out, torch.autograd.grad(loss_of(out), leaves)))
    (out, grads), (expected, expected_grads) = results
    # These are float32 here whatever comes: torch's own would round them.
    assert out.dtype == (torch.float32 if name == "logsumexp" else expected.dtype)
    rounded = torch.bfloat16 in (dtype, expected.dtype) or name == "linear_cross_entropy"  # logits
    rounding = {"rtol": 2e-2, "atol": 2e-2} if rounded else {}
    torch.testing.assert_close(out.float(), expected.float(), **rounding)
    assert [g.dtype for g in grads] == [g.dtype for g in expected_grads]
    for g, e in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(g.float(), e.float(), **({} if not rounding else tolerance(e)))


def tolerance(expected):
    return {"rtol": 5e-2, "atol": 2e-2 * (1 + expected.abs().max().item())}


# Torch's convolution asks fake tensors for their device.
@pytest.mark.parametrize("name", [n for n in TORCHS_OWN if n != "causal_conv1d"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_are_torchs_on_a_gpu(name, dtype):
    if name == "rms_norm" and torch.__version__ < "2.13":
        pytest.skip("this torch leaves its own rms_norm in the lower dtype, other norms not")
    ours, theirs, *shapes = TORCHS_OWN[name]
    drawn = inputs_of(*shapes, dtype)
    with torch._subclasses.FakeTensorMode(), cuda_autocast(torch.float16):
        leaves = [on_a_gpu(t) for t in drawn]
        assert ours(*leaves).dtype == theirs(*leaves).dtype


# --- beside the formulas of the ops' own tests, in torch's ops ------------------------------------


def scan_with(function):
    """One that takes what A is made from, as modules hold it."""
    return lambda u, delta, B, C, A_log, D, bias: function(
        u, delta, -A_log.exp(), B, C, D, delta_bias=bias, delta_softplus=True
    )


def scan_formula(*arguments, delta_softplus, **named):
    return test_selective_scan.formula(delta_softplus)(*arguments, **named)


def heads_with(function):
    return lambda x, dt, B, C, A_log, D, bias: function(
        x, dt, -A_log.exp(), B, C, D, dt_bias=bias, dt_softplus=True
    )


def heads_formula(*arguments, dt_softplus, **named):
    return test_ssd.formula(dt_softplus)(*arguments, **named)


def fused(linear):
    """A layer with all that can ride along."""
    return lambda x, residual, w, b: linear(x, w, b, activation="gelu", residual=residual)


def linear_formula(x, w, b, activation, residual):
    return test_linear.formula(activation)(x, w, b, residual)


def step_with(function):
    """One step of a recurrence whose state is float32, from a copy of it."""

    def step(x, dt, B, C, A_log, D, bias, state):
        state = state.clone()
        out = function(state, x, dt, -A_log.exp(), B, C, D, dt_bias=bias, dt_softplus=True)
        return out[0] if isinstance(out, tuple) else out

    return step


def head_with(function):
    """A language model's head over a vocabulary of 5, and a row that counts not."""
    targets = torch.tensor([1, 4, -100])
    return lambda x, w, b: function(x, w, targets, bias=b, label_smoothing=0.1)


def head_formula(*arguments, label_smoothing, **named):
    return test_linear_cross_entropy.formula(label_smoothing=label_smoothing)(*arguments, **named)


def conv_step(x, state, w, b):
    return fk.causal_conv1d_update(x, state.clone(), w, b, activation="silu")


def conv_step_formula(x, state, w, b):
    return test_causal_conv1d.formula("silu")(x[:, None], w, b, state)[:, 0]


def gated_formula(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def lstm_formula(x, w_ih, w_hh, b_ih, b_hh):
    h = c = x.new_zeros(x.shape[0], w_hh.shape[1])
    outputs = []
    for step in x.unbind(1):
        i, f, g, o = (F.linear(step, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, 1).to(F.linear(x, w_ih).dtype)


def gru_formula(x, w_ih, w_hh, b_ih, b_hh):
    h = x.new_zeros(x.shape[0], w_hh.shape[1])
    outputs = []
    for step in x.unbind(1):
        of_x, of_h = F.linear(step, w_ih, b_ih).chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
        r, z = ((a + b).sigmoid() for a, b in zip(of_x[:2], of_h[:2], strict=True))
        n = (of_x[2] + r * of_h[2]).tanh()
        h = (1 - z) * n + z * h
        outputs.append(h)
    return torch.stack(outputs, 1).to(F.linear(x, w_ih).dtype)


def halves(merge):
    """Attention over two halves of the keys; lses that autocast does not touch."""
    return lambda outs, lses: merge(outs, lses.float())[0]


FORMULAS = {
    "linear": (fused(fk.linear), fused(linear_formula), [(2, 3, 16), (2, 3, 5)], [(5, 16), (5,)]),
    "scaled_linear": (
        lambda x, w: fk.scaled_linear(x, w, torch.tensor([0.5]), torch.tensor([4.0])),
        lambda x, w: 2 * F.linear(x, w),
        [(2, 3, 16), (5, 16)],
        [],
    ),
    "gated_linear": (fk.gated_linear, gated_formula, [(2, 3, 16)], [(5, 16), (5, 16)]),
    "lstm": (
        lambda *t: fk.lstm(*t)[0],
        lstm_formula,
        [(2, 7, 6)],
        [(20, 6), (20, 5), (20,), (20,)],
    ),
    "gru": (lambda *t: fk.gru(*t)[0], gru_formula, [(2, 7, 6)], [(15, 6), (15, 5), (15,), (15,)]),
    "rope": (fk.rope, test_rope.formula(False), [(2, 5, 3, 8)], [(5, 4), (5, 4)]),
    "gated_ssm": (fk.gated_ssm, test_gated_ssm.formula, [(2, 5, 6)] * 2 + [(2, 5, 4)] * 2, []),
    "merge_attention_states": (
        halves(fk.merge_attention_states),
        halves(test_merge_attention_states.formula),
        [(2, 3, 5, 2, 8)],
        [(2, 3, 2, 5)],
    ),
    "selective_scan": (
        scan_with(fk.selective_scan),
        scan_with(scan_formula),
        [(2, 7, 6)] * 2 + [(2, 7, 4)] * 2,
        [(6, 4), (6,), (6,)],
    ),
    "ssd": (
        heads_with(fk.ssd),
        heads_with(heads_formula),
        [(2, 7, 4, 6), (2, 7, 4), (2, 7, 2, 5), (2, 7, 2, 5)],
        [(4,), (4,), (4,)],
    ),
    "selective_state_update": (
        step_with(fk.selective_state_update),
        step_with(test_selective_state_update.formula),
        [(2, 6)] * 2 + [(2, 4)] * 2,
        [(6, 4), (6,), (6,), (2, 6, 4)],
    ),
    "linear_cross_entropy": (
        head_with(fk.linear_cross_entropy),
        head_with(head_formula),
        [(3, 16)],
        [(5, 16), (5,)],
    ),
    "causal_conv1d_update": (conv_step, conv_step_formula, [(2, 6), (2, 3, 6)], [(6, 4), (6,)]),
}


def test_every_op_is_tried():
    assert {op.public_name for op in sampling.OPS} == {*TORCHS_OWN, *FORMULAS}


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("name", FORMULAS)
def test_beside_a_formula_in_torchs_ops(name, dtype):
    """Our errors beside those of torch's ops, both under autocast, against float64 without."""
    ours, formula, *shapes = FORMULAS[name]
    op = next(op for op in sampling.OPS if op.public_name == name)
    # Activations in two dtypes, as a region's ops give them, unless all are float32.
    drawn = [t.float() if i % 2 else t for i, t in enumerate(inputs_of(*shapes, dtype))]
    # Those for which an op defines no gradient; rope's are its tables.
    without = set(range(len(drawn))) if op.backward is None else {1, 2} if name == "rope" else set()

    def results(function, tensors):
        leaves = [t.detach().clone() for t in tensors]
        needed = [t.requires_grad_() for i, t in enumerate(leaves) if i not in without]
        out = function(*leaves)
        return [out, *(torch.autograd.grad(loss_of(out), needed) if needed else ())]

    exact = results(formula, [t.double() for t in drawn])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = [results(function, drawn) for function in (ours, formula)]
    for _, *grads in both:
        assert [g.dtype for g in grads] == [
            t.dtype for i, t in enumerate(drawn) if i not in without
        ]
    rounding = 1e-5 if both[0][0].dtype == dtype == torch.float32 else 2e-2
    for our, torchs, e in zip(*both, exact, strict=True):
        mine, other = ((t.double() - e).abs().max() for t in (our, torchs))
        assert mine <= 3 * other + rounding * e.abs().max()


# --- networks -------------------------------------------------------------------------------------


def linear(layer, x):
    """A module's layer by torch's own op."""
    return F.linear(x, layer.weight, layer.bias)


def mamba_in_torch(block, x):
    """fk.torch.Mamba's forward in torch's own ops."""
    x, z = linear(block.in_proj, x).chunk(2, -1)
    length = x.shape[1]
    x = F.silu(block.conv1d(F.pad(x.transpose(1, 2), (block.d_conv - 1, 0))))[..., :length]
    dt, B, C = linear(block.x_proj, x.transpose(1, 2)).split(
        [block.dt_rank, *[block.d_state] * 2], -1
    )
    dt = F.linear(dt, block.dt_proj.weight).transpose(1, 2)
    y = mamba_ssm.selective_scan_ref(
        x, dt, -torch.exp(block.A_log), B.transpose(1, 2), C.transpose(1, 2), block.D,
        z.transpose(1, 2), block.dt_proj.bias, True,
    )  # fmt: skip
    return linear(block.out_proj, y.transpose(1, 2))


def stack_in_torch(stack, x):
    residual = None
    for layer in stack.layers:
        residual = x if residual is None else residual + x
        x = mamba_in_torch(layer.mixer, layer.norm(residual))
    return stack.norm_f(residual + x)


def mamba2_in_torch(block, x):
    """fk.torch.Mamba2's forward in torch's own ops."""
    sizes = [block.d_ssm, block.conv_dim, block.nheads]
    z, xBC, dt = linear(block.in_proj, x).split(sizes, -1)
    length = x.shape[1]
    xBC = F.silu(block.conv1d(F.pad(xBC.transpose(1, 2), (block.d_conv - 1, 0))))[..., :length]
    shared = block.ngroups * block.d_state
    x, B, C = xBC.transpose(1, 2).split([block.d_ssm, shared, shared], -1)
    heads, groups = (block.nheads, block.headdim), (block.ngroups, block.d_state)
    y = test_ssd.formula(dt_softplus=True)(
        x.unflatten(-1, heads), dt, -torch.exp(block.A_log), B.unflatten(-1, groups),
        C.unflatten(-1, groups), block.D, dt_bias=block.dt_bias,
    )  # fmt: skip
    y = y.flatten(2) * F.silu(z)
    y = F.rms_norm(y.unflatten(-1, (block.ngroups, -1)), (block.d_ssm // block.ngroups,), eps=1e-5)
    return linear(block.out_proj, y.flatten(2) * block.norm.weight)


class Outputs(torch.nn.Module):
    """A recurrent net without its last states."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)[0]


def recurrent_in_torch(formula):
    def forward(network, x):
        for layer in range(network.net.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            x = formula(x, *(getattr(network.net, f"{name}_l{layer}") for name in names))
        return x

    return forward


def mlp_in_torch(block, x):
    n = F.rms_norm(x, x.shape[-1:], block.norm.weight, block.norm.eps)
    y = linear(block.down, F.silu(linear(block.gate, n)) * linear(block.up, n))
    return x.to(y.dtype) + y  # a residual is one of the activations


def backbone(name):
    """A small one, whose window holds fewer frames than there are."""
    options = {"heads": 2, "head_dim": 8, "window": 5} if name in ("Attention", "Jamba") else {}
    return getattr(backbones, name)(16, 16, **({"layers": 3} if name == "Jamba" else {}), **options)


def backbone_in_torch(net, x):
    return PlainBackbone(net)(x)[:, -1]


BACKBONES = [name for name in backbones.__all__ if name != "Backbone"]
NETWORKS = {
    **{
        f"backbones.{name}": (lambda name=name: backbone(name), backbone_in_torch)
        for name in BACKBONES
    },
    "Linear": (lambda: fk.torch.Linear(16, 8), linear),
    "MLP": (lambda: fk.torch.MLP(16, gated=True), mlp_in_torch),
    "LSTM": (
        lambda: Outputs(fk.torch.LSTM(16, 8, num_layers=2, batch_first=True)),
        recurrent_in_torch(lstm_formula),
    ),
    "GRU": (
        lambda: Outputs(fk.torch.GRU(16, 8, num_layers=2, batch_first=True)),
        recurrent_in_torch(gru_formula),
    ),
    "Mamba2": (lambda: fk.torch.Mamba2(16, d_state=8, headdim=8, ngroups=2), mamba2_in_torch),
    "compat.Mamba2": (lambda: mamba_ssm.Mamba2(16, d_state=8, headdim=8), mamba2_in_torch),
    "Mamba": (lambda: fk.torch.Mamba(16), mamba_in_torch),
    "MambaStack": (lambda: fk.torch.MambaStack(16, 2), stack_in_torch),
    "compat.Mamba": (lambda: mamba_ssm.Mamba(16), mamba_in_torch),
}


def modules_of(package, prefix=""):
    names = (n for n in package.__all__ if isinstance(getattr(package, n), type))
    return {prefix + n for n in names if issubclass(getattr(package, n), torch.nn.Module)}


def test_every_module_is_tried():
    modules = modules_of(fk.torch) | modules_of(backbones, "backbones.") - {"backbones.Backbone"}
    assert len(modules) > 10 and modules <= set(NETWORKS)


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_beside_torchs_ops(name, dtype):
    make, in_torch = NETWORKS[name]
    torch.manual_seed(0)
    network = make()
    x = torch.randn(2, 7, 16, dtype=dtype)
    exact = in_torch(network, x.float())
    exact_grads = torch.autograd.grad(loss_of(exact), list(network.parameters()))
    errors, dtypes = [], []
    for forward in (lambda network, x: network(x), in_torch):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = forward(network, leaf)
        grads = torch.autograd.grad(loss_of(out), [leaf, *network.parameters()])
        dtypes.append([out.dtype, *(g.dtype for g in grads)])
        both = zip([out, *grads[1:]], [exact, *exact_grads], strict=True)
        errors.append([((a.float() - e).abs().max() / e.abs().max()).item() for a, e in both])
    assert dtypes[0] == dtypes[1]
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 3 * theirs + 2e-2


def test_compat_flash_attn():
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind(0)
    expected = sdpa(q, k, v, is_causal=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse, _ = flash_attn.flash_attn_func(
            q, k.bfloat16(), v, causal=True, return_attn_probs=True
        )
        packed = flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True)
        cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True)
    assert lse.dtype == torch.float32
    for result in (out, packed, cached):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2)


def test_compat_mamba():
    u, dt, z = torch.randn(3, 2, 6, 5).unbind(0)
    A, D, B, C = -torch.rand(6, 4), torch.randn(6), torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    state, conv_state = torch.zeros(2, 6, 4), torch.zeros(2, 6, 3)
    weight = torch.randn(6, 4)
    expected = mamba_ssm.selective_scan_fn(u, dt, A, B, C, D, z, delta_softplus=True)
    convolved = causal_conv1d.causal_conv1d_fn(u, weight, activation="silu")
    close = {"rtol": 3e-2, "atol": 3e-2}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mamba_ssm.selective_scan_fn(
            u, dt.bfloat16(), A, B.bfloat16(), C, D, z, delta_softplus=True
        )
        steps = [
            mamba_ssm.selective_state_update(
                state, u[..., t], dt[..., t].bfloat16(), A, B[..., t], C[..., t].bfloat16(), D,
                z[..., t], dt_softplus=True,
            )
            for t in range(5)
        ]  # fmt: skip
        conv = causal_conv1d.causal_conv1d_fn(u, weight, activation="silu")
        updates = [
            causal_conv1d.causal_conv1d_update(u[..., t], conv_state, weight, activation="silu")
            for t in range(5)
        ]
    torch.testing.assert_close(out.float(), expected, **close)
    torch.testing.assert_close(torch.stack(steps, -1).float(), expected, **close)
    assert conv.dtype == updates[0].dtype == torch.bfloat16
    torch.testing.assert_close(conv.float(), convolved, **close)
    torch.testing.assert_close(torch.stack(updates, -1).float(), convolved, **close)
