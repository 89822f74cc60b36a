# SPDX-License-Identifier: Apache-2.0
"""Writes a ledger so that a killed run loses one line at most, and no other run's file is lost."""

from __future__ import annotations

import errno
import io
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from glob import escape
from itertools import count, islice
from pathlib import Path

from lightning_amp_guard.errors import AmpGuardWarning
from lightning_amp_guard.monitor.ledger.facts import facts_path
from lightning_amp_guard.monitor.ledger.line import encode
from lightning_amp_guard.monitor.records import Row

__all__ = ["LedgerWriter"]

_CHUNK = 1 << 20


class LedgerWriter:
    """Appends attempts to a new ledger file, each in one write that reaches the operating system.

    So a run that is killed loses the line that it was writing, and no other. A former file at the
    path is renamed to `amp_ledger.1.jsonl` (or the next number that is free), and its file of facts
    with it; nothing is ever cut or overwritten. Where a write fails (disk full), one warning says
    that the ledger ends there, and the run goes on. Host sync: none.

    Args:
        path: The file to make; folders on the way to it are made as well.

    Raises:
        OSError: The file cannot be made, or something other than a file is there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = LedgerWriter(Path(folder) / "amp_ledger.jsonl")
        ...     wrote = writer.write(Row(0, 0, 0, 0, True, None, 8.0, 8.0))
        ...     writer.close()
        >>> wrote, writer.lines
        (True, 1)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lines = 0
        self.ended = False
        self._crc = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._aside = _set_aside(self.path)
            # "x": a file that another process makes in this moment is not overwritten
            self._file: io.FileIO = self.path.open("xb", buffering=0)
        except OSError as error:
            raise _named(error, self.path) from error

    @property
    def digest(self) -> str:
        """Checksum of all lines so far (CRC-32, 8 hexadecimal digits); see `resume`."""
        return f"{self._crc:08x}"

    @classmethod
    def resume(
        cls, path: str | Path, former: str | Path, lines: int, digest: str
    ) -> tuple[LedgerWriter, str]:
        """Return a writer whose file begins with the former run's lines up to its checkpoint.

        The former ledger may have been renamed since, as `amp_ledger.1.jsonl` or the like, or be the
        file at `path` itself: it is known by its lines, not by its name, and stays as it is.

        Args:
            path: The file to make, as in the constructor.
            former: The former ledger's path when the checkpoint was written.
            lines: `lines` of the former writer then.
            digest: `digest` of the former writer then.

        Returns:
            The writer, and what is missing if the lines were not found; else an empty string.

        Raises:
            OSError: As in the constructor.
        """
        path, former = Path(path), Path(former)
        places = [place for place in _candidates(path, former) if place.is_file()] if lines else []
        source = _find(places, lines, digest)
        own = source is not None and path.exists() and source[0].samefile(path)
        writer = cls(path)
        if source is not None:
            writer._copy(writer._aside if own and writer._aside else source[0], source[1])
            writer.lines = lines
        elif lines:
            return writer, _missing(path, former, f"{lines} lines (CRC-32 {digest})", places)
        return writer, ""

    def _copy(self, source: Path, size: int) -> None:
        try:
            with source.open("rb") as file:
                while size and (chunk := file.read(min(size, _CHUNK))):
                    self._put(chunk)
                    size -= len(chunk)
        except OSError as error:
            self.close()
            raise _named(error, self.path) from error

    def _put(self, data: bytes) -> None:
        left = memoryview(data)
        while left:  # a write may take a part only
            left = left[self._file.write(left) :]
        self._crc = zlib.crc32(data, self._crc)

    def write(self, row: Row) -> bool:
        """Append one attempt, and return whether the ledger holds it.

        Args:
            row: The attempt.
        """
        if self.ended:
            return False
        try:
            self._put(encode(row).encode("ascii") + b"\n")
        except OSError as error:
            self.ended = True
            warnings.warn(
                f"The ledger {str(self.path)!r} ends at line {self.lines}: {error.strerror}. The run"
                " goes on without it. Make room there, or write it elsewhere:"
                " `AmpMonitor(ledger=PATH)`.",
                AmpGuardWarning,
                stacklevel=2,
            )
            return False
        self.lines += 1
        return True

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def _set_aside(path: Path) -> Path | None:
    """Rename the file at `path` and its facts to the next free number, and return the new path."""
    if not os.path.lexists(path):
        return None
    if not path.is_file() and not path.is_symlink():
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, "not a regular file", str(path))
    for number in count(1):
        target = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if os.path.lexists(target) or os.path.lexists(facts_path(target)):
            continue
        try:
            target.touch(exist_ok=False)  # takes the name, so that no other process takes it too
        except FileExistsError:
            continue
        break
    path.replace(target)
    if os.path.lexists(facts_path(path)):
        facts_path(path).rename(facts_path(target))
    return target


def _named(error: OSError, path: Path) -> OSError:
    other = str(path / "amp_ledger.jsonl") if path.is_dir() else "run.jsonl"
    why = f"{error.strerror or error}: the ledger cannot be written there. Expected a file that can"
    line = f"be made. Choose another, such as `AmpMonitor(ledger={other!r})`"
    return OSError(error.errno, f"{why} {line}", str(path))


def _find(places: Iterable[Path], lines: int, digest: str) -> tuple[Path, int] | None:
    """Return the file whose first `lines` lines have the digest, and how many bytes these are."""
    for place in places:
        size, found = _measure(place, lines)
        if found == digest:
            return place, size
    return None


def _candidates(path: Path, former: Path) -> Iterator[Path]:
    for place in dict.fromkeys((former, path)):
        yield place
        yield from sorted(place.parent.glob(f"{escape(place.stem)}.*{escape(place.suffix)}"))


def _measure(place: Path, lines: int) -> tuple[int, str]:
    """Return size and checksum of the first `lines` lines; no checksum if there are fewer."""
    size = crc = seen = 0
    try:
        with place.open("rb") as file:
            for line in islice(file, lines):
                size, crc, seen = size + len(line), zlib.crc32(line, crc), seen + 1
    except OSError:  # one that cannot be read is not the one
        return 0, ""
    return size, f"{crc:08x}" if seen == lines else ""


def _missing(path: Path, former: Path, lines: str, places: Sequence[Path]) -> str:
    looked = ", ".join(repr(str(place)) for place in places) or "no file, since there is none"
    return (
        f"The ledger {str(path)!r} begins at the resumed attempt: the {lines} that the run had"
        f" written to {str(former)!r} up to the checkpoint were not found; looked at {looked}."
        " Put that file back and resume again if you need them."
    )
