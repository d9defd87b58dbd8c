"""What a Hopper engine says about its prefill from inside.

Like ``card``, this looks behind the Engine contract on purpose.
"""

from __future__ import annotations

from nanoqwen.engines.base import Engine


def workspace_bytes(engine: Engine) -> int | None:
    """Bytes of the buffers that a chunk of a prompt passes through, or None for an engine without a card's prefill."""
    prefiller = getattr(engine, "_prefiller", None)
    return None if prefiller is None else prefiller.nbytes
