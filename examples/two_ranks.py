# SPDX-License-Identifier: Apache-2.0
"""Train in FP16 on two processes, with one weight that DDP does not synchronise.

    python examples/two_ranks.py         # two CPU processes, nothing to download, seconds

Each rank reads its own sensor and has its own calibration weight for it, which DDP is told to leave
alone; the head is shared. Twice the second rank's sensor is eight times too loud, and there the
gradient of its calibration overflows float16. DDP spreads an inf with the gradients that it reduces,
but not this one. Under stock only the second rank skips and halves its scale. From then on the
ranks' gradients carry different scales, DDP averages them all the same, and the shared weights part.
"""

import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import layer_norm, smooth_l1_loss
from torch.utils.data import DataLoader

from lightning_amp_guard import SafeAMP

BATCHES, BATCH_SIZE, WIDTH = 24, 32, 8
LOUD = 5, 15  # batches of the second rank
EXPECTED_WARNINGS = (
    "`isinstance.treespec, LeafSpec.`",  # Lightning's use of torch
    "The '.*' does not have many workers",  # the data is in memory
    ".*multi-threaded",  # newer Pythons, of any fork of a process with threads
)


class Sensors(LightningModule):
    """A shared head, a calibration for each rank, and a count of what became of the updates."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.calibration = (Linear(WIDTH, 1, bias=False) for _ in range(2))
        self._ddp_params_and_buffers_to_ignore = ["calibration.weight"]
        self.folder = folder
        self.attempted = self.applied = 0

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        prediction = self.head(layer_norm(x, (WIDTH,))) + self.calibration(x)
        return smooth_l1_loss(prediction.float().squeeze(1), x.max(1).values)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.attempted += 1

    def note_update(self, *_: Any) -> None:
        self.applied += 1

    def on_train_end(self) -> None:
        seen = {
            "final scale": self.trainer.precision_plugin.scaler.get_scale(),
            "attempted": self.attempted,
            "applied": self.applied,
            "skipped": self.attempted - self.applied,
            "head": self.head.weight.detach().flatten().tolist(),
        }
        Path(self.folder, f"{self.global_rank}.json").write_text(json.dumps(seen))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(self.note_update)  # not called for a skipped update
        return optimizer

    def train_dataloader(self) -> Any:
        x = torch.rand(BATCHES, BATCH_SIZE, WIDTH, generator=torch.manual_seed(self.global_rank))
        if self.global_rank == 1:
            x[list(LOUD)] *= 8
        return DataLoader(x.flatten(0, 1), BATCH_SIZE)


def train(plugin: MixedPrecision) -> list[dict[str, Any]]:
    """Train on two processes; return what each rank saw."""
    trainer = Trainer(
        plugins=[plugin],
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        use_distributed_sampler=False,  # each rank has its own sensor
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        trainer.fit(Sensors(folder))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]


def main() -> dict[str, list[dict[str, Any]]]:
    """Train under either plugin; print what became of the updates on each rank, and return it."""
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    results = {"stock": train(stock), "SafeAMP": train(SafeAMP())}
    print(
        " " * 27 + "".join(f"{name} rank {rank}".rjust(16) for name in results for rank in (0, 1))
    )
    for fact in ("final scale", "attempted", "applied", "skipped"):
        values = (seen[fact] for pair in results.values() for seen in pair)
        print(f"{fact:27}" + "".join(f"{value:16,.0f}" for value in values))
    print(f"{'shared weights differ by':27}", end="")
    for first, second in results.values():
        apart = max(abs(a - b) for a, b in zip(first["head"], second["head"], strict=True))
        print(f"{apart:32.2g}", end="")
    print()
    return results


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a second thread only costs time at this size
    main()
