"""Trains the backbones of `flashkernel.torch.backbones` on a task that needs memory.

    python examples/train_agent.py                      (all of them, two minutes on two cores)
    python examples/train_agent.py Mamba GRU --delay 100 --length 120
    python examples/train_agent.py --mixed --checkpoints runs --plot memory.png
    torchrun --nproc-per-node 2 examples/train_agent.py Mamba --checkpoints runs

In a window of noise one frame shows one of eight cues; after the last frame the agent must name it.
What counts is how often it does when the cue is `--delay` frames old; it learns from cues of any
age up to that. A backbone that cannot see so far back is asked for cues half as old as the oldest
it can see, and the table says so: of a cue 50 frames old an MLP knows nothing.

Under torchrun every process takes its share of each batch, and the gradients are those of one
process that takes all of it. With `--checkpoints` a run that was stopped goes on where it was.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import flashkernel as fk
from flashkernel.torch import backbones

NAMES = ("MLP", "GatedSSM", "GRU", "LSTM", "Mamba", "Attention", "Jamba")
CUES, FRAME = 8, 32


class Agent(nn.Module):
    """A backbone, and a layer that chooses one of the cues."""

    def __init__(self, name, hidden, length):
        super().__init__()
        cls, options = getattr(backbones, name), {}
        if name in ("Attention", "Jamba"):
            options = {"window": length, "heads": max(1, hidden // 64)}
        self.backbone = cls(input_size=FRAME, hidden=hidden, **options)
        self.choose = fk.torch.Linear(hidden, CUES)

    def forward(self, frames):
        return self.choose(self.backbone(frames))


def windows(seed, batch, length, youngest, oldest):
    """Windows (batch, length, FRAME) of noise, and the cue that each shows, that many frames before
    its last."""
    generator = torch.Generator().manual_seed(seed)
    frames = 0.3 * torch.randn(batch, length, FRAME, generator=generator)
    cues = torch.randint(CUES, (batch,), generator=generator)
    ages = torch.randint(youngest, oldest + 1, (batch,), generator=generator)
    row, at = torch.arange(batch), length - 1 - ages
    frames[row, at, cues] += 3
    frames[row, at, CUES] += 3  # which says "look here"
    return frames, cues


class Run:
    """The training of one backbone: its agent, its optimiser, and how well it did so far."""

    def __init__(self, name, options, device, rank, processes):
        torch.manual_seed(options.seed)  # every process begins with the same weights
        self.name, self.options, self.device = name, options, device
        self.rank, self.processes = rank, processes
        self.agent = Agent(name, options.hidden, options.length).to(device)
        context = self.agent.backbone.context
        sees = context is None or context > options.delay
        self.delay = options.delay if sees else context // 2
        self.optimiser = torch.optim.AdamW(self.agent.parameters(), options.rate)
        self.step, self.curve = 0, []
        self.file = options.checkpoints and pathlib.Path(options.checkpoints) / f"{name}.pt"
        if self.file and self.file.exists():
            self.load()
        self.model = self.agent
        if processes > 1:
            self.model = nn.parallel.DistributedDataParallel(self.agent)

    def load(self):
        kept = torch.load(self.file, map_location=self.device)
        self.agent.load_state_dict(kept["agent"])
        self.optimiser.load_state_dict(kept["optimiser"])
        self.step, self.curve = kept["step"], kept["curve"]

    def save(self):
        if not self.file or self.rank != 0:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = {
            "agent": self.agent.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "curve": self.curve,
        }
        unfinished = self.file.with_suffix(".part")
        torch.save(kept, unfinished)
        unfinished.replace(self.file)  # whoever stops us here finds the old one whole

    def precision(self):
        if not self.options.mixed:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def advance(self):
        """One step, of a batch that depends on nothing but the step's number."""
        options = self.options
        seed = options.seed + 1 + self.step
        frames, cues = windows(seed, options.batch, options.length, 0, self.delay)
        mine = slice(self.rank, None, self.processes)
        frames, cues = frames[mine].to(self.device), cues[mine].to(self.device)
        for group in self.optimiser.param_groups:  # a slow start, and a slow end
            left = 1 - self.step / options.steps
            group["lr"] = options.rate * min(1, (self.step + 1) / 20, 0.1 + 3 * left)
        with self.precision():
            loss = fk.cross_entropy(self.model(frames), cues)
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.agent.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1

    @torch.no_grad()
    def measure(self) -> float:
        """The share of 256 new windows whose cue is named."""
        frames, cues = windows(10**9, 256, self.options.length, self.delay, self.delay)
        with self.precision():
            chosen = self.agent(frames.to(self.device)).argmax(-1)
        right = (chosen.cpu() == cues).float().mean().item()
        self.curve.append((self.step, right))
        return right

    def train(self):
        """Trains, saves and reports every twentieth of the way; stops early once all is known."""
        begin, every = time.perf_counter(), max(1, self.options.steps // 20)
        right = self.curve[-1][1] if self.curve else 0.0
        while self.step < self.options.steps and right < 0.999:
            self.advance()
            if self.step % every == 0 or self.step == self.options.steps:
                right = self.measure()
                self.save()
                self.report(right, time.perf_counter() - begin)
        return right

    def report(self, right, seconds):
        if self.rank == 0 and sys.stderr.isatty():
            steps = f"{self.step}/{self.options.steps}"
            text = f"\r{self.name:10} {steps:>9} steps  {right:6.1%} right  {seconds:5.1f} s"
            print(text, end="", file=sys.stderr, flush=True)


def plot(runs, file):
    """How many cues were named, after how many steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for run in runs:
        steps, right = zip((0, 1 / CUES), *run.curve, strict=True)
        axes.plot(steps, right, label=f"{run.name}, {run.delay} frames back")
    axes.axhline(1 / CUES, color="grey", linestyle=":", label="by chance")
    axes.set(xlabel="training steps", ylabel="cues named", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(file, bbox_inches="tight", dpi=120)


def main(arguments=None) -> list[Run]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="BACKBONE", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--delay", type=int, default=50, help="frames between cue and answer")
    parser.add_argument("--length", type=int, default=60, help="frames of a window")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mixed", action="store_true", help="bfloat16 where it is safe")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--plot", metavar="FILE", help="a picture of the learning curves")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"{name}: expected one of {', '.join(NAMES)}")
    if not 0 <= options.delay < options.length:
        parser.error(f"--delay: expected less than --length, {options.length}")

    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if options.batch % processes:
        parser.error(f"--batch: expected a multiple of the {processes} processes")
    if processes > 1:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    runs = []
    for name in options.names or NAMES:
        run = Run(name, options, torch.device(device), rank, processes)
        right = run.train()
        runs.append(run)
        if rank == 0:
            end = "\r\033[K" if sys.stderr.isatty() else ""
            print(end, end="", file=sys.stderr, flush=True)
            print(f"{name:10} cue {run.delay:3} frames back: {right:6.1%} after {run.step} steps")
    if options.plot and rank == 0:
        plot(runs, options.plot)
    if processes > 1:
        dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    main()
