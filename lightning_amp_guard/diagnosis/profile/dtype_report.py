# SPDX-License-Identifier: Apache-2.0
"""What `profile_dtypes` returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["DtypeReport", "DtypeRow", "MissedMatmul", "PlainFunction", "RulelessOp"]

_ROWS_SHOWN = 12
_MANY_CASTS = 0.25


@dataclass(frozen=True)
class DtypeRow:
    """One operator in one dtype.

    Args:
        op: The operator, as `aten::mm`.
        dtype: What it computes in; `float32->float16` for a cast.
        calls: How often it ran, forward and backward.
        seconds: Time in it, with all that it calls.
        share: Of the time in all operators, 0 to 1.
    """

    op: str
    dtype: str
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class PlacedOp:
    """An operator as one line of the user's calls it.

    Args:
        op: The operator with its overload, as `aten::mm.out`.
        dtype: What it computed in.
        calls: How often that line called it.
        share: Of the time in all operators, 0 to 1.
        source: The user's line, `file.py:12`.
        module: The innermost module's name; `None` outside of any.
    """

    op: str
    dtype: str
    calls: int
    share: float
    source: str
    module: str | None

    def told(self, remark: str) -> str:
        """Return a sentence that says where it ran in what, and ends in `remark`."""
        where = f"{self.source} in {self.module!r}" if self.module else self.source
        return f"{where}: `{self.op}` ran in {self.dtype}; {remark}."


@dataclass(frozen=True)
class MissedMatmul(PlacedOp):
    """A matrix product that ran in float32 or wider although autocast was asked for.

    Args:
        reason: Why autocast left it alone, and what to write; the others are `PlacedOp`'s.
    """

    reason: str

    def __str__(self) -> str:
        return self.told(self.reason)


@dataclass(frozen=True)
class RulelessOp(PlacedOp):
    """An operator that got low precision without a rule of autocast's: it runs in what it gets.

    Args:
        note: Why that matters; empty where low precision does no harm (`relu`, `add`). The others
            are `PlacedOp`'s.
    """

    note: str

    def __str__(self) -> str:
        return self.told(self.note or "harmless")


@dataclass(frozen=True)
class PlainFunction:
    """An `autograd.Function` whose forward is not decorated with `torch.amp.custom_fwd`.

    Args:
        name: The class's qualified name.
        source: Where its forward is written, `file.py:12`.
    """

    name: str
    source: str

    def __str__(self) -> str:
        return (
            f"{self.source}: `{self.name}.forward` runs in whatever dtypes it gets, and its backward"
            " outside of autocast; decorate them with `torch.amp.custom_fwd` and `custom_bwd`."
        )


@dataclass(frozen=True)
class DtypeReport:
    """Says in which dtype every operator of one step ran, and what autocast did not reach.

    Args:
        precision: The precision profiled.
        device: The device type.
        seconds: Time in all operators of the step, forward and backward: kernel time on an
            accelerator, otherwise time on the CPU.
        cast_share: Share of it spent converting between floating dtypes, 0 to 1.
        rows: Operators by dtype, the largest share first.
        missed_matmuls: Matrix products in float32 that autocast missed.
        without_rule: Operators that got low precision without a rule.
        functions: `autograd.Function` classes without `custom_fwd`.
    """

    precision: str
    device: str
    seconds: float
    cast_share: float
    rows: tuple[DtypeRow, ...]
    missed_matmuls: tuple[MissedMatmul, ...] = ()
    without_rule: tuple[RulelessOp, ...] = ()
    functions: tuple[PlainFunction, ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """What deserves a change, a sentence each; empty for a step that autocast fits."""
        found = [str(missed) for missed in self.missed_matmuls]
        found += [str(function) for function in self.functions]
        found += [str(op) for op in self.without_rule if op.note]
        if self.cast_share > _MANY_CASTS:
            found.append(
                f"{100 * self.cast_share:.0f} % of the time in operators goes into casts; make the"
                " matrices larger (batch, width), or run small modules in float32 altogether:"
                ' `SafeAMP(fp32_modules=["name"])`.'
            )
        return tuple(found)

    @property
    def low_precision_share(self) -> float:
        """Share of the time that operators spend in float16 or bfloat16, casts left out."""
        return sum(row.share for row in self.rows if row.dtype in ("float16", "bfloat16"))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values on one flat level.

        Rows are `OP/DTYPE/calls`, `.../seconds`, `.../share`; the other parts are numbered, as
        `missed_matmuls/0/source` and `findings/0`, and the part's own name holds how many there are.
        """
        flat: dict[str, Any] = {
            "precision": self.precision,
            "device": self.device,
            "seconds": self.seconds,
            "cast_share": self.cast_share,
            "low_precision_share": self.low_precision_share,
        }
        for row in self.rows:
            key = f"{row.op}/{row.dtype}"
            flat |= {f"{key}/calls": row.calls, f"{key}/seconds": row.seconds}
            flat[f"{key}/share"] = row.share
        flat |= _numbered("missed_matmuls", [asdict(missed) for missed in self.missed_matmuls])
        flat |= _numbered("without_rule", [asdict(op) for op in self.without_rule])
        flat |= _numbered("functions", [asdict(function) for function in self.functions])
        findings = {f"findings/{i}": finding for i, finding in enumerate(self.findings)}
        return {**flat, "findings": len(findings), **findings}

    def __str__(self) -> str:
        head = (
            f"{self.precision} on {self.device}: {1000 * self.seconds:.2f} ms in operators,"
            f" {100 * self.low_precision_share:.0f} % in low precision,"
            f" {100 * self.cast_share:.0f} % in casts"
        )
        lines = [head, f"{'operator':<40} {'dtype':<18} {'calls':>6} {'time':>6}"]
        lines += [
            f"{row.op:<40} {row.dtype:<18} {row.calls:>6} {100 * row.share:>4.0f} %"
            for row in self.rows[:_ROWS_SHOWN]
        ]
        if len(self.rows) > _ROWS_SHOWN:
            lines.append(f"... and {len(self.rows) - _ROWS_SHOWN} more")
        return "\n".join([*lines, *[f"- {finding}" for finding in self.findings]])


def _numbered(part: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    flat: dict[str, Any] = {part: len(found)}
    for i, values in enumerate(found):
        flat |= {f"{part}/{i}/{key}": value for key, value in values.items()}
    return flat
