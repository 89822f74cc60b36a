# SPDX-License-Identifier: Apache-2.0
"""Train a small GAN in FP16: two optimizers, one loss scale, windows of different length.

    python examples/gan.py               # under SafeAMP; CPU only, nothing to download, seconds
    python examples/gan.py --stock       # the same run under Lightning's own MixedPrecision

Needs scikit-learn, for its 8x8 digits. The discriminator steps on every batch, the generator on
every fourth, with the gradients of four batches. Meanwhile the scale moves: it starts too high and
grows often, so that a short run meets what a long one meets.

Each loss carries a probe: a parameter that changes nothing and whose gradient is 1 by construction.
The number that an optimizer receives in its place shows how far the update's gradients are off: 2.0
if all are doubled, 0.625 if three batches of four count half.
"""

import argparse
import logging
import warnings
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import Linear, ParameterDict, ReLU, Sequential, Tanh
from torch.nn.functional import softplus
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

from lightning_amp_guard import SafeAMP, StepTally

NETWORKS = "discriminator", "generator"
EPOCHS, BATCHES, BATCH_SIZE = 2, 112, 16  # an epoch holds a whole number of windows
WINDOW, NOISE, WIDTH = 4, 16, 32
SCALE = {"init_scale": 2.0**24, "growth_interval": 16}
EXPECTED_WARNINGS = (
    "`isinstance.treespec, LeafSpec.`",  # Lightning's use of torch
    "The '.*' does not have many workers",  # the data is in memory
    "Detected call of `lr_scheduler.step",  # stock's schedules run ahead of the updates
)


class DigitGAN(LightningModule):
    """A generator, a discriminator, and a witness of what their optimizers receive."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = Sequential(Linear(64, WIDTH), ReLU(), Linear(WIDTH, 1))
        self.generator = Sequential(Linear(NOISE, WIDTH), ReLU(), Linear(WIDTH, 64), Tanh())
        self.probes = ParameterDict({name: torch.zeros(()) for name in NETWORKS})
        self.attempts = [0, 0]
        self.received: dict[str, list[float]] = {name: [] for name in NETWORKS}
        self.losses: dict[str, list[float]] = {name: [] for name in NETWORKS}

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        (opt_d, opt_g), (schedule_d, schedule_g) = self.optimizers(), self.lr_schedulers()
        fake = self.generator(torch.randn(len(real), NOISE))

        looks_real, looks_fake = self.discriminator(real), self.discriminator(fake.detach())
        loss = softplus(-looks_real.float()).mean() + softplus(looks_fake.float()).mean()
        opt_d.zero_grad()
        self.manual_backward(self.watched("discriminator", loss))
        opt_d.step()
        schedule_d.step()

        self.toggle_optimizer(opt_g)  # no gradients for the discriminator
        loss = softplus(-self.discriminator(fake).float()).mean()
        self.manual_backward(self.watched("generator", loss) / WINDOW)
        self.untoggle_optimizer(opt_g)
        if (batch_idx + 1) % WINDOW == 0:
            opt_g.step()
            opt_g.zero_grad()
            schedule_g.step()

    def watched(self, name: str, loss: Tensor) -> Tensor:
        self.losses[name].append(loss.item())
        probe = self.probes[name]
        return loss + (probe - probe.detach())  # adds 0, with the gradient 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.attempts[self.trainer.optimizers.index(optimizer)] += 1

    def note_probe(self, name: str, *_: Any) -> None:
        self.received[name].append(self.probes[name].grad.item())

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizers = []
        for name in NETWORKS:
            params = [*self.get_submodule(name).parameters(), self.probes[name]]
            optimizers.append(torch.optim.Adam(params, lr=2e-3, betas=(0.5, 0.99)))
            # Called by the optimizer's own `step`, so not for a skipped update, whoever skips it.
            optimizers[-1].register_step_pre_hook(partial(self.note_probe, name))
        return optimizers, [ExponentialLR(optimizer, 0.99) for optimizer in optimizers]


def main(stock: bool = False) -> dict[str, Any]:
    """Train under one of the two plugins; print what became of the updates, and return it."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[: BATCHES * BATCH_SIZE]).float() / 8 - 1
    plugin: MixedPrecision = SafeAMP(**SCALE)
    if stock:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SCALE))
    model = DigitGAN()
    trainer = Trainer(
        plugins=[plugin],
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        trainer.fit(model, DataLoader(images, BATCH_SIZE, shuffle=True))

    results: dict[str, Any] = {"scale": plugin.scaler.get_scale()}
    print(f"{'stock' if stock else 'SafeAMP':13} attempted   applied   skipped  schedule", end="")
    print("    loss  1.0 arrived as  wrong updates")
    for i, (name, received) in enumerate(model.received.items()):
        # Stock keeps no tally: there the witness has to do.
        seen = StepTally(model.attempts[i], len(received), model.attempts[i] - len(received))
        tally = seen if stock else trainer.precision_plugin.tallies[i]
        schedule, loss = model.lr_schedulers()[i].last_epoch, sum(model.losses[name][-64:]) / 64
        wrong = sum(gradient != 1.0 for gradient in received)
        counts = tally.attempted, tally.applied, tally.skipped, schedule
        print(f"{name:13}", *(f"{count:9}" for count in counts), f"{loss:7.3f}", end="")
        print(f" {min(received):6.4g} to {max(received):<5.4g} {wrong:14}")
        results[name] = {"tally": tally, "schedule": schedule, "loss": loss, "received": received}
    print(f"final scale {results['scale']:,.0f}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A small GAN in FP16.")
    parser.add_argument("--stock", action="store_true", help="use Lightning's own plugin")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # a second thread only costs time at this size
    main(**vars(parser.parse_args()))
