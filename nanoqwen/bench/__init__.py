"""Measurements, one protocol a module, run as ``python -m nanoqwen.bench.<name>``. The only writer of receipts."""
