"""A Hugging Face checkpoint, checked: a folder or a hub name in, named float32 tensors out.

    open_checkpoint("Qwen/Qwen2.5-Coder-7B-Instruct", notes=notes)  ->  Checkpoint

Everything is checked before any weight is read: that all files are there and whole, that ``config.json`` describes a model
we can run exactly, that every tensor has the right name, type and shape, that tokenizer and weights belong together. The
first thing wrong is one clear line (``InputError``); whatever was ignored, dropped or assumed is a line in ``notes``.

    locate           what the user typed -> folder and weight files          hub              download by name
    safetensors_io   the container format, checked against file sizes        names            stored names -> needed names
    hf_config        config.json -> Dims                                     tokenizer_files  tokenizer, template, end ids

numpy only: packing needs neither torch nor a GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nanoqwen.checkpoint.hf_config import ModelConfig, parse_config
from nanoqwen.checkpoint.jsonfile import read_object
from nanoqwen.checkpoint.locate import CONFIG, Location, locate, stored_tensors
from nanoqwen.checkpoint.names import match
from nanoqwen.checkpoint.safetensors_io import ShardReader, StoredTensor, read_tensor_rows, to_float32
from nanoqwen.checkpoint.tokenizer_files import TextFiles, read_text_files
from nanoqwen.config import Dims
from nanoqwen.errors import InputError
from nanoqwen.model import EMBED, LM_HEAD, TensorSpec, schema

#: Rows are read in blocks of about this many values, wherever a whole tensor is not asked for.
BLOCK_VALUES = 1 << 19


class Checkpoint:
    """An open, checked checkpoint. Made by ``open_checkpoint``; a context manager; safe to read from several threads.

    Attributes: ``folder``; ``hub_name`` and ``revision`` (None for a local folder); ``dims``; ``config`` and ``generation``,
    the parsed JSON files; ``architecture``; ``torch_dtype`` as declared; ``defaults`` taken for absent keys; ``text``, the
    tokenizer side (``TextFiles``); ``specs``, the tensors in file order; ``notes``.
    """

    def __init__(
        self, location: Location, config: dict, model: ModelConfig, text: TextFiles, tensors: dict[str, StoredTensor], notes: list[str]
    ) -> None:
        self.folder, self.hub_name, self.revision = location.folder, location.hub_name, location.revision
        self.config, self.generation = config, text.generation
        self.dims: Dims = model.dims
        self.architecture, self.torch_dtype, self.defaults = model.architecture, model.torch_dtype, model.defaults
        self.text = text
        self.specs: list[TensorSpec] = schema(model.dims)
        self.notes = notes
        self._tensors = tensors
        self._readers = {path: ShardReader(path) for path in {t.file for t in tensors.values()}}

    @property
    def tokenizer_bytes(self) -> bytes:
        """``tokenizer.json``, byte for byte."""
        return self.text.tokenizer_bytes

    @property
    def chat_template(self) -> str | None:
        """The chat template's text, or None."""
        return self.text.chat_template

    @property
    def stop_ids(self) -> list[dict]:
        """Ids that end a reply: [{"id", "text", "from"}]."""
        return self.text.stop_ids

    @property
    def weight_files(self) -> list[Path]:
        """The files that weights are read from."""
        return sorted(self._readers)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors that the model needs, as stored."""
        return sum(t.nbytes for t in self._tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor: [n], or [out, in]."""
        return self._tensor(name).shape

    def source_dtype(self, name: str) -> str:
        """How a tensor is stored: "BF16", "F16" or "F32"."""
        return self._tensor(name).dtype

    def read(self, name: str) -> np.ndarray:
        """A whole tensor as float32, in its shape."""
        tensor = self._tensor(name)
        return self.read_rows(name, 0, tensor.shape[0]).reshape(tensor.shape)

    # [read_rows]
    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Rows ``first`` to ``last`` (exclusive) as float32 [rows, in], or values [last - first] of a vector.

        Memory is proportional to the rows asked for. Raises InputError for an unknown name or when the file shrank.
        """
        return to_float32(self.read_stored(name, first, last), self.source_dtype(name))

    def read_stored(self, name: str, first: int, last: int) -> np.ndarray:
        """The same rows as stored: uint16 bit patterns of BF16, float16 or float32. Raises like ``read_rows``."""
        tensor = self._tensor(name)
        if not 0 <= first <= last <= tensor.shape[0]:
            raise InputError(f"{name}: rows {first} to {last} asked for, it has {tensor.shape[0]}")
        return read_tensor_rows(self._readers[tensor.file], tensor, first, last)
    # [/read_rows]

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise InputError(f"{self.folder}: no tensor {name}; the model has {len(self._tensors)}")
        return self._tensors[name]

    def close(self) -> None:
        """Close the weight files."""
        for reader in self._readers.values():
            reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# [open_checkpoint]
def open_checkpoint(source: str | Path, *, notes: list[str] | None = None) -> Checkpoint:
    """Open the checkpoint at ``source`` (see ``locate``) and check all of it except the values of the weights.

    ``notes`` collects what a user must be told. Raises InputError, one line, for the first thing wrong; the cheap and
    telling checks (which model is this?) come before the long ones.
    """
    notes = [] if notes is None else notes
    location = locate(source)
    path = location.folder / CONFIG
    config = read_object(path)
    model = parse_config(config, path, notes)
    stored = stored_tensors(location.folder, notes)
    if model.dims.num_layers > len(stored):  # an absurd number would make an absurd list of names
        raise InputError(f"{path}: num_hidden_layers is {model.dims.num_layers}, but only {len(stored)} tensors are stored; the checkpoint is incomplete")
    tie_key_absent = "tie_word_embeddings" in model.defaults
    tensors, spare_head = match(stored, schema(model.dims), str(location.folder), tie_key_absent, notes)
    text = read_text_files(location.folder, config, model.dims.vocab, notes)
    checkpoint = Checkpoint(location, config, model, text, tensors, notes)
    if spare_head is not None:
        _drop_equal_head(checkpoint, spare_head)
    return checkpoint
# [/open_checkpoint]


def _drop_equal_head(checkpoint: Checkpoint, head: StoredTensor) -> None:
    """A tied model may store its head once more. An exact copy is dropped and told; anything else is a contradiction."""
    embed, rows = checkpoint._tensor(EMBED), max(1, BLOCK_VALUES // checkpoint.dims.hidden)
    same, reader = head.shape == embed.shape, ShardReader(head.file)
    for first in range(0, embed.shape[0] if same else 0, rows):
        last = min(first + rows, embed.shape[0])
        ours = checkpoint.read_rows(EMBED, first, last)
        theirs = to_float32(read_tensor_rows(reader, head, first, last), head.dtype)
        same = same and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))  # bits: a NaN equals itself here
    reader.close()
    if not same:
        checkpoint.close()
        raise InputError(
            f"{checkpoint.folder}: config.json ties the output head to the embeddings, but the stored {LM_HEAD} differs from "
            f'{EMBED}; set "tie_word_embeddings" to false if the stored head is the right one'
        )
    checkpoint.notes.append(f"dropped the stored {LM_HEAD}: the head is tied, and it is an exact copy of {EMBED}")
