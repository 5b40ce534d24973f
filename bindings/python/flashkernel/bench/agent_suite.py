"""The cases of the suite `agent`: which backbones, sizes and precisions, beside which peers."""

import importlib.util
from dataclasses import replace

from .agent import NETS
from .suites import Case

#: So many frames, for the tail of their times.
_FRAMES = 10_000


def _peers(op, device, dtype, int8) -> tuple:
    """Those that are installed and take such a case. 8 bits stand beside our own float32."""
    if op == "agent_training":
        return ("torch_eager",)
    if int8:
        return ("float32",)
    found = all(importlib.util.find_spec(p) for p in ("onnx", "onnxruntime"))
    exported = found and op == "agent" and device == "cpu" and dtype == "float32"
    return ("torch_eager", "torch_compile", *(("onnxruntime",) if exported else ()))


def _case(op, device, net, dtype="float32", **params) -> Case:
    int8 = "int8" in params
    return Case(
        op, "fwd", dtype, (("net", net), *params.items()), _peers(op, device, dtype, int8), device,
        ("numpy", "torch") if dtype == "float32" and not int8 else ("torch",),
        _FRAMES if params["B"] == 1 else 0,
    )  # fmt: skip


def cases(device):
    for net in NETS:
        for b in (1, 32):
            for dtype in ("float32", "bfloat16"):
                yield _case("agent", device, net, dtype, B=b, L=60)
                yield _case("agent_step", device, net, dtype, B=b)
            if device == "cpu":
                yield _case("agent", device, net, B=b, L=60, int8=True)
                yield _case("agent_step", device, net, B=b, int8=True)
        for length in (60, 120, 180):
            training = _case("agent_training", device, net, B=32, L=length)
            yield replace(training, frameworks=("torch",))


def frames():
    """A window and a step of each backbone alone."""
    for net in NETS:
        yield replace(_case("agent", "", net, B=1, L=60), peers=("none",), runs=0)
        yield replace(_case("agent_step", "", net, B=1), peers=("none",), runs=0)
