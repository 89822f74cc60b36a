# SPDX-License-Identifier: Apache-2.0
"""The instruments of the benchmarks measure what can be worked out by hand."""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.benchmarks import models
from tests.benchmarks.__main__ import main
from tests.benchmarks.arms import Arm, Bare, Floor
from tests.benchmarks.counts import FROM_START, Counts, count, gradient_error
from tests.benchmarks.models import ManyParameters, Stopwatch
from tests.benchmarks.report import Row, show
from tests.benchmarks.turns import WARM_UP, Times, race
from tests.benchmarks.workloads import WORKLOADS
from tests.costs import WARM, Ops, PeakBytes, PythonCalls, host_reads

SMALL = WORKLOADS | {
    "optimizer": replace(
        WORKLOADS["optimizer"], model=lambda fused: ManyParameters(fused, count=1000, tensors=4)
    )
}


def some_optimizer(foreach=None):
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones(8)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=foreach)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_walk_is_one_pass_however_it_is_made(foreach):
    optimizer = some_optimizer()
    params = optimizer.param_groups[0]["params"]
    with Ops([optimizer]) as ops:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach)
    assert ops.walks == 2.0  # norm, multiply
    with Ops([optimizer]) as ops:
        params[0].grad.mul_(2.0)
    assert ops.walks == 0.25


@pytest.mark.parametrize("foreach", [False, True])
def test_neither_the_update_nor_a_view_is_a_walk(foreach):
    optimizer = some_optimizer(foreach)
    optimizer.step()
    with Ops([optimizer]) as ops:
        optimizer.step()
        [p.grad.detach() for p in optimizer.param_groups[0]["params"]]
    assert ops.count.total() > 0
    assert ops.walks == 0.0


def test_accumulating_in_the_backward_pass_is_no_walk():
    optimizer = some_optimizer()
    loss = sum(p.sum() for p in optimizer.param_groups[0]["params"])
    with Ops([optimizer]) as ops:
        loss.backward()
    assert float(optimizer.param_groups[0]["params"][0].grad[0]) == 2.0
    assert ops.walks == 0.0


def test_python_calls_are_exact():
    def leaf():
        pass

    calls = PythonCalls()
    calls.start()
    leaf()
    leaf()
    len([])
    calls.stop()
    # beside the three: `stop` and `sys.setprofile`
    assert calls.total == 3 + 2


def test_reads_of_every_kind_are_counted():
    calls, one = PythonCalls(), torch.ones(1)
    with Ops() as ops:
        calls.start()
        one.item(), bool(one), one.equal(one), one.nonzero(), one.tolist(), one.numpy()
        calls.stop()
    assert host_reads(ops, calls) == 6


def test_peak_bytes_see_what_is_freed_again():
    bytes_ = PeakBytes("cpu")
    bytes_.start()
    kept = torch.ones(1000)
    passing = torch.ones(5000)
    del passing
    later = torch.ones(2000)
    bytes_.stop()
    assert bytes_.peak == 4 * (1000 + 5000)
    assert len(kept) + len(later) == 3000


def test_times_are_quartiles():
    assert Times.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Times(1.0, 3.0, 2.0, 4.0)


def test_the_stopwatch_takes_the_making_of_gradients_out(monkeypatch):
    clock = iter([0.0, 2.5, 10.0, 10.5])
    monkeypatch.setattr(models.time, "thread_time", lambda: next(clock))
    watch = Stopwatch()
    with watch:
        pass
    with watch:
        pass
    assert watch.seconds == 3.0


def test_planted_gradients_carry_the_seed_and_count_for_the_norm():
    model = ManyParameters(count=100, tensors=4)
    (model.training_step(torch.ones(1), 0) * 8.0).backward()
    assert [p.grad.unique().tolist() for p in model.many] == [[pytest.approx(8e-3)]] * 4
    assert float(model.anchor.grad) == 8.0


# ---------------------------------------------------------------------- turns


class Diary(Arm):
    """An arm that writes down its steps and may fail at one of them."""

    def __init__(self, name, log, fails_at=None):
        super().__init__(name)
        object.__setattr__(self, "log", log)
        object.__setattr__(self, "fails_at", fails_at)

    def run(self, job):
        for i, _ in enumerate(job):
            if i == self.fails_at:
                raise RuntimeError("planted")
            if i >= WARM_UP:
                self.log.append(self.name)


def test_arms_take_turns_within_one_process_and_the_order_shifts():
    log = []
    workload = replace(SMALL["tiny-mlp"], turn=2)
    times = race(workload, [Diary("a", log), Diary("b", log)], "cpu", 4)
    # the first round warms up; each arm ends with the one batch fetched after its last step
    assert "".join(log) == "bbaa" + "aabb" + "ab"
    assert set(times) == {"a", "b"}


def test_an_arm_that_fails_ends_the_others_and_is_heard():
    before = threading.active_count()
    arms = [Diary("a", []), Diary("b", [], fails_at=WARM_UP + 1), Bare("bare")]
    with pytest.raises(RuntimeError, match="planted"):
        race(SMALL["tiny-mlp"], arms, "cpu", 8)
    assert threading.active_count() == before


def test_gradient_error_of_float32_itself_is_zero():
    exact = replace(SMALL["sharing"], precision="16-mixed")
    assert gradient_error(exact, Floor("no autocast"), "cpu") < 1e-6


# ---------------------------------------------------------------------- the table


ROWS = [
    Row("first", None, Times(0.002, 0.003, 0.0025, 0.004), Counts(1, 20, 3.0, 400, 5, 2**20)),
    Row("second", None, Times(0.001, 0.002, 0.0015, 0.003), Counts(0, 10, 1.0, 300, 0, 2**19)),
    Row("third", "not installed"),
]
CELLS = ["second", "1.000", "0.50", "2.000", "1.500 to 3.000", "0", "10", "1.00", "300", "-0.500"]


@pytest.mark.parametrize("fails_at", [0, FROM_START, WARM + 1])
def test_an_arm_that_fails_while_it_is_counted_leaves_no_instrument_running(fails_at):
    class Failing(Arm):
        def run(self, job):
            for i, _ in enumerate(job):
                if i == fails_at:
                    raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        count(SMALL["tiny-mlp"], Failing("failing"), "cpu")
    assert sys.getprofile() is None
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled()
    assert count(SMALL["tiny-mlp"], Bare("bare"), "cpu").walks == 1


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_holds_times_ratios_and_counts(rich, capsys, monkeypatch):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    show("title", ROWS)
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "second" in line)
    assert all(cell in line for cell in CELLS)
    assert ("│" in line) == rich
    assert "third: skipped, not installed" in out
    assert "gradient error" not in out


def test_the_command_prints_and_writes_what_was_asked_for(capsys, tmp_path, monkeypatch):
    brief = replace(SMALL["sharing"], arms=SMALL["sharing"].arms[:1])
    monkeypatch.setattr("tests.benchmarks.__main__.WORKLOADS", SMALL | {"sharing": brief})
    path = tmp_path / "costs.json"
    main(["--workload", "sharing", "--steps", "2", "--json", str(path)])
    told, written = capsys.readouterr().out, json.loads(path.read_text("utf-8"))
    assert "sharing: one Linear called 16 times" in told
    assert "tiny" not in told
    assert list(written["workloads"]) == ["sharing"]
    (row,) = written["workloads"]["sharing"]
    assert row["arm"] == "stock MixedPrecision"
    assert row["counts"]["walks"] == 1.0
    assert row["times"]["fastest"] > 0


@pytest.mark.parametrize("steps", ["1", "0", "-3"])
def test_too_few_steps_are_refused(steps, capsys):
    with pytest.raises(SystemExit):
        main(["--steps", steps])
    assert "at least 2" in capsys.readouterr().err
