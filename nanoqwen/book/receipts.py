"""Receipts as pages see them: results to read, and the line that must stand under whatever is made from them.

``nanoqwen.bench.receipts`` writes and checks the files. Pages never type a measured number; they read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from nanoqwen.bench.receipts import read_receipt, receipt_names, receipts_folder
from nanoqwen.errors import InputError


class MissingReceipt(InputError):
    """There is no such receipt, or it lacks what a receipt must have. A page has no fallback for a missing measurement."""


@dataclass(frozen=True)
class Receipt:
    """One measurement. ``raw`` is the file as read; the properties are its parts that pages use."""

    raw: dict[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        return self.raw["name"]

    @property
    def device(self) -> str:
        """Name of the device, as the driver gives it."""
        return self.raw["device"]["name"]

    @property
    def date(self) -> str:
        """ISO date, YYYY-MM-DD."""
        return self.raw["date"][:10]

    @property
    def command(self) -> str:
        return self.raw["command"]

    @property
    def protocol(self) -> dict[str, Any]:
        return self.raw["protocol"]

    @property
    def results(self) -> dict[str, Any]:
        return self.raw["results"]

    @property
    def samples(self) -> list[Any]:
        return self.raw["samples"]

    def caption(self) -> str:
        """Device, date, and command between backticks: what stands under a figure or table made from this receipt."""
        return f"{self.device}, {self.date}, `{self.command}`"

    def __str__(self) -> str:
        return f"<receipt {self.name}: {self.caption()}>"


def receipt(name: str) -> Receipt:
    """``book/receipts/<name>.json``. Raises MissingReceipt when it does not exist, is incomplete, or bears another name."""
    if name not in available():
        raise MissingReceipt(f"book/receipts/{name}.json does not exist (there are: {', '.join(available()) or 'none yet'})")
    try:
        raw = read_receipt(receipts_folder() / f"{name}.json")
    except InputError as error:
        raise MissingReceipt(str(error)) from None
    if raw["name"] != name:
        raise MissingReceipt(f"book/receipts/{name}.json calls itself {raw['name']!r}")
    return Receipt(raw)


def available() -> list[str]:
    """Names of all receipts, sorted."""
    return receipt_names(receipts_folder())
