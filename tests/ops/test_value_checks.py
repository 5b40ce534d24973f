"""FK_CHECK=1: values in index tensors on a GPU are checked as on the CPU, with the same messages.
The library reads the variable once, so each value of it needs a process of its own."""

import os
import subprocess
import sys

import pytest

import software_gpu
from harness import HAVE_CUDA

pytestmark = pytest.mark.skipif(not (HAVE_CUDA or software_gpu.ON), reason="needs a GPU")

START = """
import contextlib, os, torch, flashkernel as fk
if "FK_SOFTGPU_ARCH" in os.environ:
    device, synchronize = "cpu", lambda: None
else:
    device, synchronize = "cuda", torch.cuda.synchronize

@contextlib.contextmanager
def told():
    try:
        yield
    except fk.Error as error:
        print(error)
"""

CROSS_ENTROPY = """
logits = torch.ones(4, 10, device=device)
targets = torch.tensor([0, 9, 0, 9, 3, 9, -100, 9], device=device)
assert fk.cross_entropy(logits, targets[::2]).isfinite()
targets[4] = 10
with told():
    fk.cross_entropy(logits, targets[::2])
    synchronize()
"""

ROPE = """
x, table = torch.ones(2, 3, 2, 8, device=device), torch.ones(4, 4, device=device)
positions = torch.tensor([[0, 1, 2], [3, 2, 1]], device=device, dtype=torch.int32)
assert fk.rope(x, table, table, positions=positions).isfinite().all()
positions[1, 2] = -1
with told():
    fk.rope(x, table, table, positions=positions)
    synchronize()
"""

# A capture cannot wait for the values: they are not looked at, and the graph is whole.
CAPTURE = """
logits, targets = torch.ones(4, 10, device=device), torch.full((4,), 10, device=device)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = fk.cross_entropy(logits, targets)
graph.replay()
assert loss.isnan()
"""


def output_of(script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bad_values_raise():
    assert output_of(CROSS_ENTROPY + ROPE, FK_CHECK="1") == [
        "cross_entropy: targets: expected values from 0 to 9 or ignore_index=-100, got 10 at row 2",
        "rope: positions: expected values from 0 to 3, got -1 at (1, 2)",
    ]
    assert output_of(CROSS_ENTROPY + ROPE, FK_CHECK="0") == []


@pytest.mark.skipif(not HAVE_CUDA, reason="needs a GPU that records graphs")
def test_a_capture_is_not_disturbed():
    assert output_of(CAPTURE, FK_CHECK="1") == []
