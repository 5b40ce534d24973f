"""The frame budget of a real-time agent: what a window and a step of each backbone take of the
16.67 milliseconds between two frames, as lines and as an SVG."""

import html
import math

BUDGET_MS = 1000 / 60

_WIDTH, _LEFT, _RIGHT, _ROW = 880, 110, 130, 34
_LEAST_MS, _MOST_MS = 0.01, 100.0

STYLE = """
.frames { width: 100%; height: auto; font-size: 12px } .frames text { fill: currentColor }
.frames .window { fill: #2a7 } .frames .step { fill: #38c } .frames .tail { fill-opacity: .35 }
.frames .budget { stroke: #d50; stroke-width: 2 } .frames .grid { stroke: #8884 }
"""


def budgets(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{precision: {backbone: {"window": ms, "step": ms}}} of the rows of a batch of one."""
    out = {}
    for row in rows:
        kind = {"agent_fwd": "window", "agent_step_fwd": "step"}.get(row["op"])
        case = row["case"]
        if kind is None or case["B"] != 1:
            continue
        precision = "int8" if case.get("int8") else case["dtype"]
        out.setdefault(precision, {}).setdefault(case["net"], {})[kind] = row["ms"]
    return out


def lines(rows: list[dict]) -> list[str]:
    """A line for each backbone, under a heading for each precision; nothing where there is none."""
    out = []
    for precision, nets in budgets(rows).items():
        out.append(
            f"Frames of a real-time agent, {precision}: ms as median, p99, and what p99 takes of "
            f"{BUDGET_MS:.2f}"
        )
        for net, kinds in nets.items():
            said = "".join(_said(kind, kinds[kind]) for kind in ("window", "step") if kind in kinds)
            out.append(f"  {net:10}{said}")
    return out


_WORDS = {"window": "window of 60", "step": "one step"}


def _said(kind: str, ms: dict) -> str:
    share = f"{100 * ms['p99'] / BUDGET_MS:.1f}%"
    return f"   {_WORDS[kind]} {ms['p50']:7.3f} {ms['p99']:7.3f} {share:>6}"


def svg(nets: dict[str, dict]) -> str:
    """Two bars for each backbone, on a logarithmic axis: to the median, and paler on to the 99th
    percentile; and the line that no frame may cross."""
    height = _ROW * len(nets) + 60
    bottom = height - 40
    parts = []
    for k in range(-2, 3):
        x = _across(10.0**k)
        parts.append(f'<path class="grid" d="M{x:.1f} 10V{bottom}"/>')
        parts.append(_text(x, bottom + 16, f"{10.0**k:g} ms", "middle"))
    for i, (net, kinds) in enumerate(nets.items()):
        top = 16 + i * _ROW
        parts.append(_text(_LEFT - 8, top + 17, net, "end"))
        for j, kind in enumerate(k for k in ("window", "step") if k in kinds):
            parts.append(_bar(f"{net}, {_WORDS[kind]}", kind, kinds[kind], top + 13 * j))
    x = _across(BUDGET_MS)
    parts.append(f'<path class="budget" d="M{x:.1f} 10V{bottom}"/>')
    parts.append(_text(x + 5, bottom - 5, f"{BUDGET_MS:.2f} ms"))
    parts.append(_text(_LEFT, height - 6, "green: window of 60, blue: one step; paler to the p99"))
    view = f'viewBox="0 0 {_WIDTH} {height}"'
    return f'<svg class="frames" {view} role="img">{"".join(parts)}</svg>'


def _bar(label: str, kind: str, ms: dict, top: int) -> str:
    median, tail = _across(ms["p50"]), _across(ms["p99"])
    title = f"{label}: p50 {ms['p50']:.3f} ms, p99 {ms['p99']:.3f} ms"
    return (
        f"<g><title>{html.escape(title)}</title>"
        f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{median - _LEFT:.1f}" height="11"/>'
        f'<rect class="{kind} tail" x="{median:.1f}" y="{top}" width="{tail - median:.1f}" '
        f'height="11"/></g>' + _text(tail + 4, top + 10, f"{ms['p50']:.2f}, {ms['p99']:.2f}")
    )


def _across(ms: float) -> float:
    share = math.log(min(max(ms, _LEAST_MS), _MOST_MS) / _LEAST_MS)
    return _LEFT + (_WIDTH - _RIGHT - _LEFT) * share / math.log(_MOST_MS / _LEAST_MS)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
