"""Measures calls from Elixir beside plain step-by-step programs of XLA.

    python bindings/elixir/bench/bench.py [--quick] FILE.json [CALL...]

Elixir (bench/calls.exs) writes the programs of XLA that its calls become. They and the plain ones
are compiled and run by jaxlib's XLA here, in turns. The same calls through the NIF run in the
Elixir process, five for each time that it is told to. The library is the one that FK_LIBRARY
names."""

import ctypes
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import numpy as np
import plain
from jaxlib import _jax as xla

import flashkernel as fk
from flashkernel import _library
from flashkernel.bench import report
from flashkernel.bench.busy import Watch
from flashkernel.bench.frameworks import FRAMEWORKS
from flashkernel.bench.timing import time_cpu

PROJECT = pathlib.Path(__file__).parents[1]
LIBRARY = pathlib.Path(_library.lib._name).resolve()
#: Runs to warm up, timed runs, and seconds after which there are no more of them.
QUICK, THOROUGH = (1, 5, 0.1), (10, 100, 3.0)


class Elixir:
    """The Elixir process: a line tells it a call, and its answer is that the call is done."""

    def __init__(self, folder: str, names: list[str]):
        build = PROJECT.parents[1] / "build" / "elixir"
        settings = {"MIX_BUILD_PATH": str(build), "FLASHKERNEL": str(LIBRARY.parent)}
        self.process = subprocess.Popen(
            ["mix", "run", "bench/calls.exs", folder, *names],
            cwd=PROJECT,
            env={**os.environ, "MIX_ENV": "test", **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wait("ready")

    def wait(self, expected: str) -> None:
        for line in self.process.stdout:
            if line.strip() == expected:
                return
        raise RuntimeError("the Elixir process has ended; see above")

    def call(self, what: str) -> None:
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        self.wait("done")

    def seconds(self) -> float:
        """The processor time that it and this program have taken so far."""
        text = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return sum(os.times()[:4]) + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class NifCall:
    """Several calls in a row, so that the way to the process and back does not count."""

    holds = 5

    def __init__(self, elixir: Elixir, what: str):
        self.elixir, self.what = elixir, what

    def __call__(self) -> None:
        self.elixir.call(f"{self.what} {self.holds}")


class Program:
    """A program of XLA as Elixir wrote it, which takes and gives flat arrays by name."""

    def __init__(self, text: str):
        self.text, self.operands, self.outputs = text, [], []
        self.device = jax.devices("cpu")[0]

    @functools.cached_property
    def compiled(self):
        devices = xla.DeviceList((self.device,))
        return self.device.client.compile_and_load(self.text, devices, xla.CompileOptions())

    def __call__(self, values: dict) -> dict:
        results = self.compiled.execute_sharded([values[name] for name in self.operands])
        arrays = results.disassemble_into_single_device_arrays()
        return {o[0]: a[0] for o, a in zip(self.outputs, arrays, strict=True)}

    @property
    def operand_types(self) -> list[str]:
        return re.findall(r"%a\d+: (tensor<.*?>)", self.text)

    @property
    def output_types(self) -> str:
        return re.search(r"-> (\(.*\)) \{", self.text)[1]

    def as_function(self, name: str) -> str:
        body = self.text.strip().removeprefix("module {").removesuffix("}")
        return body.replace("public @main", f"private @{name}")

    def call(self, name: str) -> str:
        """A call of it as a function, on values of its operands' names."""
        operands = ", ".join(f"%{o}" for o in self.operands)
        types = f"({', '.join(self.operand_types)}) -> {self.output_types}"
        return f"%{name}:{len(self.outputs)} = func.call @{name}({operands}) : {types}"


def one_after_the_other(saving: Program, backward: Program) -> Program:
    """Both in one program, as EXLA has a function and its gradient: what `backward` takes and is an
    output of `saving` goes from one to the other."""
    kept = {name: f"saving#{i}" for i, (name, _, _) in enumerate(saving.outputs)}
    given = dict(zip(saving.operands, saving.operand_types, strict=True))
    given |= {
        name: kind
        for name, kind in zip(backward.operands, backward.operand_types, strict=True)
        if name not in kept
    }
    arguments = ", ".join(f"%{name}: {kind}" for name, kind in given.items())
    call = backward.call("backward")
    for name, value in kept.items():
        call = re.sub(rf"%{name}(?=[,)])", f"%{value}", call)
    results = ", ".join(f"%backward#{i}" for i in range(len(backward.outputs)))
    whole = Program(
        f"""module {{
          {saving.as_function("saving")}
          {backward.as_function("backward")}
          func.func public @main({arguments}) -> {backward.output_types} {{
            {saving.call("saving")}
            {call}
            return {results} : {backward.output_types.strip("()")}
          }}
        }}"""
    )
    whole.operands, whole.outputs = list(given), backward.outputs
    return whole


class Call:
    """One of Elixir's calls: its inputs, and its programs by kind."""

    def __init__(self, name: str):
        self.name, self.inputs, self.programs = name, {}, {}

    def flat(self) -> dict:
        return {k: jax.device_put(v.ravel()) for k, v in self.inputs.items()}

    @property
    def output(self) -> tuple:
        """The name and the dims of the first output."""
        name, _, dims = self.programs["forward"].outputs[0]
        return name, dims

    def forward(self):
        program, flat, name = self.programs["forward"], self.flat(), self.output[0]
        return lambda: program(flat)[name]

    def gradient(self):
        """The gradients of the sum of the first output."""
        program = one_after_the_other(self.programs["saving"], self.programs["backward"])
        name, dims = self.output
        ones = jax.device_put(np.ones(dims, np.float32).ravel())
        values = {**self.flat(), f"d{name}": ones}
        return lambda: program(values)


def read(folder: pathlib.Path) -> list[Call]:
    calls = []
    for line in (folder / "calls.txt").read_text().splitlines():
        kind, name, *rest = line.split()
        if kind == "call":
            calls.append(Call(name))
        elif kind == "input":
            data = np.fromfile(folder / rest[1], np.float32)
            calls[-1].inputs[name] = data.reshape(dims_of(rest[0]))
        elif kind == "program":
            program = calls[-1].programs[name] = Program((folder / rest[0]).read_text())
        elif kind == "operand":
            program.operands.append(name)
        else:
            program.outputs.append((name, rest[0], dims_of(rest[1])))
    return calls


def dims_of(text: str) -> tuple:
    return tuple(int(n) for n in text.split("x"))


def largest_error(got: list, exact: list) -> float:
    """Relative to the largest entry of each array."""
    worst = 0.0
    for g, e in zip(map(np.asarray, got), map(np.asarray, exact), strict=True):
        worst = max(worst, float(np.abs(g.reshape(e.shape) - e).max() / np.abs(e).max()))
    return worst


class Timed:
    """What is timed of one call, forward or with gradients: functions by name, and the inputs whose
    gradients they return."""

    def __init__(self, call: Call, elixir: Elixir, train: bool):
        self.call = call
        arrays = {k: jax.device_put(v) for k, v in call.inputs.items()}
        self.forms = plain.peers(call.name)
        self.names = []
        if train:
            self.names = [
                name.removeprefix("d") for name, _, _ in call.programs["backward"].outputs
            ]
        self.functions = {
            "ours": call.gradient() if train else call.forward(),
            "nif": NifCall(elixir, f"{call.name} {'gradient' if train else 'forward'}"),
            **{n: functools.partial(self.jitted(f), arrays) for n, f in self.forms.items()},
        }

    def jitted(self, form):
        """A peer, or its gradients of the sum of what it returns."""
        if not self.names:
            return jax.jit(form)

        def gradients(t):
            return jax.grad(lambda some: form({**t, **some}).sum())({n: t[n] for n in self.names})

        return jax.jit(gradients)

    def in_order(self, outputs) -> list:
        """The output, or the gradients in one order; ours have the backward's names."""
        if not self.names:
            return [outputs]
        return [outputs[n] if n in outputs else outputs[f"d{n}"] for n in self.names]

    def errors(self) -> dict:
        """Of ours and of a peer, against that peer's formula in float64."""
        peer = list(self.forms)[-1]
        exact = {k: v.astype(np.float64) for k, v in self.call.inputs.items()}
        expected = self.in_order(self.jitted(self.forms[peer])(exact))
        return {
            "max_error": largest_error(self.in_order(self.functions["ours"]()), expected),
            "peer_error": largest_error(self.in_order(self.functions[peer]()), expected),
        }


def rows_of(call: Call, elixir: Elixir, watch: Watch, effort: tuple) -> list[dict]:
    rows = []
    for train in (False, True):
        timed = Timed(call, elixir, train)
        functions = timed.functions
        for function in functions.values():  # what a call compiles is no disturbance
            jax.block_until_ready(function())
        before = watch.start()
        times, runs = time_cpu(functions, *effort, wait=jax.block_until_ready)
        seen = watch.since(before)
        peers = {n: {"ms": times[n]} for n in timed.forms}
        best = min(p["ms"]["p50"] for p in peers.values())
        accuracy = timed.errors()
        for through, ours in (("custom_call", times["ours"]), ("nif", times["nif"])):
            rows.append(
                {
                    "op": f"{call.name}_fwd",
                    "case": {
                        **sizes_of(call),
                        "train": train,
                        "dtype": "float32",
                        "framework": "elixir",
                        "through": through,
                    },
                    "impl": "cpu",
                    "ms": ours,
                    **runs,
                    **accuracy,
                    "peers": peers,
                    "busy": seen,
                    "disturbed": watch.reasons(seen, ours),
                    "ratio_to_best_peer": round(best / ours["p50"], 3),
                }
            )
    return rows


def sizes_of(call: Call) -> dict:
    shapes = {name: a.shape for name, a in call.inputs.items()}
    if call.name == "selective_scan":
        return dict(zip("BLDN", (*shapes["u"], shapes["A"][1]), strict=True))
    if call.name == "attention":
        return dict(zip("BLHD", shapes["q"], strict=True)) | {"causal": True}
    return dict(zip("BLIH", (*shapes["x"], shapes["w_hh"][1]), strict=True))


def main(arguments: list[str]) -> int:
    effort = QUICK if "--quick" in arguments else THOROUGH
    file, *names = [a for a in arguments if a != "--quick"]
    handler = jax.ffi.pycapsule(ctypes.CDLL(str(LIBRARY)).fk_exla_call_cpu)
    jax.ffi.register_ffi_target("flashkernel", handler, platform="cpu")
    jax.config.update("jax_enable_x64", True)
    with tempfile.TemporaryDirectory() as folder:
        elixir = Elixir(folder, names)
        watch = Watch(len(os.sched_getaffinity(0)), own=elixir.seconds)
        calls = read(pathlib.Path(folder))
        rows = [row for call in calls for row in rows_of(call, elixir, watch, effort)]
        elixir.close()
    version = subprocess.check_output(["elixir", "--short-version"], text=True).strip()
    warmup, iterations, _ = effort
    result = {
        "machine": {**report.machine(fk, FRAMEWORKS["jax"]("cpu"), "cpu"), "elixir": version},
        "commit": report.commit(),
        "date": report.now(),
        "method": {"warmup": warmup, "iterations": iterations, "timer": "perf_counter, in turns"},
        "busy": watch.summary(),
        "rows": rows,
    }
    report.write_json(file, result)
    for row in rows:
        peers = ", ".join(f"{n} {p['ms']['p50']:.2f}" for n, p in row["peers"].items())
        what = (
            f"{row['op']}{' + gradients' if row['case']['train'] else ''}, {row['case']['through']}"
        )
        print(f"{what}: {row['ms']['p50']:.2f} ms; {peers}; {row['ratio_to_best_peer']} times")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
