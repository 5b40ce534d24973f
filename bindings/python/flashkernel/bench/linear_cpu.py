"""Linear layers on a CPU: packed weights, and the peers that exist there alone: OpenVINO, and
torch's dynamically quantized layers."""

import importlib.util

import numpy as np

from . import counts
from .workloads import Workload, normal

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None


def weight_of(rng, *shape):
    return normal(rng, *shape) * np.float32(shape[-1] ** -0.5)


def once(make):
    """A function of (module, tensors) that makes its call for the first tensors it gets."""
    made = {}

    def call(m, t):
        if "call" not in made:
            made["call"] = make(m, t)
        return made["call"](t["x"])

    return call


def openvino(params):
    """The layer as a compiled model, in float32: by itself OpenVINO would round to bfloat16."""

    def make(torch, t):
        import openvino
        from openvino import opset13 as ops

        x = ops.parameter(list(t["x"].shape), np.float32)
        y = ops.matmul(x, ops.constant(t["weight"].float().numpy()), False, True)
        if "bias" in t:
            y = ops.add(y, ops.constant(t["bias"].float().numpy()))
        if params.get("activation") == "gelu_tanh":
            y = ops.gelu(y, "tanh")
        hints = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
        }
        model = openvino.Core().compile_model(openvino.Model([y], [x]), "CPU", hints)
        request = model.create_infer_request()

        def call(x):
            request.infer({0: x.numpy()}, share_inputs=True, share_outputs=True)
            return torch.from_numpy(request.get_output_tensor(0).data)

        return call

    return once(make)


def _torch_int8(params):
    """torch's layer with int8 weights and rows quantized as they come."""

    def make(torch, t):
        n, k = t["weight"].shape
        layer = torch.nn.Linear(k, n)
        with torch.no_grad():
            layer.weight.copy_(t["weight"])
            layer.bias.copy_(t["bias"])
        quantize = torch.ao.quantization.quantize_dynamic
        module = quantize(torch.nn.Sequential(layer), {torch.nn.Linear}, dtype=torch.qint8)
        gelu = torch.nn.functional.gelu
        if params.get("activation") == "gelu_tanh":
            return lambda x: gelu(module(x), approximate="tanh")
        return module

    return once(make)


def torch_linear(params):
    def call(m, t):
        y = m.nn.functional.linear(**t)
        if params.get("activation") == "gelu_tanh":
            y = m.nn.functional.gelu(y, approximate="tanh")
        return y

    return call


def linear_inputs(params, rng):
    m, k, n = (params[key] for key in "MKN")
    out = {"x": normal(rng, m, k), "weight": weight_of(rng, n, k)}
    if params.get("activation"):
        out["bias"] = normal(rng, n)
    return out


def _packed(params):
    activation, kept = params.get("activation"), params["kept"]
    return once(
        lambda fk, t: fk.PackedLinear(t["weight"], t["bias"], dtype=kept, activation=activation)
    )


def _unpacked(params):
    def call(m, t):
        import flashkernel

        return flashkernel.linear(**t, activation=params.get("activation"))

    return call


def _count(direction, p, size):
    """As of linear, but that the weight is read, and multiplied, as it is kept."""
    kept = {"float32": 4, "bfloat16": 2, "int8": 1}[p["kept"]]
    of_linear = counts.linear(direction, p, size)
    read = of_linear.read + p["N"] * p["K"] * (kept - size)
    return counts.Count(read, of_linear.written, of_linear.flops, arithmetic=p["kept"])


PACKED = Workload(
    "packed_linear",
    linear_inputs,
    _packed,
    {"torch": torch_linear, "torch_int8": _torch_int8, "linear": _unpacked, "openvino": openvino},
    _count,
    products=True,
    options=True,
)
