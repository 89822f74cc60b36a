# SPDX-License-Identifier: Apache-2.0
"""AmpMonitor: the callback that shows what mixed precision does to a run."""

from __future__ import annotations

from lightning.pytorch import Callback

from lightning_amp_guard.monitor.hooks import AmpMonitorCore

__all__ = ["AmpMonitor", "AmpMonitorCore"]


class AmpMonitor(AmpMonitorCore, Callback):
    """Shows what mixed precision does to a run, names what is wrong with it, and keeps a ledger.

    A skipped update leaves no trace in the loss curve, so a run that skips every other step looks
    merely slow. At log steps (`Trainer(log_every_n_steps=...)`) the values below go to the loggers
    and the progress bar, and `ModelCheckpoint` and its kind can monitor them. Findings (`AMP101` to
    `AMP113`, see `Finding`) are shown once, as an `AmpGuardWarning`, in the summary at the end, and
    in `findings`. A bar with room for a few is `prog_bar=["scale", "skipped_steps", "grad_norm"]`.
    Nothing in the run is changed. It also audits stock `MixedPrecision`, bfloat16 and
    32-true runs, whose ledgers serve as a baseline.

    | key | value |
    |---|---|
    | `amp/scale` | the scale in force after the batch; 1.0 where nothing is scaled |
    | `amp/skipped` | updates skipped since the last log step (or the fit's start), all optimizers |
    | `amp/applied_steps` | updates applied over the run, before a resume too, all optimizers |
    | `amp/skipped_steps` | updates skipped over the run, before a resume too, all optimizers |
    | `amp/consecutive_skips` | updates skipped in a row up to now, the largest of all optimizers |
    | `amp/skip_rate` | `skipped_steps` divided by all attempts over the run |
    | `amp/grad_norm` | unscaled L2 norm before clipping of the batch's last applied attempt, or nan |
    | `amp/zero_grad_fraction` | share of the batch's scaled gradients that are zero in float16 |
    | `amp/subnormal_grad_fraction` | share of them that are not zero but below 2**-14 |
    | `amp/headroom_bits` | log2(65504 / largest scaled gradient): doublings before an overflow |
    | `amp/samples_per_s` | samples a second since the last log step, after 2 warm-up batches |
    | `amp/tokens_per_s` | with a `TokenClock`: tokens a second since the last log step, all ranks |
    | `amp/peak_allocated_mib` | on CUDA: the allocator's peak of tensors in MiB, largest of all ranks |
    | `amp/peak_reserved_mib` | on CUDA: the allocator's peak of reserved memory in MiB, likewise |
    | `amp/process_rss_mib` | on the CPU: resident memory of the process in MiB, likewise |

    A sample is an element of the first dimension of the batch's first tensor; validation does not
    count as time. Gradient statistics are those of the log step's own batch, before hooks and
    clipping, in the range of float16 whatever the precision; nan where it had no attempt.

    The ledger is strict JSON Lines, a line per attempt of rank 0, written at once: a killed run loses
    the last line at most. A line holds `attempt`, `epoch`, `batch_idx`, `optimizer`, `applied`,
    `reason`, `scale`, `next_scale`, `lr`, `loss` (the mean over the window, as the user returned
    it), `grad_norm`, `micro_batches`, `batch_id` and `param_checksum` (content hashes); inf and NaN
    become null, with `nonfinite` beside; lines of log steps add `stats`. With an accumulation that is
    no power of two, `loss` is right to one rounding of its dtype. A resumed run's file begins
    with the lines up to its checkpoint; a former file there is renamed. `amp-guard report` draws it,
    `amp-guard compare` finds where two runs part.

    Args:
        ledger: `True` writes `amp_ledger.jsonl` in the logger's directory (without one in
            `default_root_dir`); a path writes there.
        checksum_every: Attempts from one `param_checksum` to the next; the lines between have none.
        baseline: The ledger of a 32-true run of the same model, for AMP106, AMP110 and AMP113.
        prog_bar: Which values also appear in the progress bar: `True` for all, `False` for none, or
            their names in the table, with or without `amp/`: `["scale", "skipped_steps"]`. Loggers
            get all of them.
        warn_after: Skips in a row of one optimizer, those that still search for the scale left out,
            after which to warn; a share above 10 % of the last 100 attempts warns too. `None` never
            warns.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: `warn_after` or `checksum_every` is below 1, `prog_bar` names no value that there
            is; `baseline` is no ledger.
        OSError: The ledger cannot be made, or the baseline not be read.

    Runs: on_train_start, on_train_batch_start, on_before_backward, on_after_backward,
        on_step_outcome, on_train_batch_end, on_train_end.
    Reads: the plugin's outcomes, tallies and scale; under a foreign plugin torch's own flags.
    Keeps: where the ledger stands, and the losses of an open window; the counts are in the precision
        plugin's checkpoint entry.
    Host sync: none between log steps (one per step under a foreign scaler with a fused optimizer); at
        a log step one for the gradient statistics and two for loss and parameters. With a ledger
        one per attempt, besides the attempt's own (under a foreign plugin one more, for the norm).
    Costs: 20 Python calls a step beyond an empty callback's 65 (under stock 39 beyond 78), no tensor
        operation. A log step costs 10,800 Python calls, 15 ms of one CPU core, nearly all of it in
        twelve `self.log` calls, plus about 30 ms per million parameters on one CPU core for the
        gradient statistics. The ledger costs 130 calls, 1.2 ms per attempt with a small model;
        `param_checksum` walks over the parameters twice: 0.1 s for 25 million on one core.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> monitor = AmpMonitor(warn_after=16)
        >>> trainer = Trainer(accelerator="cpu", callbacks=[monitor], logger=False)
    """
