"""`fk bench`: the file, the page and the table it writes, and what it refuses."""

import json
import os
import subprocess
import sys
import time

import pytest

from flashkernel.bench import report, roofline
from flashkernel.bench.__main__ import parse, ratio_to_best_peer
from flashkernel.bench.timing import time_cpu

STATISTICS = {"mean", "std", "min", "max", "p50", "p95", "p99"}


def bench(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "flashkernel.bench", *arguments],
        env={**os.environ, "COLUMNS": "120", **environment},
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
        assert row["warmup"] >= 1 and row["iterations"] >= 5
        assert f" {row['warmup']}+{row['iterations']} " in done.stdout
        assert f">{row['warmup']}+{row['iterations']}<" in page.read_text()
        assert {"read", "copy"} & set(result["ceilings"]["bandwidth_tbps"])
        assert row["ceiling"]["of"] and row["impossible"] is (row["percent_of_ceiling"] > 100)
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
    for name in ("L1", "memory", "float32"):  # a line for each bound
        row = {**second, "ceiling": {"bound": "memory", "of": name, "tbps": 0.1}}
        assert f">{name}</text>" in roofline.svg([("", row)], result["ceilings"])
    del second["bytes"]
    report.write_html(str(page), result)
    assert "<svg" not in page.read_text()


@pytest.mark.parametrize(
    "names, cases",
    [
        (["rope"], {("rope", "fwd"), ("rope", "bwd")}),
        (["rope_fwd"], {("rope", "fwd")}),
        (["softmax_bwd", "rope_fwd"], {("softmax", "bwd"), ("rope", "fwd")}),
        (["softmax", "softmax_fwd"], {("softmax", "fwd"), ("softmax", "bwd")}),
    ],
)
def test_names_of_ops_as_check_takes_them(names, cases):
    pytest.importorskip("torch")
    options = parse(["bandwidth", *(word for name in names for word in ("--op", name))])
    assert {(c.op, c.direction) for c in options.cases} == cases


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

    _, counted = time_cpu({"quick": call}, warmup=5, iterations=10, budget_s=20.0)
    assert counted == {"warmup": 5, "iterations": 10}
    assert runs >= 5 * counted["iterations"]  # calls of under a microsecond, in samples of 20


def test_narrow_terminal_and_a_peer_that_is_a_loop(tmp_path):
    """100 columns hold the table, and what nobody would use is no best peer."""
    pytest.importorskip("torch")
    file = tmp_path / "result.json"
    call = ["--quick", "--op", "selective_scan", "--op", "attention", "--peer", "torch_eager"]
    done = bench(*call, "--json", str(file), COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    attention, scan = json.loads(file.read_text())["rows"]
    assert "kind" not in attention["peers"]["torch_eager"]
    assert attention["ratio_to_best_peer"] > 0
    assert scan["peers"]["torch_eager"]["kind"] == "python loop"
    assert scan["ratio_to_best_peer"] == 0
    assert "(python loop)" in done.stdout and "nobody would use" in done.stdout


def test_a_loop_is_no_best_peer_beside_another():
    def row(**peers):
        peers = {n: {"ms": {"p50": p50}, **more} for n, (p50, more) in peers.items()}
        return {"ms": {"p50": 2.0}, "peers": peers}

    loop = {"kind": report.LOOP}
    both = row(loop=(3.0, loop), scan=(4.0, {}))
    assert report.best_peer(both) == "scan" and ratio_to_best_peer(both) == 2.0
    assert report.best_peer(row(loop=(3.0, loop))) == "loop"
    assert report.best_peer(row()) is None and ratio_to_best_peer(row()) == 0.0
