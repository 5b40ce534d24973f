"""The installed library: a user's project builds against it, and it asks nothing of the machine."""

import importlib.util
import os
import re
import shutil

import pytest

from conftest import ROOT, run

PROJECT = ROOT / "tests" / "outside_project"


def check_output(output: str):
    version, message = output.splitlines()
    assert re.fullmatch(r"[0-9.]+", version)
    assert message.startswith("rms_norm: y: expected")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_package(prefix, tmp_path):
    run("cmake", "-S", PROJECT, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path)
    for program in ("from_c", "from_c_static", "from_cpp", "from_cpp_static"):
        check_output(run(tmp_path / program))


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_package_without_cpp(prefix, tmp_path):
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DOUTSIDE_LANGUAGES=C"]
    run("cmake", "-S", PROJECT, "-B", tmp_path, "-G", "Ninja", *options)
    run("cmake", "--build", tmp_path)
    for program in ("from_c", "from_c_static"):
        check_output(run(tmp_path / program))


@pytest.mark.skipif(shutil.which("ninja") is None, reason="needs cmake and ninja")
@pytest.mark.parametrize("program", ["from_c", "from_c_static"])
def test_subdirectory(program, tmp_path_factory):
    """The headers that the build writes are there before a user's file is compiled."""
    folder = tmp_path_factory.getbasetemp() / "subdirectory"
    if not folder.exists():
        options = [f"-DFLASHKERNEL_SOURCES={ROOT}", "-DFK_CUDA=OFF"]
        run("cmake", "-S", PROJECT, "-B", folder, "-G", "Ninja", *options)
    steps = run("ninja", "-C", folder, "-t", "commands", f"CMakeFiles/{program}.dir/from_c.c.o")
    assert re.search(r"/generate_headers \S+/generated/fresh\b", steps)


@pytest.mark.parametrize("order", [("FIRST", "SECOND"), ("SECOND", "FIRST")])
def test_beside_a_whole_dlpack_header(prefix, order):
    torch = importlib.util.find_spec("torch")
    if torch is None:
        pytest.skip("torch, which has such a header, is not installed")
    includes = [prefix / "include", f"{torch.submodule_search_locations[0]}/include"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", *(f"-I{folder}" for folder in includes)]
    headers = zip(order, ("flashkernel/flashkernel.hpp", "ATen/dlpack.h"), strict=True)
    flags += [f"-D{name}=<{header}>" for name, header in headers]
    run("c++", "-fsyntax-only", *flags, PROJECT / "with_dlpack.cc")


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config")
@pytest.mark.parametrize("compiler, source", [("cc", "from_c.c"), ("c++", "from_cpp.cc")])
@pytest.mark.parametrize("static", [False, True])
def test_pkg_config(prefix, tmp_path, compiler, source, static):
    folder = next(prefix.rglob("flashkernel.pc")).parent
    environment = os.environ | {"PKG_CONFIG_PATH": str(folder)}
    # The C programs' flags: plain C99 and C++17, without extensions of ours.
    standard = ["-std=gnu99"] if compiler == "cc" else ["-std=c++17"]
    query = ["pkg-config", "--cflags", "--libs", *(["--static"] if static else []), "flashkernel"]
    flags = run(*query, env=environment).split()
    if static:
        at = flags.index("-lflashkernel")
        flags[at : at + 1] = [str(folder.parent / "libflashkernel.a")]
    program = tmp_path / "program"
    strict = ["-Wall", "-Wextra", "-Werror"]
    run(compiler, *standard, *strict, PROJECT / source, "-o", program, *flags, "-lm")
    check_output(run(program, env={"LD_LIBRARY_PATH": str(folder.parent)}))


def test_loads_anywhere(prefix):
    """Neither CUDA's libraries nor a driver's are needed to load the library."""
    library = next(prefix.rglob("libflashkernel.so"))
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library))
    allowed = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux[-\w]*)\.so\.\d+")
    assert [n for n in needed if not allowed.fullmatch(n)] == []


def test_exports_only_its_own_names(prefix):
    library = next(prefix.rglob("libflashkernel.so"))
    names = [line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()]
    assert "fk_op_call" in names
    assert [n for n in names if not n.startswith("fk_")] == []


@pytest.mark.parametrize("name", ["libflashkernel.so", "libflashkernel.a", "fk"])
def test_holds_no_path_of_its_sources(prefix, name):
    path = re.escape(f"{ROOT}/".encode()) + rb"(bindings|build|include|src|tools)/[ -~]*"
    assert re.findall(path, next(prefix.rglob(name)).read_bytes()) == []


def test_headers(prefix):
    installed = {f.name for f in (prefix / "include" / "flashkernel").iterdir()}
    assert {
        "flashkernel.h",
        "flashkernel.hpp",
        "abi.h",
        "dlpack.h",
        "engine.h",
        "linear.h",
        "model.h",
        "ops.h",
        "ops.hpp",
    } == installed


def test_license(prefix):
    """The text itself lies beside what is installed, and the package's files name it."""
    installed = next(prefix.rglob("LICENSE"))
    assert installed.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "License: Apache-2.0\n" in next(prefix.rglob("flashkernel.pc")).read_text()
    config = next(prefix.rglob("flashkernel-config.cmake")).read_text()
    assert config.startswith("# SPDX-License-Identifier: Apache-2.0\n")
