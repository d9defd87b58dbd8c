"""Stored tensors -> the tensors that a Qwen2 decoder needs: names, types, shapes, in one pass and one message.

Only what is known is stripped or ignored, and each such thing is told. Everything else that does not fit is refused before
any weight is read.
"""

from __future__ import annotations

from nanoqwen.checkpoint.safetensors_io import READABLE, StoredTensor
from nanoqwen.errors import InputError
from nanoqwen.model import EMBED, LM_HEAD, TensorSpec

#: Prefixes that wrappers put before every name when they save: vision-language models, DataParallel, torch.compile.
KNOWN_PREFIXES = ("language_model.", "module.", "_orig_mod.")

#: A buffer that old versions of transformers stored; it follows from the rotary base.
IGNORABLE = ".rotary_emb.inv_freq"

#: Name endings of packed integer weights, and the fragment of an adapter's name: worth a better word than "unexpected".
PACKED_ENDINGS = (".qweight", ".qzeros", ".g_idx", ".scales", ".weight_packed", ".weight_scale", ".quant_state", ".absmax")
ADAPTER_FRAGMENT = "lora_"

SHOWN = 5


def match(
    stored: dict[str, StoredTensor], specs: list[TensorSpec], where: str, tie_key_absent: bool, notes: list[str]
) -> tuple[dict[str, StoredTensor], StoredTensor | None]:
    """Find every tensor of ``specs`` among ``stored``; ``where`` names the checkpoint in messages.

    Returns (tensors by the name in ``specs``, a stored ``lm_head.weight`` that a tied model does not need or None). Raises
    InputError, one line, for missing and unexpected names together, for types that cannot be read, and for wrong shapes.
    """
    stored = _strip_prefix(stored, specs, where, notes)
    wanted = {spec.name for spec in specs}
    ignored = sorted(name for name in stored if name not in wanted and name.endswith(IGNORABLE))
    if ignored:
        notes.append(f"ignored {_some(ignored)}: the rotary frequencies follow from rope_theta")
    spare_head = stored.get(LM_HEAD) if LM_HEAD not in wanted else None
    missing = [spec.name for spec in specs if spec.name not in stored]
    extra = sorted(set(stored) - wanted - set(ignored) - ({LM_HEAD} if spare_head else set()))
    if missing or extra:
        raise InputError(f"{where}: {_names_problem(missing, extra, len(specs), tie_key_absent)}")
    _check_types(stored, specs, where)
    _check_shapes(stored, specs, where)
    if spare_head and spare_head.dtype not in READABLE:
        raise InputError(f"{where}: {LM_HEAD} is stored as {spare_head.dtype}; nanoqwen reads {', '.join(READABLE)}")
    return {spec.name: stored[spec.name] for spec in specs}, spare_head


def _strip_prefix(stored: dict[str, StoredTensor], specs: list[TensorSpec], where: str, notes: list[str]) -> dict[str, StoredTensor]:
    """Drop one known prefix when no name fits without it and all names fit behind it."""
    names = [spec.name for spec in specs]
    if not stored or any(name in stored for name in names):
        return stored
    fitting = [p for p in KNOWN_PREFIXES if all(p + name in stored for name in names)]
    if len(fitting) == 1:
        prefix = fitting[0]
        notes.append(f"dropped the prefix {prefix} from every tensor name")
        return {name[len(prefix) :] if name.startswith(prefix) else name: tensor for name, tensor in stored.items()}
    raise InputError(
        f"{where}: no tensor name fits (0 of {len(names)}): expected names like {names[0]}, found names like {min(stored)}; "
        "save the model again without its wrapper"
    )


def _names_problem(missing: list[str], extra: list[str], total: int, tie_key_absent: bool) -> str:
    """One sentence on missing and unexpected names, with the likeliest reason."""
    if any(ADAPTER_FRAGMENT in name for name in extra):
        adapters = [name for name in extra if ADAPTER_FRAGMENT in name]
        return f"{_some(adapters)}: this looks like an unmerged adapter (LoRA); merge it into the model and save that"
    if any(name.endswith(PACKED_ENDINGS) for name in extra):
        packed = [name for name in extra if name.endswith(PACKED_ENDINGS)]
        return f"{_some(packed)}: these weights are already quantised; take the original BF16 checkpoint"
    if missing == [LM_HEAD] and tie_key_absent and not extra:
        return (
            f"{LM_HEAD} is missing and config.json does not say whether the output head is tied to {EMBED}; add "
            '"tie_word_embeddings": true if it is, or take the complete checkpoint'
        )
    parts = []
    if missing:
        parts.append(f"{len(missing)} of {total} tensors are missing: {_some(missing)}")
    if extra:
        parts.append(f"{len(extra)} unexpected: {_some(extra)}")
    return "; ".join(parts) + "; the checkpoint is incomplete or not a plain Qwen2 model"


def _check_types(stored: dict[str, StoredTensor], specs: list[TensorSpec], where: str) -> None:
    wrong = [f"{s.name} is {stored[s.name].dtype}" for s in specs if stored[s.name].dtype not in READABLE]
    if wrong:
        raise InputError(f"{where}: {_some(wrong)}; nanoqwen reads {', '.join(READABLE)}, take the original BF16 checkpoint")


def _check_shapes(stored: dict[str, StoredTensor], specs: list[TensorSpec], where: str) -> None:
    wrong = [
        f"{s.name} is {list(stored[s.name].shape)}, config.json asks for {list(s.shape)}"
        for s in specs
        if stored[s.name].shape != s.shape
    ]
    if wrong:
        raise InputError(f"{where}: {_some(wrong)}; config.json and weights are not of the same model")


def _some(items: list[str]) -> str:
    """The first few items, and how many more there are."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
