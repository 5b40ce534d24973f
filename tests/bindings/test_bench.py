"""`fk bench`: the file, the page and the table it writes, and what it refuses."""

import json
import os
import subprocess
import sys
import time

import pytest

from flashkernel.bench import report
from flashkernel.bench.timing import time_cpu

STATISTICS = {"mean", "std", "min", "max", "p50", "p95", "p99"}


def bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "flashkernel.bench", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_file_page_and_table(tmp_path):
    file, page = tmp_path / "a" / "result.json", tmp_path / "page.html"
    call = ["--quick", "--framework", "numpy", "--op", "softmax", "--json", file, "--html", page]
    for implementation in ("cpu", "reference"):  # the second replaces the first one's row
        done = bench(*map(str, call), FK_IMPL=f"softmax_fwd={implementation}")
        assert done.returncode == 0, done.stderr
        assert "softmax_fwd 4096 x 768 float32" in done.stdout
        result = json.loads(file.read_text())
        assert {"machine", "commit", "date", "method", "rows"} <= set(result)
        (row,) = result["rows"]
        assert row["op"] == "softmax_fwd"
        assert row["impl"] == implementation
        assert row["ms"].keys() == row["peers"]["numpy"]["ms"].keys() == STATISTICS
        assert row["ratio_to_best_peer"] > 0
        assert "softmax_fwd 4096 x 768 float32" in page.read_text()


def test_a_case_that_fails_takes_no_other_with_it(tmp_path):
    file = tmp_path / "result.json"
    call = ["--quick", "--framework", "numpy", "--op", "softmax", "--op", "rope"]
    broken = f"import {report.__package__}.__main__ as m, sys;" + (
        "row = m.Bench.row;"
        "m.Bench.row = lambda self, c, *a: 1 // 0 if c.op == 'softmax' else row(self, c, *a);"
        "sys.exit(m.main(sys.argv[1:]))"
    )
    call = [sys.executable, "-c", broken, *call, "--json", str(file)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 1
    assert "softmax_fwd 4096 x 768 float32: ZeroDivisionError" in done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["op"] == "rope_fwd"


def test_interrupt_keeps_what_was_measured(tmp_path):
    file = tmp_path / "result.json"
    broken = f"import {report.__package__}.__main__ as m, sys;" + (
        "row = m.Bench.row;"
        "m.Bench.row = lambda self, c, *a: row(self, c, *a) if c.op == 'softmax' else stop();"
        "stop = lambda: (_ for _ in ()).throw(KeyboardInterrupt);"
        "sys.exit(m.main(sys.argv[1:]))"
    )
    call = ["--quick", "--framework", "numpy", "--op", "softmax", "--op", "rope"]
    call = [sys.executable, "-c", broken, *call, "--json", str(file)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 130 and not done.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["op"] == "softmax_fwd"


def test_output_that_cannot_be_written(tmp_path):
    """The file is written all the same."""
    file = tmp_path / "result.json"
    call = [sys.executable, "-m", "flashkernel.bench", "--quick", "--framework", "numpy"]
    call += ["--op", "softmax", "--json", str(file)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(call, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("fk bench: ")
    assert "Traceback" not in done.stderr and len(json.loads(file.read_text())["rows"]) == 1


def test_peers_of_another_framework_are_left_out():
    pytest.importorskip("jax")
    call = ["demo", "--quick", "--framework", "jax", "--op", "attention", "--op", "selective_scan"]
    done = bench(*call)
    assert done.returncode == 0, done.stderr
    assert "attention_fwd" in done.stdout and "selective_scan_fwd" in done.stdout


def test_roofline(tmp_path):
    file, page = tmp_path / "result.json", tmp_path / "page.html"
    call = ["--quick", "--framework", "numpy", "--op", "logsumexp", "--op", "rope"]
    done = bench(*call, "--json", str(file), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert page.read_text().count("<svg") == 1
    assert page.read_text().count("<circle") == 2
    result = json.loads(file.read_text())
    first, second = result["rows"]
    del first["flops"]  # a row needs both to have a place
    report.write_html(str(page), result)
    assert page.read_text().count("<circle") == 1
    del second["bytes"]
    report.write_html(str(page), result)
    assert "<svg" not in page.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no_such_suite"], "no_such_suite"),
        (["--op", "sofmax"], "--op: expected one of"),
        (["--peer", "nobody"], "--peer: expected one of"),
        (["--framework", "numpy", "--device", "cuda"], "has no device cuda"),
        (["--framework", "numpy", "--direction", "bwd"], "no case of the suite is what was asked"),
        (["demo", "--op", "sum"], "no case of the suite is what was asked for"),
        (["--json", os.path.dirname(__file__)], "--json: "),
        (["--json", __file__], "expected a result file or none"),
    ],
)
def test_refuses(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_refuses_a_device_that_is_not_there():
    done = bench("--framework", "torch", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "no GPU is visible" in done.stderr


def test_one_slow_call_does_not_set_how_many_make_a_sample():
    runs = 0

    def call():
        nonlocal runs
        runs += 1
        if runs == 2:
            time.sleep(0.001)

    _, iterations = time_cpu({"quick": call}, warmup=5, iterations=10, budget_s=2.0)
    assert iterations == 10
    assert runs >= 5 * iterations  # calls of under a microsecond, in samples of 20
