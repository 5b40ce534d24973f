"""Programs that leave Python with the ops inside: torch.export, packages of Inductor, torch.jit."""

import pytest
import torch

import flashkernel as fk
from torch_samples import (
    DIFFERENTIABLE_CASE,
    loss_of,
    outputs_of,
    same_values,
    sampling,
    tensor_function,
    to_torch,
    with_gradient,
)


class Scan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.A = torch.nn.Parameter(-torch.rand(6, 4))

    def forward(self, u, delta, B, C):
        return fk.selective_scan(u, delta, self.A, B, C)

    @staticmethod
    def inputs(length):
        sizes = (6, 6, 4, 4)
        return tuple(torch.rand(2, length, n) for n in sizes)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_module_for_any_length(strict):
    scan, length = Scan(), torch.export.Dim("length", min=2, max=4096)
    shapes = ({1: length},) * 4
    exported = torch.export.export(scan, Scan.inputs(40), dynamic_shapes=shapes, strict=strict)
    module = exported.module()
    for length in (2, 31, 100):
        inputs = Scan.inputs(length)
        result, expected = module(*inputs), scan(*inputs)
        same_values(result, expected)
        gradients = [torch.autograd.grad(y.sum(), scan.A) for y in (result, expected)]
        same_values(*gradients)


class Attention(torch.nn.Module):
    """With a scale that is left out, one that is given, and a residual that is optional."""

    def forward(self, q, k, v):
        out = fk.attention(q, k, v, causal=True)
        scaled, lse = fk.attention(q, k, v, scale=0.25, return_lse=True)
        return fk.rms_norm(out, residual=scaled)[0], lse


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_package_of_a_module(tmp_path):
    """By torch.export.save, and ahead of time by Inductor, where None is no number."""
    inputs = tuple(torch.randn(3, 2, 5, 2, 8).unbind(0))
    with torch.no_grad():
        expected = Attention()(*inputs)
        exported = torch.export.export(Attention(), inputs)
        torch.export.save(exported, tmp_path / "exported.pt2")
        loaded = torch.export.load(tmp_path / "exported.pt2").module()
        same_values(loaded(*inputs), expected)
        package = torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(tmp_path / "package.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        same_values(tuple(torch._inductor.aoti_load_package(package)(*inputs)), expected)


def test_numbers_that_are_left_out():
    """None, or, as in programs from before None was one, infinity."""
    operator = torch.ops.flashkernel.attention_fwd.default
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
    expected = fk.attention(q, k, v)
    least = {"bool": False, "int": -1, "float": 0.0}
    given = {a.name: least.get(str(a.type)) for a in operator._schema.arguments}
    for scale in (None, float("inf"), 8**-0.5):
        arguments = given | {"q": q, "k": k, "v": v, "scale": scale}
        torch.testing.assert_close(operator(*arguments.values()), expected)
    assert "float? scale" in str(operator._schema)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_trace_of_a_module(tmp_path):
    scan, inputs = Scan(), Scan.inputs(40)
    torch.jit.save(torch.jit.trace(scan, inputs), tmp_path / "scan.pt")
    loaded = torch.jit.load(tmp_path / "scan.pt")
    inputs = Scan.inputs(7)
    result, expected = loaded(*inputs), scan(*inputs)
    same_values(result, expected)
    result.sum().backward()
    expected.sum().backward()
    same_values(loaded.A.grad, scan.A.grad)


class AttentionBlock(torch.nn.Module):
    """Whose op meets tensors that only need a gradient because of what they were computed from."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        angles = torch.arange(64.0)[:, None] / 10 ** torch.arange(4)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 2, 8).unbind(2)
        q = fk.rope(q, self.cos, self.sin)
        k = fk.rope(k * 1, self.cos, self.sin, inplace=True)
        y = self.out(fk.attention(q, k, v, causal=True).flatten(2))
        return fk.rms_norm(y, residual=x)[0] + fk.layer_norm(x)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_trace_of_an_attention_block(mode, tmp_path):
    torch.manual_seed(0)
    block = AttentionBlock()
    with mode():
        traced = torch.jit.trace(block, torch.randn(2, 5, 16))
    torch.jit.save(traced, tmp_path / "block.pt")
    loaded = torch.jit.load(tmp_path / "block.pt")
    x = torch.randn(3, 7, 16)
    result, expected = loaded(x), block(x)
    torch.testing.assert_close(result, expected)
    for y in (result, expected):
        y.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in loaded.named_parameters()}
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@DIFFERENTIABLE_CASE
def test_trace_of_a_function(op, optionals, attributes, mode, tmp_path):
    """No module says that it is traced, and its arguments require gradients."""
    sample = sampling.draw(op, 20, optionals=optionals, attributes=attributes)
    function, names = tensor_function(op, sample)
    needed = with_gradient(op, sample)
    with mode():
        given = to_torch(sample, requires_grad=needed)
        traced = torch.jit.trace(function, tuple(given[n] for n in names))
    torch.jit.save(traced, str(tmp_path / "function.pt"))
    results = []
    for call_ in (function, torch.jit.load(tmp_path / "function.pt")):
        given = to_torch(sample, requires_grad=needed)
        outputs = outputs_of(call_(*(given[n] for n in names)))
        loss_of(outputs).backward()
        results.append([*outputs, *(given[n].grad for n in needed)])
    torch.testing.assert_close(*results, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_trace_of_a_function_that_closes_over_tensors():
    """As of torch's own ops: those that require a gradient cannot be constants of a program."""
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    own = torch.nn.functional.layer_norm
    for function in (lambda x: fk.layer_norm(x, weight), lambda x: own(x, (8,), weight)):
        with pytest.raises(RuntimeError, match="insert a Tensor that requires grad as a constant"):
            torch.jit.trace(function, x)
    detached = weight.detach()
    traced = torch.jit.trace(lambda x: fk.layer_norm(x, detached), x.clone().requires_grad_())
    y = torch.randn(2, 8, requires_grad=True)
    torch.testing.assert_close(traced(y), own(y, (8,), detached))
    gradients = [
        torch.autograd.grad(f(y).square().sum(), y)
        for f in (traced, lambda y: own(y, (8,), detached))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_trace_under_autocast():
    block, x = AttentionBlock(), torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(block, x)
        expected = block(x)
    result = traced(x)  # outside of the region: its casts are part of the program
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
