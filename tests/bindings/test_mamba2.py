"""Mamba-2: mamba-ssm's names, Transformers on them, and the module."""

import inspect
import subprocess
import sys

import pytest
import torch

import flashkernel as fk
import software_gpu
from flashkernel.compat import mamba_ssm as theirs
from flashkernel.compat.mamba_ssm.ops.triton import ssd_combined
from flashkernel.compat.mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

# Where there is a GPU in software, torch's tensors are its. This file tests Python around the ops;
# tests/ops hold these against their references on every backend.
pytestmark = pytest.mark.skipif(software_gpu.ON, reason="tests Python around the ops")


def draw(b=2, length=40, h=4, p=8, n=6, groups=2):
    torch.manual_seed(0)
    return {
        "x": torch.randn(b, length, h, p),
        "dt": torch.randn(b, length, h),
        "A": -torch.rand(h) - 0.1,
        "B": torch.randn(b, length, groups, n),
        "C": torch.randn(b, length, groups, n),
        "D": torch.randn(h),
        "z": torch.randn(b, length, h, p),
        "dt_bias": torch.randn(h),
    }


def test_chunk_scan_is_ssd():
    t = draw()
    state = torch.randn(2, 4, 8, 6)
    expected = fk.ssd(**t, dt_softplus=True, initial_state=state, return_final_state=True)
    scan = ssd_combined.mamba_chunk_scan_combined
    ours = scan(
        **t, chunk_size=16, dt_softplus=True, initial_states=state, return_final_states=True
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    limited = scan(**t, chunk_size=16, dt_limit=(0.1, 0.5))
    torch.testing.assert_close(limited, fk.ssd(**t, dt_limit=(0.1, 0.5)))
    wide = {k: v.bfloat16() if k in ("x", "z") else v for k, v in t.items()}
    out = scan(**wide, chunk_size=16, dt_softplus=True)
    exact = {k: v.float() for k, v in wide.items()}
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fk.ssd(**exact, dt_softplus=True).bfloat16())


def test_sequences_by_number():
    """seq_idx: each sequence begins anew, a row's first one from the row's state."""
    t = draw(length=9)
    state = torch.randn(2, 4, 8, 6)
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 5, 5]])
    out, last = ssd_combined.mamba_chunk_scan_combined(
        **t, chunk_size=16, dt_softplus=True, seq_idx=seq_idx.int(), initial_states=state,
        return_final_states=True,
    )  # fmt: skip
    for row, cuts in ((0, (0, 3, 5, 9)), (1, (0, 1, 7, 9))):
        for i, j in zip(cuts, cuts[1:], strict=False):
            part = {
                k: v[row : row + 1, i:j] if k in ("x", "dt", "B", "C", "z") else v
                for k, v in t.items()
            }
            begin = state[row : row + 1] if i == 0 else None
            alone, end = fk.ssd(
                **part, dt_softplus=True, initial_state=begin, return_final_state=True
            )
            torch.testing.assert_close(out[row, i:j], alone[0])
        torch.testing.assert_close(last[row], end[0])


def test_packed_sequences():
    t = draw(b=1, length=20)
    cu = torch.tensor([0, 3, 3, 20], dtype=torch.int32)
    expected, states = fk.ssd(**t, dt_softplus=True, cu_seqlens=cu, return_final_state=True)
    scan = ssd_combined.mamba_chunk_scan_combined
    given = {**t, "chunk_size": 16, "dt_softplus": True, "cu_seqlens": cu}
    out, final, varlen = scan(**given, return_final_states=True, return_varlen_states=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(final, states[2:])
    torch.testing.assert_close(varlen, states)
    seq_idx = torch.tensor([[0] * 3 + [1] * 17], dtype=torch.int32)
    out, varlen = scan(**given, seq_idx=seq_idx, return_varlen_states=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(varlen[[0, 2]], states[[0, 2]])
    with pytest.raises(fk.Error, match="cu_seqlens: expected a tensor for return_varlen_states"):
        scan(**{**given, "cu_seqlens": None}, return_varlen_states=True)


def block_inputs(dim=32, n=6, groups=2, heads=4, outer=0):
    torch.manual_seed(0)
    conv = dim + 2 * groups * n
    return {
        "zxbcdt": torch.randn(2, 11, 2 * outer + 2 * dim + 2 * groups * n + heads),
        "conv1d_weight": torch.randn(conv, 4),
        "conv1d_bias": torch.randn(conv),
        "dt_bias": torch.randn(heads),
        "A": -torch.rand(heads),
        "D": torch.randn(heads),
        "ngroups": groups,
        "headdim": dim // heads,
        "chunk_size": 16,
    }


@pytest.mark.parametrize("norm_before_gate", [False, True])
@pytest.mark.parametrize("outer", [0, 5])
def test_split_conv_scan(outer, norm_before_gate):
    t = block_inputs(outer=outer)
    weight, last = torch.randn(32), torch.randn(7, 32 + outer)
    ours, final = ssd_combined.mamba_split_conv1d_scan_combined(
        **t, rmsnorm_weight=weight, outproj_weight=last, norm_before_gate=norm_before_gate,
        return_final_states=True,
    )  # fmt: skip
    mlp, z, xBC, dt = t["zxbcdt"].split([2 * outer, 32, 56, 4], -1)
    xBC = fk.causal_conv1d(
        xBC.contiguous(), t["conv1d_weight"], t["conv1d_bias"], activation="silu"
    )
    x, B, C = xBC.split([32, 12, 12], -1)
    y, state = fk.ssd(
        x.unflatten(-1, (4, 8)), dt, t["A"], B.unflatten(-1, (2, 6)), C.unflatten(-1, (2, 6)),
        t["D"], dt_bias=t["dt_bias"], dt_softplus=True, return_final_state=True,
    )  # fmt: skip
    y, gate = y.flatten(2), torch.nn.functional.silu(z)
    y = y if norm_before_gate else y * gate
    y = torch.nn.functional.rms_norm(y.unflatten(-1, (2, 16)), (16,), eps=1e-6).flatten(2) * weight
    y = y * gate if norm_before_gate else y
    if outer:
        first, second = mlp.chunk(2, -1)
        y = torch.cat([torch.nn.functional.silu(first) * second, y], -1)
    torch.testing.assert_close(ours, y @ last.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final, state)
    with pytest.raises(fk.Error, match="headdim: expected a number"):
        ssd_combined.mamba_split_conv1d_scan_combined(**{**t, "headdim": None})
    with pytest.raises(fk.Error, match="zxbcdt: expected at least 92 features, got 50"):
        ssd_combined.mamba_split_conv1d_scan_combined(**{**t, "zxbcdt": torch.randn(2, 11, 50)})


def test_gated_norm():
    x, z, weight = torch.randn(3, 12), torch.randn(3, 12), torch.randn(12)
    gated = x * torch.nn.functional.silu(z)
    expected = torch.nn.functional.rms_norm(gated, (12,), weight, 1e-6)
    torch.testing.assert_close(rmsnorm_fn(x, weight, None, z, norm_before_gate=False), expected)
    with pytest.raises(fk.compat.NotSupported, match="rmsnorm_fn: bias"):
        rmsnorm_fn(x, weight, weight)


# Logits, loss and gradients of tiny random models, by the path that `install` makes Transformers
# take or by its own; padded on the left, and generating too. By ours also packed sequences, which
# Transformers' own path refuses, and each of them alone: outputs, and outputs and gradients in
# training, where some models take one call for a whole block.
TRANSFORMERS = """
import functools, sys, torch
if sys.argv[1] == "fast":
    import flashkernel.compat.mamba_ssm as compat
    compat.install()
    calls = []
    for name in ("mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined",
                 "selective_state_update"):
        function = getattr(sys.modules["mamba_ssm"], name)
        def counted(*a, function=function, name=name, **k):
            calls.append(name)
            return function(*a, **k)
        wrapped = functools.wraps(function)(counted)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("mamba_ssm") and hasattr(module, name):
                setattr(module, name, wrapped)
import transformers
sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2)
attention = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
mamba = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2,
             mamba_expand=2, mamba_chunk_size=8)
CONFIGS = {
    "Mamba2": dict(state_size=8, num_heads=4, head_dim=16, n_groups=2, chunk_size=8),
    "Bamba": dict(**attention, **mamba, attn_layer_indices=[1]),
    "Zamba2": dict(
        num_attention_heads=4, num_key_value_heads=4, intermediate_size=48, mamba_d_state=8,
        n_mamba_heads=4, mamba_headdim=16, mamba_ngroups=2, mamba_expand=2, chunk_size=8,
        layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, hybrid_layer_ids=[1],
    ),
    "FalconH1": dict(**attention, **mamba, mamba_d_ssm=64, head_dim=8),
    "GraniteMoeHybrid": dict(
        **attention, **mamba, layer_types=["mamba", "attention"], shared_intermediate_size=48,
        num_local_experts=0,
    ),
    "NemotronH": dict(
        **attention, head_dim=8, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8,
        n_groups=2, chunk_size=8, layers_block_type=["mamba", "attention"],
    ),
}
lengths = (5, 1, 9)

# What a model without its head makes of packed sequences, and of each alone: Mamba2's with a head
# does not hand seq_idx on.
def outputs_of(body, ids):
    parts = [{"input_ids": part} for part in ids[0].split(lengths)]
    packed = transformers.DataCollatorWithFlattening(return_seq_idx=True)(parts)
    packed = {k: packed[k] for k in ("input_ids", "position_ids", "seq_idx")}
    alone = [body(part["input_ids"][None], use_cache=False)[0] for part in parts]
    return body(**packed, use_cache=False)[0], torch.cat(alone, 1)

def packed_and_alone(body, ids):
    body.eval()
    with torch.no_grad():
        results = [outputs_of(body, ids)]
    body.train()
    results.append(outputs_of(body, ids))
    weights = torch.randn_like(results[-1][0])
    parameters = list(body.parameters())
    gradients = [torch.autograd.grad((y * weights).sum(), parameters) for y in results[-1]]
    return [*results, *zip(*gradients)]

results = []
for name in sys.argv[3:]:
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**sizes | CONFIGS[name], pad_token_id=0)
    model = getattr(transformers, name + "ForCausalLM")(config).float()
    torch.manual_seed(1)
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.05)
    ids = torch.randint(1, 50, (2, 13))
    model.train()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.eval()
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :4] = mask[0, :4] = 0
    with torch.no_grad():
        logits = [model(ids).logits, model(padded, attention_mask=mask).logits[:, 4:]]
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
    packed = None
    if sys.argv[1] == "fast":
        assert {"mamba_chunk_scan_combined", "selective_state_update"} <= set(calls), (name, calls)
        calls.clear()
        packed = packed_and_alone(model.base_model, torch.randint(1, 50, (1, sum(lengths))))
        assert "mamba_chunk_scan_combined" in calls, (name, calls)
        calls.clear()
    results.append((out.loss.detach(), gradients, logits, tokens, packed))
torch.save(results, sys.argv[2])
"""

MODELS = ("Mamba2", "Bamba", "Zamba2", "FalconH1", "GraniteMoeHybrid", "NemotronH")


@pytest.fixture(scope="module")
def transformers_results(tmp_path_factory):
    pytest.importorskip("transformers")
    folder, results = tmp_path_factory.mktemp("transformers"), []
    for path in ("slow", "fast"):
        file = folder / path
        done = subprocess.run(
            [sys.executable, "-c", TRANSFORMERS, path, str(file), *MODELS],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(torch.load(file))
    return dict(zip(MODELS, zip(*results, strict=True), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_transformers_fast_path(model, transformers_results):
    slow, fast = transformers_results[model]
    (loss, gradients, logits, tokens, _), (loss2, gradients2, logits2, tokens2, _) = slow, fast
    torch.testing.assert_close(loss, loss2, rtol=1e-5, atol=1e-5)
    for a, b in zip(logits, logits2, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, tokens2)
    for name, g in gradients.items():
        torch.testing.assert_close(g, gradients2[name], rtol=1e-3, atol=1e-4)


# GraniteMoeHybrid's attention sees all of a row: its masks do not heed where positions begin anew.
@pytest.mark.parametrize("model", [m for m in MODELS if m != "GraniteMoeHybrid"])
def test_transformers_packed_sequences(model, transformers_results):
    """Sequences that a collator flattened into one row, with seq_idx, are those alone."""
    *_, packed = transformers_results[model][1]
    for together, alone in packed:
        torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)


def modules():
    options = {"d_state": 8, "headdim": 8}
    yield fk.torch.Mamba2(16, **options)
    yield fk.torch.Mamba2(16, ngroups=2, norm_before_gate=True, chunk_size=4, **options)
    yield fk.torch.Mamba2(16, rmsnorm=False, D_has_hdim=True, bias=True, **options)
    yield fk.torch.Mamba2(16, d_ssm=16, conv_init=0.5, dt_limit=(0.01, 0.05), **options)


def test_mamba2_step_by_step():
    torch.manual_seed(0)
    for module in modules():
        x = torch.randn(3, 7, 16)
        whole = module(x)
        assert whole.requires_grad and whole.shape == x.shape
        state = module.allocate_state(3)
        steps = [module.step(x[:, i], state) for i in range(7)]
        torch.testing.assert_close(torch.stack(steps, 1), whole.detach(), rtol=1e-4, atol=1e-5)
        state = module.allocate_state(3)  # a prompt first, then one more and two more tokens
        parts = [module.step(part, state) for part in x.split([4, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(fk.Error, match="Mamba2: headdim: expected a divisor of d_ssm 32, got 5"):
        fk.torch.Mamba2(16, headdim=5)


def test_mamba2_on_packed_sequences():
    torch.manual_seed(0)
    module = fk.torch.Mamba2(16, d_state=8, headdim=8)
    x = torch.randn(1, 12, 16)
    packed = module(x, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32))
    alone = torch.cat([module(x[:, :5]), module(x[:, 5:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_mamba2_under_autocast():
    torch.manual_seed(0)
    for module in (*modules(), theirs.Mamba2(16, d_state=8, headdim=8, layer_idx=0)):
        x = torch.randn(3, 7, 16)
        exact = module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            whole = module(x)
            if isinstance(module, theirs.Mamba2):
                carried = theirs.InferenceParams(max_seqlen=7, max_batch_size=3)
                steps = module(x, inference_params=carried)
            else:
                steps = module.step(x, module.allocate_state(3))
        whole.float().sum().backward()
        for result in (whole, steps):
            torch.testing.assert_close(result.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mamba2_with_inference_params(dtype):
    torch.manual_seed(0)
    layer = theirs.Mamba2(16, d_state=8, headdim=8, layer_idx=0, dtype=dtype)
    x = torch.randn(3, 7, 16, dtype=dtype)
    carried = theirs.InferenceParams(max_seqlen=7, max_batch_size=3)
    whole = layer(x).detach()
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.02}
    for _ in range(2):  # the second begins anew
        carried.seqlen_offset, parts = 0, []
        for part in x.split([4, 1, 1, 1], 1):
            parts.append(layer(part, inference_params=carried).detach())
            carried.seqlen_offset += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **close)
    out, *states = layer.step(x[:, :1], *layer.allocate_inference_cache(3, 7))
    torch.testing.assert_close(out.detach(), layer(x[:, :1]).detach(), **close)
    assert [tuple(s.shape) for s in states] == [(3, 48, 4), (3, 4, 8, 8)]
    with pytest.raises(fk.Error, match="Mamba2: layer_idx: expected a number"):
        theirs.Mamba2(16, headdim=8)(x, inference_params=carried)
    with pytest.raises(fk.compat.NotSupported, match="Mamba2: seq_idx"):
        layer(x, seq_idx=torch.zeros(3, 7))


def test_mamba2_takes_mamba_ssms_arguments():
    expected = (
        "d_model d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim "
        "rmsnorm norm_before_gate dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size "
        "use_mem_eff_path layer_idx process_group sequence_parallel device dtype"
    )
    assert list(inspect.signature(theirs.Mamba2).parameters) == expected.split()


def test_mamba2_state_dict_is_mamba_ssms():
    names = {n: tuple(t.shape) for n, t in theirs.Mamba2(32, d_state=8).state_dict().items()}
    assert names == {
        "dt_bias": (1,),
        "A_log": (1,),
        "D": (1,),
        "in_proj.weight": (145, 32),
        "conv1d.weight": (80, 1, 4),
        "conv1d.bias": (80,),
        "norm.weight": (64,),
        "out_proj.weight": (32, 64),
    }


def test_mamba2_trains():
    torch.manual_seed(0)
    model = fk.torch.Mamba2(16, d_state=16, headdim=8)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    x, target = torch.randn(4, 20, 16), torch.randn(4, 20, 16)
    losses = []
    for _ in range(30):
        loss = (model(x) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None for p in model.parameters())
