"""Makes plain ``pytest --nbval notebooks`` compare what can be compared: see tests/nbval_sanitize.cfg.

Cells tagged ``gpu`` hold what a Hopper card said. Without one they are skipped; with one they run, and their outputs, which are
measurements, are not compared (that they rest on today's sources is a test of its own: tests/book/test_notebook_receipts.py).
"""

from pathlib import Path

from nanoqwen.book.stamp import hopper_card, needs_card

SANITIZE = Path(__file__).resolve().parents[1] / "tests" / "nbval_sanitize.cfg"


def pytest_configure(config):
    if getattr(config.option, "nbval", False) and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(SANITIZE)


def pytest_collection_modifyitems(items):
    here = hopper_card()
    for item in items:
        if needs_card(getattr(item, "cell", {"cell_type": ""})):
            item.options["skip"], item.options["check"] = not here, False
