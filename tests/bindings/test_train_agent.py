"""examples/train_agent.py: it learns, goes on from a checkpoint, shares a batch among processes."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest
import torch

FILE = pathlib.Path(__file__).parents[2] / "examples" / "train_agent.py"
TINY = ["--hidden", "16", "--length", "7", "--delay", "4", "--batch", "8"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_agent", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.agent.parameters()])


def test_it_learns(example, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    sizes = ["--hidden", "16", "--length", "12", "--delay", "8", "--rate", "1e-2"]
    runs = example.main(["GRU", "MLP", *sizes, "--steps", "200", "--plot", str(picture)])
    assert [run.delay for run in runs] == [8, 0]
    assert all(run.curve[-1][1] > 0.9 for run in runs)
    assert "GRU        cue   8 frames back" in capsys.readouterr().out
    assert picture.stat().st_size > 1000


def test_every_backbone_takes_a_mixed_step(example):
    for run in example.main([*TINY, "--steps", "1", "--mixed"]):
        assert all(p.grad.isfinite().all() for p in run.agent.parameters())
        assert run.agent.backbone.context is None or run.delay < run.agent.backbone.context


def test_a_stopped_run_goes_on(example, tmp_path):
    whole = example.main(["Mamba", *TINY, "--steps", "6"])[0]
    with pytest.MonkeyPatch.context() as patch:
        options = ["Mamba", *TINY, "--steps", "6", "--checkpoints", str(tmp_path)]
        advance = example.Run.advance

        def stop_at_four(self):
            if self.step == 4:
                raise KeyboardInterrupt
            advance(self)

        patch.setattr(example.Run, "advance", stop_at_four)
        with pytest.raises(KeyboardInterrupt):
            example.main(options)
    again = example.main(options)[0]
    assert again.step == 6 and torch.equal(weights(again), weights(whole))


def test_two_processes_have_the_gradients_of_one(example, tmp_path):
    """After one step Adam's first moments are a tenth of the gradients."""
    options = ["MLP", "Mamba", "GRU", "LSTM", "Attention", *TINY, "--steps", "1", "--checkpoints"]
    example.main([*options, str(tmp_path / "one")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    subprocess.run([*command, FILE, *options, str(tmp_path / "two")], check=True, timeout=300)
    for name in ("MLP", "Mamba", "GRU", "LSTM", "Attention"):
        one, two = (torch.load(tmp_path / n / f"{name}.pt")["optimiser"] for n in ("one", "two"))
        assert len(one["state"]) > 5
        for i, state in one["state"].items():
            other = two["state"][i]["exp_avg"]
            torch.testing.assert_close(other, state["exp_avg"], rtol=1e-4, atol=1e-7)


def test_errors(example, capsys):
    for arguments, message in (
        (["RNN"], "RNN: expected one of MLP, GatedSSM"),
        (["--delay", "60"], "--delay: expected less than --length, 60"),
    ):
        with pytest.raises(SystemExit):
            example.main(arguments)
        assert message in capsys.readouterr().err
