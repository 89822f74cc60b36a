# SPDX-License-Identifier: Apache-2.0
"""Find the module that overflows in float16 in three ways, then mend the run.

    python examples/find_the_culprit.py        # CPU only, nothing to download, seconds

A small transformer learns a cycle of numbers. From its fifth batch on, one layer's output holds
131,072: twice what float16 can hold, and ordinary in float32. Printed: which module is named by the
guard that watches a run, by a replay of one step, by a comparison of precisions; and the remedy.
"""

import logging
import textwrap
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp_guard import NonFiniteLocator, SafeAMP, compare_precisions, locate_nonfinite
from lightning_amp_guard.testing import plant

CULPRIT, HEALTHY_BATCHES = "body.layers.1.linear2", 4
BATCHES, BATCH_SIZE, LENGTH, NUMBERS, WIDTH = 12, 8, 16, 20, 32
OPTIONS = {"accelerator": "cpu", "max_epochs": 1, "logger": False}
OPTIONS |= {f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")}


class CycleModel(LightningModule):
    """Predicts the next number of a cycle."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(NUMBERS, WIDTH)
        self.body = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUMBERS)

    def training_step(self, numbers: Tensor, batch_idx: int) -> Tensor:
        scores = self.head(self.body(self.embed(numbers[:, :-1])))
        return nn.functional.cross_entropy(scores.flatten(0, 1), numbers[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(model: CycleModel, data: Tensor, **arguments: Any) -> dict[str, Any]:
    """Train, and return the tally, what the locator saw, and what was warned of."""
    locator, plugin = NonFiniteLocator(), SafeAMP(**arguments)
    trainer = Trainer(plugins=[plugin], callbacks=[locator], **OPTIONS)  # to ask it afterwards
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, DataLoader(data, BATCH_SIZE))
    said = [str(w.message) for w in caught if "NonFiniteLocator" in str(w.message)]
    return {"tally": plugin.tally, "culprit": locator.culprit, "warnings": said}


def main() -> dict[str, Any]:
    """Find the fault in three ways and mend the run; print a table, and return what was found."""
    torch.manual_seed(0)
    starts = torch.randint(NUMBERS, (BATCHES * BATCH_SIZE, 1))
    data, model = (starts + torch.arange(LENGTH)) % NUMBERS, CycleModel()
    plant(model, CULPRIT, "overflow", at=range(HEALTHY_BATCHES, 10**9))

    run = train(model, data)
    replay = locate_nonfinite(model, data[:BATCH_SIZE])
    ladder = compare_precisions(model, data[:BATCH_SIZE], steps=2)
    mended = train(model, data, fp32_modules=[CULPRIT])

    worst = max(ladder.layers, key=lambda layer: layer.activation_share)
    sick = ", ".join(rung.name for rung in ladder.rungs if not rung.healthy)
    seen, tally = run["culprit"], mended["tally"]
    rows = [
        ("way", "module", "what it says"),
        ("NonFiniteLocator", seen.module, f"{seen.direction} pass, {seen.what}"),
        ("locate_nonfinite", replay.module, f"{replay.direction} pass, {replay.op}"),
        ("compare_precisions", worst.name, f"{65504 * worst.activation_share:,.0f} in float32"),
        ("fp32_modules=[...]", CULPRIT, f"{tally.applied} of {tally.attempted} updates applied"),
    ]
    for way, module, says in rows:
        print(f"{way:19} {module:22} {says}")
    print(f"\nnot healthy: {sick}\nthe warning:\n{textwrap.fill(run['warnings'][0], 98)}")
    return {"run": run, "replay": replay, "ladder": ladder, "worst": worst, "mended": mended}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a second thread only costs time at this size
    main()
