"""What notebooks import: shipped source, receipts, figures and tables that look the same everywhere.

A chapter starts with ``from nanoqwen import book`` and uses:

``book.token_path(lit="kv")``
    The drawing that opens every chapter: a token's way through the runtime, the part under study lit. ``lit`` is one part or a
    list of parts of ``book.PARTS``, or one of the groups in ``book.GROUPS`` ("int4", "layer", "all", ...). Unknown: ValueError.
    Tag its cell ``remove-input``, so that the page opens with the drawing and not with the call.
``book.show("nanoqwen/int4.py", "pack")``
    Source as it ships, between the paired markers ``# [pack]`` and ``# [/pack]`` (``// [pack]`` in CUDA and JavaScript), dedented,
    without the marker lines, under a caption with file and line numbers. Without a region: the whole file. A missing, unpaired or
    doubled marker raises MissingRegion, so a chapter cannot print code that is gone.
``book.receipt("name")``
    ``book/receipts/name.json``, a measurement with its device, date and command. ``.results``, ``.samples``, ``.device`` read it;
    ``.caption()`` is the line that must stand under a figure or table made from it. No such file: MissingReceipt, never a default.
``book.table(rows, head=[...], caption=None, receipt=None)``
    A table. Numbers are right-aligned; format them yourself, so that a page shows the digits you mean.
``book.figure(fig, title=..., alt=..., caption=None, receipt=None)``
    A matplotlib figure as inline SVG that follows the page's theme and scales to a phone. ``alt`` says in words what the
    figure shows. Call ``book.use_style()`` once before plotting and take colours from ``book.MEMORY`` ("hbm", "l2", "shared",
    "registers") and ``book.ENGINE`` ("cpu", "eager", "graph", "persistent"); engines also have ``book.MARKER`` and ``book.HATCH``,
    because colour alone must never carry the meaning. ``book.INK``, ``book.RULE`` and ``book.ACCENT`` follow the theme as well.
``book.svg(markup, title=..., alt=..., caption=None)``
    The same frame around a drawing made by hand. Use ``currentColor`` and ``var(--nq-hbm, #0072b2)`` in it.
``book.widget("nibble-map")``, ``book.widget("token-bytes")``
    Interactive in the built book (plain JavaScript, no kernel, no network); a still figure in a notebook.

All of these return an object; let it be the last expression of a cell, or pass it to ``display``. Printing it gives plain text.

Boxes in Markdown cells, with colons so that Jupyter shows their text too::

    :::{admonition} Before you measure
    :class: predict
    How many bytes ...?
    :::

``predict`` asks for a guess before a measurement, ``takeaway`` keeps what the reader should remember, ``lost`` tells what was tried
and did not pay. ``:::{admonition} Answer`` with ``:class: answer dropdown`` folds an exercise's answer. Side facts go into
``:::{margin}``. Write formulas as code or plain text: dollar signs are dollar signs in this book.

Stored outputs must be equal on every machine (``pytest --nbval`` compares them): nothing here prints times, paths or addresses. A
drawing by matplotlib differs between its versions, so notebooks/conftest.py hides the ``<svg class="nq-plot">`` from the
comparison; everything around it, caption and title included, is compared.
"""

from __future__ import annotations

from nanoqwen.book.display import figure, svg, table
from nanoqwen.book.palette import ACCENT, ENGINE, HATCH, INK, MARKER, MEMORY, RULE
from nanoqwen.book.receipts import MissingReceipt, Receipt, receipt
from nanoqwen.book.source import MissingRegion, show
from nanoqwen.book.style import use_style
from nanoqwen.book.tokenpath import GROUPS, PARTS, token_path
from nanoqwen.book.widgets import widget

__all__ = [
    "ACCENT", "ENGINE", "GROUPS", "HATCH", "INK", "MARKER", "MEMORY", "MissingReceipt", "MissingRegion", "PARTS", "RULE", "Receipt",
    "figure", "receipt", "show", "svg", "table", "token_path", "use_style", "widget",
]  # fmt: skip
