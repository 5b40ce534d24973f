"""Elixir: every op through the NIF beside Python's answers, gradients too, and the programs of XLA
that the same calls become, run by jaxlib's XLA."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import flashkernel as fk
import sampling
from flashkernel import _library
from torch_samples import outputs_of, with_gradient

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = ROOT / "bindings" / "elixir"
TYPES = {
    "float16": ("f", 16),
    "float32": ("f", 32),
    "bfloat16": ("bf", 16),
    "int32": ("s", 32),
    "int64": ("s", 64),
    "float8_e4m3fn": ("f8_e4m3fn", 8),
}
DTYPES = {f"{kind}{bits}": name for name, (kind, bits) in TYPES.items()}
pytestmark = pytest.mark.skipif(shutil.which("mix") is None, reason="needs Elixir")


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def in_dtype(op, sample: dict, dtype: str) -> dict:
    """A sample with its activations of this dtype."""
    fixed = dict(sample)
    for f in op.inputs:
        # What an op keeps as it is given, a convolution's state, has the activations' dtype too.
        if f.dtype_rule == "T" and fixed[f.name] is not None:
            fixed[f.name] = fixed[f.name].astype(numpy_dtype(dtype))
    return fixed


class Cases:
    """Calls for the Elixir side, in a folder, with what is expected of each."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.calls, self.expected, self.labels = folder, [], [], []
        self.files = 0

    def value(self, value):
        """An argument as the Elixir side reads it."""
        if isinstance(value, torch.Tensor):
            half = value.dtype == torch.bfloat16
            value = value.detach().float().numpy() if half else value.detach().numpy()
            value = value.astype(ml_dtypes.bfloat16) if half else value
        if isinstance(value, np.ndarray):
            self.files += 1
            name = f"python_{self.files}"
            (self.folder / name).write_bytes(np.ascontiguousarray(value).tobytes())
            kind = TYPES[str(value.dtype)]
            return {"file": name, "shape": list(value.shape), "type": list(kind)}
        if isinstance(value, float) and value == float("inf"):
            return "infinity"
        return value.item() if isinstance(value, np.generic) else value

    def add(self, label: str, op, sample: dict, results: list, cotangents=None, gradients=None):
        full = {f.name: f.python_default for f in op.arguments} | sample
        positional, keywords = sampling.split(op, full)
        options = {}
        for name, value in keywords.items():
            together = isinstance(value, tuple)
            options[name] = [self.value(v) for v in value] if together else self.value(value)
        call = {
            "op": op.name,
            "positional": [self.value(v) for v in positional],
            "options": options,
            "cotangents": cotangents and [self.value(c) for c in cotangents],
        }
        self.calls.append(call)
        self.expected.append((results, gradients or {}))
        self.labels.append(label)

    def run(self) -> list:
        """(result arrays, gradients by name) of every call."""
        (self.folder / "cases.json").write_text(json.dumps(self.calls))
        mix("run", "--no-compile", "test/support/run_cases.exs", str(self.folder))
        found = []
        for line in (self.folder / "index.txt").read_text().splitlines():
            kind, *rest = line.split()
            if kind == "case":
                found.append(([], {}))
            elif kind in ("result", "gradient"):
                name, type_name, dims, file = rest
                data = np.frombuffer(
                    (self.folder / file).read_bytes(), numpy_dtype(DTYPES[type_name])
                )
                array = data.reshape([int(n) for n in dims.split("x")[1:]])
                if kind == "result":
                    found[-1][0].append(array)
                else:
                    found[-1][1][name] = array
        return found


def mix(*arguments: str, build="elixir", project=PROJECT, **settings: str | None) -> str:
    """What mix prints. A setting that is None is taken out of the environment."""
    library = pathlib.Path(_library.lib._name)
    environment = {
        **os.environ,
        "MIX_ENV": "test",
        "MIX_BUILD_PATH": str(ROOT / "build" / build),
        "FLASHKERNEL": str(library.parent),
        **settings,
    }
    return run("mix", *arguments, cwd=project, env=environment)


def run(*command, env: dict, **options) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(
        [str(c) for c in command],
        env={name: value for name, value in env.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


WITH_XLA = {**os.environ, "FK_LIBRARY": _library.lib._name, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def project():
    mix("compile", "--warnings-as-errors")


def same_bits(got: np.ndarray, expected: np.ndarray) -> bool:
    return (
        got.dtype == expected.dtype
        and got.shape == expected.shape
        and got.tobytes() == np.ascontiguousarray(expected).tobytes()
    )


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().float().numpy().astype(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def check(cases: Cases) -> None:
    found = cases.run()
    assert len(found) == len(cases.calls)
    wrong = []
    for label, (results, gradients), (expected, expected_gradients) in zip(
        cases.labels, found, cases.expected, strict=True
    ):
        if len(results) != len(expected) or not all(map(same_bits, results, expected)):
            wrong.append(f"{label}: results")
        for name, gradient in expected_gradients.items():
            if not same_bits(gradients[name], gradient):
                wrong.append(f"{label}: gradient of {name}")
    assert not wrong, wrong
    programs = pathlib.Path(__file__).with_name("elixir_programs.py")
    run(sys.executable, programs, cases.folder, env=WITH_XLA)


def test_every_op(project, tmp_path):
    cases = Cases(tmp_path)
    for op in sampling.OPS:
        for seed in range(4):
            for dtype in ("float32", "float16", "bfloat16"):
                sample = in_dtype(op, sampling.draw(op, seed, optionals=seed % 2 == 0), dtype)
                # States come back as outputs, as from JAX.
                expected = sampling.call_with_state(op, sample)
                cases.add(f"{op.public_name} {dtype} {seed}", op, sample, list(expected))
    check(cases)


def test_floats_of_8_bits(project, tmp_path):
    """Activations of 8 bits with and without their scales; results are bfloat16."""
    cases = Cases(tmp_path)
    ops = [op for op in sampling.OPS if op.float8]
    assert ops
    for op in ops:
        random = np.random.default_rng(8)
        for seed in range(8):
            sample = sampling.draw(op, seed, optionals=seed % 2 == 0)
            sample = in_dtype(op, sample, "float8_e4m3fn")
            for f in op.inputs:
                if f.with_float8 and seed % 4 < 2:
                    batch, *_, heads, _ = sample[f.name.removesuffix("_scale")].shape
                    one_each = seed < 4 or sample["cu_seqlens_q"] is not None
                    shape = heads if one_each else (batch, heads)
                    sample[f.name] = random.uniform(0.5, 2.0, shape).astype(np.float32)
            expected = sampling.call_with_state(op, sample)
            assert expected[0].dtype == ml_dtypes.bfloat16
            cases.add(f"{op.public_name} {seed}", op, sample, list(expected))
    check(cases)


def test_every_gradient(project, tmp_path):
    cases = Cases(tmp_path)
    for op in sampling.OPS:
        if op.backward is None:
            continue
        for seed in range(2):
            for dtype in ("float32", "float16", "bfloat16"):
                sample = in_dtype(op, sampling.draw(op, seed, optionals=seed == 0), dtype)
                add_gradient(cases, f"{op.public_name} {dtype} {seed}", op, sample)
    check(cases)


def add_gradient(cases: Cases, label: str, op, sample: dict) -> None:
    tensors = {}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            half = value.dtype == ml_dtypes.bfloat16
            value = torch.from_numpy(value.astype(np.float32) if half else value.copy())
            value = value.bfloat16() if half else value
        tensors[name] = value
    names = with_gradient(op, sample)
    for name in names:
        tensors[name].requires_grad_()
    outputs = outputs_of(sampling.call(op, tensors))
    generator = torch.Generator().manual_seed(3)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype).mul(2**-3) for o in outputs]
    gradients = torch.autograd.grad(outputs, [tensors[n] for n in names], cotangents)
    expected = {n: as_numpy(g) for n, g in zip(names, gradients, strict=True)}
    results = [as_numpy(o) for o in outputs]
    cases.add(label, op, sample, results, [as_numpy(c) for c in cotangents], expected)


def test_scans_shorter_than_a_checkpoint(project, tmp_path):
    """Their checkpoints are empty, and XLA's program has no buffer for them."""
    cases = Cases(tmp_path)
    op = fk._declarations.PUBLIC["selective_scan"]
    random = np.random.default_rng(5)

    def normal(*shape):
        return random.standard_normal(shape, np.float32)

    for length in (1, 2, 31, 33):
        sample = {
            "u": normal(2, length, 4),
            "delta": np.abs(normal(2, length, 4)),
            "A": -np.abs(normal(4, 3)),
            "B": normal(2, length, 3),
            "C": normal(2, length, 3),
        }
        sample = {f.name: f.python_default for f in op.arguments} | sample
        add_gradient(cases, f"L {length}", op, sample)
    check(cases)


def test_its_own_suite(project):
    print(mix("test", "--no-compile"))


def test_its_own_suite_with_every_access_watched():
    """The NIF under AddressSanitizer, whose runtime has to be there before Erlang's."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    runtimes = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    mix(
        "test",
        build="elixir-asan",
        CXX=compiler,
        CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all",
        LD_PRELOAD=" ".join(runtimes),
        ASAN_OPTIONS="detect_leaks=0",  # Erlang gives back nothing when it ends
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """Where the library is installed, and the project without a checkout around it."""
    if shutil.which("cmake") is None or not (ROOT / "build" / "libflashkernel.a").exists():
        pytest.skip("needs cmake and a build/ of it")
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", ROOT / "build", "--prefix", prefix, env=os.environ)
    project = tmp_path_factory.mktemp("alone") / "bindings" / "elixir"
    shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("_build", "deps"))
    return prefix, project


@pytest.mark.parametrize("found_by", ["FLASHKERNEL", "pkg-config"])
def test_an_installed_library(installed, tmp_path, found_by):
    prefix, project = installed
    if found_by == "FLASHKERNEL":
        settings = {"FLASHKERNEL": str(prefix)}
    elif shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    else:
        folder = next(prefix.rglob("flashkernel.pc")).parent
        settings = {"FLASHKERNEL": None, "PKG_CONFIG_PATH": str(folder)}
    settings |= {"build": tmp_path, "project": project}
    mix("compile", "--warnings-as-errors", **settings)
    call = "FlashKernel.Tensor.from_list([1.0, 2.0]) |> FlashKernel.sum() |> IO.inspect()"
    assert "{<<0, 0, 64, 64>>, {}, {:f, 32}}" in mix("run", "--no-compile", "-e", call, **settings)
    taken = tmp_path / "lib" / "flashkernel" / "priv" / "libflashkernel.so"
    given = next(prefix.rglob("libflashkernel.so"))
    assert taken.read_bytes() == given.read_bytes()


def test_no_library_anywhere(installed, tmp_path):
    _, project = installed
    settings = {"build": tmp_path, "project": project, "PKG_CONFIG_PATH": None}
    for where in (str(tmp_path), None):
        with pytest.raises(
            AssertionError, match="libflashkernel.so was not found: build it, or set"
        ):
            mix("compile", **settings, FLASHKERNEL=where, PKG_CONFIG_LIBDIR=str(tmp_path))


@pytest.fixture(scope="module")
def stand_ins():
    """The project beside stand-ins for Nx, EXLA and Axon."""
    mix("compile", "--warnings-as-errors", **STAND_INS)


STAND_INS = {"build": "elixir-stand-ins", "MIX_ENV": "stand_ins"}


def test_with_stand_ins(stand_ins):
    print(mix("test", "--no-compile", **STAND_INS))


TAKEN = [
    "registered flashkernel Host: handler",
    "registered flashkernel CUDA: handler",
    'host: flashkernel "softmax_fwd"',
    'cuda: flashkernel "softmax_fwd"',
    "tpu: skip",
    "again: :ok",
    "handlers: 2",
]


def left_to_the_nif(why: str) -> list:
    said = f'"fk_exla_register: {why}"'
    return ["host: skip", "cuda: skip", "tpu: skip", f"again: {{:error, {said}}}", "handlers: 0"]


@pytest.mark.parametrize(
    ("stub", "expected"),
    [
        (None, left_to_the_nif("library: expected one that is loaded, got libxla_extension.so")),
        ("-DAPI_BY=1", TAKEN),
        ("-DAPI_BY=2", TAKEN),
        (
            "-DAPI_BY=0",
            left_to_the_nif("library: expected one with XLA's FFI, got libxla_extension.so"),
        ),
        (
            "-DAPI_BY=1 -DMAJOR=1",
            left_to_the_nif(
                "library: expected version 0 of XLA's FFI, got another in libxla_extension.so"
            ),
        ),
        ("-DAPI_BY=2 -DREFUSES=1", left_to_the_nif("Host: the stub takes no handlers")),
    ],
)
def test_registration_when_the_application_starts(stand_ins, tmp_path, stub, expected):
    settings = {}
    if stub is not None:
        compiler = shutil.which("c++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        where = 'io:format("~s/erts-~s/include", [code:root_dir(), erlang:system_info(version)])'
        erlang = subprocess.check_output(
            ["erl", "-noshell", "-eval", f"{where}, halt()."], text=True
        )
        shared = [compiler, "-std=c++17", "-shared", "-fPIC", "-isystem", erlang]
        library = ["-o", "libxla_extension.so", PROJECT / "test/support/xla_stub.cc"]
        nif = ["-o", "xla_stub_nif.so", PROJECT / "test/support/xla_stub_nif.cc"]
        linked = ["-L.", "-l:libxla_extension.so", "-Wl,-rpath,$ORIGIN"]
        for more in ([*stub.split(), *library], [*nif, *linked]):
            subprocess.run([*shared, *more], cwd=tmp_path, check=True)
        settings = {"XLA_STUB": str(tmp_path / "xla_stub_nif")}
    script = "test/support/registration.exs"
    said = mix("run", "--no-compile", "--no-start", script, **STAND_INS, **settings)
    assert [line for line in said.splitlines() if "[warning]" not in line and line] == expected
    # It is said once why not.
    assert said.count("FlashKernel's calls do not become XLA's") == (expected is not TAKEN)


def test_the_frame_loop(project):
    said = mix("run", "--no-compile", "examples/frame_loop.exs", "0.5")
    print(said)
    assert "30 frames: p50 " in said


def test_the_page(project, tmp_path):
    """What docs/elixir.md says runs, but for what needs Nx, EXLA or Axon."""
    page = (ROOT / "docs" / "elixir.md").read_text()
    blocks = re.findall(r"```elixir\n(.*?)```", page, re.DOTALL)
    alone = [b for b in blocks if not re.search(r"\b(Nx|EXLA|Axon)\b|^\{:", b)]
    assert len(blocks) > len(alone) > 3
    for i, block in enumerate(alone):
        script = tmp_path / f"{i}.exs"
        script.write_text(block)
        mix("run", "--no-compile", str(script))


def test_its_bench(project, tmp_path):
    """One call of the suite, whose programs of XLA must give what the plain ones give."""
    file = tmp_path / "elixir.json"
    bench = PROJECT / "bench" / "bench.py"
    run(sys.executable, bench, "--quick", file, "attention", env=WITH_XLA)
    rows = json.loads(file.read_text())["rows"]
    assert [(r["case"]["train"], r["case"]["through"]) for r in rows] == [
        (train, through) for train in (False, True) for through in ("custom_call", "nif")
    ]
    assert all(r["max_error"] < 1e-5 for r in rows)


def test_its_format(project):
    mix("format", "--check-formatted")
