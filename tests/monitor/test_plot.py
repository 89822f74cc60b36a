# SPDX-License-Identifier: Apache-2.0
"""The picture of a run shows what its rows hold, whatever they lack."""

import math
import sys

import numpy as np
import pytest

from lightning_amp_guard.monitor.plot.histogram import FP16_BANDS, exponent_histogram
from lightning_amp_guard.monitor.plot.plot import build_figure, draw_report
from lightning_amp_guard.monitor.records import Baseline, GradientStats, Row, RunFacts

plt = pytest.importorskip("matplotlib.pyplot", reason="needs the extra `report`")
FACTS = RunFacts("SafeAMP", "16-mixed", "cpu", True, 2000, world_size=2)
REASONS = {2: "NONFINITE_GRADIENTS", 5: "NONFINITE_LOSS", 6: "NONFINITE_GRADIENTS"}


def stats(exponents, **kwargs):
    return GradientStats(0, 0, sum(exponents.values()), 0, 1.0, exponents, **kwargs)


def run():
    """Eight attempts, of which 2, 5 and 6 are skipped; statistics at 0 and 4."""
    rows, scale = [], 64.0
    for i in range(8):
        reason = REASONS.get(i)
        after = scale / 2 if reason == "NONFINITE_GRADIENTS" else scale
        loss = math.nan if i == 5 else 1.0 + i
        found = {0: stats({-30: 1, -20: 3}), 4: stats({-10: 4})}.get(i)
        norm = math.inf if reason else 2.0 * (i + 1)
        rows.append(
            Row(i, 0, i, 0, not reason, reason, scale, after, 0.1 * i, loss, norm, stats=found)
        )
        scale = after
    return rows


def panels(rows, facts=None):
    return build_figure(Baseline(rows, facts)).axes


def line(axes, nth=0):
    return axes.lines[nth].get_xydata().tolist()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(axes):
    found = axes.get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


# ---------------------------------------------------------------------- picture


def ink(path):
    """Return the picture's pixels as an array, and the share of them that is not white."""
    pixels = plt.imread(path)[..., :3]
    return pixels, float((pixels.min(axis=-1) < 0.98).mean())


def test_picture_is_1200_pixels_wide_and_not_blank_and_pyplot_knows_nothing_of_it(tmp_path):
    draw_report(Baseline(run(), FACTS), tmp_path / "a.png")
    assert plt.get_fignums() == []
    pixels, share = ink(tmp_path / "a.png")
    assert pixels.shape == (1300, 1200, 3)
    assert 0.05 < share < 0.6
    thirds = np.array_split(pixels, 5, axis=0)
    assert all((third.min(axis=-1) < 0.98).mean() > 0.01 for third in thirds)


def test_the_users_settings_do_not_change_the_picture_nor_are_they_changed(tmp_path):
    draw_report(Baseline(run()), tmp_path / "a.png")
    settings = {"savefig.bbox": "tight", "savefig.dpi": 50, "lines.linewidth": 9, "font.size": 30}
    with plt.rc_context(settings):
        before = dict(plt.rcParams)
        draw_report(Baseline(run()), tmp_path / "b.png")
        assert dict(plt.rcParams) == before
    assert np.array_equal(ink(tmp_path / "a.png")[0], ink(tmp_path / "b.png")[0])


def test_suffix_chooses_the_format_and_an_unknown_one_is_refused(tmp_path):
    draw_report(Baseline(run()), str(tmp_path / "a.pdf"))
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ValueError, match="xyz"):
        draw_report(Baseline(run()), tmp_path / "a.xyz")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning-amp-guard\[report\]'"):
        build_figure(Baseline(run()))


def test_a_run_without_an_attempt_is_refused():
    with pytest.raises(ValueError, match="no attempt"):
        build_figure(Baseline([]))


# ---------------------------------------------------------------------- artists


def test_lines_hold_the_values_of_the_rows():
    scale, lr, loss, norm, _ = panels(run())
    assert line(scale) == [[0, 64], [1, 64], [2, 64], [3, 32], [4, 32], [5, 32], [6, 32], [7, 16]]
    assert line(lr) == [[i, 0.1 * i] for i in range(8)]
    assert [y for x, y in line(loss) if x != 5] == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0]
    assert math.isnan(line(loss)[5][1])
    assert [[x, y] for x, y in line(norm) if not math.isnan(y)] == [
        [0, 2.0],
        [1, 4.0],
        [3, 8.0],
        [4, 10.0],
        [7, 16.0],
    ]


def test_what_is_not_finite_is_marked_at_the_top_of_its_panel():
    _, _, loss, norm, _ = panels(run())
    assert line(loss, 1) == [[5, 1.0]]
    assert line(norm, 1) == [[2, 1.0], [5, 1.0], [6, 1.0]]
    assert legend(loss) == ["inf or NaN"]


def test_skips_are_marked_on_the_scale_by_reason():
    scale = panels(run())[0]
    marked = {c.get_label(): c.get_offsets().tolist() for c in scale.collections}
    assert marked == {
        "skipped: non-finite gradients": [[2, 64.0], [6, 32.0]],
        "skipped: non-finite loss": [[5, 32.0]],
    }
    assert legend(scale) == list(marked)
    assert (scale.get_yscale(), scale.get_ylim()) == ("log", (8.0, 128.0))
    assert scale.yaxis.get_transform().base == 2


def test_a_reason_of_another_version_is_shown_by_its_name():
    scale = panels([Row(0, 0, 0, 0, False, "COSMIC_RAY", 8.0, 8.0)])[0]
    assert legend(scale) == ["skipped: cosmic ray"]


def test_axes_are_labelled_with_units():
    *timeline, histogram = panels(run())
    labels = [axes.get_ylabel().replace("\n", " ") for axes in (*timeline, histogram)]
    assert labels == [
        "loss scale (log2 axis)",
        "learning rate",
        "loss (mean over the window)",
        "gradient norm (unscaled, L2)",
        "share of finite non-zero elements (%)",
    ]
    assert timeline[-1].get_xlabel() == "attempt"
    assert histogram.get_xlabel() == "log2 |gradient element|, over 2 log steps"


def test_title_says_what_run_it_was_and_what_was_skipped():
    figure = build_figure(Baseline(run(), FACTS))
    assert figure.get_suptitle() == (
        "SafeAMP, 16-mixed, cpu on 2 ranks\n"
        "8 attempts, 3 skipped (2 for non-finite gradients, 1 for non-finite loss)"
    )
    assert build_figure(Baseline(run()[:1])).get_suptitle() == "1 attempt, 0 skipped"


def test_legends_stand_beside_the_data_and_inside_the_picture(tmp_path):
    figure = build_figure(Baseline(run(), FACTS))
    figure.canvas.draw()
    shown = [axes for axes in figure.axes if axes.get_legend()]
    assert len(shown) == 4
    for axes in shown:
        box = axes.get_legend().get_window_extent()
        assert axes.get_window_extent().x1 <= box.x0 < box.x1 <= 1200


def test_wide_spans_of_positive_values_take_a_log_axis():
    def scale_of(*losses):
        rows = [Row(i, 0, i, 0, True, None, 1.0, 1.0, loss=x) for i, x in enumerate(losses)]
        return panels(rows)[2].get_yscale()

    assert scale_of(1.0, 101.0) == "log"
    assert scale_of(1.0, 99.0) == "linear"
    assert scale_of(0.0, 1000.0) == "linear"
    assert scale_of(-1.0, 1000.0, math.inf) == "linear"


# -------------------------------------------------------------------- histogram


def test_histogram_counts_exponents_before_and_after_the_scale_of_each_attempt():
    found = exponent_histogram(run())
    # scale 64 = 2**6 at attempt 0 and 32 = 2**5 at attempt 4
    assert dict(found.before) == {-30: 1, -20: 3, -10: 4}
    assert dict(found.after) == {-24: 1, -14: 3, -5: 4}
    assert (found.log_steps, found.scaled) == (2, True)
    assert [found.share(found.before, band) for band in FP16_BANDS] == [1 / 8, 3 / 8, 4 / 8, 0]
    assert [found.share(found.after, band) for band in FP16_BANDS] == [0, 1 / 8, 7 / 8, 0]


def test_bands_are_those_of_float16():
    # what numpy's float16 makes of the numbers at the bounds
    half = np.float16
    assert half(2.0**-25) == 0 != half(2.0**-25 * 1.001)
    assert half(2.0**-14) == np.finfo(half).tiny
    assert half(65519) == 65504
    with np.errstate(over="ignore"):
        assert np.isinf(half(2.0**16))
    assert [band[0] for band in FP16_BANDS.values()] == [-math.inf, -25, -14, 16]
    assert [band[1] for band in FP16_BANDS.values()] == [-25, -14, 16, math.inf]


def test_an_exponent_at_a_bound_belongs_to_the_band_above():
    found = exponent_histogram(
        [Row(0, 0, 0, 0, True, None, 1.0, 1.0, stats=stats({-25: 1, 16: 1}))]
    )
    shares = {band: found.share(found.before, band) for band in FP16_BANDS}
    assert shares == {"zero": 0, "subnormal": 0.5, "normal": 0, "overflow": 0.5}


def test_stairs_show_the_shares_in_percent():
    from matplotlib.patches import StepPatch

    histogram = panels(run())[4]
    before, after = (p for p in histogram.patches if isinstance(p, StepPatch))
    values, edges, _ = before.get_data()
    assert edges.tolist() == list(range(-30, -8))
    assert {e: v for e, v in zip(edges, values, strict=False) if v} == {
        -30: 12.5,
        -20: 37.5,
        -10: 50,
    }
    values, edges, _ = after.get_data()
    assert {e: v for e, v in zip(edges, values, strict=False) if v} == {
        -24: 12.5,
        -14: 37.5,
        -5: 50,
    }
    assert [text.splitlines() for text in legend(histogram)] == [
        ["before scaling (true value):", "  12.5 % zero", "  37.5 % subnormal", "  0 % overflow"],
        ["after scaling:", "  0 % zero", "  12.5 % subnormal", "  0 % overflow"],
    ]
    assert [f"{band} in FP16" for band in FP16_BANDS] == texts(histogram)


def test_without_a_scale_there_is_one_histogram():
    rows = [Row(0, 0, 0, 0, True, None, 1.0, 1.0, stats=stats({-3: 2}))]
    assert [text.splitlines()[0] for text in legend(panels(rows)[4])] == ["gradients (scale 1):"]


# ----------------------------------------------------------------- what may lack


def test_what_the_ledger_lacks_is_said_in_its_panel():
    _, lr, loss, norm, histogram = panels([Row(0, 0, 0, 0, True, None, 1.0, 1.0)])
    for axes in (lr, loss, norm):
        assert texts(axes) == ["not in this ledger"]
    assert "no gradient statistics in this ledger" in texts(histogram)
    rows = [Row(0, 0, 0, 0, False, "NONFINITE_LOSS", 8.0, 8.0, loss=math.nan, stats=stats({}))]
    _, _, loss, _, histogram = panels(rows)
    assert texts(loss) == ["no finite value"]
    assert "no finite non-zero gradient at a log step" in texts(histogram)


def test_each_optimizer_has_a_line_of_its_own():
    rows = [Row(i // 2, 0, i, i % 2, True, None, 8.0, 8.0, lr=float(i % 2)) for i in range(6)]
    lr = panels(rows)[1]
    assert line(lr) == [[0, 0.0], [1, 0.0], [2, 0.0]]
    assert line(lr, 1) == [[0, 1.0], [1, 1.0], [2, 1.0]]
    assert legend(lr) == ["optimizer 0", "optimizer 1"]


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_a_scale_that_cannot_be_placed_is_marked(scale):
    axes = panels([Row(0, 0, 0, 0, True, None, 8.0, 4.0), Row(1, 0, 1, 0, False, None, scale, 0.0)])
    assert line(axes[0], 1) == [[1, 1.0]]
    assert legend(axes[0]) == ["0, inf or NaN"]
    assert axes[0].get_ylim() == (4.0, 16.0)


@pytest.mark.parametrize(
    "rows",
    [
        [
            Row(i, 0, i, 0, False, "NONFINITE_GRADIENTS", 2.0**-i, 1.0, 0.0, math.inf, math.nan)
            for i in range(9)
        ],
        [Row(10**9, 0, 0, 0, True, None, 2.0**100, 2.0**100, 1e-300, -1e300, 1e300)],
        [
            Row(i, 0, i, i % 8, True, None, 3.0, 3.0, stats=stats({-149: 1, 127: 1}))
            for i in range(24)
        ],
    ],
    ids=["nothing finite", "one line of extremes", "eight optimizers"],
)
def test_odd_runs_are_drawn(rows, tmp_path):
    draw_report(Baseline(rows), tmp_path / "a.png")
    pixels, share = ink(tmp_path / "a.png")
    assert pixels.shape[1] == 1200
    assert share > 0.02
