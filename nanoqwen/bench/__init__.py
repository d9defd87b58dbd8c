"""Measurements: those of `nanoqwen bench` (``suite``), and others run as ``python -m nanoqwen.bench.<name>``. The only writer of receipts."""
