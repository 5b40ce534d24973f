"""What the machine code of every kernel shows without running it: registers, stack, spills, and the
instructions of its main loop. Reads the objects below a build's folder with NVIDIA's cuobjdump and
nvdisasm (`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`, or a toolkit's).

    python tools/machine_code.py build/cuda results/softgpu/machine_code.json

These are facts about the compiler's output, not times: what a loop holds, not how long it takes."""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

# The class of an instruction by how its name begins; the first that fits.
CLASSES = (
    ("tensor", ("HMMA", "IMMA", "BMMA", "DMMA", "HGMMA", "QGMMA", "IGMMA")),
    ("special", ("MUFU",)),
    ("half", ("HADD2", "HMUL2", "HFMA2", "HMNMX2", "HSET", "BF16")),
    ("fma", ("FFMA", "FADD", "FMUL", "FSWZADD")),
    ("float", ("FMNMX", "FSETP", "FSEL", "FSET", "FCHK", "D")),
    ("convert", ("F2F", "F2I", "I2F", "FRND", "PRMT", "I2I")),
    ("local", ("LDL", "STL")),
    ("load_shared", ("LDS",)),  # LDSM too
    ("store_shared", ("STS", "ATOMS", "UBLKCP", "STAS")),
    ("load_global", ("LDG", "LD.", "UTMALDG", "LDGSTS", "CCTL")),
    ("store_global", ("STG", "ST.", "RED", "ATOM", "UTMASTG", "UTMAREDG", "UBLKRED")),
    ("load_constant", ("LDC", "ULDC")),
    ("shuffle", ("SHFL", "MOVM", "VOTE", "REDUX", "MATCH")),
    ("barrier", ("BAR", "SYNCS", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "WARPGROUP", "MEMBAR", "FENCE",
                 "UCGABAR", "ERRBAR", "NANOSLEEP", "ACQBULK", "PREEXIT", "ARRIVES")),
    ("branch", ("BRA", "BRX", "BSSY", "BSYNC", "CALL", "RET", "EXIT", "JMP", "BREAK", "YIELD",
                "WARPGROUP", "BMOV", "ENDCOLLECTIVE")),
    ("nothing", ("NOP",)),
)  # fmt: skip
OTHERWISE = "integer"  # what is left: addresses, moves, logic, uniform registers

_FUNCTION = re.compile(r"^\s*Function : (\S+)")
_ARCHITECTURE = re.compile(r"^\s*\.target\s+(\S+)|^\s*code for (\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def tool(name: str) -> str:
    """The program's path: on PATH, or where the PyPI package puts it."""
    if found := shutil.which(name):
        return found
    for path in pathlib.Path(sysconfig.get_path("purelib"), "nvidia").glob(f"*/bin/{name}"):
        path.chmod(path.stat().st_mode | 0o111)
        return str(path)
    sys.exit(f"{name} was not found: pip install nvidia-cuda-{name}")


def class_of(opcode: str) -> str:
    for name, beginnings in CLASSES:
        if opcode.startswith(beginnings):
            return name
    return OTHERWISE


def innermost_loops(code):
    """(first, last) indices of each loop that holds no other: a branch back and its target."""
    index = {address: i for i, (address, _, _) in enumerate(code)}
    loops = set()
    for i, (address, opcode, operands) in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if opcode.startswith("BRA") and target:
            to = int(target.group(1), 16)
            # The last instruction of every kernel jumps to itself.
            if to < address and to in index:
                loops.add((index[to], i))
    return [
        a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)
    ]  # fmt: skip


def main_loop(code):
    """The innermost loop that does most: matrix products before all else, then instructions."""

    def work(loop):
        body = [class_of(opcode) for _, opcode, _ in code[loop[0] : loop[1] + 1]]
        return body.count("tensor"), len(body) - body.count("nothing")

    return max(innermost_loops(code), key=work, default=None)


def mix(code) -> dict:
    counts = collections.Counter(class_of(opcode) for _, opcode, _ in code)
    del counts["nothing"]
    return dict(sorted(counts.items()))


def listing(text: str):
    """(architecture, kernel, [(address, opcode, operands)]) of each kernel in a listing."""
    architecture, name, code = None, None, []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            if name:
                yield architecture, name, code
            name, code = match.group(1), []
        elif match := _ARCHITECTURE.match(line):
            if name:
                yield architecture, name, code
            architecture, name, code = match.group(1) or match.group(2), None, []
        elif name and (match := _INSTRUCTION.match(line)):
            code.append((int(match.group(1), 16), match.group(3), match.group(4).strip()))
    if name:
        yield architecture, name, code


def resources(text: str):
    """{(architecture, kernel): (registers, stack, shared, local)}"""
    found, architecture, name = {}, None, None
    for line in text.splitlines():
        if match := re.match(r"arch = (\S+)", line.strip()):
            architecture = match.group(1)
        elif match := re.match(r"\s*Function (\S+):", line):
            name = match.group(1)
        elif match := _RESOURCES.search(line):
            found[architecture, name] = tuple(map(int, match.groups()))
    return found


def run(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kernels_of(object_file: pathlib.Path, folder: pathlib.Path):
    """A row for each kernel and architecture of an object."""
    facts = resources(run(tool("cuobjdump"), "--dump-resource-usage", str(object_file)))
    if not facts:  # an object without device code
        return []
    rows = []
    for architecture, name, code in listing(run(tool("cuobjdump"), "-sass", str(object_file))):
        registers, stack, shared, _ = facts[architecture, name]
        loop = main_loop(code)
        counts = mix(code)
        rows.append({
            "kernel": name,
            "source": str(object_file.relative_to(folder).with_suffix("")),
            "architecture": architecture,
            "registers": registers,
            "stack_bytes": stack,
            "static_shared_bytes": shared,
            "local_instructions": counts.get("local", 0),
            "instructions": sum(counts.values()),
            "main_loop": mix(code[loop[0] : loop[1] + 1]) if loop else {},
        })  # fmt: skip
    return rows


def readable(rows) -> None:
    """Demangles the names, and leaves out parameters and casts."""
    if shutil.which("c++filt") is None:
        return
    text = "\n".join(row["kernel"] for row in rows)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    for row, name in zip(rows, done.stdout.splitlines(), strict=True):
        name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
        name = re.sub(r"\([\w: ]+\)(?=-?\d)", "", name)
        row["kernel"] = name.split("(")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="objects with machine code: build/cuda")
    parser.add_argument("output", type=pathlib.Path, help="the JSON file to write")
    options = parser.parse_args()
    os.environ["PATH"] += os.pathsep + str(pathlib.Path(tool("nvdisasm")).parent)
    objects = sorted(options.folder.rglob("*.o"))
    with concurrent.futures.ProcessPoolExecutor() as pool:
        parts = pool.map(kernels_of, objects, [options.folder] * len(objects))
    rows = [row for part in parts for row in part]
    if not rows:
        print(f"{options.folder}: no machine code in any object", file=sys.stderr)
        return 1
    readable(rows)
    rows.sort(key=lambda row: (row["source"], row["architecture"], row["kernel"]))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    options.output.write_text(f'{{"rows": [\n  {lines}\n]}}\n')
    spilling = sum(row["local_instructions"] > 0 for row in rows)
    print(f"{len(rows)} kernels in {options.output}; {spilling} use local memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
