"""Annotated nanoqwen: an LLM decode stack for Qwen2-family models that you can own.

The package is the runtime; the book in ``notebooks/`` and ``book/`` explains it. Importing it costs
nothing: numpy, torch and CuPy are loaded by the modules that need them.
"""

__version__ = "0.1.0"
