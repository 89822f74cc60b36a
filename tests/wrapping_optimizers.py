# SPDX-License-Identifier: Apache-2.0
"""Optimizers that users write or install beside torch's: wrappers, and state in eight bits."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lookahead(Optimizer):
    """Steps another optimizer, and every `every`-th time goes only half of the way (1907.08610)."""

    def __init__(self, base: Optimizer, every: int = 2, share: float = 0.5) -> None:
        self.base, self.every, self.share, self.count = base, every, share, 0
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.param_groups = base.param_groups
        for p in [p for g in self.param_groups for p in g["params"]]:
            self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    slow = self.state[p]["slow"]
                    slow.lerp_(p, self.share)
                    p.copy_(slow)
        return loss

    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[p]["slow"] for g in self.param_groups for p in g["params"]]
        return {"base": self.base.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state["base"])
        self.param_groups, self.count = self.base.param_groups, state["count"]
        for p, slow in zip(self.parameters(), state["slow"], strict=True):
            self.state[p]["slow"].copy_(slow)

    def parameters(self) -> list[torch.Tensor]:
        return [p for g in self.param_groups for p in g["params"]]


class SAM(Optimizer):
    """Sharpness-aware minimization (2010.01412) as it is widely copied: two steps, one closure."""

    def __init__(
        self, params: Any, base: type[Optimizer], rho: float = 0.25, **kwargs: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        """Climb to the worst point nearby."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def go_back(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p].pop("old"))

    def second_step(self, zero_grad: bool = False) -> None:
        """Go back and step with the gradient found there."""
        self.go_back()
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss


class SteppableSAM(SAM):
    """A SAM whose `step` is the second one, so that Lightning and the plugin see it."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.second_step()
        return loss


class EightBitMomentum(Optimizer):
    """SGD whose momentum is kept in int8 beside one scale per parameter, as 8-bit optimizers do."""

    def __init__(self, params: Any, lr: float = 0.125, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                if not state:
                    state["codes"] = torch.zeros_like(p, dtype=torch.int8)
                    state["absmax"] = torch.zeros((), dtype=torch.float32)
                moment = state["codes"].float() * (state["absmax"] / 127)
                moment.mul_(group["momentum"]).add_(p.grad)
                state["absmax"].copy_(moment.abs().amax())
                state["codes"].copy_((moment * (127 / state["absmax"])).round())
                p.sub_(moment, alpha=group["lr"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(
            state_dict
        )  # which makes float32 of every state of a float32 weight
        for state in self.state.values():
            state["codes"] = state["codes"].to(torch.int8)
