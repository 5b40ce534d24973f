"""How each framework holds a workload's tensors and what is timed in it."""

import functools
import os

import numpy as np

from .workloads import PARAMETERS, Workload

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

    def threads(self) -> int:
        """Those that our ops and the peers run on."""
        return self.fk.num_threads()


def plain_name(peer: str) -> str:
    return peer.removesuffix("_eager").removesuffix("_dynamic").removesuffix("_compile")


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
        else:
            out["torch_cpu_target"] = self.module.backends.cpu.get_cpu_capability()
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
        """A peer of the workload by its name, or with `_compile` behind it, compiled for its shape,
        or with `_compile_dynamic`, for any shape; `_eager` may stand where it is not."""
        torch = self.module
        functions = {"ours": lambda t: workload.ours(self.fk, t)}
        for name in peers:
            plain = plain_name(name)
            if plain not in workload.peers:
                continue
            functions[name] = functools.partial(workload.peers[plain], torch)
            if name.startswith(plain + "_compile"):
                torch._dynamo.reset()
                # Matrix products have tiles to choose from.
                mode = "max-autotune-no-cudagraphs" if workload.products else None
                dynamic = name.endswith("_dynamic")
                # Or a backward could run only once.
                torch._functorch.config.donated_buffer = False
                functions[name] = torch.compile(functions[name], dynamic=dynamic, mode=mode)
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
            try:
                reference = _first(workload.peers["torch"](torch, exact))
            except torch.OutOfMemoryError:  # a formula may take far more than the op
                return {}
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

    def threads(self) -> int:
        return max(self.module.get_num_threads(), self.fk.num_threads())

    def gpu_caches(self) -> dict:
        properties = self.module.cuda.get_device_properties(self.device)
        return {"L2": getattr(properties, "L2_cache_size", 0)}

    def traffic_call(self, mix: str, size: int):
        """A plain call that touches `size` bytes, and how many it reads and writes. By a kernel: a
        copy in a CUDA graph goes to the copy engines, which are slower."""
        torch = self.module
        tensors = {"read": 1, "write": 1, "update": 1, "copy": 2, "add": 3}[mix]
        n = size // tensors // 4
        a, b, c = (torch.ones(n if i < tensors else 0, device=self.device) for i in range(3))
        call = {
            "read": lambda: a.sum(),
            "write": lambda: a.fill_(2.0),
            "update": lambda: a.neg_(),
            "copy": lambda: torch.neg(a, out=b),
            "add": lambda: torch.add(a, b, out=c),
        }[mix]
        return call, (2 if mix == "update" else tensors) * 4 * n

    def gemm_call(self, n: int, dtype: str):
        """A plain matrix product, of float32 on the tensor cores as well."""
        torch = self.module
        a = torch.randn(n, n, device=self.device).to(getattr(torch, dtype))
        if dtype == "float8_e4m3fn":
            one = torch.ones((), device=self.device)
            return lambda: torch._scaled_mm(
                a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        out = torch.empty_like(a)

        def call():
            settings = torch.backends.cuda.matmul
            before, settings.allow_tf32 = settings.allow_tf32, True
            torch.matmul(a, a, out=out)
            settings.allow_tf32 = before

        return call


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
        if direction == "bwd":
            tensors = (tensors, self._output_gradients(functions["ours"], tensors))
            functions = {n: self._gradient(f, workload) for n, f in functions.items()}
        else:
            tensors = (tensors,)
        return {name: self._compiled(f, tensors) for name, f in functions.items()}

    def _output_gradients(self, function, tensors) -> list:
        """Small ones, so that gradients that are inputs in their turn stay finite."""
        outputs = self.jax.tree.leaves(self.jax.eval_shape(function, tensors))
        key = self.jax.random.key(0)
        drawn = (1e-3 * self.jax.random.normal(key, o.shape, o.dtype) for o in outputs)
        return [self.jax.device_put(d, self.device) for d in drawn]

    def _gradient(self, function, workload):
        """Forward and backward together, since JAX has no call for the backward alone: the outputs
        and, from gradients of these, those of the inputs."""

        def gradient(t, output_gradients):
            floats = {k: v for k, v in t.items() if k in workload.differentiable}
            rest = {k: v for k, v in t.items() if k not in workload.differentiable}
            outputs, backward = self.jax.vjp(lambda f: function({**f, **rest}), floats)
            leaves, tree = self.jax.tree.flatten(outputs)
            return leaves, backward(self.jax.tree.unflatten(tree, output_gradients))[0]

        return gradient

    def _compiled(self, function, tensors):
        """The call under jit. On a GPU, where a small one is shorter than the way to it, several in
        one, as layers of a model are: each takes what the one before it returned."""
        elements = sum(t.size for t in self.jax.tree.leaves(tensors))
        count = 8 if elements < 1 << 18 and self.device.platform == "gpu" else 1

        def together(*tensors):
            for _ in range(count):
                outputs = function(*tensors)
                tensors = _next(tensors, outputs)
            return outputs

        call = functools.partial(self.jax.jit(together), *tensors)
        call.holds = count
        return call

    def peak_bytes(self, call) -> int:
        return 0  # XLA plans its buffers ahead; it has no per-call figure

    def threads(self) -> int:
        return max(len(os.sched_getaffinity(0)), self.fk.num_threads())

    def gpu_caches(self) -> dict:
        return {}

    def traffic_call(self, mix: str, size: int):
        """A copy, whatever the mix: of arrays that cannot be written in place there is no more."""
        a = self.jax.device_put(np.ones(size // 8, np.float32), self.device)
        # Into the last call's output, so that there are no fresh pages to be found.
        copy = self.jax.jit(lambda a, b: a + 1, donate_argnums=1, keep_unused=True)
        held = [a + 1]

        def call():
            held[0] = copy(a, held[0])
            return held[0]

        return call, 2 * a.nbytes

    def gemm_call(self, n: int, dtype: str):
        a = np.random.default_rng(0).standard_normal((n, n), np.float32)
        a = self.jax.device_put(a.astype(self.dtype(dtype)), self.device)
        product = self.jax.jit(lambda x: x @ x)
        return lambda: product(a)


def jax_waits(device: str) -> dict:
    """On a GPU calls follow each other without waiting, as they do in a program: a sample is long
    enough that the way there and back does not count."""
    import jax

    grain = {"grain_s": 50e-3} if device == "cuda" else {}
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


def _next(tensors: tuple, outputs) -> tuple:
    """The inputs of a call that follows one which returned `outputs`: the gradients in the place of
    their inputs and the outputs in that of their gradients; of a forward, its first output in the
    place of the first input that looks like it."""
    if len(tensors) == 2:
        outputs, gradients = outputs
        return {**tensors[0], **gradients}, outputs
    output = _first(outputs)
    for name, t in tensors[0].items():
        if t.shape == output.shape and t.dtype == output.dtype:
            return ({**tensors[0], name: output},)
    return tensors


def _first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


__all__ = ["FRAMEWORKS", "ITEMSIZE", "installed", "jax_waits"]
