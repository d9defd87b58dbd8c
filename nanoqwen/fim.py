"""Fill in the middle: a prompt that shows what stands before a gap and after it, so that the model writes the gap.

    <|fim_prefix|> before the gap <|fim_suffix|> after the gap <|fim_middle|>  -->  the middle

The three markers are ids of the checkpoint's own tokenizer, found by their names. The two texts are encoded apart from each other and as
plain text: marker letters in a user's file stay letters, and the last token before the gap never swallows the first behind it.
The reply ends at an ordinary end id, or where the model pads the gap or goes on to another file (``Tokenizer.end_ids``).
"""

from __future__ import annotations

from nanoqwen.errors import InputError
from nanoqwen.tokenizer import FIM_PROMPT, Tokenizer


def fim_ids(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """The prompt's ids. Either text may be empty, not both. Raises InputError for that, and for a tokenizer without the markers."""
    missing = [name for name in FIM_PROMPT if name not in tokenizer.markers]
    if missing:
        raise InputError(f"{tokenizer.source}: the tokenizer has no {', no '.join(missing)}; this model was not made to fill in the middle")
    if not prefix and not suffix:
        raise InputError("there is nothing around the gap: the text before it and the text after it are both empty")
    before, after, middle = (tokenizer.markers[name] for name in FIM_PROMPT)
    return [before, *tokenizer.encode(prefix), after, *tokenizer.encode(suffix), middle]


def split_at(text: str, mark: str) -> tuple[str, str]:
    """(before, after) the one place where ``mark`` stands, which itself is removed. Raises InputError for no place and for several."""
    places = text.count(mark)
    if places != 1:
        found = "is not in the text" if not places else f"is in the text {places} times"
        raise InputError(f"the cursor mark {mark!r} {found}; it must stand once, where the gap is")
    before, _, after = text.partition(mark)
    return before, after
