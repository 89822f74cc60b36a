# SPDX-License-Identifier: Apache-2.0
"""Configure plugin, guards and monitor from YAML with LightningCLI.

    python examples/cli/train.py fit --config examples/cli/config.yaml
    python examples/cli/train.py fit --config examples/cli/config.yaml --print_config

Needs the extra `cli`. Plugin and guards are given by `class_path` and `init_args`; never set
`trainer.precision` as well, the plugin is the precision. Options on the command line win over the
file: `--trainer.plugins.init_args.init_scale 65536`.
"""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Regressor(LightningModule):
    """Fits a noisy plane with a small network."""

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs).float(), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(256, 4, generator=generator)
        targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
        return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def main(args: list[str] | None = None) -> LightningCLI:
    """Run the command line; `args` stand in for `sys.argv` in tests."""
    cli = LightningCLI(Regressor, args=args, save_config_callback=None)
    plugin = cli.trainer.precision_plugin
    print(f"{plugin.tally.applied} updates applied, {plugin.tally.skipped} skipped")
    return cli


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
