"""One suite for every backend: an op's cases and its formula in torch are written once, and run
through NumPy, torch and JAX, on the CPU and, where there is one, on the GPU. With a GPU in software
(docs/softgpu.md) "torch_cuda" is the one backend, and its tensors are torch's CPU tensors.

The error bar is relative: against the formula in float64, our largest error may be at most twice
that of the same formula done by torch in the inputs' own precision (three times for gradients)."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import zlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

import flashkernel as fk
import software_gpu
from flashkernel._declarations import PUBLIC

DTYPES = ("float32", "float16", "bfloat16")
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
NUMPY_DTYPE = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HAVE_JAX = importlib.util.find_spec("jax") is not None
HAVE_CUDA = torch.cuda.is_available() and bool(fk.build_info()["gpus"])


def backends() -> list[str]:
    if software_gpu.ON:
        return ["torch_cuda"]
    names = ["numpy", "torch"] + (["jax"] if HAVE_JAX else [])
    if HAVE_CUDA:
        names.append("torch_cuda")
        if HAVE_JAX and _jax_has_gpu():
            names.append("jax_cuda")
    return names


def _jax_has_gpu() -> bool:
    import jax

    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


BACKENDS = backends()
WITH_GRADIENTS = [b for b in BACKENDS if b != "numpy"]
TORCH_BACKENDS = [b for b in BACKENDS if b.startswith("torch")]


@dataclasses.dataclass(frozen=True)
class Case:
    """`inputs` maps names to float64 or integer torch tensors; names in `parameters` stay float32
    when the case says so. `formula` is the op written in plain torch."""

    name: str
    op: str
    inputs: Callable[[torch.Generator], dict]
    formula: Callable[..., object]
    attributes: dict = dataclasses.field(default_factory=dict)
    parameters: tuple = ()
    differentiable: tuple = ()
    # Absolute errors to allow at least, where terms far larger than the result cancel.
    floor: float = 0.0
    gradient_floor: float = 0.0
    # Inputs whose gradient adds up many terms made from a rounded output, which torch's own formula
    # keeps unrounded.
    sums: tuple = ()

    def __str__(self):
        return self.name


def normal(generator, *shape, scale=1.0):
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def seeded(*key) -> torch.Generator:
    """Inputs that depend on the case alone; FK_TEST_SEED draws others."""
    key = repr((os.environ.get("FK_TEST_SEED", "0"), *key))
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))


# --- tensors of each backend ----------------------------------------------------------------------


def rounded(case: Case, dtype: str, generator, parameters_float32: bool) -> dict:
    """The inputs in the precision the op will see, as torch CPU tensors."""
    out = {}
    for name, t in case.inputs(generator).items():
        if t.is_floating_point():
            keep = name in case.parameters and parameters_float32
            t = t.to(torch.float32 if keep else getattr(torch, dtype))
        out[name] = t
    return out


LAYOUTS = ("contiguous", "padded_rows", "every_other", "transposed", "offset", "expanded")


def lay_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values at other strides. "expanded" repeats the first row."""
    if t.ndim == 0 or t.numel() == 0 or layout == "contiguous":
        return t.clone()
    if layout == "padded_rows":
        wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan")).to(t.dtype)
        wide[..., : t.shape[-1]] = t
        return wide[..., : t.shape[-1]]
    if layout == "every_other":
        wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        flat = torch.zeros(t.numel() + 1, dtype=t.dtype)
        flat[1:] = t.reshape(-1)
        return flat[1:].view(t.shape)
    if layout == "expanded" and t.ndim > 1:
        return t[:1].expand(t.shape)
    return t.clone()


def to_numpy(t: torch.Tensor) -> np.ndarray:
    if t.dtype == torch.bfloat16:
        return t.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return t.detach().cpu().numpy()


def convert(t: torch.Tensor, backend: str):
    if backend == "numpy":
        return to_numpy(t)
    if backend == "torch" or (backend == "torch_cuda" and software_gpu.ON):
        return t
    if backend == "torch_cuda":
        # Device copies keep strides only through as_strided on the copied storage.
        storage = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
        return torch.as_strided(storage, t.shape, t.stride(), t.storage_offset())
    import jax

    platform = "gpu" if backend == "jax_cuda" else "cpu"
    return jax.device_put(to_numpy(t), jax.devices(platform)[0])


def to_float64(value) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().double()
    return torch.from_numpy(np.asarray(value).astype(np.float64))


def as_tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


@contextlib.contextmanager
def poisoned_outputs():
    """torch.empty gives NaN inside: an element that a kernel forgets to write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# --- running and comparing ------------------------------------------------------------------------


def call(case: Case, tensors: dict):
    arguments = dict(tensors)
    for name, members in PUBLIC[case.op].groups.items():
        if members[0].name in tensors:
            arguments[name] = tuple(arguments.pop(f.name) for f in members)
    return getattr(fk, case.op)(**arguments, **case.attributes)


def assert_close(ours, exact, same_precision, dtype: str, factor: float, what: str, least=0.0):
    """The relative error bar. Small cases can make torch's own error vanish by luck, so the bar
    is never below two units in the last place of the largest float32 value (one in half precision,
    where a single rounding is all there is), nor below the case's own floor."""
    ours, exact, same = (to_float64(t) for t in (ours, exact, same_precision))
    assert ours.shape == exact.shape, f"{what}: shape {tuple(ours.shape)}, not {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    special = ~torch.isfinite(exact)
    agree = (ours == exact) | (torch.isnan(ours) & torch.isnan(exact))
    assert bool(agree[special].all()), f"{what}: NaN and infinities differ"
    ours, exact, same = ours[~special], exact[~special], same[~special]
    if exact.numel() == 0:
        return
    assert torch.isfinite(ours).all(), f"{what}: {(~torch.isfinite(ours)).sum()} not finite"
    error = (ours - exact).abs().max().item()
    peer = (same - exact).abs().nan_to_num(0.0, posinf=0.0).max().item()
    units = 4 if dtype == "float32" else 2
    floor = max(units * EPSILON[dtype] * exact.abs().max().item(), least, 1e-12)
    assert error <= max(factor * peer, floor), (
        f"{what}: error {error:.3e}, torch's own {peer:.3e}, floor {floor:.3e}"
    )


def run_forward(case: Case, backend: str, dtype: str, layout="contiguous", parameters_float32=True):
    generator = seeded(case.name, dtype)
    tensors = rounded(case, dtype, generator, parameters_float32)
    tensors = {k: lay_out(t, layout) if t.is_floating_point() else t for k, t in tensors.items()}
    exact = as_tuple(case.formula(**{k: _exact(t) for k, t in tensors.items()}))
    same = as_tuple(case.formula(**_common_dtype(tensors, dtype)))
    with poisoned_outputs():
        ours = as_tuple(call(case, {k: convert(t, backend) for k, t in tensors.items()}))
    assert len(ours) == len(exact)
    for i, (o, e, s) in enumerate(zip(ours, exact, same, strict=True)):
        out_dtype = str(o.dtype).removeprefix("torch.")
        what = f"{case} output {i} ({backend}, {dtype}, {layout})"
        assert_close(o, e, s, out_dtype, 2.0, what, case.floor)
    return ours


def run_gradients(
    case: Case, backend: str, dtype: str, layout="contiguous", parameters_float32=True
):
    generator = seeded(case.name, dtype, "gradient")
    tensors = rounded(case, dtype, generator, parameters_float32)
    tensors = {k: lay_out(t, layout) if t.is_floating_point() else t for k, t in tensors.items()}
    wanted = [k for k in case.differentiable if k in tensors]
    exact_outputs, exact = _torch_gradients(
        case.formula, {k: _exact(t) for k, t in tensors.items()}, wanted, generator
    )
    cotangents = exact_outputs
    _, same = _torch_gradients(case.formula, _common_dtype(tensors, dtype), wanted, cotangents)
    with poisoned_outputs():
        if backend.startswith("torch"):
            moved = {k: convert(t, backend).detach() for k, t in tensors.items()}
            function = functools.partial(_named_call, case)
            _, ours = _torch_gradients(function, moved, wanted, cotangents)
        else:
            ours = _jax_gradients(case, tensors, wanted, cotangents, backend)
    for name, o, e, s in zip(wanted, ours, exact, same, strict=True):
        assert str(o.dtype).removeprefix("torch.") == str(tensors[name].dtype).removeprefix(
            "torch."
        )
        o_dtype = str(tensors[name].dtype).removeprefix("torch.")
        what = f"{case} d{name} ({backend}, {dtype}, {layout})"
        least = max(case.gradient_floor, 32 * EPSILON[dtype] if name in case.sums else 0.0)
        assert_close(o, e, s, o_dtype, 3.0, what, least)


def forward_and_gradients(cases: list[Case]):
    """The two tests that every op has, its forward and its gradients, on each backend and dtype."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("case", cases, ids=str)
    def test_forward(case, backend, dtype):
        run_forward(case, backend, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("backend", WITH_GRADIENTS)
    @pytest.mark.parametrize("case", cases, ids=str)
    def test_gradients(case, backend, dtype):
        run_gradients(case, backend, dtype)

    return test_forward, test_gradients


def _exact(t):
    return t.double() if t.is_floating_point() else t


def _common_dtype(tensors: dict, dtype: str) -> dict:
    """What torch can run: all floats in the activations' precision."""
    cast = getattr(torch, dtype)
    return {k: t.to(cast) if t.is_floating_point() else t for k, t in tensors.items()}


def _named_call(case, **tensors):
    return call(case, tensors)


def _torch_gradients(function, tensors, wanted, cotangents):
    """(cotangents, gradients); cotangents are drawn where a generator is given instead."""
    leaves = {
        k: t.detach().requires_grad_(k in wanted) if t.is_floating_point() else t
        for k, t in tensors.items()
    }
    outputs = as_tuple(function(**leaves))
    if isinstance(cotangents, torch.Generator):
        cotangents = [normal(cotangents, *o.shape) for o in outputs]
        # Rounded once, so that every precision is given the same cotangents.
        cotangents = [c.to(torch.bfloat16).double() for c in cotangents]
    given = [c.to(o.dtype).to(o.device) for c, o in zip(cotangents, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, [leaves[k] for k in wanted], given)
    return cotangents, gradients


def _jax_gradients(case, tensors, wanted, cotangents, backend):
    import jax

    converted = {k: convert(t, backend) for k, t in tensors.items()}
    rest = {k: v for k, v in converted.items() if k not in wanted}

    @jax.jit
    def gradients(values, given):
        outputs, pull = jax.vjp(
            lambda v: as_tuple(call(case, {**dict(zip(wanted, v, strict=True)), **rest})), values
        )
        cast = tuple(g.astype(o.dtype) for g, o in zip(given, outputs, strict=True))
        return pull(cast)[0]

    given = tuple(convert(c.float(), backend) for c in cotangents)
    return gradients(tuple(converted[k] for k in wanted), given)


def check_finite_differences(case: Case, backend: str):
    """The gradient along a random direction against the forward's own central difference."""
    generator = seeded(case.name, "differences")
    tensors = rounded(case, "float32", generator, True)
    moved = {k: convert(t, backend).detach() for k, t in tensors.items()}
    for name in case.differentiable:
        if name not in moved:
            continue
        leaves = {
            k: t.clone().requires_grad_(k == name) if t.is_floating_point() else t
            for k, t in moved.items()
        }
        outputs = as_tuple(call(case, leaves))
        weights = [normal(generator, *o.shape).float().to(o.device) for o in outputs]
        (gradient,) = torch.autograd.grad(outputs, [leaves[name]], weights)
        direction = normal(generator, *gradient.shape).float().to(gradient.device)
        step = 1e-2

        def value(sign, name=name, direction=direction, weights=weights, step=step):
            shifted = {**moved, name: moved[name] + sign * step * direction}
            outs = as_tuple(call(case, shifted))
            return sum((o.double() * w.double()).sum() for o, w in zip(outs, weights, strict=True))

        numeric = ((value(+1) - value(-1)) / (2 * step)).item()
        analytic = (gradient.double() * direction.double()).sum().item()
        scale = (gradient.double().norm() * direction.double().norm()).item()
        assert abs(numeric - analytic) <= 5e-3 * scale + 1e-4, (
            f"{case} d{name}: {numeric} {analytic}"
        )


def check_each_gradient_alone(function, tensors: dict):
    """One gradient at a time equals that of all together."""

    def gradients(names):
        leaves = {k: v.detach().requires_grad_(k in names) for k, v in tensors.items()}
        y = function(**leaves)
        found = torch.autograd.grad(y.square().sum(), [leaves[n] for n in names])
        return dict(zip(names, found, strict=True))

    together = gradients(list(tensors))
    for name in tensors:
        assert torch.equal(gradients([name])[name], together[name]), name


def raises(text: str):
    """An flashkernel.Error whose message has all these words in it."""
    return pytest.raises(fk.Error, match=text)
