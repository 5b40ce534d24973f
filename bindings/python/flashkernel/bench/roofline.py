"""The roofline of a result, as an SVG: how much each row computes for a byte it must move, how fast
it does, and what the machine would let it, as the same run measured it: a slope for each cache and
the memory, a flat line for each kind of arithmetic."""

import html
import math

_WIDTH, _HEIGHT = 880, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 20, 50

STYLE = """
.roofline { width: 100%; height: auto; font-size: 12px }
.roofline text { fill: currentColor } .roofline .grid { stroke: #8884 }
.roofline .roof { stroke: #888; stroke-width: 2; fill: none }
.roofline circle { fill: #2a7 } .roofline circle.bwd { fill: #d70 }
"""


def svg(rows: list[tuple], ceilings: dict) -> str:
    """`rows`: (label, row), of which those that know their FLOPs and bytes are drawn; nothing where
    none does, or where a bound is missing."""
    points = [
        (label, row, row["flops"] / row["bytes"], row["flops"] / row["ms"]["p50"] * 1e3)
        for label, row in rows
        if row.get("flops") and row.get("bytes")
    ]
    slopes, peaks = _slopes([row for _, row in rows], ceilings), _peaks(ceilings)
    if not points or not slopes or not peaks:
        return ""
    ridges = [peak / slope for peak in peaks.values() for slope in slopes.values()]
    left, right = _decades(*ridges, *(x for _, _, x, _ in points))
    low, high = _decades(
        *peaks.values(), left * min(slopes.values()), *(y for _, _, _, y in points)
    )
    across = _scale(left, right, _LEFT, _WIDTH - _RIGHT)
    up = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)

    parts = []
    for value in _powers(left, right):
        x = across(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{value:g}", "middle"))
    for value in _powers(low, high):
        y = up(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, _rate(value), "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, "FLOP per byte", "middle"))
    top = max(peaks.values())
    for name, slope in slopes.items():
        begin, ridge = max(left, low / slope), top / slope
        line = f"M{across(begin):.1f} {up(begin * slope):.1f}L{across(ridge):.1f} {up(top):.1f}"
        parts.append(f'<path class="roof" d="{line}"/>')
        x = (begin * ridge) ** 0.5
        parts.append(_text(across(x) - 6, up(x * slope) - 6, name, "end"))
    for name, peak in peaks.items():
        start = across(peak / max(slopes.values()))
        parts.append(f'<path class="roof" d="M{start:.1f} {up(peak):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_WIDTH - _RIGHT - 4, up(peak) - 6, name, "end"))
    for label, row, x, y in points:
        cx, cy = across(x), up(y)
        title = html.escape(f"{label}: {x:.3g} FLOP per byte, {_rate(y)}")
        kind = ' class="bwd"' if row["op"].endswith("_bwd") else ""
        circle = f'<circle{kind} cx="{cx:.1f}" cy="{cy:.1f}" r="4"><title>{title}</title></circle>'
        parts.append(circle + _text(cx + 6, cy + 4, label.partition(" ")[0]))
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg class="roofline" {view} role="img">{"".join(parts)}</svg>'


def _slopes(rows: list[dict], ceilings: dict) -> dict:
    """The bandwidth of each cache, and the memory, that bounds a row: the best of its rows'."""
    out = {"memory": ceilings.get("copy_tbps", 0.0)}
    for row in rows:
        ceiling = row.get("ceiling", {})
        if "tbps" in ceiling:
            out[ceiling["of"]] = max(ceiling["tbps"], out.get(ceiling["of"], 0.0))
    return {name: tbps * 1e12 for name, tbps in out.items() if tbps}


def _peaks(ceilings: dict) -> dict:
    peaks = ceilings.get("tflops") or {"product": ceilings.get("gemm_tflops", 0.0)}
    return {name: tflops * 1e12 for name, tflops in peaks.items() if tflops}


def _decades(*values: float) -> tuple[float, float]:
    """The powers of ten around the values."""
    return (
        10.0 ** math.floor(math.log10(min(values))),
        10.0 ** math.ceil(math.log10(max(values) * 1.01)),
    )


def _powers(low: float, high: float) -> list[float]:
    return [10.0**k for k in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def _scale(low: float, high: float, begin: float, end: float):
    """From low to high, by their logarithms, to begin to end."""
    span = math.log10(high / low)
    return lambda value: begin + (end - begin) * math.log10(value / low) / span


def _rate(flops: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops >= unit:
            return f"{flops / unit:.3g} {name}FLOP/s"
    return f"{flops:.3g} FLOP/s"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
