"""attention of 8-bit floats: every feature on every backend, with a scale for each head.

The bar is the formula in float64 on the same 8-bit inputs. Beside the rounding of the output, a
kernel may round each probability to 8 bits (Hopper's does), by up to one part in 16: what that can
do to an output is bounded by a sixteenth of the same attention over the values' magnitudes."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from attention_cases import FEATURES, LONG, SIZES, attention_case
from harness import (
    BACKENDS,
    HAVE_JAX,
    LAYOUTS,
    TORCH_BACKENDS,
    as_tuple,
    call,
    convert,
    lay_out,
    poisoned_outputs,
    raises,
    seeded,
    to_float64,
)

FLOAT8 = torch.float8_e4m3fn
SCALED = {"q": "q_scale", "k": "k_scale", "v": "v_scale"}
# What a probability is rounded by: on GPUs to 8 bits, or to 16 like the scaled inputs.
ROUNDING = {False: 2.0**-12, True: 2.0**-4}
# Tensor cores add up products of 8-bit floats with about 14 bits.
SCORE_ROUNDING = {False: 2.0**-18, True: 2.0**-11}


def drawn(case, generator, scales, parameters=torch.float32):
    """The inputs as the op sees them. `scales`: None, "H" or "BH"."""
    tensors = {}
    for name, t in case.inputs(generator).items():
        if t.is_floating_point():
            t = t.to(FLOAT8 if name in SCALED else parameters)
        tensors[name] = t
    if scales:
        packed = "cu_seqlens_q" in tensors
        rows = len(tensors["cu_seqlens_q"]) - 1 if packed else len(tensors["q"])
        for x, name in SCALED.items():
            shape = (tensors[x].shape[-2],) if scales == "H" else (rows, tensors[x].shape[-2])
            values = 0.5 + torch.rand(shape, generator=generator)
            tensors[name] = torch.where(
                torch.rand(shape, generator=generator) < 0.2, -values, values
            )
    return tensors


def exact_inputs(tensors):
    """The same in float64, scales applied."""
    out = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    for x, name in SCALED.items():
        if name not in out:
            continue
        scale = out.pop(name)
        if scale.ndim == 2 and out[x].ndim == 3:  # a row for each packed sequence
            offsets = tensors["cu_seqlens_q" if x == "q" else "cu_seqlens_k"].long()
            scale = scale.repeat_interleave(offsets.diff(), 0)[..., None]
        elif scale.ndim == 2:
            scale = scale[:, None, :, None]
        else:
            scale = scale[:, None]
        out[x] = out[x] * scale
    return out


def check(case, backend, scales, layout="contiguous", parameters=torch.float32):
    tensors = drawn(case, seeded(case.name, "float8", scales), scales, parameters)
    for name in SCALED:
        bits = lay_out(tensors[name].view(torch.uint8), layout)
        tensors[name] = bits.view(FLOAT8)
    exact = exact_inputs(tensors)
    expected = as_tuple(case.formula(**exact))
    weighted = as_tuple(case.formula(**{**exact, "v": exact["v"].abs()}))[0]
    with poisoned_outputs():
        ours = as_tuple(call(case, {n: moved(t, backend) for n, t in tensors.items()}))
    assert len(ours) == len(expected)
    assert str(ours[0].dtype).removeprefix("torch.") == "bfloat16"
    on_gpu = backend.endswith("cuda")
    out, want = to_float64(ours[0]), expected[0]
    assert out.shape == want.shape
    # Scores move weights: an error of x in a score changes its weight by a factor of 1 + x.
    largest = largest_score(case, exact)
    relative = ROUNDING[on_gpu] + 2 * SCORE_ROUNDING[on_gpu] * largest
    allowed = 2.0**-8 * want.abs() + relative * weighted + 1e-30
    assert bool(((out - want).abs() <= allowed).all()), (
        f"{case} ({backend}, {scales}, {layout}): error {(out - want).abs().max():.3e}, "
        f"{((out - want).abs() / allowed).max():.2f} times what is allowed"
    )
    if len(ours) == 2:
        lse, want = to_float64(ours[1]), expected[1]
        assert bool((lse.isinf() == want.isinf()).all())
        error = (lse - want)[want.isfinite()].abs()
        assert bool((error <= SCORE_ROUNDING[on_gpu] * (1 + largest)).all()), (
            f"{case} lse ({backend}, {scales}): error {error.max():.3e}"
        )


def largest_score(case, exact):
    if min(exact["q"].numel(), exact["k"].numel()) == 0:
        return 0.0
    scale = case.attributes.get("scale") or exact["q"].shape[-1] ** -0.5
    stretch = exact["rotary_cos"].abs().max().item() ** 2 if "rotary_cos" in exact else 1.0
    norms = exact["q"].norm(dim=-1).max() * exact["k"].norm(dim=-1).max()
    return abs(scale) * norms.item() * max(stretch, 1.0)


def moved(t, backend):
    """convert, for a dtype that few of torch's own functions take."""
    if t.dtype != FLOAT8:
        return convert(t, backend)
    if backend.startswith("torch"):
        return convert(t.view(torch.uint8), backend).view(FLOAT8)
    import ml_dtypes

    array = t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    if backend == "numpy":
        return array
    import jax

    return jax.device_put(array, jax.devices("gpu" if backend == "jax_cuda" else "cpu")[0])


SCALES = (None, "H", "BH")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("i,case", list(enumerate(FEATURES + SIZES)), ids=str)
def test_forward(i, case, backend):
    check(case, backend, SCALES[i % 3])
    if backend.startswith("torch"):
        check(case, backend, SCALES[(i + 1) % 3], parameters=torch.bfloat16)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize(
    "case",
    [
        *LONG,
        attention_case(1, 2000, h=2, g=1, d=128, causal=True, return_lse=True),
        attention_case(1, 300, 1900, h=2, d=128, sinks=True, return_lse=True),
        attention_case(2, 333, h=2, d=112, e=80, window=(100, 20)),
        attention_case(2, 333, h=2, d=48, e=64, causal=True),
        attention_case(1, 400, h=2, d=256, return_lse=True),
        attention_case(lengths=((1, 1), (250, 1700), (0, 5), (100, 3)), h=2, d=128, causal=True),
    ],
    ids=str,
)
def test_long(case, backend):
    check(case, backend, "BH")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.startswith("jax")])
def test_strides(backend, layout):
    check(attention_case(2, 33, 40, h=4, g=2, d=32, e=16, causal=True), backend, "BH", layout)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_every_value(backend):
    """All 256 codes of a byte, one in each value, come back through a softmax over one key."""
    codes = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    q = torch.zeros(256, 1, 1, 16).to(FLOAT8)
    v = moved(codes[:, None, None, None].view(torch.uint8).expand(-1, 1, 1, 8).contiguous()
              .view(FLOAT8), backend)  # fmt: skip
    out = fk.attention(moved(q, backend), moved(q, backend), v)
    expected = codes.double()[:, None, None, None].expand_as(out)
    torch.testing.assert_close(to_float64(out), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_zero_scale(backend):
    """Scores that are all 0 weigh all keys alike."""
    generator = seeded("zero")
    q, k, v = (torch.randn(1, 40, 2, 64, generator=generator).to(FLOAT8) for _ in range(3))
    out, lse = fk.attention(
        *(moved(x, backend) for x in (q, k, v)),
        k_scale=convert(torch.zeros(2), backend),
        return_lse=True,
    )
    mean = v.double().mean(1, keepdim=True).expand(1, 40, 2, 64)
    assert (to_float64(out) - mean).abs().max() < 4e-3
    assert (to_float64(lse) - np.log(40)).abs().max() < 1e-5


def test_compiled():
    generator = seeded("compiled")
    q, k, v = (torch.randn(1, 20, 2, 32, generator=generator).to(FLOAT8) for _ in range(3))
    scale = torch.tensor([0.5, 2.0])
    compiled = torch.compile(
        lambda q, k, v, s: fk.attention(q, k, v, causal=True, q_scale=s), fullgraph=True
    )
    expected = fk.attention(q, k, v, causal=True, q_scale=scale)
    assert compiled(q, k, v, scale).equal(expected)
    assert expected.dtype == torch.bfloat16


def test_no_gradient():
    x = torch.zeros(1, 4, 2, 16).to(FLOAT8)
    message = "attention: float8 inputs have no gradient"
    with raises(message):
        fk.attention(x.clone().requires_grad_(), x, x)
    with raises(message):
        fk.attention(x, x, x, sinks=torch.zeros(2, requires_grad=True))
    with torch.no_grad():
        fk.attention(x.clone().requires_grad_(), x, x)
    if HAVE_JAX:
        import jax
        import jax.numpy as jnp

        y = jnp.zeros((1, 4, 2, 16), jnp.float8_e4m3fn)
        with raises(message):
            jax.grad(lambda q: fk.attention(q, y, y).astype(jnp.float32).sum())(y)


@pytest.mark.parametrize("make", [lambda t: moved(t, "numpy"), lambda t: t], ids=["numpy", "torch"])
def test_errors(make):
    x = torch.zeros(2, 5, 4, 8)
    x8, ones = make(x.to(FLOAT8)), make(torch.ones(4))
    x, x16 = make(x), make(x.half())
    for message, arguments in [
        ("k: expected float8_e4m3fn, the dtype of q, got float32", {"k": x}),
        ("q: expected float32, float16, bfloat16 or float8_e4m3fn, got float64",
         dict.fromkeys("qkv", make(torch.zeros(2, 5, 4, 8, dtype=torch.float64)))),
        ("q_scale: expected none, since q is float32 and not float8_e4m3fn, got a tensor",
         {"q": x, "k": x, "v": x, "q_scale": ones}),
        ("k_scale: expected none, since q is float16 and not float8_e4m3fn, got a tensor",
         {"q": x16, "k": x16, "v": x16, "k_scale": ones}),
        (r"v_scale: expected shape .* got \(3,\)", {"v_scale": make(torch.ones(3))}),
        (r"q_scale: expected shape .* got \(3, 4\)", {"q_scale": make(torch.ones(3, 4))}),
        ("k_scale: expected float32, got float16", {"k_scale": make(torch.ones(4).half())}),
        ("sinks: expected float32 or bfloat16, got float16",
         {"sinks": make(torch.zeros(4).half())}),
    ]:  # fmt: skip
        with raises(f"attention: {message}"):
            fk.attention(**{"q": x8, "k": x8, "v": x8, **arguments})
    with raises("softmax: x: expected float32, float16 or bfloat16, got float8_e4m3fn"):
        fk.softmax(x8)
    offsets = make(torch.tensor([0, 2, 5], dtype=torch.int32))
    packed = make(torch.zeros(5, 4, 8).to(FLOAT8))
    with raises("attention: k_scale: expected 2 rows, one per sequence, got 3"):
        fk.attention(packed, packed, packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
                     k_scale=make(torch.ones(3, 4)))  # fmt: skip
