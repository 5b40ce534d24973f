"""Timers. Ours and the peers take turns, so that a slow moment of the machine hits all of them."""

import time

import numpy as np


def statistics(seconds) -> dict:
    """mean, std, min, max and percentiles, in milliseconds."""
    ms = np.asarray(seconds) * 1e3
    p50, p95, p99 = np.percentile(ms, [50, 95, 99])
    values = {
        "mean": ms.mean(),
        "std": ms.std(),
        "min": ms.min(),
        "max": ms.max(),
        "p50": p50,
        "p95": p95,
        "p99": p99,
    }
    return {k: round(float(v), 6) for k, v in values.items()}


#: Seconds after which a first call has been run often enough, whatever was asked for.
_LONGEST_S = 60.0


def time_cpu(
    calls: dict,
    warmup: int,
    iterations: int,
    budget_s: float,
    wait=lambda out: out,
    grain_s=20e-6,
    runs_of_first: int = 0,
) -> tuple[dict, dict]:
    """Seconds of each call, taken in turns. A sample of a call under `grain_s` is the mean of
    several, for the last of which `wait` waits. Stops after `budget_s` even if fewer samples were
    taken; returns the runs there were, too: to warm up, and timed.

    runs_of_first: so many samples of the first call, each of one call, for the tail of its times.
    In every turn it then has as many as make up that number, and the others, whose turns still end
    after `budget_s`, have one."""
    for call in calls.values():  # the first may compile
        wait(call())
    shortest = dict.fromkeys(calls, float("inf"))
    deadline = time.perf_counter() + budget_s / 5
    warmed = 1
    while warmed < warmup:
        warmed += 1
        for name, call in calls.items():
            start = time.perf_counter()
            wait(call())
            shortest[name] = min(shortest[name], time.perf_counter() - start)
        if time.perf_counter() > deadline:
            break
    # By the shortest: one slow call must not make a sample a single call for one name and many for
    # another.
    repeats = {name: max(1, min(100, int(grain_s / max(s, 1e-7)))) for name, s in shortest.items()}
    # Of long calls each sample comes after untimed ones of the same kind: XLA's threads give memory
    # back for a while after a call has returned, and would take a core from the next one. In calls
    # of seconds that does not show; nor need there be many of them.
    longest = max(shortest.values())
    settle_s = min(longest / 2, 0.25) if len(calls) > 1 and 0.01 < longest < 1.0 else 0.0
    fewest = 5 if longest < 1.0 else 3
    first, *others = calls
    in_a_turn = dict.fromkeys(calls, 1)
    if runs_of_first:
        a_turn = sum(settle_s + shortest[name] * repeats[name] for name in others)
        iterations = max(fewest, min(iterations, int(budget_s / a_turn) if others else iterations))
        in_a_turn[first] = -(-runs_of_first // iterations)
        repeats[first] = 1
        budget_s = _LONGEST_S
    samples = {name: [] for name in calls}
    deadline = time.perf_counter() + budget_s
    for i in range(iterations):
        for name, call in calls.items():
            n, holds = repeats[name], getattr(call, "holds", 1)  # calls in one
            settled = time.perf_counter() + settle_s
            while settle_s and time.perf_counter() < settled:
                wait(call())
            for _ in range(in_a_turn[name]):
                start = time.perf_counter()
                for _ in range(n):
                    out = call()
                wait(out)
                samples[name].append((time.perf_counter() - start) / (n * holds))
        if i + 1 >= fewest and time.perf_counter() > deadline:
            break
    runs = {"warmup": warmed, "iterations": len(samples[first])}
    if runs_of_first:
        runs["peer_iterations"] = i + 1
    return {name: statistics(s) for name, s in samples.items()}, runs


def time_cuda(calls: dict[str, list], warmup: int, iterations: int) -> dict:
    """Each name has the same call on several sets of inputs, together larger than the L2 cache. All
    sets of a name are captured in one CUDA graph, so that no call finds its inputs in the cache and
    the launches follow each other as they do in a model; graphs are replayed in turns. A sample is
    a replay's time over the number of sets."""
    import torch

    stream = torch.cuda.current_stream()
    graphs, kept = {}, []
    for name, sets in calls.items():
        for _ in range(3):
            for call in sets:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in sets:
                kept.append(call())
        graphs[name] = graph
        kept.clear()  # the graph's pool keeps the outputs' memory
    events = {name: [] for name in graphs}
    for i in range(warmup + iterations):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            if i >= warmup:
                events[name].append((start, end))
        if i % 32 == 31:
            torch.cuda.synchronize()  # keeps the queue short
    torch.cuda.synchronize()
    return {
        name: statistics([s.elapsed_time(e) * 1e-3 / len(calls[name]) for s, e in pairs])
        for name, pairs in events.items()
    }
