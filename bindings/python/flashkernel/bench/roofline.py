"""The roofline of a result, as an SVG: how much each row computes for a byte it must move, how fast
it does, and what the machine would let it. Bounds are what the same run measured: a plain copy, and
a plain matrix product."""

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
    if not points or not {"copy_tbps", "gemm_tflops"} <= set(ceilings):
        return ""
    bandwidth, peak = ceilings["copy_tbps"] * 1e12, ceilings["gemm_tflops"] * 1e12
    ridge = peak / bandwidth
    left, right = _decades(ridge, *(x for _, _, x, _ in points))
    low, high = _decades(peak, left * bandwidth, *(y for _, _, _, y in points))
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
    start, top = up(left * bandwidth), up(peak)
    roof = f"M{_LEFT} {start:.1f}L{across(ridge):.1f} {top:.1f}H{_WIDTH - _RIGHT}"
    parts.append(f'<path class="roof" d="{roof}"/>')
    for label, row, x, y in points:
        cx, cy = across(x), up(y)
        title = html.escape(f"{label}: {x:.3g} FLOP per byte, {_rate(y)}")
        kind = ' class="bwd"' if row["op"].endswith("_bwd") else ""
        circle = f'<circle{kind} cx="{cx:.1f}" cy="{cy:.1f}" r="4"><title>{title}</title></circle>'
        parts.append(circle + _text(cx + 6, cy + 4, label.partition(" ")[0]))
    view = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg class="roofline" {view} role="img">{"".join(parts)}</svg>'


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
