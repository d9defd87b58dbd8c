"""Experiments of the book with kernels that are wrong or slow on purpose (``kernels/lessons/``). The runtime imports nothing from here."""
