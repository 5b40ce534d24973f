"""Measures ops beside the peers that are installed."""

import argparse
import ctypes
import dataclasses
import importlib.util
import sys

import numpy as np

import flashkernel as fk

from .. import _library, _program
from . import report
from .agent import WORKLOADS as BACKBONES
from .busy import Watch
from .ceilings import Ceilings, CpuProbe, GpuProbe
from .frameworks import FRAMEWORKS, ITEMSIZE, installed, jax_waits, plain_name
from .linear import WORKLOADS as LINEAR
from .mamba import WORKLOADS as MAMBA
from .mamba2 import WORKLOADS as MAMBA2
from .mamba_agent import WORKLOADS as AGENT
from .rnn import WORKLOADS as RNN
from .suites import NEEDS, SUITES
from .timing import time_cpu, time_cuda
from .triton_twins import TWINS
from .workloads import WORKLOADS as GENERAL

WORKLOADS = GENERAL | {w.op: w for w in [*LINEAR, *MAMBA, *MAMBA2, *AGENT, *RNN, *BACKBONES]}
for _op, _twin in TWINS.items():
    _own = WORKLOADS[_op]
    WORKLOADS[_op] = dataclasses.replace(_own, peers={**_own.peers, "triton": _twin})
DIRECTIONS = ("fwd", "bwd")


def named(ops: list[str] | None) -> set[tuple[str, str]]:
    """(op, direction) of what is asked for, by the names that `fk check` takes: "rope" is both
    directions, "rope_fwd" one."""
    known = {op: [(op, d) for d in DIRECTIONS] for op in WORKLOADS}
    known |= {f"{op}_{d}": [(op, d)] for op in WORKLOADS for d in DIRECTIONS}
    for op in ops or ():
        if op not in known:
            raise ValueError(f"--op: expected one of {', '.join(WORKLOADS)}, got {op}")
    return {case for op in ops or WORKLOADS for case in known[op]}


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
    devices = ("cpu", "cuda", "softgpu")
    counting = "softgpu counts in place of timing: fk bench --device softgpu --help"
    add("--device", choices=devices, default="cpu", help=f"default: cpu; {counting}")
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
    try:
        wanted = named(options.op)
    except ValueError as error:
        parser.error(str(error))
    if options.device == "cuda" and not fk.build_info()["gpus"]:
        parser.error("--device cuda: no GPU is visible to this build")
    known = sorted({name for w in WORKLOADS.values() for name in w.peers})
    for peer in options.peer or ():
        if plain_name(peer) not in known:
            parser.error(f"--peer: expected one of {', '.join(known)}, got {peer}")
    directions = FRAMEWORKS[options.framework].directions
    options.cases = [
        c
        for c in cases_here(parser, options)
        if (c.op, c.direction) in wanted
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


def cases_here(parser, options) -> list:
    """The suite's cases for this device and framework; an error where it has none."""
    cases = list(SUITES[options.suite]())
    here = [
        c
        for c in cases
        if c.device in ("", options.device)
        and (not c.frameworks or options.framework in c.frameworks)
    ]
    if not here:
        devices = sorted({c.device for c in cases if c.device})
        frameworks = sorted({f for c in cases for f in c.frameworks})
        needed = [f"--device {' or '.join(devices)}"] if devices else []
        needed += [f"--framework {' or '.join(frameworks)}"] if frameworks else []
        parser.error(
            f"{options.suite}: expected {' and '.join(needed)}, got --device {options.device} "
            f"and --framework {options.framework}"
        )
    package = NEEDS.get(options.suite)
    if package and importlib.util.find_spec(package) is None:
        parser.error(f"{options.suite}: needs {package}, which is not installed")
    return here


def implementation_of(op: str, device: str) -> str:
    """What the op's last call took; where it ran, for what is more than one op, or where the
    library does not tell (FK_LIBRARY may name an older one, to compare with)."""
    if not hasattr(_library.lib, "fk_op_last_implementation"):
        return device
    last = _library.function("fk_op_last_implementation", ctypes.c_char_p, ctypes.c_void_p)
    name = last(_library.find_op(op.encode()))
    return name.decode() if name else device


# Runs to warm up, timed runs, and seconds after which there are no more of them.
QUICK, THOROUGH = (10, 100, 0.3), (100, 1000, 2.0)


class Bench:
    def __init__(self, options):
        self.options = options
        self.framework = FRAMEWORKS[options.framework](options.device)
        self.effort = QUICK if options.quick else THOROUGH
        self.rng = np.random.default_rng(0)
        threads = self.framework.threads()
        # Beside a GPU the host only has to keep its queue full.
        self.watch = Watch(1 if options.device == "cuda" else threads)
        if options.device == "cuda":
            probe = GpuProbe(self.framework, self.rotation, self.shortest)
        else:
            probe = CpuProbe(threads)
        self.ceilings = Ceilings(probe)
        self.rows, self.asked = [], []  # what each row asks of the ceilings

    @property
    def graphs(self) -> bool:
        return self.options.device == "cuda" and self.options.framework == "torch"

    def time(self, sets: list[dict], effort: tuple, runs=0) -> tuple[dict, dict]:
        """`sets`: the calls by name, once per set of inputs; `runs`: the least of ours. Returns
        their statistics, and how many runs there were."""
        warmup, iterations, _ = effort
        if not self.graphs:
            return time_cpu(sets[0], *effort, **self.framework.waits, runs_of_first=runs)
        # JAX's are not torch's to capture.
        foreign = {name: call for name, call in sets[0].items() if name.startswith("jax")}
        names = [name for name in sets[0] if name not in foreign]
        # A replay holds at least 4 calls, so fewer replays make as many runs.
        warmup, iterations = warmup // 4, max(iterations // 4, -(-runs // len(sets)))
        times = time_cuda({n: [calls[n] for calls in sets] for n in names}, warmup, iterations)
        if foreign:
            times |= time_cpu(foreign, *effort, **jax_waits("cuda"))[0]
        return times, {"warmup": warmup * len(sets), "iterations": iterations * len(sets)}

    def rotation(self, bytes_of_one: int) -> int:
        """So many sets of inputs that none is in the L2 cache when its turn comes, sixteen at
        most."""
        return min(16, max(4, -(-(512 << 20) // max(bytes_of_one, 1)))) if self.graphs else 1

    def shortest(self, sets: list[dict]) -> dict:
        """Seconds of each call at its best, for ceilings."""
        return {name: ms["min"] * 1e-3 for name, ms in self.time(sets, QUICK)[0].items()}

    def peak_bytes(self, name, call) -> int:
        # XLA plans its buffers ahead; it has no per-call figure.
        return 0 if name.startswith("jax") else self.framework.peak_bytes(call)

    def run(self, case) -> None:
        """Measures a row, and its ceilings around it."""
        workload = WORKLOADS[case.op].bound(dict(case.params))
        count = workload.count(case.direction, dict(case.params), ITEMSIZE[case.dtype])
        needs = self.ceilings.needs(count, case.dtype)
        self.ceilings.measure(needs)
        row = self.row(case, workload, count)
        self.ceilings.measure(needs)
        self.rows.append(row)
        self.asked.append((count, case.dtype, row["ms"]["p50"] * 1e-3))

    def row(self, case, workload, count) -> dict:
        params = dict(case.params)
        peers = self.options.peer or list(case.peers or self.framework.peers)
        arrays = workload.inputs(params, self.rng)
        tensors = self.framework.tensors(arrays, case.dtype)
        functions = self.framework.functions(workload, peers)
        sets = [
            self.framework.calls(functions, workload, case.direction, t)
            for t in self.framework.copies(tensors, self.rotation(count.working_set))
        ]
        calls = sets[0]
        # What a call compiles in other processes is no disturbance; some do at their second.
        for call in [*calls.values()] * 2:
            self.framework.waits.get("wait", lambda out: out)(call())
        before = self.watch.start()
        times, runs = self.time(sets, self.effort, 0 if self.options.quick else case.runs)
        seen = self.watch.since(before)
        ours = times.pop("ours")
        rate = {}
        if workload.products and count.flops:
            rate = {"tflops": round(count.flops / ours["p50"] / 1e9, 5)}
            for t in times.values():
                t["tflops"] = round(count.flops / t["p50"] / 1e9, 5)
        row = {
            "op": f"{case.op}_{case.direction}",
            "case": {**params, "dtype": case.dtype, "framework": self.framework.name},
            "impl": implementation_of(f"{case.op}_{case.direction}", self.options.device),
            "ms": ours,
            **runs,
            "flops": count.flops,
            "bytes": count.bytes,
            "bytes_written": count.written,
            "working_set": count.working_set,
            **rate,
            "tbps": round(count.bytes / ours["p50"] / 1e9, 5),
            "percent_of_ceiling": 0.0,  # known at the end
            "peak_bytes": self.framework.peak_bytes(calls["ours"]),
            **(self.framework.errors(workload, tensors) if case.direction == "fwd" else {}),
            "peers": {
                name: {"ms": t, "peak_bytes": self.peak_bytes(name, calls[name])}
                for name, t in times.items()
            },
            "busy": seen,
            "disturbed": self.watch.reasons(seen, ours),
        }
        for name, peer in row["peers"].items():
            if kind := kind_of(name, workload):
                peer["kind"] = kind
        return {**row, "ratio_to_best_peer": ratio_to_best_peer(row)}

    def judge(self) -> None:
        """What share of its ceiling each row reached, by the best ceilings of the whole run."""
        self.ceilings.measure(self.ceilings.always)
        self.ceilings.settle(self.asked)
        for row, (count, dtype, seconds) in zip(self.rows, self.asked, strict=True):
            ceiling = self.ceilings.of(count, dtype)
            row["percent_of_ceiling"] = round(100 * ceiling.seconds / seconds, 2)
            row["ceiling"] = ceiling.as_json()
            # No machine is faster than itself: then a count or a ceiling is wrong.
            row["impossible"] = row["percent_of_ceiling"] > 100


def kind_of(peer: str, workload) -> str:
    """Of a peer that walks through the steps of a sequence: whether Python does, or a program that
    a compiler made of such a loop; nothing for any other."""
    if plain_name(peer) not in workload.loops:
        return ""
    by_python = "_compile" not in peer and peer != "onnxruntime"
    return report.LOOP if by_python else report.UNROLLED


def ratio_to_best_peer(row: dict) -> float:
    """The fastest peer's p50 over ours, of those that somebody would use; 0: there is none."""
    times = [p["ms"]["p50"] for p in row["peers"].values() if p.get("kind") != report.LOOP]
    return round(min(times) / row["ms"]["p50"], 3) if times else 0.0


def counts_instead(arguments: list[str]) -> list[str] | None:
    """The other arguments where `--device softgpu` is among them; else None."""
    for i, argument in enumerate(arguments):
        if argument == "--device=softgpu":
            return arguments[:i] + arguments[i + 1 :]
        if arguments[i : i + 2] == ["--device", "softgpu"]:
            return arguments[:i] + arguments[i + 2 :]
    return None


def main(arguments=None) -> int:
    others = counts_instead(sys.argv[1:] if arguments is None else arguments)
    if others is not None:
        from .softgpu import command

        return command.main(others)
    options = parse(arguments)
    bench = Bench(options)
    cases = options.cases
    progress = sys.stderr.isatty()
    bench.ceilings.measure(bench.ceilings.always)
    failed, interrupted = 0, False
    for i, case in enumerate(cases):
        if progress:
            print(
                f"\r\033[K[{i + 1}/{len(cases)}] {case.name}", end="", file=sys.stderr, flush=True
            )
        try:
            bench.run(case)
        except KeyboardInterrupt:  # what was measured so far is not lost
            interrupted = True
            break
        except Exception as error:  # nor what comes after
            failed += 1
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
    bench.judge()
    if progress:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    timer = "cuda graph replay over rotating inputs" if bench.graphs else "perf_counter, in turns"
    result = {
        "machine": report.machine(fk, bench.framework, options.device),
        "commit": report.commit(),
        "date": report.now(),
        "method": {"warmup": bench.effort[0], "iterations": bench.effort[1], "timer": timer},
        "ceilings": bench.ceilings.as_json(),
        "busy": bench.watch.summary(),
        "rows": bench.rows,
    }
    if options.json:
        report.write_json(options.json, result)
    if options.html:
        report.write_html(options.html, result)
    report.print_table(result)
    return 130 if interrupted else 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_program.run("fk bench", main))
