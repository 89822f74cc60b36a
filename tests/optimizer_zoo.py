# SPDX-License-Identifier: Apache-2.0
"""Every optimizer that torch has, its variants, a model for them, and a training loop by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_amp_guard import SafeAMP, _upstream
from tests.helpers import BAD, GOOD, NAN_LOSS, PlantedOverflow, make_trainer

G, B, N = GOOD, BAD, NAN_LOSS
# the first attempt is skipped, some in the middle and two in a row, and the last
PLAN = (B, G, G, B, N, G, G, B)

Make = Callable[[list[Tensor]], Any]


def optimizers_of_torch() -> list[type[Optimizer]]:
    """Return what `torch.optim` has to offer, new ones too."""
    found = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = {kind for kind in found if issubclass(kind, Optimizer) and kind is not Optimizer}
    return sorted(kinds, key=lambda kind: kind.__name__)


def switches(kind: type[Optimizer]) -> list[dict[str, Any]]:
    """Return every argument of the optimizer's that is worth a run of its own."""
    arguments = inspect.signature(kind).parameters
    found: list[dict[str, Any]] = [{}]
    for name, argument in arguments.items():
        kind_of = str(argument.annotation)
        if argument.default is False or (argument.default is None and "bool" in kind_of):
            found.append({name: True, **({"momentum": 0.5} if name == "nesterov" else {})})
        elif name in ("weight_decay", "momentum"):
            found.append({name: 0.25})
    if "lr" in arguments:
        found.append({"lr": torch.tensor(0.125)})
    return found


def maker(kind: type[Optimizer], arguments: dict[str, Any]) -> Make:
    """Return what builds the optimizer; a tensor among the arguments is copied, steps write to it."""

    def make(params: list[Tensor]) -> Optimizer:
        own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}
        return kind(params, **own)

    return make


def holds(kind: type[Optimizer]) -> str:
    """Return what of `Bowl` suits the optimizer: matrix and vector, the matrix alone, or the table."""
    vector = torch.nn.Parameter(torch.zeros(3))
    try:
        optimizer = kind([vector])
    except ValueError:
        return "m"
    vector.grad = torch.zeros(3)
    try:
        optimizer.step(lambda: torch.zeros(()))
    except RuntimeError:  # wants sparse gradients
        return "s"
    return "mv"


def variants(kind: type[Optimizer]) -> list[dict[str, Any]]:
    """Return single switches, and each of the implementations with each other switch."""
    alone = switches(kind)
    ways = [s for s in alone if {*s} & {"foreach", "fused"}]
    alike = {"foreach", "fused", "capturable", "differentiable"}
    others = [s for s in alone if s and not {*s} & alike]
    return alone + [{**other, **way} for way in ways for other in others]


class Targets(Dataset[Any]):
    """Batches of a matrix, a vector and row numbers (some twice): what the parameters are drawn to."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.items = [
            (
                torch.randn(4, 4, generator=generator),
                torch.randn(3, generator=generator),
                torch.randint(0, 6, (5,), generator=generator),
            )
            for _ in range(n)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Bowl(L.LightningModule):
    """loss = half the squared distance to the batch: the distance is the gradient, at any scale.

    Depends on the weights, so one wrong update shows in all later ones.
    """

    def __init__(
        self, make: Make, plan: Any = PLAN, *, kinds: str = "mv", heard: bool = True
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        if "m" in kinds:
            self.matrix = torch.nn.Parameter(torch.randn(4, 4, generator=generator))
        if "v" in kinds:
            self.vector = torch.nn.Parameter(torch.randn(3, generator=generator))
        if "s" in kinds:
            self.table = torch.nn.Embedding(6, 4, sparse=True)
            self.table.weight.data.copy_(torch.randn(6, 4, generator=generator))
        self.kinds, self.make, self.plan = kinds, make, list(plan)
        self.seen = 0
        self.path: list[Any] = []
        self.outcomes: list[Any] = []
        if heard:
            self.on_step_outcome = self.outcomes.append

    def loss(self, batch: Any) -> Tensor:
        matrix, vector, rows = batch
        distances = []
        if "m" in self.kinds:
            distances.append(self.matrix - matrix)
        if "v" in self.kinds:
            distances.append(self.vector - vector)
        if "s" in self.kinds:
            distances.append(self.table(rows) - matrix[0])
        return torch.stack([0.5 * d.square().sum() for d in distances]).sum()

    def faulty_loss(self, batch: Any) -> Tensor:
        fault = self.plan[self.seen] if self.seen < len(self.plan) else G
        loss = PlantedOverflow.apply(self.loss(batch), fault == B)
        return loss * float("nan") if fault == N else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.faulty_loss(batch)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.path.append(self.weights())

    def configure_optimizers(self) -> Any:
        return self.make(list(self.parameters()))


class ManualBowl(Bowl):
    """`Bowl` in manual optimization."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.faulty_loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def loader(n: int) -> DataLoader[Any]:
    return DataLoader(Targets(n), batch_size=None)


class Run:
    """What became of the weights after each batch, and of the optimizer's state; or the error."""

    def __init__(self) -> None:
        self.path: list[list[Tensor]] = []
        self.state: Any = None
        self.error: Exception | None = None
        self.outcomes: list[Any] = []


def by_hand(make: Make, plan: Any = PLAN, *, kinds: str = "mv", clip: float | None = None) -> Run:
    """Train in float32 by a plain loop that leaves out what is faulty."""
    run, model = Run(), Bowl(make, (), kinds=kinds)
    try:
        optimizer = make(list(model.parameters()))
        for fault, batch in zip(plan, loader(len(plan)), strict=True):
            if fault == G:
                _step_by_hand(model, optimizer, batch, clip)
            run.path.append(model.weights())
        run.state = optimizer.state_dict()
    except Exception as error:  # noqa: BLE001 - to be compared with the plugin's
        run.error = error
    return run


def _step_by_hand(model: Bowl, optimizer: Any, batch: Any, clip: float | None) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        return loss

    if _upstream.needs_closure(optimizer):
        optimizer.step(closure)
        return
    closure()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def guarded(
    make: Make,
    precision: str = "16-mixed",
    plan: Any = PLAN,
    *,
    way: str = "heard",
    kinds: str = "mv",
    clip: float | None = None,
) -> Run:
    """Train the same under `SafeAMP`."""
    run = Run()
    heard = way in ("heard", "manual")
    model = (ManualBowl if way == "manual" else Bowl)(make, plan, kinds=kinds, heard=heard)
    plugin = SafeAMP(precision, init_scale=1024.0, growth_interval=2)
    trainer = make_trainer(plugin, gradient_clip_val=clip)
    try:
        trainer.fit(model, loader(len(plan)))
        run.state = trainer.optimizers[0].state_dict()
    except Exception as error:  # noqa: BLE001 - to be compared with that of a plain loop
        run.error = error
    run.path, run.outcomes = model.path, model.outcomes
    return run


def differences(one: Any, other: Any, where: str = "", tolerance: float = 0.0) -> Iterator[str]:
    """Yield the places in which two nested structures differ."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        close = tolerance and alike and torch.allclose(one, other, tolerance, tolerance)
        if not (alike and (torch.equal(one, other) or close)):
            yield f"{where}: {one} is not {other}"
    elif isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            yield f"{where}: {list(one)} is not {list(other)}"
        for key in [key for key in one if key in other]:
            yield from differences(one[key], other[key], f"{where}.{key}", tolerance)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} entries"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{where}[{i}]", tolerance)
    elif one != other:
        yield f"{where}: {one!r} is not {other!r}"


AS_IN_FLOAT32, REFUSED = "as in float32", "refused at set-up"
UNGUARDED, TORCH_REFUSES = "runs unguarded, and says so", "refused by torch itself"


def clip_of_sparse() -> str:
    """Return what clipping sparse gradients is: torch does so from 2.14 on."""
    row = torch.nn.Embedding(2, 1, sparse=True)
    row(torch.tensor([0])).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(row.parameters(), 0.5)
    except RuntimeError:
        return TORCH_REFUSES
    return AS_IN_FLOAT32


def judged(make: Make, precision: str = "16-mixed", way: str = "heard", kinds: str = "mv") -> str:
    """Return what the plugin makes of an optimizer, compared with a plain loop bit for bit.

    Raises:
        AssertionError: It parts from the plain loop.
    """
    clip = 0.5 if way == "clipped" else None
    want = by_hand(make, kinds=kinds, clip=clip)
    got = guarded(make, precision, way=way, kinds=kinds, clip=clip)
    if got.error is not None:
        if isinstance(got.error, MisconfigurationException) and "its closure" in str(got.error):
            return REFUSED
        alike = type(got.error) is type(want.error) and str(got.error) == str(want.error)
        assert alike, f"{got.error!r} instead of {want.error!r}"
        return TORCH_REFUSES
    assert want.error is None, f"went through, instead of {want.error!r}"
    if way in ("heard", "manual") and not got.outcomes:
        healthy = (G, G, G)
        want, got = (run(make, plan=healthy, kinds=kinds) for run in (by_hand, guarded_bf16))
        verdict = UNGUARDED
    else:
        verdict = AS_IN_FLOAT32
    tolerance = 1e-6 if clip else 0.0
    found = [*differences([got.path, got.state], [want.path, want.state], "", tolerance)]
    assert not found, found[0]
    return verdict


def guarded_bf16(make: Make, plan: Any, kinds: str) -> Run:
    return guarded(make, "bf16-mixed", plan, kinds=kinds)
