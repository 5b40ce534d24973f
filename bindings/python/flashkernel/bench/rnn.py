"""The workloads of recurrent nets: a layer of LSTM or GRU, forward or with its gradients, and one
frame of several layers. Peers are torch's module and, where they are installed, ONNX Runtime and
OpenVINO, each with the layout that it likes best."""

import functools
import importlib.util

import numpy as np

from . import counts
from .workloads import Workload, normal

GATES = {"lstm": 4, "gru": 3}
# torch's gates in the order that ONNX has: i, f, g, o -> i, o, f, g and r, z, n -> z, r, n.
_ONNX_ORDER = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


def peers(train: bool) -> tuple:
    """Those that are installed; others than torch have no gradients."""
    more = () if train else ("onnxruntime", "openvino")
    # Both are given the layer as an ONNX model.
    found = importlib.util.find_spec("onnx") is not None
    return ("torch", *(p for p in more if found and importlib.util.find_spec(p)))


def inputs(op, params, rng):
    b, length, width, hidden = (params[key] for key in "BLIH")
    rows, scale = GATES[op] * hidden, np.float32(hidden**-0.5)
    return {
        "x": normal(rng, b, length, width),
        "w_ih": normal(rng, rows, width) * scale,
        "w_hh": normal(rng, rows, hidden) * scale,
        "b_ih": normal(rng, rows) * scale,
        "b_hh": normal(rng, rows) * scale,
    }


def _with_gradients(call, t):
    """The outputs and the gradients of all tensors, from ones."""
    import torch

    with torch.enable_grad():
        leaves = {k: v.detach().requires_grad_() for k, v in t.items()}
        y = call(leaves)
        return y, torch.autograd.grad(y, list(leaves.values()), torch.ones_like(y))


def _ours(op):
    def make(params):
        def call(fk, t):
            if params.get("train"):
                return _with_gradients(lambda leaves: getattr(fk, op)(**leaves)[0], t)
            return getattr(fk, op)(**t)

        return call

    return make


def _torch(op):
    def make(params):
        def call(m, t):
            # The functions below torch's modules, which tell weights apart by their place.
            function = getattr(m, op)

            def layer(leaves):
                x = leaves["x"]
                zeros = x.new_zeros(1, x.shape[0], params["H"])
                hx = (zeros, zeros) if op == "lstm" else zeros
                weights = [leaves[k] for k in ("w_ih", "w_hh", "b_ih", "b_hh")]
                return function(x, hx, weights, True, 1, 0.0, m.is_grad_enabled(), False, True)

            if params.get("train"):
                return _with_gradients(lambda leaves: layer(leaves)[0], t)
            return layer(t)

        return call

    return make


def _onnx_model(op, t) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    hidden = t["w_hh"].shape[1]

    def ordered(a):
        return np.concatenate([np.split(a, GATES[op])[g] for g in _ONNX_ORDER[op]])[None]

    bias = np.concatenate([ordered(t["b_ih"]), ordered(t["b_hh"])], 1)
    weights = {"W": ordered(t["w_ih"]), "R": ordered(t["w_hh"]), "B": bias}
    states = ["h", "c"][: 1 + (op == "lstm")]
    options = {"linear_before_reset": 1} if op == "gru" else {}
    node = helper.make_node(
        op.upper(), ["x", *weights], ["y", *states], hidden_size=hidden, **options
    )
    b, length, inputs = t["x"].shape
    of_floats = functools.partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    graph = helper.make_graph(
        [node],
        op,
        [of_floats("x", shape=[length, b, inputs])],
        [
            of_floats("y", shape=[length, 1, b, hidden]),
            *(of_floats(s, shape=[1, b, hidden]) for s in states),
        ],
        [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in weights.items()],
    )
    opsets = [helper.make_opsetid("", 14)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def _once(op, prepare):
    """A peer that gets the layer as a file once, and x in its layout, steps first."""

    def make(params):
        made = []

        def call(m, t):
            if not made:
                arrays = {k: v.numpy() for k, v in t.items()}
                x = np.ascontiguousarray(arrays["x"].swapaxes(0, 1))
                made.append(prepare(_onnx_model(op, arrays), x, m.get_num_threads()))
            return made[0]()

        return call

    return make


def _onnxruntime(model, x, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads spin while a run lasts, but not into the calls of others, whose core they held.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"x": x})


def _openvino(model, x, threads):
    import openvino

    core = openvino.Core()
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY",
               "INFERENCE_PRECISION_HINT": "f32"}  # fmt: skip
    compiled = core.compile_model(core.read_model(model), "CPU", options)
    request = compiled.create_infer_request()
    request.set_tensor("x", openvino.Tensor(x, shared_memory=True))

    def call():
        request.infer()
        return request

    return call


def _step_inputs(params, rng):
    return {"x": normal(rng, params["B"], params["H"])}


def _step(op, of):
    """One frame of all layers. `of(m, op, hidden, layers)` gives the module's step."""

    def make(params):
        made = []

        def call(m, t):
            if not made:
                made.append(of(m, op, params["H"], params["layers"]))
            return made[0](t["x"])

        return call

    return make


def _our_module(fk, op, hidden, layers):
    module = getattr(fk.torch, op.upper())(hidden, hidden, layers).requires_grad_(False)
    state = []

    def step(x):
        y, after = module.step(x, state[0] if state else None)
        state[:] = [after]
        return y

    return step


def _torch_module(m, op, hidden, layers):
    module = getattr(m.nn, op.upper())(hidden, hidden, layers).requires_grad_(False)
    state = []

    def step(x):
        y, after = module(x[None], state[0] if state else None)
        state[:] = [after]
        return y

    return step


WORKLOADS = [
    *(
        Workload(
            op,
            functools.partial(inputs, op),
            _ours(op),
            {
                "torch": _torch(op),
                "onnxruntime": _once(op, _onnxruntime),
                "openvino": _once(op, _openvino),
            },
            counts.recurrent(GATES[op]),
            products=True,
            options=True,
            errors=False,
        )
        for op in GATES
    ),
    *(
        Workload(
            f"{op}_step",
            _step_inputs,
            _step(op, _our_module),
            {"torch": _step(op, _torch_module)},
            counts.recurrent_step(GATES[op]),
            options=True,
            errors=False,
        )
        for op in GATES
    ),
]
