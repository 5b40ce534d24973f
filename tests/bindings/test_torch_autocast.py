"""The torch binding under torch.autocast: every op beside the same call with casts made by hand,
in every place where a region may stand."""

import numpy as np
import pytest
import torch

import flashkernel as fk
from flashkernel.torch import _operators
from torch_samples import (
    DIFFERENTIABLE,
    DIFFERENTIABLE_CASE,
    EVERY_CASE,
    EVERY_OP,
    FLOATS,
    cuda_autocast,
    loss_of,
    on_a_gpu,
    outputs_of,
    same_values,
    sampling,
    with_gradient,
)

LOWER = FLOATS[1:]
EVERY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu"] + ["cuda"] * (torch.cuda.is_available() and bool(fk.build_info()["gpus"]))
)


def mixed(op, seed, optionals, attributes, dtypes=FLOATS, requires_grad=(), device="cpu"):
    """Arguments for an op, whose tensors come in different dtypes as in an autocast program."""
    random = np.random.default_rng(seed)
    result = {}
    sample = sampling.draw(op, seed, optionals=optionals, attributes=attributes)
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(value.copy()).to(device)
            if value.is_floating_point():
                value = value.to(dtypes[random.integers(len(dtypes))])
            value.requires_grad_(name in requires_grad)
        result[name] = value
    return result


def cast_by_hand(op, arguments: dict, lower, device="cpu") -> dict:
    """What the op's rule says, in the words of INTERFACE: activations of one dtype, parameters of
    that or float32."""
    rules = {f.name: f.dtype_rule for f in op.inputs}
    given = [v.dtype for n, v in arguments.items() if rules.get(n) == "T" and v is not None]
    activation = torch.float32 if len(set(given)) > 1 else given[0]
    if op.autocast == "lower":
        activation = lower
    elif op.autocast == "float32_on_gpu" and device == "cuda":
        activation = torch.float32
    result = dict(arguments)
    for name, value in arguments.items():
        if value is None or rules.get(name) not in ("T", "P", "F"):
            continue
        fits = rules[name] == "P" and value.dtype in (activation, torch.float32)
        if not fits:
            result[name] = value.to(activation if rules[name] == "T" else torch.float32)
    return result


def call_once(op, arguments: dict, public=None):
    """The public call, which updates the arguments' own state."""
    positional, keywords = sampling.split(op, arguments)
    return outputs_of((public or getattr(fk, op.public_name))(*positional, **keywords))


def copies(arguments: dict) -> dict:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


# --- every op, by the rule it declares ------------------------------------------------------------


@EVERY_DEVICE
@pytest.mark.parametrize("lower", LOWER)
@EVERY_CASE
def test_values_are_those_of_casts_by_hand(op, optionals, attributes, lower, device):
    for seed in range(4):
        arguments = mixed(op, seed, optionals, attributes, device=device)
        by_hand = copies(cast_by_hand(op, arguments, lower, device))
        expected = call_once(op, by_hand)
        given = copies(arguments)
        with torch.autocast(device, dtype=lower):
            outputs = call_once(op, given)
        for ours, plain in zip(outputs, expected, strict=True):
            same_values(ours, plain)
        for name in (f.updates for f in op.state_outputs):
            assert given[name].dtype == arguments[name].dtype
            same_values(given[name], by_hand[name].to(arguments[name].dtype))


@EVERY_DEVICE
@pytest.mark.parametrize("lower", LOWER)
@DIFFERENTIABLE_CASE
def test_gradients_are_those_of_casts_by_hand(op, optionals, attributes, lower, device):
    for seed in range(2):
        names = with_gradient(op, mixed(op, seed, optionals, attributes))
        results = []
        for autocast in (False, True):
            arguments = mixed(op, seed, optionals, attributes, requires_grad=names, device=device)
            with torch.autocast(device, dtype=lower, enabled=autocast):
                given = arguments if autocast else cast_by_hand(op, arguments, lower, device)
                outputs = call_once(op, given)
            grads = torch.autograd.grad(loss_of(outputs), [arguments[n] for n in names])
            assert [g.dtype for g in grads] == [arguments[n].dtype for n in names]
            results.append([*outputs, *grads])
        if device == "cpu":
            same_values(*results)
        else:  # where sums of gradients need not be added in one order
            torch.testing.assert_close(*results, equal_nan=True)


@DIFFERENTIABLE_CASE
def test_backward_inside_the_region(op, optionals, attributes):
    names = with_gradient(op, mixed(op, 3, optionals, attributes))
    grads = []
    for inside in (False, True):
        arguments = mixed(op, 3, optionals, attributes, requires_grad=names)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(call_once(op, arguments))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append([arguments[n].grad for n in names])
    same_values(*grads)


def test_backward_by_compiled_autograd():
    torch._dynamo.reset()
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    norm = torch.ones(8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(fk.attention(fk.rms_norm(q, norm), q, q))
    expected = torch.autograd.grad(loss, (q, norm), retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close((q.grad, norm.grad), expected)


@EVERY_OP
def test_compiled(op):
    """The region around the compiled function, and inside of it."""
    arguments = mixed(op, 4, True, {})
    names = [n for n, v in arguments.items() if isinstance(v, torch.Tensor)]
    needed = with_gradient(op, arguments)
    public = getattr(fk, op.public_name)

    def function(*tensors):
        values = {**arguments, **dict(zip(names, tensors, strict=True))}
        return call_once(op, values, public)

    def with_region(*tensors):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(*tensors)

    results = []
    for compiled in (None, function, with_region):
        torch._dynamo.reset()
        inputs = [arguments[n].detach().clone().requires_grad_(n in needed) for n in names]
        call = torch.compile(compiled, fullgraph=True, backend="aot_eager") if compiled else None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compiled is not with_region):
            outputs = (call or function)(*inputs)
        targets = [t for t in inputs if t.requires_grad]
        grads = torch.autograd.grad(loss_of(outputs), targets) if targets else ()
        results.append([*outputs, *grads])
    for compiled in results[1:]:
        assert [t.dtype for t in compiled] == [t.dtype for t in results[0]]
        torch.testing.assert_close(compiled, results[0], equal_nan=True)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@DIFFERENTIABLE
def test_transforms(op):
    """torch.func.grad and vmap, whose wrapped tensors do not say what they need."""
    # Torch's own stack, which vmap calls, refuses float16 in a region of bfloat16.
    arguments = mixed(op, 5, False, {}, dtypes=FLOATS[:2])
    names = with_gradient(op, arguments)

    def results(*values):
        given = {**copies(arguments), **dict(zip(names, values, strict=True))}
        return call_once(op, given)

    def loss(*values):
        return sum(o.float().square().sum() for o in results(*values))

    places = tuple(range(len(names)))
    values = [arguments[n] for n in names]
    stacked = [torch.stack([v, v / 2]) for v in values]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.func.grad(loss, places)(*values)
        each = torch.func.vmap(torch.func.grad(loss, places))(*stacked)
        outputs = torch.func.vmap(results)(*stacked)
        leaves = [v.clone().requires_grad_() for v in values]
        expected = torch.autograd.grad(loss(*leaves), leaves)
        expected_outputs = results(*values)
    assert [g.dtype for g in grads] == [v.dtype for v in values]
    torch.testing.assert_close(grads, expected, equal_nan=True)
    for ours, theirs in ((each, expected), (outputs, expected_outputs)):
        torch.testing.assert_close(tuple(t[0] for t in ours), tuple(theirs), equal_nan=True)


@EVERY_OP
def test_regions_inside_regions(op):
    arguments = cast_by_hand(op, mixed(op, 6, None, {}, dtypes=FLOATS[:1]), torch.float32)
    plain = call_once(op, copies(arguments))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            switched_off = call_once(op, copies(arguments))
        with torch.autocast("cpu", dtype=torch.float16):
            inner = call_once(op, copies(arguments))
        outer = call_once(op, copies(arguments))
    after = call_once(op, copies(arguments))
    with cuda_autocast(torch.float16):
        of_another_device = call_once(op, copies(arguments))
    for same in (switched_off, after, of_another_device):
        same_values(same, plain)
    for outputs, lower in ((inner, torch.float16), (outer, torch.bfloat16)):
        by_hand = call_once(op, copies(cast_by_hand(op, arguments, lower)))
        same_values(outputs, by_hand)


@EVERY_OP
def test_what_autocast_does_not_touch(op):
    """float64, and 8-bit floats, which a caller chose."""
    activation = next(f.name for f in op.inputs if f.dtype_rule == "T")
    arguments = mixed(op, 7, False, {}, dtypes=FLOATS[:1])
    arguments[activation] = arguments[activation].double()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(fk.Error, match=f"{op.public_name}: {activation}: .*float64"),
    ):
        call_once(op, arguments)


@EVERY_OP
def test_meta_tensors_have_no_autocast(op):
    arguments = mixed(op, 9, False, {}, dtypes=FLOATS[:1])
    expected = call_once(op, copies(arguments))
    needed = with_gradient(op, arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to("meta").requires_grad_(name in needed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = call_once(op, arguments)
    assert [(t.shape, t.dtype) for t in outputs] == [(t.shape, t.dtype) for t in expected]


def test_eight_bit_activations_stay():
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    q, k, v = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
    scale = torch.full((2,), 0.5)
    expected = fk.attention(q, k, v, q_scale=scale)
    with torch.autocast("cpu", dtype=torch.float16):
        same_values(fk.attention(q, k, v, q_scale=scale.half()), expected)


def test_parts_of_one_array():
    outs, lses = list(torch.randn(2, 1, 3, 2, 8)), list(torch.randn(2, 1, 2, 3))
    expected = fk.merge_attention_states(outs, lses)
    mixed = [outs[0], outs[1].bfloat16()]
    compiled = torch.compile(fk.merge_attention_states, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for merge in (fk.merge_attention_states, compiled):
            results = merge(mixed, lses)
            assert results[0].dtype == torch.float32
            torch.testing.assert_close(results, expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(fk.Error, match="outs: part 1: expected dtype torch.float32"):
        fk.merge_attention_states(mixed, lses)


def test_in_place():
    x, angles = torch.randn(1, 5, 2, 8).bfloat16(), torch.randn(5, 4)
    cos, sin = angles.cos().half(), angles.sin()
    expected = fk.rope(x, cos.float(), sin)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        version, result = x._version, fk.rope(x, cos, sin, inplace=True)
    assert result is x and x._version > version
    same_values(x, expected)


# --- on a GPU, without one ------------------------------------------------------------------------


@EVERY_OP
def test_rules_of_a_gpu(op):
    for optionals in (False, True):
        arguments = mixed(op, 8, optionals, {})
        by_hand = cast_by_hand(op, arguments, torch.float16, "cuda")
        for f in op.state_outputs:  # which could not be copied back without a GPU
            arguments[f.updates] = by_hand[f.updates]
        expected = call_once(op, copies(by_hand))
        with torch._subclasses.FakeTensorMode(), cuda_autocast(torch.float16):
            on_gpu = {
                k: on_a_gpu(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
            }
            outputs = call_once(op, on_gpu)
        for ours, plain in zip(outputs, expected, strict=True):
            assert (ours.device.type, ours.dtype, ours.shape) == ("cuda", plain.dtype, plain.shape)


def test_every_operator_has_the_keys():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for operators in _operators.registered.values():
        for v in operators.variants:
            for overload in filter(None, (v.forward, v.in_place, v.differentiable)):
                for key in ("AutocastCPU", "AutocastCUDA"):
                    assert has_kernel(overload._name, key), (overload, key)
