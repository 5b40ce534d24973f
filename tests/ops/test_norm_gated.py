"""rms_norm with a gate, before or after the norm, and with groups of columns."""

import pytest
import torch
import torch.nn.functional as F

import flashkernel as fk
from harness import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    TORCH_BACKENDS,
    Case,
    check_finite_differences,
    convert,
    forward_and_gradients,
    normal,
    raises,
    run_forward,
    run_gradients,
    seeded,
)


def gated_formula(eps=1e-6, weight_offset=0.0, norm_before_gate=False, group_size=None):
    def formula(x, weight=None, residual=None, gate=None):
        s = x if residual is None else x + residual
        v = s if gate is None or norm_before_gate else s * F.silu(gate)
        groups = v.unflatten(-1, (-1, group_size)) if group_size else v[..., None, :]
        y = F.rms_norm(groups, groups.shape[-1:], None, eps).flatten(-2)
        y = y if weight is None else y * (weight + weight_offset)
        y = y * F.silu(gate) if gate is not None and norm_before_gate else y
        return y if residual is None else (y, s)

    return formula


def gated_case(shape, gate=True, weight=True, residual=False, **attributes):
    names = ["x", *(["residual"] if residual else []), *(["gate"] if gate else [])]

    def inputs(g):
        out = {n: normal(g, *shape) for n in names}
        return out | ({"weight": normal(g, shape[-1])} if weight else {})

    label = "x".join(map(str, shape)) + "".join(f"+{n}" for n in [*names[1:], weight])
    extra = "".join(f",{k}={v}" for k, v in attributes.items())
    return Case(
        f"rms_norm[{label}{extra}]",
        "rms_norm",
        inputs,
        gated_formula(**attributes),
        attributes,
        ("weight",),
        (*names, *(["weight"] if weight else [])),
        gradient_floor=1e-4 if 1 in (shape[-1], attributes.get("group_size")) else 0.0,
    )


CASES = [
    gated_case((5, 64)),
    gated_case((3, 7, 33), residual=True),
    gated_case((2, 3, 96), norm_before_gate=True, group_size=32),
    gated_case((4, 768), residual=True, eps=1e-3, group_size=256, norm_before_gate=True),
    gated_case((4, 60), group_size=20, weight_offset=1.0),
    gated_case((6, 40), gate=False, group_size=8),
    gated_case((6, 21), gate=False, group_size=7, residual=True, weight=False),
    gated_case((3, 8), group_size=1, norm_before_gate=True),
    gated_case((1, 1)),
    gated_case((2, 20001), group_size=6667),
    gated_case((1200, 40), norm_before_gate=True),
    gated_case((0, 16)),
    gated_case((2, 0, 16), residual=True, group_size=4),
    gated_case((64,), norm_before_gate=True),
]
test_forward, test_gradients = forward_and_gradients(CASES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("norm_before_gate", (False, True))
def test_strides(norm_before_gate, backend, layout, dtype):
    case = gated_case((4, 6, 72), residual=True, group_size=24, norm_before_gate=norm_before_gate)
    run_forward(case, backend, dtype, layout)
    run_gradients(case, backend, dtype, layout)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_in_the_activations_dtype(backend, dtype):
    case = gated_case((5, 72), group_size=8)
    run_forward(case, backend, dtype, parameters_float32=False)
    if backend != "numpy":
        run_gradients(case, backend, dtype, parameters_float32=False)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "0x" not in str(c)], ids=str)
def test_finite_differences(case, backend):
    check_finite_differences(case, backend)


@pytest.mark.parametrize("backend", TORCH_BACKENDS)
def test_one_group_without_a_gate_is_the_plain_norm(backend):
    generator = seeded("one group")
    x, weight = (convert(normal(generator, *s).float(), backend) for s in ((9, 48), (48,)))
    plain = fk.rms_norm(x, weight)
    for size in (None, 0, 48):
        assert torch.equal(fk.rms_norm(x, weight, group_size=size), plain)


def test_errors_name_the_argument():
    x = torch.randn(3, 12)
    with raises("rms_norm: group_size: expected a divisor of x's last size 12, got 5"):
        fk.rms_norm(x, group_size=5)
    with raises("rms_norm: group_size: expected at least 0, got -1"):
        fk.rms_norm(x, group_size=-1)
    with raises("rms_norm: group_size: expected an integer or None"):
        fk.rms_norm(x, group_size=2.5)
    with raises(r"rms_norm: gate: expected shape \(3, 12\) to fit x, got \(3, 11\)"):
        fk.rms_norm(x, gate=x[:, :11])
