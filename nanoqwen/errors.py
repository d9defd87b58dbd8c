"""What can go wrong for a user, each as one plain line.

``str(error)`` is a single sentence that names the thing at fault (file, tensor, id), the number found
and the number needed, and what to do next. The command line prints it behind ``nanoqwen: error:`` and
exits with status 2; a traceback appears only with ``--debug``. Anything else that escapes is a bug.
"""

from __future__ import annotations


class NanoqwenError(Exception):
    """Base of every error that is the input's or the machine's fault rather than the code's."""


class InputError(NanoqwenError):
    """A file, a checkpoint or an argument that cannot be used as it is."""


class ContextError(InputError):
    """More tokens than the model's context holds; the engine is unchanged and stays usable."""


class NonFiniteError(NanoqwenError):
    """NaN or infinity in the hidden state or the logits.

    ``layer`` is the index of the first decoder block whose output is not finite, -1 for the embedding,
    or None when only the logits are known.
    """

    def __init__(self, message: str, layer: int | None = None) -> None:
        super().__init__(message)
        self.layer = layer


class DeviceError(NanoqwenError):
    """The device or engine that was asked for is not usable here."""
