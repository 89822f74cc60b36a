# SPDX-License-Identifier: Apache-2.0
"""Each rule speaks of its fault, with numbers, and is silent beside it."""

import dataclasses
import math
import re

import pytest

from lightning_amp_guard.monitor.records import (
    WINDOW,
    Baseline,
    GradientStats,
    Row,
    RunFacts,
    RunView,
    ScheduleLead,
)
from lightning_amp_guard.monitor.rules.registry import RULES, find

GRADIENTS, LOSS, PARTNER = "NONFINITE_GRADIENTS", "NONFINITE_LOSS", "PARTNER_SKIPPED"
SAFE = RunFacts("SafeAMP", "16-mixed", "cuda", scaling=True, growth_interval=2000)
STOCK = dataclasses.replace(SAFE, plugin="MixedPrecision")
BF16 = dataclasses.replace(SAFE, precision="bf16-mixed", scaling=False, growth_interval=None)
FP32 = RunFacts("Precision", "32-true", "cuda", scaling=False)
HEALTHY_LOOK = GradientStats(0, 0, 1000, 0, 0.5, {-1: 1000})
DEAD_LOOK = GradientStats(900, 0, 100, 0, 0.5, {-1: 100})  # 90 % zeros, the others at 0.5
LOST_LOOK = GradientStats(900, 90, 10, 0, 2.0**-29, {-38: 90, -29: 10})  # at scale 2**16


def row(attempt=0, optimizer=0, applied=True, scale=1024.0, **more):
    told = {
        "epoch": 0,
        "batch_idx": attempt,
        "reason": None if applied else GRADIENTS,
        "next_scale": scale,
        "lr": 0.1,
        "loss": 1.0 / (1 + attempt),
        "grad_norm": 1.0 if applied else None,
        "param_checksum": f"{attempt:016x}" if applied else None,
    }
    return Row(
        attempt=attempt, optimizer=optimizer, applied=applied, scale=scale, **{**told, **more}
    )


def skip(attempt, scale=1024.0, to=None, **more):
    next_scale = scale / 2 if to is None else to
    return row(attempt, applied=False, scale=scale, next_scale=next_scale, **more)


def view(rows=(), facts=SAFE, **more):
    return RunView(facts, list(rows), **more)


def codes(seen):
    return [finding.code for finding in find(seen)]


def only(seen, code):
    """The finding of a view with that fault alone."""
    (finding,) = find(seen)
    assert finding.code == code
    return finding


def says(finding, *parts):
    for part in parts:
        assert part in finding.evidence


# ---------------------------------------------------------------------- AMP101


def cut(attempt, kept, norm, scale=1024.0, largest=0.25, **more):
    stats = dataclasses.replace(HEALTHY_LOOK, kept=kept, largest=largest)
    return row(attempt, scale=scale, grad_norm=norm, stats=stats, **more)


def test_clip_of_scaled_gradients_is_told_from_one_log_step():
    # clipped to 0.5 at a scale of 1024: 0.5 / 1024 = 0.00048828125 of a norm of 7
    seen = view([cut(9, 0.5 / 1024 / 7, 0.5 / 1024)], STOCK)
    finding = only(seen, "AMP101")
    says(finding, "attempt 9", "the norm was 0.5", "scale of 1024", "got 0.0004883", "0.00698 %")
    assert finding.remedy.endswith("`Trainer(plugins=[SafeAMP()])`")


def test_clip_by_value_of_scaled_gradients_is_told_by_the_largest_element():
    seen = view([cut(9, 1e-4, 3.3 / 65536, 65536.0, largest=0.5 / 65536)])
    finding = only(seen, "AMP101")
    says(finding, "largest element was 0.5", "got 7.629e-06", "0.01 %")
    assert finding.remedy.endswith("`self.trainer.precision_plugin.unscale_(optimizer)`")


def test_clip_to_an_odd_value_is_told_once_three_log_steps_agree():
    rows = [
        cut(i, 0.3717 / 1024 / norm, 0.3717 / 1024, largest=0.1 + 0.1 * i)
        for i, norm in enumerate((7.0, 5.0, 6.0))
    ]
    says(only(view(rows), "AMP101"), "asked to clip to 0.3717", "3 log steps")
    assert codes(view(rows[:2])) == []


def test_each_optimizer_has_its_own_clip_value():
    rows = [cut(0, 1e-4, 0.5 / 1024), cut(0, 1e-4, 3.0 / 1024, optimizer=1, largest=0.3)]
    says(only(view(rows), "AMP101"), "of optimizer 0", "the norm was 0.5")


@pytest.mark.parametrize(
    "seen",
    [
        [cut(i, 1.0, 0.5) for i in range(5)],
        [cut(i, None, 0.5 / 1024) for i in range(5)],
        [cut(0, 0.5 / 7, 0.5, scale=1.0)],  # nothing carries a scale: an ordinary clip
        # a mask: whatever is left, it is left of an ordinary size
        [cut(i, 0.02 + 0.001 * i, 0.14 + 0.01 * i, largest=0.1 + 0.01 * i) for i in range(5)],
        # divided by a count of 4096 tokens before unscaling: one proportion, whatever the norm
        [cut(i, 1 / 4096, 1.7 + 0.1 * i, largest=0.2 + 0.03 * i) for i in range(5)],
        # ... of gradients that hardly change
        [cut(i, 1 / 4096, 0.1723 + 1e-5 * i, largest=0.0671 + 1e-6 * i) for i in range(5)],
        [cut(0, 0.0, 0.0, largest=0.0)],
        [cut(0, math.inf, math.inf, largest=math.inf)],
        [cut(0, math.nan, math.nan, largest=math.nan)],
    ],
    ids=["kept", "unknown", "unscaled", "mask", "count", "steady", "zeroed", "inf", "nan"],
)
def test_gradients_that_were_not_clipped_while_scaled_are_silent(seen):
    assert codes(view(seen)) == []


@pytest.mark.parametrize("mantissa", [1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 7.5, 8, 9, 9.996])
@pytest.mark.parametrize("power", [0.01, 1.0, 10.0])
def test_any_clip_value_that_people_write_is_recognized(mantissa, power):
    seen = view([cut(9, 0.049, mantissa * power / 1024)], STOCK)
    says(only(seen, "AMP101"), "4.9 % of the norm")


@pytest.mark.parametrize(
    "rows",
    [
        [cut(9, 0.05, 0.5 / 1024)],  # enough was kept
        [cut(9, 1e-4, 0.5006 / 1024)],  # off the round number by 0.12 %
        [cut(9, 1e-4, 200.0 / 1024)],  # nobody clips to so much
        # three log steps 1.2 % apart
        [cut(i, 1e-4 * (1 + i), 0.37 * (1 + 0.006 * i) / 1024, largest=i + 1) for i in range(3)],
        # alike, but so is the share kept (within 2 %)
        [cut(i, 1e-4 * (1 + 0.009 * i), 0.37 / 1024, largest=i + 1) for i in range(3)],
        # one round number each, not one for all
        [cut(0, 1e-4, 0.5 / 1024), cut(1, 1e-4, 0.6 / 1024, largest=0.3)],
        [cut(9, 1e-4, None, largest=0.0)],
    ],
    ids=["kept", "odd", "large", "apart", "proportion", "two values", "nothing known"],
)
def test_sizes_that_a_clip_would_not_leave_are_silent(rows):
    assert codes(view(rows)) == []


# ---------------------------------------------------------------------- AMP102


def test_schedule_that_a_skip_advanced_is_told():
    rows = [skip(0, 65536.0), skip(1, 32768.0), *[row(i, scale=16384.0) for i in range(2, 6)]]
    seen = view(rows, STOCK, schedules=[ScheduleLead("StepLR", 0, 6, 4)])
    says(only(seen, "AMP102"), "StepLR", "advanced 6 times", "4 were due, 2 ahead", "2 of the")


def test_the_schedule_furthest_ahead_is_the_one_named():
    leads = [ScheduleLead("StepLR", 0, 6, 5), ScheduleLead("CosineAnnealingLR", 1, 6, 3)]
    rows = [skip(0), skip(0, optimizer=1)]
    says(only(view(rows, STOCK, schedules=leads), "AMP102"), "CosineAnnealingLR of optimizer 1")


@pytest.mark.parametrize(
    ("rows", "lead"),
    [
        ([skip(0), row(1)], ScheduleLead("StepLR", 0, 1, 1)),
        ([row(0), row(1)], ScheduleLead("StepLR", 0, 2, 1)),  # no skip: some other reason
        ([skip(0, optimizer=1), row(0)], ScheduleLead("StepLR", 0, 2, 1)),
        ([skip(0), row(1)], ScheduleLead("StepLR", 0, 1, 2)),
        ([], ScheduleLead("StepLR", 0, 1, 0)),
    ],
    ids=["even", "no skip", "other optimizer's skip", "behind", "nothing seen"],
)
def test_schedule_that_no_skip_advanced_is_silent(rows, lead):
    assert codes(view(rows, STOCK, schedules=[lead])) == []


# ---------------------------------------------------------------------- AMP103


def calibration(start=2.0**24, down_to=2.0**12):
    rows, scale = [], start
    while scale > down_to:
        rows.append(skip(len(rows), scale))
        scale /= 2
    return rows


def test_overflows_at_the_lower_bound_are_told_at_the_eighth():
    # from 32 to 16 is calibration; at 16, 8, 4, 2 and three times 1 the search explains nothing
    scales = [32.0, 16.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    rows = [skip(i, s, max(s / 2, 1.0)) for i, s in enumerate(scales)]
    assert codes(view(rows[:-1])) == []
    finding = only(view(rows), "AMP103")
    says(finding, "skipped 8 of 8 (100 %)", "from attempt 1 on", "attempt 8, at scale 1", "0.05 %")
    assert "65504" in finding.cause or "6.55e+04" in finding.cause
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(precision="bf16-mixed")])`')


def test_culprit_is_named_and_put_into_float32():
    rows = [skip(i, 1.0, 1.0) for i in range(8)]
    where = {"culprit": "`net.head` (Linear) in the forward pass", "culprit_path": "net.head"}
    finding = only(view(rows, **where), "AMP103")
    says(finding, "`net.head` (Linear)")
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(fp32_modules=["net.head"])])`')


def test_scale_that_fell_to_zero_under_the_stock_plugin_is_told():
    rows = [skip(i, 2.0**-145, 0.0) if i == 0 else skip(i, 0.0, 0.0) for i in range(8)]
    finding = only(view(rows, STOCK), "AMP103")
    says(finding, "at scale 0")
    assert "fallen to 0" in finding.cause


def test_overflows_here_and_there_are_told_by_their_share():
    # every ninth of 100 attempts is 12 (0, 9, ... 99): the first finds the scale, 11 are too many
    rows = [skip(i, 64.0, 64.0) if i % 9 == 0 else row(i, scale=64.0) for i in range(100)]
    says(only(view(rows), "AMP103"), "skipped 12 of 100 (12 %)", "attempt 99")
    rows = [skip(i, 64.0, 64.0) if i % 10 == 0 else row(i, scale=64.0) for i in range(100)]
    assert codes(view(rows)) == []


def test_fsdp_plugin_is_named_to_those_who_use_it():
    facts = dataclasses.replace(SAFE, plugin="FSDPPrecision")
    rows = [skip(i, 1.0, 1.0) for i in range(8)]
    assert "SafeFSDP(" in only(view(rows, facts), "AMP103").remedy


def test_advice_counts_what_runs_in_float32_already():
    rows = [skip(i, 1.0, 1.0) for i in range(8)]
    finding = only(view(rows, culprit="'b'", culprit_path="b", fp32_modules=("a",)), "AMP103")
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP(fp32_modules=["a", "b"])])`')


def test_culprit_that_float32_would_not_help_gets_its_own_cause_and_change():
    told = {"culprit": "'b'", "culprit_help": ("its weights are spoiled", "Load: `load(x)`")}
    rows = [skip(i, 1.0, 1.0, loss=float(i)) for i in range(16)]
    overflows, frozen = find(view(rows, **told))
    assert (overflows.code, overflows.cause) == ("AMP103", "its weights are spoiled")
    assert overflows.remedy == "Load: `load(x)`"
    assert (frozen.code, frozen.remedy) == ("AMP104", "Take the cause away: Load: `load(x)`")


def test_custom_operator_that_gets_float32_already_needs_another_formula():
    rows = [row(0, loss=math.nan)]
    told = {"custom_op": "Mine", "culprit_help": ("c", "`x`")}
    finding = only(view(rows, **told), "AMP105")
    assert finding.cause == "`Mine` makes inf or NaN of finite values, in float32 already"
    assert finding.remedy.endswith("`x.clamp(min=1e-6)`")


def test_bfloat16_has_no_calibration_and_its_own_cause():
    rows = [skip(i, 1.0, 1.0) for i in range(8)]
    finding = only(view(rows, BF16), "AMP103")
    assert finding.title == "non-finite gradients go on"
    assert "no scale can help" in finding.cause
    assert finding.remedy.endswith('precision="bf16-mixed", error_if_nonfinite=True)])`')
    assert codes(view(rows[:-1], BF16)) == []


@pytest.mark.parametrize(
    "rows",
    [
        calibration(),
        calibration(down_to=16.0),
        [*calibration(), *[row(i) for i in range(12, 40)]],
        [skip(0, 64.0), row(1, scale=32.0), *[skip(i, 1.0, 1.0) for i in range(2, 9)]],
        [skip(i, 64.0, 64.0, reason=LOSS, loss=math.nan) for i in range(20)],
        [skip(i, 64.0, 64.0, reason=PARTNER) for i in range(20)],
    ],
    ids=["calibration", "to 16", "then settled", "seven", "non-finite loss", "partner"],
)
def test_skips_that_the_search_explains_are_silent(rows):
    assert codes(view(rows)) == []


def test_growth_that_overflows_every_time_is_silent():
    # growth_interval=1: up after each update, down at each overflow, half of all are skipped
    facts = dataclasses.replace(SAFE, growth_interval=1)
    rows = [skip(i, 2048.0) if i % 2 else row(i, scale=1024.0) for i in range(200)]
    assert codes(view(rows, facts)) == []


def test_overflows_that_hysteresis_bears_are_silent():
    # hysteresis=12: eleven overflows are borne at 65536, the twelfth backs off
    rows = [skip(i, 65536.0, 65536.0) for i in range(11)] + [skip(11, 65536.0)]
    rows += [row(i, scale=32768.0) for i in range(12, 30)]
    assert codes(view(rows)) == []


def test_share_counts_the_last_hundred_attempts_alone():
    # 11 in the last 100 are too many, one of them 100 attempts ago is one too few; 64 finds the scale
    bad = [0, *range(102, 122, 2), 199]
    rows = [skip(i, 64.0, 64.0) if i in bad else row(i, scale=64.0) for i in range(200)]
    says(only(view(rows), "AMP103"), "skipped 11 of 98 (11.2 %)", "from attempt 102 on")
    rows = [
        skip(i, 64.0, 64.0) if i in [0, 99, *bad[2:]] else row(i, scale=64.0) for i in range(200)
    ]
    assert codes(view(rows)) == []


def test_twice_the_share_that_growth_explains_is_allowed():
    # growth_interval=4 explains 20 %, so 40 of 100 are allowed
    facts = dataclasses.replace(SAFE, growth_interval=4)
    bad = [i for i in range(100) if i % 5 < 2]
    rows = [skip(i, 64.0, 64.0) if i in bad else row(i, scale=64.0) for i in range(100)]
    assert codes(view(rows, facts)) == []
    rows[2] = skip(2, 64.0, 64.0)
    says(only(view(rows, facts), "AMP103"), "skipped 41 of 100", "explains 20 %")


def test_nothing_explains_overflows_of_a_static_scale():
    facts = dataclasses.replace(SAFE, growth_interval=None)
    says(only(view([skip(i, 64.0, 64.0) for i in range(8)], facts), "AMP103"), "explains 0 %")


def test_streak_ends_with_an_applied_update():
    rows = [*[skip(i, 1.0, 1.0) for i in range(8)], row(8, scale=1.0)]
    assert codes(view(rows)) == []
    assert codes(view(rows[:-1])) == ["AMP103"]


# ---------------------------------------------------------------------- AMP104


def frozen(n, lr=0.1, start=0, loss=lambda i: 2.0 + i % 3, **more):
    return [
        row(i, lr=lr, loss=loss(i), param_checksum="5eed" * 4, **more)
        for i in range(start, start + n)
    ]


def test_updates_that_change_no_weight_are_told_after_sixteen():
    # the first row shows the checksum, sixteen more updates leave it
    rows = frozen(17, stats=GradientStats(1000, 0, 0, 0, 0.0))
    finding = only(view(rows), "AMP104")
    says(finding, "16 updates from attempt 1 to 16", "up to 0.1", "between 2 and 4")
    says(finding, "1000 of 1000 (100 %) gradient elements are exactly zero")
    assert "underflow" in finding.cause
    assert codes(view(rows[:-1])) == []


def test_checksums_of_every_tenth_attempt_are_enough():
    rows = [
        r if r.attempt % 10 == 0 else dataclasses.replace(r, param_checksum=None)
        for r in frozen(31)
    ]
    says(only(view(rows), "AMP104"), "30 updates from attempt 1 to 30")
    assert codes(view(rows[:20])) == []  # two known ones are a coincidence


def test_half_weights_are_the_cause_where_there_are_some():
    rows = frozen(17, stats=HEALTHY_LOOK)
    finding = only(view(rows, half_parameters=["net.weight"]), "AMP104")
    assert "rounded away" in finding.cause
    assert finding.remedy.endswith("`model.float()`")


def test_float32_run_is_not_told_of_underflow():
    rows = frozen(17, scale=1.0, stats=GradientStats(1000, 0, 0, 0, 0.0))
    finding = only(view(rows, FP32), "AMP104")
    assert "no gradient reaches the weights" in finding.cause
    assert "self.parameters()" in finding.remedy


def test_run_that_skips_every_step_is_told():
    rows = [
        skip(i, 1.0, 1.0, reason=LOSS if i % 2 else GRADIENTS, loss=2.0 + i % 3) for i in range(16)
    ]
    facts = dataclasses.replace(SAFE, plugin="MixedPrecision")
    found = {f.code: f for f in find(view(rows, facts))}
    assert sorted(found) == ["AMP103", "AMP104"]
    says(found["AMP104"], "last 16 attempts, 0 to 15, were all skipped", "between 2 and 4")
    assert "every update is skipped" in found["AMP104"].cause
    assert "AMP104" not in codes(view(rows[:-1], facts))


@pytest.mark.parametrize(
    "rows",
    [
        frozen(40, lr=0.0),  # a warm-up begins at exactly 0
        frozen(40, lr=2.0**-24),  # too small to move a weight of 1
        frozen(40, lr=None),
        [dataclasses.replace(r, lr=1e-6 * (1 + r.attempt)) for r in frozen(40)],  # warming up
        frozen(40, loss=lambda i: 2.0),
        frozen(40, loss=lambda i: 2.0 * (1 + 1e-7 * (i % 2))),
        frozen(40, loss=lambda i: math.nan),
        frozen(40, loss=lambda i: None),
        [*frozen(40), row(40)],  # the last update moved them
        [*frozen(16, lr=0.0), *[row(i) for i in range(16, 40)]],
        [dataclasses.replace(r, param_checksum=None) for r in frozen(40)],
        frozen(3),
        [skip(i, 2.0 ** (24 - i), loss=2.0 + i % 3) for i in range(20)],  # calibration
        [skip(i, 2.0 ** (24 - i), loss=2.0 + i % 3, reason=PARTNER) for i in range(20)],
    ],
    ids=[
        "lr 0",
        "tiny lr",
        "unknown lr",
        "warm-up",
        "constant loss",
        "rounding",
        "nan",
        "unknown loss",
        "moved",
        "after warm-up",
        "unknown checksum",
        "short",
        "calibration",
        "partner",
    ],
)
def test_weights_that_have_reason_to_stand_still_are_silent(rows):
    assert codes(view(rows)) == []


def test_losses_that_were_not_finite_are_no_calibration():
    # stock halves the scale at each of them all the same
    rows = [
        skip(i, 2.0 ** (24 - i), reason=LOSS, loss=math.nan if i % 4 else 2.0 + i)
        for i in range(16)
    ]
    assert codes(view(rows, STOCK)) == ["AMP104"]


def test_eight_unexplained_skips_are_needed_among_sixteen():
    scales = [2.0 ** (12 - i) for i in range(16)]  # 4096 to 16 is calibration: eight skips
    rows = [skip(i, s, loss=2.0 + i % 3) for i, s in enumerate(scales)]
    assert "AMP104" in codes(view(rows, STOCK))
    rows = [skip(i, 2 * s, loss=2.0 + i % 3) for i, s in enumerate(scales)]
    assert codes(view(rows, STOCK)) == []


# ---------------------------------------------------------------------- AMP105


def test_custom_operator_that_makes_the_loss_nan_is_told():
    rows = [row(0), skip(1, reason=LOSS, loss=math.nan, to=1024.0), row(2)]
    seen = view(rows, custom_op="MyExp", culprit="`MyExp` in the forward pass")
    finding = only(seen, "AMP105")
    says(finding, "`MyExp` in the forward pass", "1 of 3 (33.3 %)", "attempt 1", "scale 1024")
    assert "`MyExp`" in finding.cause
    assert finding.remedy.endswith(
        '`@torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)`'
    )


def test_custom_operator_behind_overflows_that_go_on_replaces_amp103():
    rows = [skip(i, 1.0, 1.0) for i in range(8)]
    says(only(view(rows, custom_op="MyExp"), "AMP105"), "`MyExp` made", "8 of 8 (100 %)")


def test_custom_operator_that_made_an_applied_nan_loss_is_told():
    rows = [row(0), row(1, scale=1.0, loss=math.nan)]
    says(only(view(rows, FP32, custom_op="MyExp"), "AMP105"), "1 of 2 (50 %)")


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (calibration(), {"custom_op": "MyExp"}),
        ([row(i) for i in range(5)], {"custom_op": "MyExp"}),
        ([row(0, loss=math.nan)], {"custom_op": None}),
        ([], {"custom_op": "MyExp"}),
    ],
    ids=["calibration", "healthy", "none", "nothing seen"],
)
def test_custom_operator_without_trouble_is_silent(rows, more):
    assert codes(view(rows, **more)) == []


def test_bad_batch_explains_the_loss_before_a_custom_operator_does():
    rows = [skip(1, reason=LOSS, loss=math.nan)]
    assert codes(view(rows, custom_op="MyExp", bad_batch="x: 3 nan of 8")) == ["AMP108"]


# ---------------------------------------------------------------------- AMP106


def timed(mine, base, facts=BF16, base_facts=FP32, n=16):
    facts = dataclasses.replace(facts, samples_per_s=mine)
    base_facts = dataclasses.replace(base_facts, samples_per_s=base)
    rows = [row(i, scale=1.0) for i in range(n)]
    return view(rows, facts, baseline=Baseline([], base_facts))


def test_run_that_is_no_faster_than_float32_is_told():
    finding = only(timed(105.0, 100.0), "AMP106")
    says(finding, "105 samples/s in bf16-mixed", "100 in the", "1.05 times as fast", "cuda")
    assert finding.remedy.endswith("`print(profile_dtypes(model, batch))`")


def test_cpu_is_told_to_stay_in_float32():
    cpu = dataclasses.replace(BF16, device="cpu"), dataclasses.replace(FP32, device="cpu")
    finding = only(timed(40.0, 100.0, *cpu), "AMP106")
    says(finding, "0.4 times as fast")
    assert finding.remedy.endswith('`Trainer(precision="32-true")`')


@pytest.mark.parametrize(
    "seen",
    [
        timed(106.0, 100.0),
        timed(None, 100.0),
        timed(100.0, None),
        timed(100.0, 0.0),
        timed(math.nan, 100.0),
        timed(90.0, 100.0, n=15),
        timed(90.0, 100.0, facts=FP32),
        timed(90.0, 100.0, base_facts=BF16),
        timed(90.0, 100.0, base_facts=dataclasses.replace(FP32, device="cpu")),
        timed(90.0, 100.0, base_facts=dataclasses.replace(FP32, world_size=2)),
        view([row(i) for i in range(16)], dataclasses.replace(SAFE, samples_per_s=9.0)),
        dataclasses.replace(timed(90.0, 100.0), baseline=Baseline([])),
    ],
    ids=[
        "faster",
        "unknown",
        "base unknown",
        "zero",
        "nan",
        "short",
        "float32",
        "low base",
        "other device",
        "other world",
        "no baseline",
        "no facts",
    ],
)
def test_speed_that_cannot_be_compared_or_is_better_is_silent(seen):
    assert codes(seen) == []


def test_speeds_that_are_not_finite_numbers_above_zero_are_unknown():
    for mine, base in [(math.inf, 1.0), (1.0, math.inf), (0.0, 1.0), (-1.0, 1.0)]:
        assert codes(timed(mine, base)) == []


# ---------------------------------------------------------------------- AMP107


def test_resume_without_the_scaler_is_told():
    rows = [skip(40, 65536.0), row(41, scale=32768.0), row(42, scale=32768.0)]
    seen = view(rows, STOCK, resumed_without_scaler="the checkpoint holds no scaler state")
    finding = only(seen, "AMP107")
    says(finding, "holds no scaler state", "65536 at attempt 40", "1 of 3 (33.3 %)")
    assert finding.remedy.endswith('`Trainer(plugins=[SafeAMP()]).fit(model, ckpt_path="last")`')


def test_resume_with_the_scaler_is_silent():
    rows = [skip(40, 65536.0), row(41, scale=32768.0)]
    assert codes(view(rows, STOCK)) == []
    assert codes(view([], STOCK, resumed_without_scaler="it held none")) == []


# ---------------------------------------------------------------------- AMP108


def test_batch_that_made_the_loss_nan_is_told():
    rows = [row(0), skip(1, 64.0, 64.0, reason=LOSS, loss=math.nan, epoch=2, batch_idx=7), row(2)]
    finding = only(view(rows, bad_batch="batch['x']: 3 nan of 128\nbatch['y']: 1 inf"), "AMP108")
    says(finding, "1 of 3 (33.3 %)", "attempt 1 (epoch 2, batch 7)")
    says(finding, "batch['x']: 3 nan of 128 batch['y']: 1 inf")
    assert len(str(finding).splitlines()) == 4


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_update_applied_with_a_bad_loss_is_told_too(loss):
    rows = [row(0, scale=1.0, loss=loss)]
    assert codes(view(rows, FP32, bad_batch="x: 1 nan of 4")) == ["AMP108"]


def test_long_report_on_a_batch_is_cut():
    rows = [row(0, loss=math.nan)]
    finding = only(view(rows, bad_batch="x" * 5000), "AMP108")
    assert "x" * 300 + " ..." in finding.evidence
    assert "x" * 301 not in finding.evidence


def test_bad_batch_without_a_bad_loss_and_bad_loss_without_a_bad_batch_are_silent():
    assert codes(view([row(0), skip(1)], bad_batch="x: 1 nan of 4")) == []
    assert codes(view([row(0, loss=math.nan)])) == []


def test_report_of_just_the_longest_length_is_not_cut():
    rows = [row(0, loss=math.nan)]
    assert only(view(rows, bad_batch="x" * 300), "AMP108").evidence.endswith("x" * 300)


# ---------------------------------------------------------------------- AMP109


def stuck(n=24, loss=lambda i: 2.0 + 0.1 * (i % 2), look=LOST_LOOK, start=0, **more):
    return [
        row(i, scale=65536.0, loss=loss(i), stats=look if i % 8 == 0 else None, **more)
        for i in range(start, start + n)
    ]


def test_loss_that_stays_while_gradients_underflow_is_told():
    finding = only(view(stuck()), "AMP109")
    # the thirds hold 2.0 and 2.1 four times each
    says(finding, "from 2.05 to 2.05 over 24 attempts", "attempt 16, scale 65536")
    says(finding, "900 of 1000 (90 %)", "90 of the other 100 below 2**-14", "3 of 3 log steps")
    assert finding.remedy.endswith("growth_interval=200)])`")


def test_loss_that_stays_while_every_gradient_is_zero_is_told():
    assert codes(view(stuck(look=GradientStats(1000, 0, 0, 0, 0.0)))) == ["AMP109"]


def test_loss_that_rises_while_gradients_underflow_is_told():
    says(only(view(stuck(loss=lambda i: 2.0 + i)), "AMP109"), "from 5.5 to 21.5")


def test_loss_that_stays_on_half_weights_is_told():
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]
    finding = only(view(stuck(look=HEALTHY_LOOK), half_parameters=names), "AMP109")
    says(finding, "from 2.05 to 2.05", "4 trained parameters are not float32: 'a.weight'")
    assert "'b.bias'" not in finding.evidence
    assert finding.remedy.endswith("`model.float()`")


def test_second_optimizer_is_judged_by_itself():
    other = [dataclasses.replace(r, optimizer=1) for r in stuck()]
    falling = stuck(loss=lambda i: 8.0 - 0.2 * i, look=HEALTHY_LOOK)
    rows = [r for pair in zip(falling, other, strict=True) for r in pair]
    says(only(view(rows), "AMP109"), "of optimizer 1")


@pytest.mark.parametrize(
    "rows",
    [
        stuck(23),
        stuck(look=None),
        stuck(look=HEALTHY_LOOK),
        stuck(look=DEAD_LOOK),  # dead units or unused embeddings: what is left is of ordinary size
        stuck(16),  # two looks
        stuck(loss=lambda i: 2.0 - 0.02 * i),
        stuck(loss=lambda i: 2.0 - 0.05 * i + 0.2 * (i % 2)),
        stuck(loss=lambda i: 1e-8 * (1 - 0.02 * i)),
        stuck(loss=lambda i: 1e12 * (1 - 0.02 * i)),
        stuck(loss=lambda i: None),
        stuck(lr=0.0),
        stuck(lr=None),
        [dataclasses.replace(r, lr=1e-3 * (1 + r.attempt)) for r in stuck()],
        stuck(start=WINDOW),  # a plateau late in the run
    ],
    ids=[
        "short",
        "no look",
        "no fault",
        "dead units",
        "two looks",
        "falls",
        "falls in noise",
        "tiny and falls",
        "huge and falls",
        "unknown",
        "lr 0",
        "unknown lr",
        "warm-up",
        "plateau",
    ],
)
def test_loss_that_falls_or_may_stay_is_silent(rows):
    assert codes(view(rows)) == []


def test_tiny_gradients_that_are_not_lost_are_silent():
    # modules in float32 hold values that float16 could not: none of them is exactly zero
    look = GradientStats(900, 100, 0, 0, 2.0**-34, {-60: 900, -36: 100})
    assert codes(view(stuck(look=look))) == []


@pytest.mark.parametrize("facts", [BF16, FP32])
def test_float16_range_does_not_matter_to_other_precisions(facts):
    assert codes(view(stuck(), facts)) == []


def test_fewer_than_half_of_the_looks_are_not_enough():
    rows = stuck(32)
    rows[0] = dataclasses.replace(rows[0], stats=HEALTHY_LOOK)
    assert codes(view(rows)) == ["AMP109"]  # 3 of 4
    rows[8] = dataclasses.replace(rows[8], stats=HEALTHY_LOOK)
    assert codes(view(rows)) == []  # 2 of 4


@pytest.mark.parametrize(("end", "expected"), [(1.991, ["AMP109"]), (1.979, [])])
def test_one_percent_is_a_fall(end, expected):
    assert codes(view(stuck(loss=lambda i: 2.0 if i < 12 else end))) == expected


@pytest.mark.parametrize(("fall", "expected"), [(0.24, ["AMP109"]), (0.26, [])])
def test_a_quarter_of_the_spread_is_a_fall(fall, expected):
    # in each third half of the losses lie 1 above and half 1 below the median: the spread is 1
    seen = view(stuck(loss=lambda i: 5.0 + (-1) ** i - (fall if i >= 12 else 0.0)))
    assert codes(seen) == expected


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (GradientStats(500, 250, 250, 0, 1e-9), ["AMP109"]),
        (GradientStats(499, 251, 250, 0, 1e-9), []),  # most are there
        (GradientStats(500, 249, 251, 0, 1e-9), []),  # most of those are held in full
        (GradientStats(900, 90, 10, 1, 1e-9), []),  # something overflows: not too small
    ],
)
def test_half_the_elements_lost_and_half_the_others_at_the_lower_end_are_underflow(look, expected):
    assert codes(view(stuck(look=look))) == expected


# ---------------------------------------------------------------------- AMP110


def heavy(mine, base, weights, state, facts=BF16, base_facts=FP32):
    return view(
        [],
        dataclasses.replace(facts, peak_mib=mine),
        baseline=Baseline([], dataclasses.replace(base_facts, peak_mib=base)),
        weight_bytes=weights * 2**20,
        state_bytes=state * 2**20,
    )


def test_memory_that_weights_and_state_dominate_is_told():
    finding = only(heavy(950.0, 1000.0, 200, 600), "AMP110")
    says(finding, "peak 950 MiB in bf16-mixed, 1000 MiB", "weights take 200 MiB", "state 600 MiB")
    says(finding, "84.2 % of the peak")  # 800 / 950
    says(only(heavy(900.0, 1000.0, 200, 350), "AMP110"), "61.1 % of the peak")  # 550 / 900
    assert finding.remedy.endswith("`")


@pytest.mark.parametrize(
    "seen",
    [
        heavy(899.0, 1000.0, 200, 600),
        heavy(1000.0, 1000.0, 200, 400),  # exactly 60 %
        heavy(None, 1000.0, 200, 600),
        heavy(950.0, None, 200, 600),
        heavy(950.0, 1000.0, 200, 600, facts=FP32),
        heavy(950.0, 1000.0, 200, 600, base_facts=BF16),
        heavy(950.0, 1000.0, 200, 600, base_facts=dataclasses.replace(FP32, device="cpu")),
    ],
    ids=["drops", "activations", "unknown", "base unknown", "float32", "low base", "device"],
)
def test_memory_that_drops_or_cannot_be_compared_is_silent(seen):
    assert codes(seen) == []


# ---------------------------------------------------------------------- AMP111


def test_ranks_that_hold_different_parameters_are_told():
    facts = dataclasses.replace(SAFE, world_size=4)
    finding = only(view([row(0)], facts, rank_checksums=["a", "a", "b", "c"]), "AMP111")
    says(finding, "3 different parameter checksums on 4 ranks", "rank 2, 3 parted from rank 0")
    assert "not at all" in finding.cause


def test_reduction_in_half_precision_is_told():
    facts = dataclasses.replace(SAFE, world_size=2)
    seen = view([row(0, scale=65504.0)], facts, half_reduction="the hook `fp16_compress_hook`")
    finding = only(seen, "AMP111")
    says(finding, "`fp16_compress_hook` reduces gradients of 2 ranks", "above 1 leave float16")
    assert finding.title == "gradients are reduced in half precision"
    assert "DDPStrategy" in finding.remedy


def test_both_are_one_finding():
    facts = dataclasses.replace(SAFE, world_size=2)
    seen = view([row(0)], facts, half_reduction="a hook", rank_checksums=["a", "b"])
    finding = only(seen, "AMP111")
    says(finding, "2 different", "a hook reduces")
    assert finding.title == "ranks differ"


@pytest.mark.parametrize(
    "seen",
    [
        view([row(0)], dataclasses.replace(SAFE, world_size=2), rank_checksums=["a", "a"]),
        view([row(0)], rank_checksums=["a"]),
        view([row(0)], half_reduction="the hook `fp16_compress_hook`"),
        view([], dataclasses.replace(SAFE, world_size=8)),
    ],
    ids=["equal", "one", "one process", "unknown"],
)
def test_ranks_that_agree_are_silent(seen):
    assert codes(seen) == []


def test_reduction_in_half_precision_does_not_claim_that_ranks_differ():
    facts = dataclasses.replace(SAFE, world_size=2)
    seen = view([row(0)], facts, half_reduction="a hook", rank_checksums=["a", "a"])
    finding = only(seen, "AMP111")
    assert finding.title == "gradients are reduced in half precision"
    assert "different" not in finding.evidence


# ---------------------------------------------------------------------- AMP112


def test_scale_that_stands_still_for_three_intervals_is_told():
    seen = view([row(7000, scale=65536.0)], STOCK, updates_at_scale=6001)
    finding = only(seen, "AMP112")
    says(finding, "6001 updates in a row", "scale 65536", "growth_interval=2000", "least 3 times")
    assert codes(dataclasses.replace(seen, updates_at_scale=5999)) == []


def test_optimizers_that_share_an_update_get_its_time():
    rows = [row(9, optimizer=0), row(9, optimizer=1)]
    facts = dataclasses.replace(STOCK, growth_interval=10)
    assert codes(view(rows, facts, updates_at_scale=59)) == []
    says(only(view(rows, facts, updates_at_scale=60), "AMP112"), "least 3 times")


@pytest.mark.parametrize(
    ("facts", "scale"),
    [
        (SAFE, 2.0**24),
        (dataclasses.replace(SAFE, plugin="SafeFSDP"), 2.0**24),
        (dataclasses.replace(STOCK, growth_interval=None), 65536.0),
        (dataclasses.replace(STOCK, scaling=False), 1.0),
        (STOCK, 2.0**127),
    ],
    ids=["max_scale", "fsdp", "static", "unscaled", "as large as it gets"],
)
def test_scale_that_may_stand_still_is_silent(facts, scale):
    assert codes(view([row(9, scale=scale)], facts, updates_at_scale=10**6)) == []


# ---------------------------------------------------------------------- AMP113


def pair(factor, n=3, facts=BF16, base_facts=FP32, mine=None, base=None):
    """A view whose norms are `factor` times the baseline's 2.0."""
    told = {"scale": 1.0, "loss": 1.0, "batch_id": "b" * 16}
    rows = [row(i, grad_norm=2.0 * factor, **{**told, **(mine or {})}) for i in range(n)]
    others = [row(i, grad_norm=2.0, **{**told, **(base or {})}) for i in range(n)]
    return view(rows, facts, baseline=Baseline(others, base_facts))


@pytest.mark.parametrize(
    ("factor", "number", "ratio"), [(11.0, "22", "11 times"), (0.09, "0.18", "0.09 times")]
)
def test_norms_ten_times_apart_are_told(factor, number, ratio):
    finding = only(pair(factor), "AMP113")
    says(finding, f"norm was {number} at attempt 0 and 2 in", ratio, "3 of 3 (100 %)")
    assert finding.remedy.endswith('(fp32_modules=["name.of.module"])])`')


def test_gradients_that_vanish_are_told_without_a_division():
    says(only(pair(0.0), "AMP113"), "norm was 0 at", "0 times that")


def test_gradients_out_of_nothing_are_told_without_a_division():
    base = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"head.weight": 0.0})}
    mine = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"head.weight": 1.0})}
    says(only(pair(1.0, mine=mine, base=base), "AMP113"), "and 0 in", "where there was none")


def test_layer_at_fault_is_named():
    base = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a.weight": 1.0, "b": 1.7})}
    mine = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a.weight": 0.05, "b": 1.7})}
    finding = only(pair(1.0, mine=mine, base=base), "AMP113")
    says(finding, "'a.weight' was 0.05 at attempt 0 and 1", "0.05 times")
    assert finding.remedy.endswith('(fp32_modules=["a"])])`')


def test_baseline_without_facts_is_taken_for_float32():
    assert codes(pair(11.0, base_facts=None)) == ["AMP113"]


@pytest.mark.parametrize(
    "seen",
    [
        pair(9.9),
        pair(0.11),
        pair(11.0, n=2),
        pair(11.0, facts=FP32),
        pair(11.0, base_facts=BF16),
        pair(11.0, mine={"batch_id": "c" * 16}),
        pair(11.0, mine={"loss": 1.2}),  # the trajectories have parted
        pair(11.0, mine={"loss": math.nan}, base={"loss": math.nan}),
        pair(11.0, mine={"loss": None}),
        pair(11.0, mine={"optimizer": 1}),
        pair(11.0, mine={"micro_batches": 4}),
        pair(11.0, base={"applied": False}),
        pair(math.nan),
        pair(math.inf),
        dataclasses.replace(pair(11.0), baseline=Baseline([], FP32)),
        dataclasses.replace(pair(11.0), baseline=None),
    ],
    ids=[
        "below 10x",
        "above a tenth",
        "two",
        "float32",
        "low base",
        "other batch",
        "parted",
        "nan loss",
        "no loss",
        "other optimizer",
        "other window",
        "skipped",
        "nan",
        "inf",
        "no rows",
        "no baseline",
    ],
)
def test_norms_that_agree_or_cannot_be_compared_are_silent(seen):
    assert codes(seen) == []


def test_rounding_noise_after_convergence_is_silent():
    told = {"scale": 1.0, "loss": 1.0}
    norms = [2.0, 2.0, 2.0, *[1e-9] * 20]
    noisy = [2.0, 2.0, 2.0, *[1e-5] * 20]
    base = [row(i, grad_norm=n, **told) for i, n in enumerate(norms)]
    rows = [row(i, grad_norm=n, **told) for i, n in enumerate(noisy)]
    assert codes(view(rows, BF16, baseline=Baseline(base, FP32))) == []


def test_fewer_than_half_of_the_attempts_are_chance():
    told = {"scale": 1.0, "loss": 1.0}
    base = [row(i, grad_norm=2.0, **told) for i in range(8)]
    rows = [row(i, grad_norm=40.0 if i < 3 else 2.0, **told) for i in range(8)]
    assert codes(view(rows, BF16, baseline=Baseline(base, FP32))) == []
    assert codes(view(rows[:6], BF16, baseline=Baseline(base, FP32))) == ["AMP113"]


def test_losses_agree_up_to_a_tenth_of_the_larger():
    assert codes(pair(11.0, mine={"loss": 0.9})) == ["AMP113"]
    assert codes(pair(11.0, mine={"loss": 0.89})) == []
    assert codes(pair(11.0, mine={"loss": 1.0}, base={"loss": math.inf})) == []


def test_layer_below_a_hundredth_of_the_largest_norm_does_not_count():
    for base_norm, expected in [(0.0201, ["AMP113"]), (0.0199, [])]:
        base = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a": base_norm})}
        mine = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a": 0.001})}
        assert codes(pair(1.0, mine=mine, base=base)) == expected


def test_layer_is_named_rather_than_the_total():
    base = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a.b.weight": 2.0})}
    mine = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a.b.weight": 40.0})}
    finding = only(pair(50.0, mine=mine, base=base), "AMP113")
    says(finding, "'a.b.weight' was 40")
    assert '["a.b"]' in finding.remedy


def test_layers_that_one_run_alone_knows_are_left_out():
    base = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"a": 2.0})}
    mine = {"stats": dataclasses.replace(HEALTHY_LOOK, per_layer={"b": 40.0})}
    assert codes(pair(1.0, mine=mine, base=base)) == []
    assert codes(pair(1.0, mine=mine)) == codes(pair(1.0, base=base)) == []


# ---------------------------------------------------------------------- all of them

FAULTS = {
    "AMP101": view([cut(9, 0.5 / 1024 / 7, 0.5 / 1024)], STOCK),
    "AMP102": view([skip(0)], STOCK, schedules=[ScheduleLead("StepLR", 0, 1, 0)]),
    "AMP103": view([skip(i, 1.0, 1.0) for i in range(8)]),
    "AMP104": view(frozen(17)),
    "AMP105": view([row(0, loss=math.nan)], custom_op="MyExp"),
    "AMP106": timed(90.0, 100.0),
    "AMP107": view([row(40)], STOCK, resumed_without_scaler="the checkpoint held none"),
    "AMP108": view([row(0, loss=math.nan)], bad_batch="x: 3 nan of 8"),
    "AMP109": view(stuck()),
    "AMP110": heavy(950.0, 1000.0, 200, 600),
    "AMP111": view([row(0)], rank_checksums=["a", "b"]),
    "AMP112": view([row(0)], STOCK, updates_at_scale=6000),
    "AMP113": pair(11.0),
}


def test_registry_holds_every_code_in_order():
    assert list(RULES) == [f"AMP{n}" for n in range(101, 114)] == list(FAULTS)


@pytest.mark.parametrize("code", RULES)
def test_fault_is_found_by_its_rule_alone_and_told_in_full(code):
    finding = only(FAULTS[code], code)
    assert RULES[code](FAULTS[code]) == finding
    assert finding.to_dict().keys() == {"code", "title", "evidence", "cause", "remedy"}
    assert all(finding.to_dict().values())
    assert len(re.findall(r"\d[\d.e+-]*", finding.evidence)) >= 2
    assert re.search(r"`[^`]+`$", finding.remedy)
    assert len(str(finding).splitlines()) == 4


@pytest.mark.parametrize("code", RULES)
def test_known_code_is_not_told_again_and_known_is_left_alone(code):
    known = {code}
    assert find(FAULTS[code], known) == []
    assert known == {code}
    assert codes(FAULTS[code]) == [code]


@pytest.mark.parametrize("facts", [SAFE, STOCK, BF16, FP32])
def test_run_that_has_not_begun_is_silent(facts):
    assert codes(RunView(facts)) == []
    assert codes(RunView(facts, baseline=Baseline([], facts))) == []


# ---------------------------------------------------------------------- losses that stay bad


def bad(attempt, applied=False, **more):
    reason = None if applied else LOSS
    return row(attempt, applied=applied, reason=reason, scale=64.0, loss=math.nan, **more)


KNOWN = {"culprit": "the module 'head' (Head) returned inf.", "culprit_path": "head"}


def test_losses_that_stay_bad_are_told_at_the_eighth_skip():
    rows = [row(0), *[bad(i) for i in range(1, 9)]]
    finding = only(view(rows, **KNOWN), "AMP103")
    says(finding, "8 of 8 (100 %) attempts of optimizer 0 from attempt 1 on", "(8 were skipped)")
    says(finding, "attempt 8, at scale 64; first non-finite: the module 'head'")
    assert "forward pass leaves float16's range" in finding.cause
    assert codes(view(rows[:-1], **KNOWN)) == []
    assert codes(view([*rows, row(9)], **KNOWN)) == []


def test_losses_that_stay_bad_are_told_at_the_third_that_was_applied():
    rows = [row(0), *[bad(i, True) for i in range(1, 4)]]
    finding = only(view(rows, FP32, culprit="the module 'lin' (Linear)"), "AMP103")
    says(finding, "3 of 3 (100 %)", "(0 were skipped)")
    assert finding.title == "non-finite losses go on"
    assert codes(view(rows[:-1], FP32, **KNOWN)) == []


@pytest.mark.parametrize("facts", [SAFE, BF16])
def test_bad_losses_with_finite_gradients_are_to_be_found_not_skipped(facts):
    rows = [row(0), *[bad(i, True) for i in range(1, 4)]]
    finding = only(view(rows, facts, culprit="the step of Net"), "AMP103")
    assert finding.title == "non-finite losses go on"
    assert "passes finite gradients on" in finding.cause
    assert finding.remedy == "Find the operation: `locate_nonfinite(module, batch)`"


def test_attempts_whose_loss_nobody_knows_do_not_end_a_streak_of_bad_ones():
    rows = [bad(i, True) if i % 10 == 0 else row(i, loss=None) for i in range(1, 31)]
    says(only(view(rows, FP32, **KNOWN), "AMP103"), "3 of 21", "from attempt 10 on")


def test_bad_losses_here_and_there_are_told_by_their_share():
    rows = [bad(i) if i % 9 == 0 else row(i) for i in range(100)]
    says(only(view(rows, **KNOWN), "AMP103"), "12 of 100 (12 %)")
    rows = [bad(i) if i % 10 == 0 else row(i) for i in range(100)]
    assert codes(view(rows, **KNOWN)) == []


def test_bad_losses_are_not_laid_to_the_precision_without_a_culprit_or_with_a_bad_batch():
    rows = [bad(i) for i in range(20)]
    assert codes(view(rows)) == []
    seen = view(rows, **KNOWN, bad_batch="x: 1 nan", bad_attempts=[(0, i) for i in range(20)])
    assert codes(seen) == ["AMP108"]
    seen = view(rows, **KNOWN, bad_batch="x: 1 nan", bad_attempts=[(0, 0)])
    assert codes(seen) == ["AMP103", "AMP108"]


def test_bad_batch_explains_all_losses_after_it_where_nothing_is_skipped():
    rows = [row(0), *[bad(i, True) for i in range(1, 9)]]
    seen = view(rows, FP32, **KNOWN, custom_op="MyExp", bad_batch="x: 1 nan", bad_attempts=[(0, 1)])
    says(only(seen, "AMP108"), "1 of 9", "attempt 1 (epoch 0, batch 1)")


def test_bad_batch_of_one_attempt_leaves_the_others_to_the_custom_operator():
    rows = [bad(1), bad(2), row(3)]
    seen = view(rows, custom_op="MyExp", bad_batch="x: 1 nan", bad_attempts=[(0, 1)])
    assert codes(seen) == ["AMP105", "AMP108"]
    says(find(seen)[0], "1 of 3", "the last attempt 2")


def test_custom_operator_of_a_float32_run_is_not_laid_to_autocast():
    finding = only(view([bad(1, True)], FP32, custom_op="MyExp"), "AMP105")
    assert "in 32-true already" in finding.cause
    assert finding.remedy.endswith("`x.clamp(min=1e-6)`")
