# SPDX-License-Identifier: Apache-2.0
"""A model of two rows, one for each of two ranks to hold, and its data."""

from __future__ import annotations

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import BAD, GOOD, NAN_LOSS, PlantedOverflow

OVERFLOW, LOSS, PARTNER = "NONFINITE_GRADIENTS", "NONFINITE_LOSS", "PARTNER_SKIPPED"

# The norm of eight gradients of 2, and what clipping it to 1 leaves of each.
NORM, CLIPPED = 32**0.5, 2 / 32**0.5


class Rows(L.LightningModule):
    """loss = the sum over two rows of mean(w.x): every element has the mean of x as its gradient.

    Rank 0 sees ones and rank 1 threes, so reduced over ranks, or on the joint batch, every gradient
    is 2. All weights start at 8. Sharded over two ranks, rank 1 holds the second row, and a BAD batch
    makes an inf in that row alone.
    """

    def __init__(self, plan=(), make_optimizer=None):
        super().__init__()
        self.plan = list(plan)
        self.make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.5))
        self.seen = 0
        self.outcomes, self.scales, self.tallies, self.weights = [], [], [], []
        self.lin = torch.nn.Linear(4, 2, bias=False)
        torch.nn.init.constant_(self.lin.weight, 8.0)

    def loss(self, out):
        fault = self.plan[self.seen] if self.seen < len(self.plan) else GOOD
        first, second = out.float().mean(0)
        loss = first + PlantedOverflow.apply(second, fault == BAD)
        return loss * float("nan") if fault == NAN_LOSS else loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.lin(batch[0]))

    def on_step_outcome(self, outcome):
        self.outcomes.append(outcome)

    def rows(self):
        """Return the first element of either row, whoever holds it."""
        return self.lin.weight.detach()[:, 0].tolist()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1
        plugin = self.trainer.precision_plugin
        self.scales.append(1.0 if plugin.scaler is None else plugin.scaler.get_scale())
        self.tallies.append([(t.attempted, t.applied, t.skipped) for t in plugin.tallies])
        self.weights.append(self.rows())

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())

    def told(self):
        return {
            "scales": self.scales,
            "tallies": self.tallies,
            "weights": self.weights,
            "reasons": [outcome.reason and outcome.reason.name for outcome in self.outcomes],
            "norms": [outcome.grad_norm for outcome in self.outcomes],
            "carried": [(outcome.scale, outcome.next_scale) for outcome in self.outcomes],
        }


class SavesInsideWindow(Rows):
    """Writes a checkpoint after the first micro-batch of the second window of two."""

    def __init__(self, path, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.path = path

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if batch_idx == 2:
            self.trainer.save_checkpoint(self.path)


def momentum(params):
    return torch.optim.SGD(params, lr=0.5, momentum=0.5)


def fused(params):
    return torch.optim.Adam(params, lr=0.5, fused=True)


def own_data(rank, n):
    """Return `n` batches: ones on rank 0, threes on rank 1."""
    return DataLoader(TensorDataset(torch.full((4 * n, 4), 1.0 + 2.0 * rank)), batch_size=4)


def joint_data(n):
    """Return `n` batches that hold both ranks' samples."""
    both = torch.tensor([1.0] * 4 + [3.0] * 4).reshape(8, 1).expand(8, 4)
    return DataLoader(TensorDataset(both.repeat(n, 1)), batch_size=8)


def alike(first, second, reference, **tolerance):
    """Assert that both ranks noted the same, and the same as the one-process `reference`.

    Exactly, but for `tolerance`, which the weights and norms may be off the reference.
    """
    assert first == second
    close = {key: first[key] for key in ("weights", "norms")}
    for key in close:
        expected = [x if x is not None else float("nan") for x in reference[key]]
        actual = [x if x is not None else float("nan") for x in close[key]]
        torch.testing.assert_close(
            torch.tensor(actual),
            torch.tensor(expected),
            **{"rtol": 0, "atol": 0, **tolerance},
            equal_nan=True,
        )
    assert {**first, "weights": 0, "norms": 0} == {**reference, "weights": 0, "norms": 0}
