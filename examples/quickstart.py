# SPDX-License-Identifier: Apache-2.0
"""Train one small model under stock mixed precision and under SafeAMP, then resume it mid-epoch.

    python examples/quickstart.py        # CPU only, nothing to download, under a minute

A character-level transformer learns the English text that ships with CPython, in real FP16. The
loss scale starts too high on purpose, so that the first updates overflow, as in many real runs.
Printed: what became of every attempt to update the weights; then a run resumed from a mid-epoch
checkpoint beside the same run without the interruption. The two must agree in every bit.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_amp_guard import AmpMonitor, SafeAMP, StepOutcome

Row = tuple[int, float, float, bool, float]  # batch id, learning rate, scale, skipped, loss

BATCHES, BATCH_SIZE, CONTEXT, WIDTH = 96, 8, 32, 32
INIT_SCALE = 2.0**24  # several powers of two too high for this model
RESUME_AT, SHOWN = 6, 5  # attempts before the checkpoint, attempts printed after it
FACTS = ("attempts", "updates applied", "skipped", "scheduler position", "final scale", "loss")
EXPECTED_WARNINGS = (
    "`isinstance.treespec, LeafSpec.`",  # Lightning's use of torch
    "The dirpath has changed",  # each run has its own folder
    "Detected call of `lr_scheduler.step",  # stock's fault, which the first table shows in full
)

TEXT = "".join(topics[name] for name in sorted(topics))
NUMBER_OF = {character: number for number, character in enumerate(sorted(set(TEXT)))}
ENCODED = torch.tensor([NUMBER_OF[character] for character in TEXT])


class TextLoader:
    """Yields `(batch id, characters)` in a fixed order; Lightning saves and restores the place."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for batch_id in range(self.position, BATCHES):
            self.position = (batch_id + 1) % BATCHES
            starts = (torch.arange(BATCH_SIZE) + batch_id * BATCH_SIZE) * 8 * CONTEXT
            yield batch_id, ENCODED[starts[:, None] + torch.arange(CONTEXT + 1)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class CharacterModel(LightningModule):
    """Predicts the next character, and counts the steps that really moved its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(NUMBER_OF), WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(NUMBER_OF))
        self.moved = self.batch_id = 0
        self.losses: list[float] = []
        self.rows: list[Row] = []

    def training_step(self, batch: tuple[int, Tensor], batch_idx: int) -> Tensor:
        self.batch_id, characters = batch
        hidden = self.embed(characters[:, :-1]) + self.place.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        logits = self.head(self.body(hidden, mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        warm_up = LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 16))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        # One witness for both plugins: it asks neither of them, it looks at the weights.
        before = self.head.weight.detach().clone()
        super().optimizer_step(*args, **kwargs)
        self.moved += not torch.equal(before, self.head.weight)

    def on_step_outcome(self, outcome: StepOutcome) -> None:
        # SafeAMP calls this after each attempt, before the schedule advances; stock never does.
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        skipped = not outcome.applied
        self.rows.append((self.batch_id, lr, outcome.scale, skipped, self.losses[-1]))


def fit(plugin: MixedPrecision, folder: Path, resume_from: Path | None = None) -> CharacterModel:
    """Train for one epoch; only the plugin tells one arm of the comparison from the other."""
    torch.manual_seed(0 if resume_from is None else 1)  # a resumed run owes nothing to the seed
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=RESUME_AT, save_top_k=-1)
    trainer = Trainer(
        plugins=[plugin],
        callbacks=[AmpMonitor(), checkpoints],
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = CharacterModel()
    trainer.fit(model, TextLoader(), ckpt_path=resume_from)
    return model


def endings(model: CharacterModel) -> tuple[float, float, float]:
    """Scheduler position, scale, and mean loss of the last eight batches."""
    scale = model.trainer.precision_plugin.scaler.get_scale()
    return model.lr_schedulers().last_epoch, scale, sum(model.losses[-8:]) / 8


def main() -> dict[str, Any]:
    """Run both comparisons, print them, and return their numbers."""
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE)
    plugin = SafeAMP(init_scale=INIT_SCALE)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        stock = fit(MixedPrecision("16-mixed", "cpu", scaler), Path(root, "stock"))
        safe = fit(plugin, Path(root, "safe"))
        checkpoint = Path(root, "safe", f"step={RESUME_AT}.ckpt")
        resumed = fit(SafeAMP(init_scale=INIT_SCALE), Path(root, "resumed"), checkpoint)

    attempts, tally = stock.trainer.global_step, plugin.tally
    left = (attempts, stock.moved, attempts - stock.moved, *endings(stock))
    right = (tally.attempted, tally.applied, tally.skipped, *endings(safe))
    table = dict(zip(FACTS, zip(left, right, strict=True), strict=True))
    print(f"{'':18} {'stock':>10} {'SafeAMP':>10}")
    for fact, (a, b) in table.items():
        print(f"{fact:18} {a:10,.6g} {b:10,.6g}")

    rest = safe.rows[RESUME_AT:]
    print("\nattempt  run            batch        lr      scale  outcome      loss")
    for attempt in range(SHOWN):
        for run, rows in ("uninterrupted", rest), ("resumed", resumed.rows):
            batch_id, lr, scale, skipped, loss = rows[attempt]
            fate = "skipped" if skipped else "applied"
            print(f"{RESUME_AT + attempt:7}  {run:13} {batch_id:6}", end="")
            print(f" {lr:9.6f} {scale:10,.0f}  {fate} {loss:9.6f}")
    weights = zip(safe.parameters(), resumed.parameters(), strict=True)
    if resumed.rows != rest or not all(torch.equal(a, b) for a, b in weights):
        raise SystemExit("the resumed run parted from the uninterrupted one")
    print(f"all {len(rest)} attempts after the resume and the final weights: equal in every bit")
    return {"table": table, "moved": safe.moved, "rest": rest, "resumed": resumed.rows}


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a second thread only costs time at this size
    main()
