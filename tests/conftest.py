# SPDX-License-Identifier: Apache-2.0
"""What every test gets: one thread, one seed, and the two rules about which tests run."""

import random

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, help="run at most this many of the selected tests")
    parser.addoption("--sample-seed", type=int, default=0, help="which ones --sample draws")


@pytest.hookimpl(trylast=True)  # after -m and -k have made their choice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    size = config.getoption("--sample")
    if size is not None and size < len(items):
        kept = set(random.Random(config.getoption("--sample-seed")).sample(items, size))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def seed() -> int:
    """Start every test from the same random state; the value is for those that need another."""
    random.seed(0)
    torch.manual_seed(0)
    return 0
