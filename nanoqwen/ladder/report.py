"""What a run of the ladder found: checks in tiers, as plain data and as lines for people."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import numpy as np

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass(frozen=True)
class Check:
    """One comparison. `value` and `limit` are what was measured and what was allowed; `detail` says where or how."""

    name: str
    passed: bool
    value: float
    limit: float
    unit: str = "relative error"
    detail: str = ""


@dataclass
class Tier:
    """`file`, or one of the ladder's three tiers. A tier whose predecessor failed is not run."""

    name: str
    subject: str = ""  # what is under test
    oracle: str = ""  # what it is compared with
    checks: list[Check] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # damaged sections, mismatched tokens
    facts: dict = field(default_factory=dict)  # counts that a receipt quotes
    seconds: float = 0.0
    ran: bool = False

    @property
    def status(self) -> str:
        if not self.ran:
            return NOT_RUN
        return PASSED if all(check.passed for check in self.checks) else FAILED


@dataclass
class Report:
    path: str
    tiers: list[Tier]

    @property
    def passed(self) -> bool:
        return all(tier.status == PASSED for tier in self.tiers)

    def as_dict(self) -> dict:
        """Plain data for JSON, which has no word for infinity: a value that is not finite becomes None."""
        tiers = [{**asdict(tier), "status": tier.status} for tier in self.tiers]
        for check in (check for tier in tiers for check in tier["checks"]):
            if not math.isfinite(check["value"]):
                check["value"] = None
        return {"path": self.path, "passed": self.passed, "tiers": tiers}


# [relative_error]
def relative_error(out: np.ndarray, expected: np.ndarray) -> float:
    """||out - expected|| / ||expected|| in float64, infinite when shapes differ or `out` holds a NaN or infinity.

    Positions of NaN come first: a NaN compares false with every bound, so a test of "error > limit" would let it pass.
    """
    if out.shape != expected.shape or not np.isfinite(out).all():
        return float("inf")
    difference = np.linalg.norm((out.astype(np.float64) - expected).ravel())
    size = np.linalg.norm(expected.ravel())
    return float(difference / size) if size else float(difference)
# [/relative_error]


def worst_element(out: np.ndarray, expected: np.ndarray) -> str:
    """`[3, 17]: 0.25, expected 0.5` of the element that is furthest off, or of the first that is not finite."""
    if out.shape != expected.shape:
        return f"shape {list(out.shape)}, expected {list(expected.shape)}"
    bad = ~np.isfinite(out)
    at = np.unravel_index(np.argmax(bad if bad.any() else np.abs(out.astype(np.float64) - expected)), out.shape)
    return f"worst at [{', '.join(str(int(i)) for i in at)}]: {out[at]:.7g}, expected {expected[at]:.7g}"


def compare(name: str, out: np.ndarray, expected: np.ndarray, limit: float, detail: str = "") -> Check:
    """A Check of `out` against `expected`; a failed one names the worst element."""
    error = relative_error(out, expected)
    passed = error <= limit
    return Check(name, passed, error, limit, detail="; ".join(filter(None, (detail, "" if passed else worst_element(out, expected)))))


def within(name: str, out: np.ndarray, expected: np.ndarray, bound: np.ndarray, detail: str = "") -> Check:
    """A Check of every element: |out - expected| is at most its `bound`. The value is the largest share of a bound that was used.

    For results that were rounded once, where the bound of an element is known. NaN and infinity come first, as in `relative_error`.
    """
    if out.shape != expected.shape or not np.isfinite(out).all():
        return Check(name, False, math.inf, 1.0, "of the bound", "; ".join(filter(None, (detail, worst_element(out, expected)))))
    off = np.abs(out.astype(np.float64) - expected)
    used = np.divide(off, bound, out=np.where(off > 0, np.inf, 0.0), where=np.broadcast_to(bound, off.shape) > 0)
    worst = float(used.max(initial=0.0))
    if worst > 1:
        at = np.unravel_index(np.argmax(used), out.shape)
        place = f"worst at [{', '.join(str(int(i)) for i in at)}]: {out[at]:.7g}, expected {expected[at]:.7g}"
        detail = "; ".join(filter(None, (detail, place)))
    return Check(name, worst <= 1, worst, 1.0, "of the bound", detail)


def none_wrong(name: str, wrong: int, unit: str, detail: str = "") -> Check:
    """A Check of something that must not happen at all."""
    return Check(name, wrong == 0, wrong, 0, unit, detail)
