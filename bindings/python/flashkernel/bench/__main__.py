"""Measures ops beside the peers that are installed."""

import argparse
import ctypes
import sys

import numpy as np

import flashkernel as fk

from .. import _library, _program
from . import report
from .frameworks import FRAMEWORKS, ITEMSIZE, bytes_moved, installed, jax_waits, plain_name
from .mamba import WORKLOADS as MAMBA
from .mamba_agent import WORKLOADS as AGENT
from .suites import SUITES
from .timing import time_cpu, time_cuda
from .workloads import WORKLOADS as GENERAL

WORKLOADS = GENERAL | {w.op: w for w in [*MAMBA, *AGENT]}


def parse(arguments):
    frameworks = installed()
    about = [(name, " ".join(suite.__doc__.split())) for name, suite in SUITES.items()]
    about.append(("decode MODEL", "Tokens a second of a model: fk bench decode --help."))
    parser = argparse.ArgumentParser(
        "fk bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="suites:\n" + "\n".join(f"  {name:17} {text}" for name, text in about),
    )
    add = parser.add_argument
    add("suite", nargs="?", default="demo", choices=SUITES, metavar="SUITE", help="what to measure")
    add("--framework", choices=frameworks, help="whose tensors; default: torch, else numpy")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--peer", action="append", help="only these peers; repeat for several")
    add("--op", action="append", help="only these ops; repeat for several")
    add("--direction", choices=("fwd", "bwd"), help="only forward or backward; default: both")
    add("--dtype", choices=ITEMSIZE, help="only cases of this type")
    add("--quick", action="store_true", help="fewer warm-up and timed runs")
    add("--json", metavar="F", help="write (or update) a result file")
    add("--html", metavar="F", help="write a page, with a roofline")
    options = parser.parse_args(arguments)
    if options.framework is None:
        options.framework = "torch" if "torch" in frameworks else "numpy"
    if options.device not in FRAMEWORKS[options.framework].devices:
        parser.error(f"--framework {options.framework} has no device {options.device}")
    for op in options.op or ():
        if op not in WORKLOADS:
            parser.error(f"--op: expected one of {', '.join(WORKLOADS)}, got {op}")
    if options.device == "cuda" and not fk.build_info()["gpus"]:
        parser.error("--device cuda: no GPU is visible to this build")
    known = sorted({name for w in WORKLOADS.values() for name in w.peers})
    for peer in options.peer or ():
        if plain_name(peer) not in known:
            parser.error(f"--peer: expected one of {', '.join(known)}, got {peer}")
    directions = FRAMEWORKS[options.framework].directions
    options.cases = [
        c
        for c in SUITES[options.suite]()
        if c.op in (options.op or WORKLOADS)
        and c.device in ("", options.device)
        and options.dtype in (None, c.dtype)
        and c.direction in directions
        and options.direction in (None, c.direction)
    ]
    if not options.cases:
        parser.error(f"{options.suite}: no case of the suite is what was asked for")
    if options.json:  # before anything is measured
        try:
            report.rows_of(options.json)
        except ValueError as error:
            parser.error(f"--json: {error}")
    return options


def implementation_of(op: str, device: str) -> str:
    """What the op's last call took; where it ran, for what is more than one op, or where the
    library does not tell (FK_LIBRARY may name an older one, to compare with)."""
    if not hasattr(_library.lib, "fk_op_last_implementation"):
        return device
    last = _library.function("fk_op_last_implementation", ctypes.c_char_p, ctypes.c_void_p)
    name = last(_library.find_op(op.encode()))
    return name.decode() if name else device


class Bench:
    def __init__(self, options):
        self.options = options
        self.framework = FRAMEWORKS[options.framework](options.device)
        self.warmup, self.iterations = (10, 100) if options.quick else (100, 1000)
        self.budget_s = 0.3 if options.quick else 2.0
        self.rng = np.random.default_rng(0)

    @property
    def graphs(self) -> bool:
        return self.options.device == "cuda" and self.options.framework == "torch"

    def time(self, sets: list[dict]) -> tuple[dict, int]:
        """`sets`: the calls by name, once per set of inputs."""
        if self.graphs:
            # A replay holds at least 4 calls, so fewer replays make as many runs.
            iterations = self.iterations // 4
            # JAX's are not torch's to capture.
            foreign = {n: call for n, call in sets[0].items() if n.startswith("jax")}
            names = [name for name in sets[0] if name not in foreign]
            by_name = {name: [calls[name] for calls in sets] for name in names}
            times = time_cuda(by_name, self.warmup // 4, iterations)
            if foreign:
                waits = jax_waits("cuda")
                more = time_cpu(foreign, self.warmup, self.iterations, self.budget_s, **waits)
                times |= more[0]
            return times, iterations * len(sets)
        waits = self.framework.waits
        return time_cpu(sets[0], self.warmup, self.iterations, self.budget_s, **waits)

    def sets_needed(self, bytes_of_one: int) -> int:
        """So many sets of inputs that none is in the L2 cache when its turn comes."""
        return max(4, -(-(512 << 20) // max(bytes_of_one, 1))) if self.graphs else 1

    def ceilings(self) -> dict:
        cuda = self.options.device == "cuda"
        call, moved = self.framework.copy_call(2048 if cuda else 128)
        times, _ = self.time([{"copy": call}])
        out = {"copy_tbps": moved / times["copy"]["p50"] / 1e9}
        if hasattr(self.framework, "gemm_call"):
            n = 4096 if cuda else 1024
            times, _ = self.time([{"gemm": self.framework.gemm_call(n)}])
            out["gemm_tflops"] = 2 * n**3 / times["gemm"]["p50"] / 1e9
        return {k: round(v, 5) for k, v in out.items()}

    def peak_bytes(self, name, call) -> int:
        # XLA plans its buffers ahead; it has no per-call figure.
        return 0 if name.startswith("jax") else self.framework.peak_bytes(call)

    def row(self, case, ceilings) -> dict:
        params = dict(case.params)
        workload = WORKLOADS[case.op].bound(params)
        peers = self.options.peer or list(case.peers or self.framework.peers)
        arrays = workload.inputs(params, self.rng)
        itemsize = ITEMSIZE[case.dtype]
        moved = bytes_moved(workload, case.direction, params, arrays, itemsize)
        count = self.sets_needed(sum(a.size for a in arrays.values()) * itemsize)
        tensors = self.framework.tensors(arrays, case.dtype)
        functions = self.framework.functions(workload, peers)
        sets = [
            self.framework.calls(functions, workload, case.direction, t)
            for t in self.framework.copies(tensors, min(count, 16))
        ]
        calls = sets[0]
        times, iterations = self.time(sets)
        ours = times.pop("ours")
        tbps = moved / ours["p50"] / 1e9
        percent, rate = tbps / ceilings["copy_tbps"], {}
        flops = workload.count(case.direction, params)
        if workload.products:
            rate = {"tflops": round(flops / ours["p50"] / 1e9, 5)}
            percent = rate["tflops"] / ceilings.get("gemm_tflops", float("inf"))
            for t in times.values():
                t["tflops"] = round(flops / t["p50"] / 1e9, 5)
        best = min((t["p50"] for t in times.values()), default=None)
        return {
            "op": f"{case.op}_{case.direction}",
            "case": {**params, "dtype": case.dtype, "framework": self.framework.name},
            "impl": implementation_of(f"{case.op}_{case.direction}", self.options.device),
            "ms": ours,
            "iterations": iterations,
            "flops": flops,
            "bytes": moved,
            **rate,
            "tbps": round(tbps, 5),
            "percent_of_ceiling": round(100 * percent, 2),
            "peak_bytes": self.framework.peak_bytes(calls["ours"]),
            **(self.framework.errors(workload, tensors) if case.direction == "fwd" else {}),
            "peers": {
                name: {"ms": t, "peak_bytes": self.peak_bytes(name, calls[name])}
                for name, t in times.items()
            },
            "ratio_to_best_peer": round(best / ours["p50"], 3) if best else 0.0,
        }


def main(arguments=None) -> int:
    options = parse(arguments)
    bench = Bench(options)
    cases = options.cases
    progress = sys.stderr.isatty()
    ceilings = bench.ceilings()
    rows, failed, interrupted = [], 0, False
    for i, case in enumerate(cases):
        if progress:
            print(
                f"\r\033[K[{i + 1}/{len(cases)}] {case.name}", end="", file=sys.stderr, flush=True
            )
        try:
            rows.append(bench.row(case, ceilings))
        except KeyboardInterrupt:  # what was measured so far is not lost
            interrupted = True
            break
        except Exception as error:  # nor what comes after
            failed += 1
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    timer = "cuda graph replay over rotating inputs" if bench.graphs else "perf_counter, in turns"
    result = {
        "machine": report.machine(fk, bench.framework, options.device),
        "commit": report.commit(),
        "date": report.now(),
        "method": {"warmup": bench.warmup, "iterations": bench.iterations, "timer": timer},
        "ceilings": ceilings,
        "rows": rows,
    }
    if options.json:
        report.write_json(options.json, result)
    if options.html:
        report.write_html(options.html, result)
    report.print_table(result)
    return 130 if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_program.run("fk bench", main))
