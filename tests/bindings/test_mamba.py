"""mamba-ssm's and causal-conv1d's names, Transformers on them, and the Mamba modules."""

import importlib.metadata
import inspect
import subprocess
import sys
import types

import pytest
import torch

import flashkernel as fk
from flashkernel.compat import causal_conv1d as theirs_conv
from flashkernel.compat import flash_attn
from flashkernel.compat import mamba_ssm as theirs


def draw(b=2, d=6, length=11, n=4):
    torch.manual_seed(0)
    return {
        "u": torch.randn(b, d, length),
        "delta": torch.randn(b, d, length),
        "A": -torch.rand(d, n) - 0.1,
        "B": torch.randn(b, n, length),
        "C": torch.randn(b, n, length),
        "D": torch.randn(d),
        "z": torch.randn(b, d, length),
        "delta_bias": torch.randn(d),
    }


def test_selective_scan_fn():
    """Beside the recurrence in plain torch: every layout of B and C, and the least arguments."""
    t = draw()
    least = {k: t[k] for k in ("u", "delta", "A", "B", "C")}
    for case in (
        {**t, "delta_softplus": True},
        {**t, "B": torch.randn(2, 3, 4, 11), "C": torch.randn(2, 3, 4, 11), "delta_softplus": True},
        {**least, "delta": t["delta"].abs(), "B": torch.randn(6, 4)},
        {k: v[..., :0] if v.ndim == 3 else v for k, v in least.items()},
    ):
        expected, state = theirs.selective_scan_ref(**case, return_last_state=True)
        out, last = theirs.selective_scan_fn(**case, return_last_state=True)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(theirs.selective_scan_ref(**case), expected)
    half = {k: v if k in ("A", "D", "delta_bias") else v.bfloat16() for k, v in t.items()}
    assert theirs.selective_scan_fn(**half, delta_softplus=True).dtype == torch.bfloat16


def test_outputs_lie_in_memory_as_inputs_do():
    """Time last in, time last out, gradients too: mixed layouts take slower kernels."""
    t = {k: v.requires_grad_() for k, v in draw().items()}
    halves = torch.randn(2, 12, 11, requires_grad=True)  # as a projection to x and z leaves them
    for u in (t["u"], halves.chunk(2, 1)[0]):
        out = theirs.selective_scan_fn(**{**t, "u": u}, delta_softplus=True)
        names = ("delta", "B", "C", "z")
        gradients = torch.autograd.grad(out.square().sum(), (u, *(t[k] for k in names)))
        assert all(x.is_contiguous() for x in (out, *gradients))
        out = theirs_conv.causal_conv1d_fn(u, torch.randn(6, 4), activation="silu")
        assert out.is_contiguous()
        assert torch.autograd.grad(out.square().sum(), u)[0].is_contiguous()
    dims_first = torch.randn(6, 2, 11).transpose(0, 1)  # as mamba-ssm's block lays them out
    assert theirs_conv.causal_conv1d_fn(dims_first, torch.randn(6, 4)).stride() == (11, 22, 1)
    repeated = torch.randn(2, 1, 11).expand(2, 6, 11)
    like = torch.empty_like(repeated.transpose(1, 2)).transpose(1, 2)
    assert theirs_conv.causal_conv1d_fn(repeated, torch.randn(6, 4)).stride() == like.stride()


def test_selective_scan_fn_with_constant_projections():
    t = draw()
    fixed = {k: torch.randn(6, 4, requires_grad=True) for k in "BC"}
    out = theirs.selective_scan_fn(**{**t, **fixed})
    expected = []
    for c in range(6):
        own = {k: v[:, c : c + 1] if v.ndim == 3 else v[c : c + 1] for k, v in t.items()}
        for k in "BC":
            own[k] = fixed[k][c][None, :, None].expand(2, 4, 11)
        expected.append(theirs.selective_scan_fn(**own))
    torch.testing.assert_close(out, torch.cat(expected, 1))
    out.sum().backward()
    assert fixed["B"].grad.abs().sum() > 0


def test_selective_state_update_and_conv_update():
    t = draw(length=5)
    expected, _ = theirs.selective_scan_fn(**t, delta_softplus=True, return_last_state=True)
    state = torch.zeros(2, 6, 4, dtype=torch.float32)
    for i in range(5):
        step = {k: t[k][..., i] for k in ("B", "C", "z")}
        out = theirs.selective_state_update(
            state, t["u"][..., i], t["delta"][..., i], t["A"], D=t["D"], dt_bias=t["delta_bias"],
            dt_softplus=True, **step,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[..., i], rtol=1e-4, atol=1e-5)

    weight, bias = torch.randn(6, 4), torch.randn(6)
    whole = theirs_conv.causal_conv1d_fn(t["u"], weight, bias, activation="silu")
    for kept in (3, 4, 7):
        conv_state = torch.zeros(2, 6, kept)
        for i in range(5):
            out = theirs_conv.causal_conv1d_update(
                t["u"][..., i], conv_state, weight, bias, activation="silu"
            )
            torch.testing.assert_close(out, whole[..., i])
        padded = torch.nn.functional.pad(t["u"], (kept, 0))
        torch.testing.assert_close(conv_state, padded[..., -kept:])


def test_conv_states():
    x, weight = torch.randn(2, 6, 9), torch.randn(6, 4)
    whole = theirs_conv.causal_conv1d_fn(x, weight)
    first, state = theirs_conv.causal_conv1d_fn(x[..., :5], weight, return_final_states=True)
    second = theirs_conv.causal_conv1d_fn(x[..., 5:], weight, initial_states=state)
    torch.testing.assert_close(torch.cat([first, second], -1), whole)
    seq_idx = torch.zeros(2, 9, dtype=torch.int32)
    with pytest.raises(fk.Error, match="causal_conv1d_fn: seq_idx: expected None"):
        theirs_conv.causal_conv1d_fn(x, weight, seq_idx=seq_idx, return_final_states=True)


def test_conv_of_sequences_side_by_side():
    x = torch.randn(2, 6, 9, requires_grad=True)
    weight, bias = torch.randn(6, 4), torch.randn(6)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, -1, -1]])
    out = theirs_conv.causal_conv1d_fn(x, weight, bias, seq_idx.int(), activation="silu")
    expected = torch.zeros_like(out)
    for row, cuts in ((0, (0, 3, 5, 9)), (1, (0, 1, 7))):
        for i, j in zip(cuts, cuts[1:], strict=False):
            part = x[row : row + 1, :, i:j]
            alone = theirs_conv.causal_conv1d_fn(part, weight, bias, activation="silu")
            expected[row, :, i:j] = alone[0]
    torch.testing.assert_close(out, expected)
    given = torch.randn_like(out)
    ours = torch.autograd.grad(out, x, given)[0]
    torch.testing.assert_close(ours, torch.autograd.grad(expected, x, given)[0])

    steps, offsets = torch.randn(9, 6), torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    states = theirs_conv.causal_conv1d_varlen_states(steps, offsets, 4)
    assert states.shape == (3, 6, 4)
    torch.testing.assert_close(states[2], steps[5:].T)
    torch.testing.assert_close(states[0, :, 2:], steps[:2].T)
    assert not states[0, :, :2].any() and not states[1].any()


@pytest.mark.parametrize("kept", [3, 5])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_conv_update_in_a_ring(kept, length):
    x, weight, bias = torch.randn(2, 6, 3 * length), torch.randn(6, 4), torch.randn(6)
    whole = theirs_conv.causal_conv1d_fn(x, weight, bias, activation="silu")
    ring = torch.zeros(2, 6, kept)
    # The rows' rings begin in different places.
    seen = torch.tensor([0, 4], dtype=torch.int32)
    for i in range(0, 3 * length, length):
        out = theirs_conv.causal_conv1d_update(
            x[..., i : i + length], ring, weight, bias, "silu", cache_seqlens=seen
        )
        torch.testing.assert_close(out, whole[..., i : i + length])
        seen += length
    for row in range(2):
        order = [(int(seen[row]) + i) % kept for i in range(kept)]
        padded = torch.nn.functional.pad(x[row], (kept, 0))
        torch.testing.assert_close(ring[row][:, order], padded[:, -kept:])


def test_states_by_index():
    t = draw(b=3, length=1)
    indices = torch.tensor([4, -1, 1], dtype=torch.int32)
    used, unused = [4, 1], [0, 2, 3]
    rows = [0, 2]  # of the batch
    step = {k: t[k][..., 0] for k in ("u", "delta", "B", "C", "z")}

    cache = torch.randn(5, 6, 4)
    before, expected = cache.clone(), cache[used].clone()
    names = {"D": t["D"], "dt_bias": t["delta_bias"], "dt_softplus": True}

    def update(state, rows, **more):
        u, dt, B, C, z = (step[k][rows] for k in ("u", "delta", "B", "C", "z"))
        return theirs.selective_state_update(state, u, dt, t["A"], B, C, z=z, **names, **more)

    y = update(expected, rows)
    out = update(cache, slice(None), state_batch_indices=indices)
    torch.testing.assert_close(out[rows], y)
    assert not out[1].any()
    torch.testing.assert_close(cache[used], expected)
    assert torch.equal(cache[unused], before[unused])

    cache, weight = torch.randn(5, 6, 3), torch.randn(6, 4)
    before, expected = cache.clone(), cache[used].clone()
    y = theirs_conv.causal_conv1d_update(step["u"][rows], expected, weight)
    out = theirs_conv.causal_conv1d_update(step["u"], cache, weight, conv_state_indices=indices)
    torch.testing.assert_close(out[rows], y)
    assert not out[1].any()
    torch.testing.assert_close(cache[used], expected)
    assert torch.equal(cache[unused], before[unused])


WIDER = ["B", "C", "BC", "dt", "z"]


@pytest.mark.parametrize("wider", WIDER)
def test_wider_inputs_are_not_rounded(wider):
    """mamba-ssm's kernels compute in float32 from what they are given."""
    t = {k: v for k, v in draw().items() if k not in ("D", "delta_bias")}
    names = {"dt": ["delta"], "z": ["z"]}.get(wider, list(wider))
    low = {k: v if k == "A" else v.bfloat16() for k, v in t.items()}
    for fixed in (False, True) if wider in ("B", "C", "BC") else (False,):
        given = {**low, **{k: torch.randn(6, 4) if fixed else t[k] for k in names}}
        exact = {k: v.float() for k, v in given.items()}
        out, last = theirs.selective_scan_fn(**given, return_last_state=True)
        expected, state = theirs.selective_scan_fn(**exact, return_last_state=True)
        assert out.dtype == torch.bfloat16 and last.dtype == torch.float32
        assert torch.equal(out, expected.bfloat16()) and torch.equal(last, state)
        for v in given.values():
            v.requires_grad_()
        theirs.selective_scan_fn(**given).sum().backward()
        assert all(v.grad.dtype == v.dtype for v in given.values())
    step = {k if k != "delta" else "dt": v if k == "A" else v[..., 0] for k, v in low.items()}
    step["x"] = step.pop("u")
    names = [n if n != "delta" else "dt" for n in names]
    step |= {n: t["delta" if n == "dt" else n][..., 0] for n in names}
    for dtype in (torch.float32, torch.bfloat16):
        states = [torch.ones(2, 6, 4, dtype=dtype) for _ in range(2)]
        out = theirs.selective_state_update(states[0], **step)
        exact = {k: v.float() for k, v in step.items()}
        expected = theirs.selective_state_update(states[1], **exact)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected.bfloat16()) and torch.equal(*states)


def test_what_is_not_supported_raises_one_error():
    t = draw()
    x, weight = torch.randn(1, 6, 8), torch.randn(6, 4)
    q, index = torch.randn(1, 4, 2, 8), torch.zeros(1, 8, dtype=torch.int32)
    cu = torch.tensor([0, 4], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    conv = theirs_conv.causal_conv1d_fn
    attend = flash_attn.flash_attn_func
    for call in (
        lambda: conv(x, weight, seq_idx=index, return_final_states=True),
        lambda: conv(x, weight, activation="gelu"),
        lambda: theirs_conv.causal_conv1d_update(x, x, weight, activation="relu"),
        lambda: theirs.selective_scan_fn(**{**t, "A": t["A"] + 0j}),
        lambda: theirs.Mamba(8, dt_init="uniform"),
        lambda: attend(q, q, q, dropout_p=0.1),
        lambda: flash_attn.flash_attn_varlen_func(
            q[0], q[0], q[0], cu, cu, 4, 4, block_table=table
        ),
        lambda: flash_attn.flash_attn_with_kvcache(q, q, q, cache_leftpad=cu[:1]),
        lambda: flash_attn.flash_attn_with_kvcache(q, q, q, block_table=table),
    ):
        with pytest.raises(fk.compat.NotSupported) as raised:
            call()
        assert isinstance(raised.value, fk.Error) and isinstance(raised.value, NotImplementedError)
    assert str(fk.compat.NotSupported).endswith("'flashkernel.compat.NotSupported'>")
    assert flash_attn.Unsupported is fk.compat.NotSupported


@pytest.mark.parametrize(
    ("version", "gpu", "text"),
    [
        ("4.57.1", True, "expected Transformers 5 or later.*got 4.57.1"),
        ("5.0.0", False, "expected a later version of Transformers.*on a GPU only.*got 5.0.0"),
    ],
)
def test_install_beside_a_transformers_that_would_not_look(version, gpu, text, monkeypatch):
    integrations = types.ModuleType("transformers.integrations")
    package = types.ModuleType("transformers")
    package.integrations = integrations
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.integrations", integrations)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(fk.compat.NotSupported, match=f"install: {text}"):
        theirs.install()
    assert "mamba_ssm" not in sys.modules


# Logits, loss and gradients of tiny random models, by the path that `install` makes Transformers
# take or by its own.
TRANSFORMERS = """
import sys, torch
if sys.argv[1] == "fast":
    import flashkernel.compat.mamba_ssm as compat
    compat.install()
    calls = []
    for name in ("mamba_inner_fn", "selective_scan_fn", "selective_state_update"):
        function = getattr(sys.modules["mamba_ssm"], name)
        import functools
        def counted(*a, function=function, name=name, **k):
            calls.append(name)
            return function(*a, **k)
        wrapped = functools.wraps(function)(counted)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("mamba_ssm") and hasattr(module, name):
                setattr(module, name, wrapped)
import transformers
results = []
for name in ("Mamba", "FalconMamba"):
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, state_size=8, num_hidden_layers=2)
    config = getattr(transformers, name + "Config")(**sizes)
    model = getattr(transformers, name + "ForCausalLM")(config).float()
    torch.manual_seed(1)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.05)
    ids = torch.randint(0, 50, (2, 13))
    model.train()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    results.append((out.loss.detach(), gradients, logits, tokens))
    if sys.argv[1] == "fast":
        assert {"mamba_inner_fn", "selective_scan_fn", "selective_state_update"} <= set(calls), name
        calls.clear()
torch.save(results, sys.argv[2])
"""


def test_transformers_fast_path(tmp_path):
    pytest.importorskip("transformers")
    results = []
    for path in ("slow", "fast"):
        file = tmp_path / path
        done = subprocess.run(
            [sys.executable, "-c", TRANSFORMERS, path, str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(torch.load(file))
    for slow, fast in zip(*results, strict=True):
        (loss, gradients, logits, tokens), (loss2, gradients2, logits2, tokens2) = slow, fast
        torch.testing.assert_close(loss, loss2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, logits2, rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens, tokens2)
        for name, g in gradients.items():
            torch.testing.assert_close(g, gradients2[name], rtol=1e-3, atol=1e-4)


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
def test_mamba_step_by_step(device):
    torch.manual_seed(0)
    for module in (fk.torch.Mamba(16), fk.torch.MambaStack(16, 2, d_state=4, d_conv=3)):
        module = module.to(device)
        x = torch.randn(3, 7, 16, device=device)
        whole = module(x)
        assert whole.requires_grad and whole.shape == x.shape
        state = module.allocate_state(3)
        steps = [module.step(x[:, i], state) for i in range(7)]
        torch.testing.assert_close(torch.stack(steps, 1), whole.detach(), rtol=1e-4, atol=1e-5)
        state = module.allocate_state(3)  # a prompt first, then one more and two more tokens
        parts = [module.step(part, state) for part in x.split([4, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole.detach(), rtol=1e-4, atol=1e-5)


def test_mamba_under_autocast():
    torch.manual_seed(0)
    for module in (fk.torch.Mamba(16), fk.torch.MambaStack(16, 2), theirs.Mamba(16, layer_idx=0)):
        x = torch.randn(3, 7, 16)
        exact = module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = module(x)
            if isinstance(module, theirs.Mamba):
                carried = theirs.InferenceParams(max_seqlen=7, max_batch_size=3)
                steps = module(x, carried)
            else:
                steps = module.step(x, module.allocate_state(3))
        whole.float().sum().backward()
        for result in (whole, steps):
            torch.testing.assert_close(result.float(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba_with_inference_params(dtype):
    torch.manual_seed(0)
    layers = [theirs.Mamba(16, layer_idx=i, dtype=dtype) for i in range(2)]
    x = torch.randn(3, 7, 16, dtype=dtype)
    carried = theirs.InferenceParams(max_seqlen=7, max_batch_size=3)

    def run(x, *given):
        for layer in layers:
            x = layer(x, *given)
        return x.detach()

    whole, close = run(x), {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    for _ in range(2):  # the second begins anew
        carried.seqlen_offset, parts = 0, []
        for part in x.split([4, 1, 1, 1], 1):
            parts.append(run(part, carried))
            carried.seqlen_offset += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **close)
    for layer in layers:
        for kept, made in zip(
            carried.key_value_memory_dict[layer.layer_idx],
            layer.allocate_inference_cache(3, 7),
            strict=True,
        ):
            assert kept.shape == made.shape and kept.dtype == made.dtype == dtype
    out, *states = layers[0].step(x[:, :1], *layers[0].allocate_inference_cache(3, 7))
    torch.testing.assert_close(out, layers[0](x[:, :1]).detach(), **close)
    assert [tuple(s.shape) for s in states] == [(3, 32, 4), (3, 32, 16)]
    with pytest.raises(fk.Error, match="Mamba: layer_idx: expected a number"):
        theirs.Mamba(16)(torch.randn(1, 1, 16), carried)
    with pytest.raises(fk.Error, match="Mamba: dt_init: expected 'random' or 'constant'"):
        theirs.Mamba(16, dt_init="zero")


def test_mamba_takes_mamba_ssms_arguments():
    expected = (
        "d_model d_state d_conv expand dt_rank dt_min dt_max dt_init dt_scale dt_init_floor "
        "conv_bias bias use_fast_path layer_idx device dtype"
    )
    assert list(inspect.signature(theirs.Mamba).parameters) == expected.split()
    layer = theirs.Mamba(16, dt_init="constant", use_fast_path=False)
    assert (layer.dt_proj.weight == 1).all()  # the rank is 1


def test_mamba_state_dict_is_mamba_ssms():
    names = {n: tuple(t.shape) for n, t in theirs.Mamba(32, d_state=8).state_dict().items()}
    assert names == {
        "A_log": (64, 8),
        "D": (64,),
        "in_proj.weight": (128, 32),
        "conv1d.weight": (64, 1, 4),
        "conv1d.bias": (64,),
        "x_proj.weight": (18, 64),
        "dt_proj.weight": (64, 2),
        "dt_proj.bias": (64,),
        "out_proj.weight": (32, 64),
    }
    stack = fk.torch.MambaStack(32, 2).state_dict()
    assert {"layers.1.norm.weight", "layers.0.mixer.A_log", "norm_f.weight"} <= set(stack)


@pytest.mark.parametrize("device", DEVICES)
def test_mamba_trains(device):
    torch.manual_seed(0)
    model = fk.torch.MambaStack(16, 2).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    x, target = (torch.randn(4, 20, 16, device=device) for _ in range(2))
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
