"""The backbones of a real-time agent: a window of frames, one frame, or a step of training
(forward, backward, torch's fused AdamW). Ours are `flashkernel.torch.backbones` or, of NumPy
arrays, `flashkernel.backbones`. Peers are the same weights in torch's own ops, plain, compiled, and
where it is installed in ONNX Runtime; they, too, see no more frames than the newest output depends
on."""

import functools
import io

import numpy as np

from .counts import Count
from .workloads import Workload, normal

NETS = ("MLP", "GatedSSM", "GRU", "LSTM", "Mamba", "Attention", "Jamba")
INPUTS = 288
#: Whose scan is a loop in Python over the frames, in torch's own ops.
_WITH_LOOPS = ("Mamba", "Jamba")


@functools.cache
def _parameters(name):
    """The weights that all have: ours, the peers, and what is counted."""
    from .. import backbones

    return backbones.parameters(name, np.random.default_rng(0), input_size=INPUTS)


def _net(fk, params, t):
    import torch

    net = getattr(fk.torch.backbones, params["net"])(INPUTS)
    weights = _parameters(params["net"])
    net.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return net.to(t["x"].device, t["x"].dtype)


def _window(params, rng):
    return {"x": normal(rng, params["B"], params["L"], INPUTS)}


def _frame(params, rng):
    return {"x": normal(rng, params["B"], INPUTS)}


def _training(forward, net):
    """A step on the mean square of the newest frame's output, so small that weights stay as they
    are."""
    import torch

    cuda = next(net.parameters()).is_cuda
    # Capturable: on a GPU the whole step is one graph.
    optimiser = torch.optim.AdamW(net.parameters(), 1e-6, fused=True, capturable=cuda)

    def call(x):
        with torch.enable_grad():
            loss = forward(x).float().square().mean()
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        return loss.detach()

    return call


def _made_once(make_call):
    """A call that is made of the first tensors that it gets. A compiler sees only what comes after:
    one graph, which it compiles at the second call."""

    def make(params):
        made = []

        def first(m, t):
            made.append(make_call(m, params, t))
            return made[0](t["x"])

        def call(m, t):
            if made:
                return made[0](t["x"])
            return _outside_of_graphs(first, t)(m, t)

        return call

    return make


def _outside_of_graphs(function, t):
    if isinstance(t["x"], np.ndarray):
        return function
    import torch

    return torch.compiler.disable(function)


def _ready(fk, params, t):
    if isinstance(t["x"], np.ndarray):
        return fk.backbones.Backbone(_parameters(params["net"]))
    net = _net(fk, params, t).requires_grad_(False)
    return fk.torch.quantize(net, "int8") if params.get("int8") else net


def _float32(torch, params, t):
    """Our own network, not quantized."""
    import flashkernel as fk

    return _ready(fk, {**params, "int8": False}, t)


def _our_step(fk, params, t):
    return _stepping(_ready(fk, params, t), params)


def _float32_step(torch, params, t):
    return _stepping(_float32(torch, params, t), params)


def _stepping(net, params):
    """Frame after frame, from the state that the last one left."""
    state = [net.init_state(params["B"])]

    def step(x):
        out, state[0] = net.step(x, state[0])
        return out

    return step


def _our_training(fk, params, t):
    net = _net(fk, params, t)
    return _training(net, net)


def _plain(params, t):
    import flashkernel as fk

    from .agent_in_torch import PlainBackbone

    net = _net(fk, params, t)
    plain = PlainBackbone(net)
    context = net.context or params["L"]
    return net, lambda x: plain(x[:, -context:])[:, -1]


def _torch(torch, params, t):
    net, newest = _plain(params, t)
    net.requires_grad_(False)
    return newest


def _torch_step(torch, params, t):
    import flashkernel as fk

    from .agent_in_torch import PlainBackbone

    return _stepping(PlainBackbone(_net(fk, params, t).requires_grad_(False)), params)


def _torch_training(torch, params, t):
    net, newest = _plain(params, t)
    return _training(newest, net)


def _onnxruntime(torch, params, t):
    import onnxruntime

    class Newest(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.newest = _plain(params, t)

        def forward(self, x):
            return self.newest(x)

    file = io.BytesIO()
    torch.onnx.export(Newest().eval(), (t["x"],), file, input_names=["x"], dynamo=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(
        file.getvalue(), options, providers=["CPUExecutionProvider"]
    )
    return lambda x: session.run(None, {"x": x.numpy()})


#: The layers that `flashkernel.torch.quantize` replaces.
_IN_8_BITS = ("embed", "in_proj", "x_proj", "out_proj", "qkv", "up", "down")


def _count(direction, params, size, training=False):
    """Products alone. Of the last block that looks back, and behind it, only what the newest frame
    needs: of a window that is all that must be done. Those of 8 bits have no ceiling, and are not
    counted."""
    from ..backbones import Backbone

    weights_of = _parameters(params["net"])
    net = Backbone(weights_of)
    length = params.get("L", 1)
    frames = min(length, net.context or length)
    flops = weights = 0
    for name, weight in weights_of.items():
        in_8_bits = params.get("int8") and weight.ndim == 2 and name.split(".")[-2] in _IN_8_BITS
        weights += weight.size * (1 if in_8_bits else size)
        if weight.ndim != 2 or name.endswith("A_log"):
            continue
        block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        alone = net.last_looking is None or block >= net.last_looking
        flops += 2 * weight.size * (1 if alone else frames)
    flops *= params["B"]
    x, out = (params["B"] * n * size for n in (frames * INPUTS, net.hidden))
    if training:  # weights and both of AdamW's moments are read and written anew
        return Count(x + 3 * weights, 3 * weights, 3 * flops, in_place=3 * weights)
    return Count(x + weights, out, 0 if params.get("int8") else flops)


def _workload(op, inputs, ours, peers, count=_count, loops=()):
    peers = {name: _made_once(make) for name, make in peers.items()}

    def loops_of(params):
        return loops if params["net"] in _WITH_LOOPS else ()

    return Workload(
        op, inputs, _made_once(ours), peers, count, products=True, options=True, errors=False,
        loops=loops_of,
    )  # fmt: skip


WORKLOADS = [
    _workload(
        "agent", _window, _ready,
        {"torch": _torch, "onnxruntime": _onnxruntime, "float32": _float32},
        loops=("torch", "onnxruntime"),
    ),
    _workload(
        "agent_step", _frame, _our_step, {"torch": _torch_step, "float32": _float32_step}
    ),
    _workload(
        "agent_training", _window, _our_training, {"torch": _torch_training},
        functools.partial(_count, training=True), loops=("torch",),
    ),
]  # fmt: skip
