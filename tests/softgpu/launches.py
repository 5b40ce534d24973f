"""Calls whose counters ncu read on a chip, for the software GPU to agree with.

    python tests/softgpu/launches.py --profile FILE     # where a GPU and ncu are: writes FILE
    python tests/softgpu/launches.py                    # what --profile runs under ncu

Every call is small enough to be interpreted, and its inputs are the same wherever it runs. Between
two calls torch's arange runs, so that the launches of each can be told apart in ncu's list."""

import argparse
import csv
import datetime
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile

METRICS = (
    # Time, and what the launch asks for.
    "gpu__time_duration.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__shared_mem_per_block_static",
    # Warp instructions, all and by the unit that executes them.
    "smsp__inst_executed.sum",
    "smsp__inst_executed_pipe_fma.sum",
    "smsp__inst_executed_pipe_alu.sum",
    "smsp__inst_executed_pipe_xu.sum",
    "smsp__inst_executed_pipe_lsu.sum",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    # Shared memory: instructions, passes over the banks, and passes that conflicts add.
    "smsp__inst_executed_op_shared_ld.sum",
    "smsp__inst_executed_op_shared_st.sum",
    "smsp__inst_executed_op_ldsm.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    # Global memory: instructions, requests and sectors of 32 bytes.
    "smsp__inst_executed_op_global_ld.sum",
    "smsp__inst_executed_op_global_st.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)


def calls(torch, fk, device):
    """(name, function of no arguments) for each call."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    made = []

    def add(name, function, *arguments, **options):
        made.append((name, functools.partial(function, *arguments, **options)))

    def add_with_backward(op, shape, function, *leaves):
        """The op, and its backward alone."""
        add(f"{op} {shape}", function, *(t.detach() for t in leaves))
        result = function(*(t.requires_grad_() for t in leaves))
        gradient = normal(*result.shape, dtype=result.dtype)
        add(
            f"{op} backward {shape}",
            torch.autograd.grad,
            result,
            leaves,
            gradient,
            retain_graph=True,
        )

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        rows = functools.partial(normal, dtype=dtype)
        add_with_backward(
            "rms_norm",
            f"64x768 {name}",
            lambda x, residual, weight: fk.rms_norm(x, weight, residual=residual)[0],
            rows(64, 768),
            rows(64, 768),
            normal(768),
        )
        add_with_backward("softmax", f"64x1000 {name}", fk.softmax, rows(64, 1000))
        targets = torch.arange(16).to(device)
        cross_entropy = functools.partial(fk.cross_entropy, targets=targets)
        add_with_backward("cross_entropy", f"16x4099 {name}", cross_entropy, rows(16, 4099))
        add(
            f"rope 1x128x2x64 {name}",
            fk.rope,
            rows(1, 128, 2, 64),
            normal(128, 32),
            normal(128, 32),
        )
        for causal in (False, True):
            for head in (64, 128):
                add_with_backward(
                    "attention",
                    f"1x256x2x{head} {'causal' if causal else 'full'} {name}",
                    functools.partial(fk.attention, causal=causal),
                    *(rows(1, 256, 2, head) for _ in range(3)),
                )
        decay = -torch.rand(128, 16, generator=generator).to(device) - 0.5
        add_with_backward(
            "selective_scan",
            f"1x256x128x16 {name}",
            lambda u, delta, A, B, C, z: fk.selective_scan(
                u, delta, A, B, C, z=z, delta_softplus=True
            ),
            *(rows(1, 256, 128), rows(1, 256, 128), decay),
            *(rows(1, 256, 16), rows(1, 256, 16), rows(1, 256, 128)),
        )
        add_with_backward(
            "causal_conv1d",
            f"2x256x128x4 {name}",
            functools.partial(fk.causal_conv1d, activation="silu"),
            *(rows(2, 256, 128), normal(128, 4), normal(128)),
        )
    return made


def run() -> None:
    import torch

    import flashkernel as fk

    def marker():
        torch.arange(1, device="cuda")

    torch.cuda.synchronize()
    prepared = calls(torch, fk, "cuda")
    for _, function in prepared:
        function()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _, function in prepared:
        marker()
        function()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(json.dumps([name for name, _ in prepared]))


def profile(path: str) -> None:
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        command = ["ncu", "--clock-control", "none", "--csv", "--profile-from-start", "off"]
        command += ["--kernel-name-base", "demangled", "--metrics", ",".join(METRICS)]
        command += ["--log-file", log.name, sys.executable, __file__]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        names = json.loads(done.stdout.strip().splitlines()[-1])
        with open(log.name) as text:
            lines = itertools.dropwhile(lambda line: not line.startswith('"ID"'), text)
            rows = list(csv.DictReader(lines))
    launches = {}
    for row in rows:
        launch = launches.setdefault(
            int(row["ID"]),
            {
                "kernel": row["Kernel Name"],
                "grid": row["Grid Size"],
                "block": row["Block Size"],
                "metrics": {},
            },
        )
        value = row["Metric Value"].replace(",", "")
        if value not in ("", "n/a"):
            launch["metrics"][row["Metric Name"]] = float(value)
    of_calls, current = [], -1
    for _, launch in sorted(launches.items()):
        if "arange" in launch["kernel"]:
            current += 1
            of_calls.append({"call": names[current], "launches": []})
        elif "at::" not in launch["kernel"]:
            of_calls[current]["launches"].append(launch)
    result = {
        "machine": {"gpu": output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv")},
        "commit": os.environ.get("FK_COMMIT") or output("git", "rev-parse", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "rows": of_calls,
    }
    with open(path, "w") as out:
        json.dump(result, out, indent=0)


def output(*command: str) -> str:
    """The last line that a command prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip().splitlines()[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", metavar="FILE")
    arguments = parser.parse_args()
    profile(arguments.profile) if arguments.profile else run()
