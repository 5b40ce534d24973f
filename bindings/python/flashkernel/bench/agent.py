"""The backbones of a real-time agent (`flashkernel.torch.backbones`): a window of frames, one
frame, or a step of training. Peers are the same weights in torch's own ops, plain, compiled, and
where it is installed in ONNX Runtime; they, too, see no more frames than the newest output depends
on."""

import functools
import importlib.util
import io

from .counts import Count
from .workloads import Workload, normal

NETS = ("MLP", "Mamba", "Attention", "LSTM", "GRU", "Jamba", "GatedSSM")
INPUTS = 288


def peers() -> tuple:
    """Those that are installed."""
    found = all(importlib.util.find_spec(p) for p in ("onnx", "onnxruntime"))
    return ("torch_eager", "torch_compile", *(("onnxruntime",) if found else ()))


def _net(fk, params, **made):
    return getattr(fk.torch.backbones, params["net"])(INPUTS, **made)


def _window(params, rng):
    return {"x": normal(rng, params["B"], params["L"], INPUTS)}


def _frame(params, rng):
    return {"x": normal(rng, params["B"], INPUTS)}


def _like(net, t):
    return net.to(t["x"].device, t["x"].dtype)


def _training(forward, net):
    """Every gradient of the mean square of the newest frame's output."""

    def call(x):
        import torch

        with torch.enable_grad():
            loss = forward(x).float().square().mean()
            return torch.autograd.grad(loss, list(net.parameters()))

    return call


def _made_once(make_call):
    """A call that is made of the first tensors that it gets."""

    def make(params):
        made = []

        def call(m, t):
            if not made:
                made.append(make_call(m, params, t))
            return made[0](t["x"])

        return call

    return make


def _ready(fk, params, t):
    net = _like(_net(fk, params), t).requires_grad_(False)
    return fk.torch.quantize(net, "int8") if params.get("int8") else net


def _our_step(fk, params, t):
    net = _ready(fk, params, t)
    state = [net.init_state(params["B"])]

    def step(x):
        out, state[0] = net.step(x, state[0])
        return out

    return step


def _our_training(fk, params, t):
    net = _like(_net(fk, params), t)
    return _training(net, net)


def _plain(params, t):
    import flashkernel as fk

    from .agent_in_torch import PlainBackbone

    net = _like(_net(fk, params), t)
    plain = PlainBackbone(net)
    context = net.context or params["L"]
    return net, lambda x: plain(x[:, -context:])[:, -1]


def _torch(torch, params, t):
    net, newest = _plain(params, t)
    net.requires_grad_(False)
    return newest


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


def _count(direction, params, size, training=False):
    """Products alone. Of the last block that looks back, and behind it, only what the newest frame
    needs: of a window that is all that must be done."""
    import flashkernel as fk

    net = _net(fk, params, device="meta")
    length = params.get("L", 1)
    frames = min(length, net.context or length)
    flops = numbers = 0
    for name, weight in net.named_parameters():
        numbers += weight.numel()
        if weight.ndim != 2 or name.endswith("A_log"):
            continue
        block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
        alone = net.last_looking is None or block >= net.last_looking
        flops += 2 * weight.numel() * (1 if alone else frames)
    weights = numbers * (1 if params.get("int8") else size)
    x, out = (params["B"] * n * size for n in (frames * INPUTS, net.hidden))
    if training:
        return Count(x + weights, weights, 3 * params["B"] * flops)
    return Count(x + weights, out, params["B"] * flops)


def _workload(op, inputs, ours, peers, count=_count):
    peers = {name: _made_once(make) for name, make in peers.items()}
    return Workload(
        op, inputs, _made_once(ours), peers, count, products=True, options=True, errors=False
    )


# A plain network has no step: it would see a whole window for each frame.
WORKLOADS = [
    _workload("agent", _window, _ready, {"torch": _torch, "onnxruntime": _onnxruntime}),
    _workload("agent_step", _frame, _our_step, {}),
    _workload(
        "agent_training", _window, _our_training, {"torch": _torch_training},
        functools.partial(_count, training=True),
    ),
]  # fmt: skip
