# SPDX-License-Identifier: Apache-2.0
"""Faults with a known place, and models that are healthy though they look strange.

`FAULTS` and `HEALTHY` are tables: each row builds a fresh module, a batch and a loss. The tests of
`locate_nonfinite` and of the armed locator read the same rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

INF, NAN = float("inf"), float("nan")
WIDTH = 4


class Case(NamedTuple):
    """One step: `loss_fn` is None for a LightningModule."""

    module: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True)
class Planted:
    """One planted fault.

    Args:
        name: The row's name.
        make: Builds the step; the same each time.
        module: The expected module path.
        ops: Operators of which one is expected; (None,) where the input is at fault.
        direction: "forward" or "backward".
        subject: The expected subject, where the input is at fault.
        scale: The loss scale.
        persists: Whether training steps meet the fault again and again at any scale, and within a
            submodule, so that hooks on modules can see it.
    """

    name: str
    make: Callable[[], Case]
    module: str
    ops: tuple[str | None, ...]
    direction: str = "forward"
    subject: str = ""
    scale: float = 2.0**16
    persists: bool = True


class Trained(L.LightningModule):
    """A case as a LightningModule: the names of its modules begin with "model."."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss_fn = case.module, case.loss_fn

    def training_step(self, batch, batch_idx):
        return self.loss_fn(self.model, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)  # so that the fault stays as it is


class Apply(nn.Module):
    """A module around one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def chain(culprit: nn.Module, *, head: nn.Module | None = None) -> nn.Sequential:
    """Linear, culprit, Linear: the weights are fixed, so that the numbers can be worked out."""
    body = linear(0.5)
    return nn.Sequential(
        OrderedDict(body=body, culprit=culprit, head=linear(0.5) if head is None else head)
    )


def linear(value: float) -> nn.Linear:
    """A square layer: value times the identity, no bias."""
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        made.weight.copy_(value * torch.eye(WIDTH))
    return made


def ones(value: float = 1.0) -> Tensor:
    return torch.full((2, WIDTH), value)


def mean_loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).float().mean()


def through(function: Callable[[Tensor], Tensor], x: float = 2.0) -> Callable[[], Case]:
    """A chain whose culprit applies the function to `x` halved."""
    return lambda: Case(chain(Apply(function)), ones(x), mean_loss)


def modular(culprit: Callable[[], nn.Module], x: float = 2.0) -> Callable[[], Case]:
    return lambda: Case(chain(culprit()), ones(x), mean_loss)


# ---------------------------------------------------------------- functions and operators of one's own


class ForwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sub(1.0).reciprocal()  # x is 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class BackwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (x - 1.0)  # x is 1


class OutsideTorch(torch.autograd.Function):
    """Computes in numpy, which no dispatch mode sees."""

    @staticmethod
    def forward(ctx, x):
        values = x.detach().float().numpy()
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.log(values * 0.0))

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.library.custom_op("amp_guard_planted::inverse_of_zero", mutates_args=())
def inverse_of_zero(x: Tensor) -> Tensor:
    return (x * 0).reciprocal()


@inverse_of_zero.register_fake
def _(x):
    return torch.empty_like(x)


inverse_of_zero.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("amp_guard_planted::steep", mutates_args=())
def steep(x: Tensor) -> Tensor:
    return x.clone()


steep.register_autograd(lambda ctx, grad: grad / (grad * 0))


# ---------------------------------------------------------------- models


def overflowing_conv() -> Case:
    net = nn.Sequential(OrderedDict(culprit=nn.Conv2d(1, 2, 3), flat=nn.Flatten()))
    nn.init.constant_(net.culprit.weight, 1000.0)
    return Case(net, torch.full((1, 1, 5, 5), 100.0), mean_loss)  # 9 x 1e5 > 65504


class Attention(nn.Module):
    def __init__(self, blocked: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("mask", torch.zeros(3, 3, dtype=torch.bool))
        self.mask[0, :blocked] = True

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(self.mask, -INF)
        return scores.softmax(-1) @ v


def attention(blocked: int) -> Case:
    net = nn.Sequential(OrderedDict(body=linear(1.0), culprit=Attention(blocked)))
    return Case(net, torch.ones(1, 3, WIDTH), mean_loss)


class Words(nn.Module):
    def __init__(self, sparse: bool, tail: nn.Module) -> None:
        super().__init__()
        self.embed, self.tail = nn.Embedding(5, WIDTH, sparse=sparse), tail
        nn.init.ones_(self.embed.weight)

    def forward(self, ids):
        return self.tail(self.embed(ids))


def summed_embedding() -> Case:
    """Eight gradients of 1e33 x 65536 each: their sum leaves float32."""
    return Case(
        Words(False, nn.Identity()),
        torch.zeros(8, dtype=torch.long),
        lambda module, ids: (module(ids) * ids.new_tensor([1, -1, 1, -1])).sum() * 1e33,
    )


def sparse_embedding() -> Case:
    words = Words(True, Apply(lambda x: (x - 1.0).sqrt()))
    return Case(words, torch.tensor([0, 1]), mean_loss)


def bad_embedding() -> Case:
    words = Words(False, linear(1.0))
    with torch.no_grad():
        words.embed.weight[1, 0] = INF
    return Case(words, torch.tensor([0, 1]), mean_loss)


class Gru(nn.Module):
    def __init__(self, hidden_bias: float) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), linear(1.0)
        with torch.no_grad():
            self.gru.bias_ih_l0[:WIDTH] = -1e4  # the reset gate is 0 ...
            self.gru.bias_hh_l0[2 * WIDTH :] = hidden_bias  # ... times this

    def forward(self, x):
        return self.head(self.gru(x)[0])


def gru(hidden_bias: float) -> Case:
    return Case(Gru(hidden_bias), torch.ones(2, 3, WIDTH), mean_loss)


def checkpointed(function: Callable[[Tensor], Tensor], reentrant: bool) -> Callable[[], Case]:
    def make() -> Case:
        inner = nn.Sequential(OrderedDict(lin=linear(1.0), culprit=Apply(function)))
        block = Checkpointed(inner, reentrant)
        net = nn.Sequential(OrderedDict(body=linear(0.5), part=block, head=linear(0.5)))
        return Case(net, ones(2.0), mean_loss)

    return make


def huge_norm() -> Case:
    net = nn.Sequential(OrderedDict(culprit=nn.LayerNorm(WIDTH)))
    return Case(net, torch.tensor([[3e38, -3e38, 3e38, 3e38]]), mean_loss)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(300.0), linear(1.0)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x))  # 1 -> 300 -> 90000


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = linear(300.0), linear(1.0)
        self.again = self.shared

    def forward(self, x):
        return self.head(self.again(self.shared(x)))


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lin, self.act = linear(1.0), Apply(function)

    def forward(self, x):
        return self.act(self.lin(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(torch.tanh), Layer(lambda x: x / (x * 0))])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), linear(1.0)

    def forward(self, x):
        return self.head(self.encoder(x))


class InFloat32(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return (x.float() * 0).log()


def in_place_on_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(-1)[1:2].div_(0.0)
    return y


class Logs(L.LightningModule):
    """Computes its loss outside of any submodule, and logs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = linear(1.0), function

    def training_step(self, batch, batch_idx):
        loss = self.function(self.net(batch)).float().mean()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "extra": batch}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@dataclass
class Sample:
    image: Tensor
    label: Tensor


class Nested(NamedTuple):
    sample: Sample


def squared(module: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(module(batch["x"]).float(), batch["y"])


def bad_dict(field: str, value: float) -> Callable[[], Case]:
    def make() -> Case:
        batch = {"x": ones(), "y": ones(), "unused": ones(NAN)}
        batch[field][1, 2] = value
        return Case(chain(nn.ReLU()), batch, squared)

    return make


def bad_dataclass() -> Case:
    batch = [Nested(Sample(ones(NAN), ones()))]
    return Case(chain(nn.ReLU()), batch, lambda m, b: m(b[0].sample.image).float().mean())


def bad_tensor(name: str, value: float) -> Callable[[], Case]:
    def make() -> Case:
        net = chain(nn.BatchNorm1d(WIDTH).eval())
        with torch.no_grad():
            dict([*net.named_parameters(), *net.named_buffers()])[name][1] = value
        return Case(net, ones(), mean_loss)

    return make


def half_loss() -> Case:
    return Case(chain(nn.ReLU()), ones(4.0), lambda m, x: m(x).mean())  # float16 times 2**16


def outside_of_modules() -> Case:
    return Case(chain(nn.ReLU()), ones(), lambda m, x: (m(x) * 0).float().log().mean())


def masked_exp(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, (x.float() * 1000).exp())  # x is 1


def exp_softmax(x: Tensor) -> Tensor:
    e = (x.float() * 100).exp()
    return e / e.sum(-1, keepdim=True)


DIV = ("aten.div.Tensor", "aten.div_.Tensor")

FAULTS = (
    Planted("matmul", modular(lambda: linear(1e5), 2.0), "culprit", ("aten._to_copy.default",)),
    Planted("matmul range", modular(lambda: linear(6e4), 4.0), "culprit", ("aten.mm.default",)),
    Planted("conv", overflowing_conv, "culprit", ("aten.convolution.default",)),
    Planted("hand-written softmax", through(exp_softmax), "culprit", ("aten.exp.default",)),
    Planted("exp", through(lambda x: (x * 100).exp()), "culprit", ("aten.exp.default",)),
    Planted("division by zero", through(lambda x: x / (x - 1)), "culprit", DIV),
    Planted("log of zero", through(lambda x: (x - 1).log()), "culprit", ("aten.log.default",)),
    Planted("attention row of -inf", lambda: attention(3), "culprit", ("aten._softmax.default",)),
    Planted(
        "deviation of a constant",
        through(lambda x: x * x.var(-1, keepdim=True).sqrt()),
        *("culprit", ("aten.sqrt.default",), "backward"),
    ),
    Planted("Function, forward", through(ForwardFault.apply), "culprit", ("ForwardFault",)),
    Planted(
        "Function, backward",
        through(BackwardFault.apply),
        *("culprit", ("BackwardFault",), "backward"),
    ),
    Planted("Function outside torch", through(OutsideTorch.apply), "culprit", ("OutsideTorch",)),
    Planted(
        "custom operator",
        through(inverse_of_zero),
        *("culprit", ("amp_guard_planted.inverse_of_zero.default",)),
    ),
    Planted(
        "custom operator, backward",
        through(steep),
        *("culprit", ("amp_guard_planted.steep.default",), "backward"),
    ),
    Planted(
        "embedding, summed gradients",
        summed_embedding,
        *("embed", ("aten.embedding.default",), "backward"),
        persists=False,
    ),
    Planted(
        "behind a sparse embedding",
        sparse_embedding,
        *("tail", ("aten.sqrt.default",), "backward"),
    ),
    Planted(
        "row of an embedding",
        bad_embedding,
        *("embed", (None,), "forward", "parameter 'embed.weight'"),
        persists=False,
    ),
    Planted(
        "LayerNorm on huge inputs",
        huge_norm,
        "culprit",
        ("aten.native_layer_norm.default",),
    ),
    Planted(
        "float16 sum",
        through(lambda x: x * x.half().expand(70000, 2, WIDTH).sum(0)),
        *("culprit", ("aten.sum.dim_IntList",)),
    ),
    Planted(
        "scale overflow",
        lambda: Case(chain(nn.ReLU()), ones(), mean_loss),
        *("", ("aten._to_copy.default",), "backward"),  # of the loss function's `.float()`
        scale=2.0**30,
        persists=False,
    ),
    Planted(
        "scale overflow of a float16 loss",
        half_loss,
        *("", ("aten.mul.Tensor",), "backward"),
        persists=False,
    ),
    Planted(
        "NaN in data",
        bad_dict("x", NAN),
        *("", (None,), "forward", "batch['x']"),
        persists=False,
    ),
    Planted(
        "inf in labels",
        bad_dict("y", INF),
        *("", (None,), "forward", "batch['y']"),
        persists=False,
    ),
    Planted(
        "-inf in data",
        bad_dict("x", -INF),
        *("", (None,), "forward", "batch['x']"),
        persists=False,
    ),
    Planted(
        "NaN in a dataclass",
        bad_dataclass,
        *("", (None,), "forward", "batch[0].sample.image"),
        persists=False,
    ),
    Planted("GRU", lambda: gru(1e5), "gru", ("aten._to_copy.default",)),
    *[
        Planted(
            f"checkpointed block, forward, reentrant={reentrant}",
            checkpointed(lambda x: (x * 100).exp(), reentrant),
            *("part.block.culprit", ("aten.exp.default",)),
        )
        for reentrant in (False, True)
    ],
    *[
        Planted(
            f"checkpointed block, backward, reentrant={reentrant}",
            checkpointed(lambda x: (x - 1).sqrt(), reentrant),
            *("part.block.culprit", ("aten.sqrt.default",), "backward"),
        )
        for reentrant in (False, True)
    ],
    Planted("tied weights", lambda: Case(Tied(), ones(), mean_loss), "last", ("aten.mm.default",)),
    Planted(
        "shared module, second call",
        lambda: Case(Twice(), ones(), mean_loss),
        *("shared", ("aten.mm.default",)),
    ),
    Planted(
        "nested modules",
        lambda: Case(Model(), ones(), mean_loss),
        *("encoder.layers.1.act", DIV),
    ),
    Planted(
        "in-place operator",
        through(lambda x: x.clone().mul_(100).exp_()),
        *("culprit", ("aten.exp_.default",)),
    ),
    Planted("in-place on a view", through(in_place_on_view), "culprit", ("aten.div_.Tensor",)),
    Planted(
        "pow at zero, backward",
        through(lambda x: (x - 1) ** 0.5),
        *("culprit", ("aten.pow.Tensor_Scalar",), "backward"),
    ),
    Planted(
        "sqrt at zero, backward",
        through(lambda x: (x - 1).sqrt()),
        *("culprit", ("aten.sqrt.default",), "backward"),
    ),
    Planted(
        "hand-written norm at zero, backward",
        through(lambda x: x * (x - 1).square().sum(-1, keepdim=True).sqrt()),
        *("culprit", ("aten.sqrt.default",), "backward"),
    ),
    Planted(
        "hand-written cosine of zero",
        through(lambda x: x * (0 * x).sum(-1, keepdim=True) / (0 * x).norm(dim=-1, keepdim=True)),
        *("culprit", DIV),
    ),
    Planted(
        "cosine similarity of zero",  # in float16 its eps of 1e-8 is zero
        through(lambda x: x * F.cosine_similarity(x * 0, x)[:, None]),
        *("culprit", DIV),
    ),
    Planted(
        "arc cosine at 1, backward",
        through(lambda x: x.float().acos()),
        *("culprit", ("aten.acos.default",), "backward"),
    ),
    Planted(
        "hand-written BatchNorm on a constant",
        through(lambda x: (x - x.mean(0)) / x.std(0)),
        *("culprit", DIV),
    ),
    Planted("nested autocast off", modular(InFloat32), "culprit", ("aten.log.default",)),
    Planted(
        "hidden by where",
        through(masked_exp),
        *("culprit", ("aten.exp.default",), "backward"),
    ),
    Planted(
        "mask that reaches the loss",
        through(lambda x: x.masked_fill(x > 0, -INF)),
        *("culprit", ("aten.masked_fill.Scalar",)),
    ),
    Planted(
        "LightningModule that logs",
        lambda: Case(Logs(lambda x: (x - 1).log()), ones(), None),
        *("", ("aten.log.default",)),
        persists=False,
    ),
    Planted(
        "operator in the loss",
        outside_of_modules,
        *("", ("aten.log.default",)),
        persists=False,
    ),
    Planted(
        "NaN parameter",
        bad_tensor("body.weight", NAN),
        *("body", (None,), "forward", "parameter 'body.weight'"),
        persists=False,
    ),
    Planted(
        "NaN buffer",
        bad_tensor("culprit.running_mean", NAN),
        *("culprit", (None,), "forward", "buffer 'culprit.running_mean'"),
        persists=False,
    ),
)


# ---------------------------------------------------------------- healthy


class Mask(nn.Module):
    """An additive mask of -inf, held as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(1.0)
        self.register_buffer("causal", torch.full((3, 3), -INF).triu(1))

    def forward(self, x):
        y = self.lin(x)
        return (y @ y.transpose(-1, -2) + self.causal).softmax(-1) @ y


class Cache(nn.Module):
    """Memory that is written to before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = linear(1.0)

    def forward(self, x):
        memory = torch.full((3, WIDTH), NAN)
        memory[: len(x)] = self.lin(x)
        room = torch.empty(len(x), WIDTH)
        torch.mul(memory[: len(x)], 2.0, out=room) if not torch.is_grad_enabled() else None
        return memory[: len(x)]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(16, 2),
        )

    def forward(self, x):
        return self.net(x)


class Penalized(L.LightningModule):
    """A gradient penalty: a backward pass within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(linear(1.0), nn.Tanh(), linear(1.0))

    def training_step(self, batch):
        x = batch.requires_grad_()
        loss = self.net(x).float().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.float().square().sum()


def transformer() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return Case(layer, torch.randn(2, 3, WIDTH), lambda m, x: m(x, src_mask=mask).float().mean())


def sdpa(x: Tensor) -> Tensor:
    q = x.reshape(1, 1, 2, WIDTH)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(2, WIDTH)


def classifier() -> Case:
    batch = {"x": torch.randn(4, WIDTH), "y": torch.tensor([0, -100, 1, 2])}
    return Case(chain(nn.GELU()), batch, lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))


def lstm() -> Case:
    """In float32: some processors have no LSTM in float16."""
    net = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True)

    def loss_fn(module, x):
        with torch.autocast("cpu", enabled=False):
            return module(x)[0].mean()

    return Case(net, torch.randn(3, 2, WIDTH), loss_fn)


HEALTHY = {
    "mlp": modular(nn.ReLU),
    "in-place activation": modular(lambda: nn.ReLU(inplace=True)),
    "conv net": lambda: Case(Conv(), torch.randn(2, 1, 4, 4), mean_loss),
    "transformer with a mask": transformer,
    "attention with masked elements": lambda: attention(2),
    "mask buffer": lambda: Case(Mask(), torch.ones(1, 3, WIDTH), mean_loss),
    "causal attention": through(sdpa),
    "logarithm of a mask": through(
        lambda x: (x + torch.tensor([1.0, 0.0, 1.0, 1.0]).log()).softmax(-1)
    ),
    "logsumexp of a mask": through(
        lambda x: (
            x * torch.where(x.new_tensor([1, 0, 1, 1]) > 0, x, -INF).logsumexp(-1, keepdim=True)
        )
    ),
    "memory not yet written": lambda: Case(Cache(), ones(), mean_loss),
    "gru": lambda: gru(1.0),
    "lstm": lstm,
    "sparse embedding": lambda: Case(Words(True, linear(1.0)), torch.tensor([0, 1]), mean_loss),
    "checkpoint": checkpointed(torch.tanh, False),
    "reentrant checkpoint": checkpointed(torch.tanh, True),
    "norm at zero": through(lambda x: x * (x - 1).norm(dim=-1, keepdim=True)),
    "std of a constant": through(lambda x: x * x.std(-1, keepdim=True)),
    "clamp to inf": through(lambda x: x.clamp(-INF, INF)),
    "nan_to_num": through(lambda x: x * torch.nan_to_num(x.detach() / 0, posinf=1.0)),
    "gradient penalty": lambda: Case(Penalized(), ones(), None),
    "classifier": classifier,
    "unused NaN in the batch": bad_dict("x", 1.0),
    "batch norm on a constant": modular(lambda: nn.BatchNorm1d(WIDTH)),
    "complex numbers": through(lambda x: torch.fft.rfft(x.float()).abs().sum(-1, keepdim=True) * x),
}
