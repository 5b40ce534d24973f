"""Spoils kernels, one waiting or ordering instruction at a time, and looks whether the software GPU
notices: a report, a deadlock, or another result.

    FK_SOFTGPU_ARCH=90 FK_LIBRARY=build/libflashkernel_softgpu.so PYTHONPATH=bindings/python \
        python tests/softgpu/mutants.py [CALL...]

Prints what was not noticed, with its source line, and ends with the share of those that were."""

import argparse
import functools
import os
import re
import sys

os.environ.setdefault("FK_SOFTGPU_ARCH", "90")
# A spoiled kernel may turn for ever.
os.environ.setdefault("FK_SOFTGPU_INSTRUCTIONS", "20000000")
os.environ.setdefault("FK_SOFTGPU_REPORTS", "1")

import torch

import flashkernel as fk
import software_gpu

# (what, the instruction's text, what it becomes: nothing, or an instruction that never waits).
SPOILED = tuple(
    (what, re.compile(rf"(\s*(?:@!?[%\w]+\s+)?){instruction};(.*)"), instead)
    for what, instruction, instead in (
        ("barrier", r"(?:bar|barrier)\.sync\b[^;]*", ""),
        ("barrier of a cluster", r"barrier\.cluster\.wait[^;]*", ""),
        ("wait for cp.async", r"cp\.async\.wait[^;]*", ""),
        ("wait for bulk copies", r"cp\.async\.bulk\.wait_group[^;]*", ""),
        ("wait for wgmma", r"wgmma\.wait_group[^;]*", ""),
        ("proxy fence", r"fence\.proxy[^;]*", ""),
        ("wait at an mbarrier", r"mbarrier\.try_wait\S*\s+(?P<done>[%\w]+),[^;]*",
         "setp.eq.u32 {}, 0, 0;"),
    )
)  # fmt: skip


# What is a report wherever it runs.
NO_BARRIER = "bar.sync 16;"


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def gradients(function, *inputs):
    leaves = [t.requires_grad_() for t in inputs]
    out = function(*leaves)
    return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))


def calls() -> dict:
    """Small calls, each of which launches kernels that wait in their own ways."""
    half = functools.partial(normal, dtype=torch.float16)
    made = {
        "rms_norm": lambda: fk.rms_norm(half(8, 768), normal(768)),
        "softmax": lambda: fk.softmax(normal(4, 9000)),
        "cross_entropy": lambda: fk.cross_entropy(normal(4, 5000), torch.tensor([1, 2, 3, 4])),
        "sum": lambda: fk.sum(normal(300, 70), axis=0),
    }
    for d in (64, 128):
        q, k, v = (half(1, 520, 2, d) for _ in range(3))
        made[f"attention {d}"] = functools.partial(
            gradients, functools.partial(fk.attention, causal=True), q, k, v
        )
    q = normal(1, 130, 1, 64)
    made["attention float32"] = functools.partial(gradients, fk.attention, q, q + 1, q - 1)
    u, delta, b, c = normal(1, 70, 32), normal(1, 70, 32), normal(1, 70, 16), normal(1, 70, 16)
    scan = functools.partial(fk.selective_scan, delta_softplus=True)
    made["selective_scan"] = functools.partial(
        gradients, scan, u, delta, -normal(32, 16).exp(), b, c
    )
    made["causal_conv1d"] = functools.partial(
        gradients, fk.causal_conv1d, normal(2, 70, 64), normal(64, 4), normal(64)
    )
    for name, dtype in (("", torch.float16), (" float32", torch.float32)):
        linear = functools.partial(fk.linear, activation="gelu")
        x, weight = normal(150, 96, dtype=dtype), normal(136, 96, dtype=dtype)
        made[f"linear{name}"] = functools.partial(
            gradients, linear, x, weight, normal(136, dtype=dtype)
        )
    return made


def flat(result) -> list:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def body_of(ptx: str, kernel: str) -> tuple:
    """Where a kernel's body begins and ends in the text."""
    begin = ptx.index("{", ptx.index(")", ptx.index(f".entry {kernel}(")))
    depth = 0
    for brace in re.compile(r"[{}]").finditer(ptx, begin):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return begin, brace.end()
    raise ValueError(f"{kernel}: the text ends before its body does")


def only(ptx: str, kernel: str) -> str:
    """The module without its other kernels, which need not be read again for each mutant."""
    entries = [m.start() for m in re.finditer(r"^(\.visible |\.weak )?\.entry ", ptx, re.M)]
    mine = max(e for e in entries if e <= ptx.index(f".entry {kernel}("))
    _, end = body_of(ptx, kernel)
    files = "\n".join(re.findall(r"^\t?\.file\t.*$", ptx, re.M))
    return ptx[: entries[0]] + ptx[mine:end] + "\n" + files + "\n"


def mutants(ptx: str, kernel: str):
    """(what was spoiled, source line, spoiled text, a text that reports that the instruction ran)
    for each waiting instruction of the kernel."""
    begin, end = body_of(ptx, kernel)
    lines = ptx[begin:end].split("\n")
    source = ""
    for i, line in enumerate(lines):
        if match := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            source = f"file {match.group(1)} line {match.group(2)}"
        for what, pattern, instead in SPOILED:
            if match := pattern.fullmatch(line):
                changed = match.group(1) + instead.format(match.groupdict().get("done"))
                spoiled, telling = (
                    ptx[:begin]
                    + "\n".join([*lines[:i], text + match.groups()[-1], *lines[i + 1 :]])
                    + ptx[end:]
                    for text in (changed if instead else "", match.group(1) + NO_BARRIER)
                )
                yield what, source, spoiled, telling
                break


def noticed(call, expected) -> str:
    """How it was noticed, or ""."""
    software_gpu.take_problems()
    try:
        got = flat(call())
    except fk.Error as error:
        return software_gpu.take_problems() or str(error)
    if problems := software_gpu.take_problems():
        return problems
    same = all(alike(a, b) for a, b in zip(got, expected, strict=True))
    return "" if same else "another result"


def alike(a, b) -> bool:
    """But for the order of atomic sums. What is read too soon is NaN, or some other block's."""
    a, b = a.double(), b.double()
    off = (a - b).abs() > 1e-2 * b[b.isfinite()].abs().max()
    return not bool((off | (a.isnan() != b.isnan())).any())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calls", nargs="*", metavar="CALL", help="names of calls; none: all")
    parser.add_argument("--seeds", type=int, default=3, help="orders to try, the late one first")
    parser.add_argument("--verbose", action="store_true", help="shows how each was noticed")
    options = parser.parse_args()
    found = total = missed = 0
    for name, call in calls().items():
        if options.calls and name not in options.calls:
            continue
        software_gpu.schedule(0, True)
        with software_gpu.launches() as made:
            expected = flat(call())
        if problems := software_gpu.take_problems():
            print(f"{name}: wrong before it was spoiled:\n{problems}")
            return 1
        for kernel in dict.fromkeys(launch["kernel"] for launch in made):
            own = only(software_gpu.ptx_of(kernel), kernel)
            for what, source, spoiled, telling in mutants(own, kernel):
                software_gpu.replace_ptx(kernel, spoiled)
                how = ""
                for seed in range(options.seeds):
                    software_gpu.schedule(seed, True)
                    if how := noticed(call, expected):
                        break
                if not how:
                    # The call may not come by.
                    software_gpu.replace_ptx(kernel, telling)
                    if not noticed(call, expected):
                        missed += 1
                        continue
                total += 1
                found += bool(how)
                if not how or options.verbose:
                    print(f"{name}: {kernel}: {what}, {source}: {how or 'NOT NOTICED'}", flush=True)
            software_gpu.replace_ptx(kernel, "")
    print(f"{found} of {total} mutants were noticed; {missed} more stand where no call comes by")
    return 0 if total and found >= 0.95 * total else 1


if __name__ == "__main__":
    sys.exit(main())
