"""How each framework holds a workload's tensors and what is timed in it."""

import functools
import os

import numpy as np

from .workloads import PARAMETERS, Workload, bytes_moved

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


class Numpy:
    name = "numpy"
    devices = ("cpu",)
    directions = ("fwd",)
    peers = ("numpy",)
    waits: dict = {}  # how `time_cpu` waits for results that are not there yet

    def __init__(self, device: str):
        import flashkernel as fk

        self.fk, self.module = fk, np

    def versions(self) -> dict:
        return {"numpy": np.__version__}

    def dtype(self, name: str):
        if name == "bfloat16":
            import ml_dtypes

            return ml_dtypes.bfloat16
        return np.dtype(name)

    def tensors(self, arrays: dict, dtype: str) -> dict:
        cast = self.dtype(dtype)
        return {
            k: a.astype(cast) if a.dtype == np.float32 and k not in PARAMETERS else a
            for k, a in arrays.items()
        }

    def copies(self, tensors: dict, count: int) -> list[dict]:
        """The tensors themselves, and count - 1 copies of them."""
        return [tensors] + [{k: t.copy() for k, t in tensors.items()} for _ in range(count - 1)]

    def functions(self, workload: Workload, peers: list) -> dict:
        """What is compared, by name: functions of the tensors."""
        functions = {"ours": lambda t: workload.ours(self.fk, t)}
        if "numpy" in peers:
            functions["numpy"] = lambda t: workload.peers["numpy"](np, t)
        return functions

    def calls(self, functions: dict, workload: Workload, direction: str, tensors: dict) -> dict:
        """What is timed, by name: calls without arguments."""
        return {name: functools.partial(f, tensors) for name, f in functions.items()}

    def errors(self, workload, tensors) -> dict:
        return {}

    def peak_bytes(self, call) -> int:
        import tracemalloc

        tracemalloc.start()
        kept = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del kept
        return peak

    def copy_call(self, megabytes: int):
        a = np.ones(megabytes << 18, np.float32)
        b = np.empty_like(a)
        return (lambda: np.copyto(b, a)), 2 * a.nbytes

    def gemm_call(self, n: int):
        a = np.random.default_rng(0).standard_normal((n, n), np.float32)
        return lambda: a @ a


class Torch(Numpy):
    name = "torch"
    devices = ("cpu", "cuda")
    directions = ("fwd", "bwd")
    peers = ("torch_eager", "torch_compile")

    def __init__(self, device: str):
        # Torch's profiler, which counts the memory, writes a line of its own at each use.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        import torch

        import flashkernel as fk

        self.fk, self.module, self.device = fk, torch, device
        self.stream = None
        if device == "cuda":
            # Forward, backward and capture on one stream: autograd runs a backward where its
            # forward ran, and a capture sees one stream only.
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)

    def versions(self) -> dict:
        out = {"torch": self.module.__version__}
        if self.device == "cuda":
            out["cudnn"] = str(self.module.backends.cudnn.version())
        return out

    def tensors(self, arrays: dict, dtype: str) -> dict:
        torch = self.module
        cast = getattr(torch, dtype)
        out = {}
        for k, a in arrays.items():
            t = torch.from_numpy(a).to(self.device)
            out[k] = t.to(cast) if a.dtype == np.float32 and k not in PARAMETERS else t
        return out

    def copies(self, tensors, count):
        return [tensors] + [{k: t.clone() for k, t in tensors.items()} for _ in range(count - 1)]

    def functions(self, workload, peers) -> dict:
        """A peer of the workload by its name, or with `_compile` behind it, compiled; `_eager` may
        stand where it is not."""
        torch = self.module
        functions = {"ours": lambda t: workload.ours(self.fk, t)}
        for name in peers:
            plain = name.removesuffix("_eager").removesuffix("_compile")
            if plain not in workload.peers:
                continue
            functions[name] = functools.partial(workload.peers[plain], torch)
            if name.endswith("_compile"):
                torch._dynamo.reset()
                # Matrix products have tiles to choose from.
                mode = "max-autotune-no-cudagraphs" if workload.flops else None
                functions[name] = torch.compile(functions[name], dynamic=False, mode=mode)
        return functions

    def calls(self, functions, workload, direction, tensors) -> dict:
        torch = self.module
        if direction == "fwd":
            return {
                name: _without_grad(torch, function, tensors)
                for name, function in functions.items()
            }
        return {
            name: self._backward(function, workload, tensors)
            for name, function in functions.items()
        }

    def _backward(self, function, workload, tensors):
        torch = self.module
        leaves = {
            k: t.detach().requires_grad_(k in workload.differentiable) for k, t in tensors.items()
        }
        outputs = function(leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [torch.randn_like(o) for o in outputs]
        wanted = [t for t in leaves.values() if t.requires_grad]
        return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)

    def errors(self, workload, tensors) -> dict:
        """Largest absolute error of our forward and of torch's, against torch in float64."""
        torch = self.module
        limit = 1 << (28 if self.device == "cuda" else 23)
        if not workload.errors or next(iter(tensors.values())).numel() > limit:
            return {}
        exact = {k: t.double() if t.is_floating_point() else t for k, t in tensors.items()}
        with torch.no_grad():
            reference = _first(workload.peers["torch"](torch, exact))
            # Packed sequences come back as rows.
            ours = _first(workload.ours(self.fk, tensors)).double().reshape_as(reference)
            peer = _first(workload.peers["torch"](torch, tensors)).double()
        return {
            "max_error": float((ours - reference).abs().max()),
            "peer_error": float((peer - reference).abs().max()),
        }

    def peak_bytes(self, call) -> int:
        torch = self.module
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            kept = call()
            torch.cuda.synchronize()
            del kept
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(profile_memory=True) as profile:
            kept = call()
        del kept
        total = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
        return peak

    def copy_call(self, megabytes: int):
        torch = self.module
        a = torch.ones(megabytes << 18, device=self.device)
        b = torch.empty_like(a)
        # By a kernel: a copy in a CUDA graph goes to the copy engines, which are slower.
        return (lambda: torch.neg(a, out=b)), 2 * a.numel() * 4

    def gemm_call(self, n: int):
        torch = self.module
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        a = torch.randn(n, n, device=self.device).to(dtype)
        out = torch.empty_like(a)
        return lambda: torch.matmul(a, a, out=out)


class Jax(Numpy):
    name = "jax"
    devices = ("cpu", "cuda")
    directions = ("fwd", "bwd")
    peers = ("jax",)

    def __init__(self, device: str):
        import jax

        import flashkernel as fk

        self.fk, self.jax, self.module = fk, jax, jax.numpy
        self.device = jax.devices("gpu" if device == "cuda" else "cpu")[0]
        self.waits = jax_waits(device)

    def versions(self) -> dict:
        return {"jax": self.jax.__version__}

    def tensors(self, arrays, dtype):
        cast = Numpy.tensors(self, arrays, dtype)
        return {k: self.jax.device_put(a, self.device) for k, a in cast.items()}

    def functions(self, workload, peers) -> dict:
        functions = {"ours": lambda t: workload.ours(self.fk, t)}
        for name in peers:
            if name in workload.peers:
                functions[name] = functools.partial(workload.peers[name], self.module)
        return functions

    def calls(self, functions, workload, direction, tensors) -> dict:
        calls = {}
        for name, function in functions.items():
            if direction == "bwd":
                function = self._gradient(function, workload)
            calls[name] = self._compiled(function, tensors)
        return calls

    def _compiled(self, function, tensors):
        """The call under jit. On a GPU, where a small one is shorter than the way to it, several
        calls on inputs of their own in one."""
        small = sum(t.size for t in tensors.values()) < 1 << 18
        count = 8 if small and self.device.platform == "gpu" else 1
        if count == 1:
            return functools.partial(self.jax.jit(function), tensors)
        sets = [{k: t + 0 for k, t in tensors.items()} for _ in range(count)]
        together = self.jax.jit(lambda sets: [function(t) for t in sets])
        call = functools.partial(together, sets)
        call.holds = count
        return call

    def _gradient(self, function, workload):
        """Forward and backward together: JAX has no call for the backward alone."""

        def total(floats, rest):
            outputs = function({**floats, **rest})
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return sum(o.astype(self.module.float32).sum() for o in outputs)

        def gradient(t):
            floats = {k: v for k, v in t.items() if k in workload.differentiable}
            rest = {k: v for k, v in t.items() if k not in workload.differentiable}
            return self.jax.grad(total)(floats, rest)

        return gradient

    def peak_bytes(self, call) -> int:
        return 0  # XLA plans its buffers ahead; it has no per-call figure

    def copy_call(self, megabytes: int):
        a = self.jax.device_put(np.ones(megabytes << 18, np.float32), self.device)
        copy = self.jax.jit(lambda x: x + 1)
        return (lambda: copy(a).block_until_ready()), 2 * a.size * 4


def jax_waits(device: str) -> dict:
    """On a GPU calls follow each other without waiting, as they do in a program: a sample is long
    enough that the way there and back does not count."""
    import jax

    grain = {"grain_s": 5e-3} if device == "cuda" else {}
    return {"wait": jax.block_until_ready, **grain}


FRAMEWORKS = {f.name: f for f in (Numpy, Torch, Jax)}


def installed() -> list[str]:
    import importlib.util

    return [name for name in FRAMEWORKS if importlib.util.find_spec(name)]


def _without_grad(torch, function, tensors):
    def call():
        with torch.no_grad():
            return function(tensors)

    return call


def _first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


__all__ = ["FRAMEWORKS", "ITEMSIZE", "bytes_moved", "installed", "jax_waits"]
