"""Counts cases on one chip: `python -m flashkernel.bench.softgpu.count ARCHITECTURE SUITE...`, with
FK_SOFTGPU_ARCH set to the same, prints a row of JSON for each case. `fk bench --device softgpu`
starts it once for each chip, since a process has but one."""

import collections
import json
import re
import sys

import numpy as np

from ..frameworks import FRAMEWORKS, ITEMSIZE
from ..workloads import PARAMETERS, WithoutValues
from . import device
from .cases import CHIPS, SAMPLED, SUITES
from .workloads import WORKLOADS

#: What a row has of each counter: the sum over its launches.
SUMS = (
    "warp_instructions", "tensor_flops", "global_load_bytes", "global_store_bytes",
    "global_atomic_bytes", "global_load_requests", "global_load_sectors", "global_store_requests",
    "global_store_sectors", "shared_load_wavefronts", "shared_store_wavefronts", "barriers",
    "async_copies",
)  # fmt: skip

#: Ops whose kernels skip work by what they read.
DECIDED_BY_VALUES = ("attention", "selective_scan")


def readable(kernel: str) -> str:
    """A demangled name without parameters, casts and namespaces that have no name; the same as in
    machine_code.json."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.sub(r"\([\w: ]+\)(?=-?\d)", "", name).split("(")[0]


def calls_of(case, sample: int = device.ALL):
    """(the workload, its count of the least, the call) of a case, on torch's CPU tensors, which are
    the software GPU's. `sample` is for the forward that a backward needs; where it is not ALL, the
    values are nobody's concern, except for those that may decide what a kernel does."""
    framework = FRAMEWORKS["torch"]("cpu")
    torch = framework.module
    torch.manual_seed(0)
    params = dict(case.params)
    workload = WORKLOADS[case.op].bound(params)
    values = sample == device.ALL or case.op in DECIDED_BY_VALUES
    arrays = workload.inputs(params, np.random.default_rng(0) if values else WithoutValues())
    hollow = {k: a for k, a in arrays.items() if a.ndim and not any(a.strides)}
    tensors = framework.tensors({k: a for k, a in arrays.items() if k not in hollow}, case.dtype)
    for name, array in hollow.items():
        dtype = "float32" if name in PARAMETERS else case.dtype
        tensors[name] = torch.empty(array.shape, dtype=getattr(torch, dtype))
    if values:  # NumPy's memory begins anywhere, torch's with a sector
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    functions = framework.functions(workload, [])
    with device.launches(sample):
        call = framework.calls(functions, workload, case.direction, tensors)["ours"]
    count = workload.count(case.direction, params, ITEMSIZE[case.dtype])
    return workload, count, call


def counters_of(call, sample: int = device.ALL) -> list[dict]:
    """The launches of a call; raises where a kernel did wrong."""
    device.problems()
    with device.launches(sample) as made:
        call()
    if wrong := device.problems():
        raise RuntimeError(wrong)
    return made


def row_of(case, architecture: int) -> dict:
    from ..__main__ import implementation_of

    workload, least, call = calls_of(case)
    made = counters_of(call)
    total = {name: sum(launch["counters"][name] for launch in made) for name in SUMS}
    classes = collections.Counter()
    for launch in made:
        classes.update(launch["counters"]["by_class"])
    memory = sum(launch["counters"]["global_unique_bytes"] for launch in made)
    conflicts = sum(
        launch["counters"][f"shared_{way}_conflicts"]
        for launch in made
        for way in ("load", "store")
    )
    return {
        "op": f"{case.op}_{case.direction}",
        "case": {**dict(case.params), "dtype": case.dtype},
        "chip": CHIPS[architecture],
        "impl": implementation_of(f"{case.op}_{case.direction}", "cuda"),
        "launches": len(made),
        **total,
        "by_class": dict(sorted(classes.items())),
        "tensor_instructions": classes["tensor"],
        "bank_conflicts": conflicts,
        # Each launch's own: what it touches again is counted once, what the next one does anew.
        "memory_bytes": memory,
        "least_bytes": least.working_set,
        "bytes_over_least": _ratio(memory, least.working_set),
        **_products(workload, least, total["tensor_flops"]),
        "sectors_a_load": _ratio(total["global_load_sectors"], total["global_load_requests"]),
        "sectors_a_store": _ratio(total["global_store_sectors"], total["global_store_requests"]),
        "kernels": [_kernel(launch) for launch in made],
    }


def sampled_row(case, architecture: int) -> dict:
    from ..__main__ import implementation_of
    from . import full_size

    op = f"{case.op}_{case.direction}"
    _, _, call = calls_of(case, sample=0)
    with device.launches(0):  # dispatch says what would run
        call()
    implementation = implementation_of(op, "cuda")
    continued = full_size.shares_out_work(op, implementation)
    return {
        "op": op,
        "case": {**dict(case.params), "dtype": case.dtype},
        "chip": CHIPS[architecture],
        "impl": implementation,
        "launches": full_size.launches_of(case, continued, {}),
    }


def _products(workload, least, flops: int) -> dict:
    if not workload.products:
        return {}
    return {"least_flops": least.flops, "flops_over_least": _ratio(flops, least.flops)}


def _ratio(a: int, b: int) -> float:
    return round(a / b, 3) if b else 0.0


def _kernel(launch: dict) -> dict:
    return {
        "kernel": readable(launch["name"]),
        "grid": launch["grid"],
        "block": launch["block"],
        "shared_bytes": launch["shared_bytes"],
    }


def main() -> int:
    architecture, names, quick = int(sys.argv[1]), sys.argv[2:], False
    if names[0] == "--quick":
        quick, names = True, names[1:]
    failed = 0
    for name in names:
        for counted in SUITES[name]():
            if architecture not in counted.architectures or (quick and not counted.quick):
                continue
            make = sampled_row if name == SAMPLED else row_of
            try:
                row = make(counted.case, architecture)
            except Exception as error:  # the other cases are counted all the same
                failed += 1
                where = f"{CHIPS[architecture]}: {counted.case.name}"
                print(f"{where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            print(json.dumps({"suite": name, **row}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
