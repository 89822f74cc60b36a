# SPDX-License-Identifier: Apache-2.0
"""What is kept away from a measurement: garbage collection, Lightning's lines and warnings."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen", "no_collection", "quiet"]


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep one arm's garbage from being collected while another is measured."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """Make collecting what is left by an arm cheap: what is there by now is not looked at again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's information lines and warnings, which are not what is measured here."""
    names = ("lightning.pytorch", "lightning_utilities.core.rank_zero", "lightning.fabric")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
