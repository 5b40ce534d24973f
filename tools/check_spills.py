"""Reads what ptxas said of each kernel (`*.ptxas` below the folder named) and fails where registers
spilled to memory."""

import collections
import pathlib
import re
import shutil
import subprocess
import sys

# (pattern of the kernel's name, architecture) -> why it must spill, as the kernel's file says too.
WAIVED: dict[tuple[str, str], str] = {
    ("walk_step_by_step.*bfloat16", "sm_90"): "two numbers before its loop; never launched there",
    ("walk_chunks.*WalkTileIfLi128", "sm_90"): "52 bytes, in 255 registers that do on sm_80",
}

# Kernels that spill nothing but have a stack: patterns of their names -> what lies there.
FRAMES = {
    "scan_forward": "8 bytes at 80 registers on sm_75 and sm_80, none on sm_90a; cause unknown",
}

_KERNEL = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def kernels(log: str):
    """(name, architecture, stack, stores, loads, registers) of each kernel in a log."""
    name = architecture = None
    spills = (0, 0, 0)
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            name, architecture = match.groups()
            spills = (0, 0, 0)
        elif match := _SPILLS.search(line):
            spills = tuple(map(int, match.groups()))
        elif name and (match := _REGISTERS.search(line)):
            yield name, architecture, *spills, int(match.group(1))
            name = None


def waiver(name: str, architecture: str) -> str | None:
    for (pattern, where), reason in WAIVED.items():
        if where == architecture and re.search(pattern, name):
            return reason
    return None


def readable(name: str) -> str:
    tool = shutil.which("c++filt")
    if tool is None:
        return name
    return subprocess.run([tool, name], capture_output=True, text=True).stdout.strip() or name


def main() -> int:
    folder = pathlib.Path(sys.argv[1])
    logs = sorted(folder.rglob("*.ptxas"))
    counts, most, bad, waived = collections.Counter(), collections.Counter(), [], 0
    for log in logs:
        for name, architecture, stack, stores, loads, registers in kernels(log.read_text()):
            counts[architecture] += 1
            most[architecture] = max(most[architecture], registers)
            if not (stack or stores or loads):
                continue
            frame = not (stores or loads) and any(p in name for p in FRAMES)
            if frame or waiver(name, architecture):
                waived += 1
                continue
            where = log.relative_to(folder).with_suffix("").with_suffix("")
            bad.append(
                f"{where}: {readable(name)} on {architecture}: {stack} bytes of stack, "
                f"{stores} spilled, {loads} loaded back ({registers} registers)"
            )
    for line in bad:
        print(line, file=sys.stderr)
    if not counts:
        print(f"{folder}: no ptxas log names a kernel", file=sys.stderr)
        return 1
    for architecture, count in sorted(counts.items()):
        print(f"{architecture}: {count} kernels, at most {most[architecture]} registers")
    print(f"{len(bad)} kernels spill, {waived} waived")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
