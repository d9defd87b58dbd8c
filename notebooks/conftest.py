"""Makes plain ``pytest --nbval notebooks`` compare what can be compared: see tests/nbval_sanitize.cfg."""

from pathlib import Path

SANITIZE = Path(__file__).resolve().parents[1] / "tests" / "nbval_sanitize.cfg"


def pytest_configure(config):
    if getattr(config.option, "nbval", False) and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(SANITIZE)
