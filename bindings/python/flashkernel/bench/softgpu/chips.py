"""The chips that times are estimated for: facts from NVIDIA's documents. What a multiprocessor does
in a clock is that of the CUDA C++ Programming Guide, "Throughput of native arithmetic instructions"
(lanes a clock, here divided by 32: warp instructions), and of the architecture's white paper for
matrix products.

    T4     data sheet; Turing architecture white paper; its L2 as in "Dissecting the NVidia Turing
           T4 GPU via Microbenchmarking" (2019), since NVIDIA says nothing of it
    A100   data sheet of the 40 GB SXM; architecture white paper: L2 gives 5120 bytes a clock
    H100   data sheet of the SXM5; architecture white paper; its L2 taken for as wide as the A100's,
           since NVIDIA says nothing of it
    H200   data sheet of the SXM: the H100's chip with faster memory
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chip:
    name: str
    multiprocessors: int
    clock: float  # Hz: the boost clock
    memory: float  # bytes a second
    l2: float  # bytes a second that multiprocessors read from L2: bytes a clock times the clock
    l2_bytes: int
    # Floating-point operations a clock and multiprocessor, of dense products, by type of inputs.
    tensor: dict
    # Warp instructions a clock and multiprocessor.
    issue: float
    fma: float  # in float32: multiply-adds, sums, products
    integer: float
    special: float  # exponentials, reciprocals
    convert: float
    # Accesses to shared memory or L1, of up to 128 bytes, a clock and multiprocessor.
    shared: float
    threads: int  # a multiprocessor holds at once
    blocks: int
    shared_bytes: int
    registers: int = 65536
    wgmma: bool = False


_AMPERE_TENSOR = {"f16": 2048, "bf16": 2048, "tf32": 1024, "s8": 4096, "u8": 4096}
_HOPPER_TENSOR = {"f16": 4096, "bf16": 4096, "tf32": 2048, "s8": 8192, "u8": 8192, "e4m3": 8192,
                  "e5m2": 8192}  # fmt: skip

T4 = Chip(
    "T4", 40, 1.59e9, 320e9, 1024 * 1.59e9, 4 << 20, {"f16": 1024, "s8": 2048, "u8": 2048},
    issue=4, fma=2, integer=2, special=0.5, convert=0.5, shared=1,
    threads=1024, blocks=16, shared_bytes=64 << 10,
)  # fmt: skip
A100 = Chip(
    "A100", 108, 1.41e9, 1555e9, 5120 * 1.41e9, 40 << 20, _AMPERE_TENSOR,
    issue=4, fma=2, integer=2, special=0.5, convert=0.5, shared=1,
    threads=2048, blocks=32, shared_bytes=164 << 10,
)  # fmt: skip
H100 = Chip(
    "H100", 132, 1.83e9, 3350e9, 5120 * 1.83e9, 50 << 20, _HOPPER_TENSOR,
    issue=4, fma=4, integer=2, special=0.5, convert=2, shared=1,
    threads=2048, blocks=32, shared_bytes=228 << 10, wgmma=True,
)  # fmt: skip
H200 = replace(H100, name="H200", memory=4800e9)

CHIPS = {c.name: c for c in (T4, A100, H100, H200)}
