"""The tables of the errata appendix: arithmetic from the configuration, models run while the book is built, and receipts.

A measurement that has no receipt yet is said to be missing; it never becomes a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanoqwen.book.display import Table, table
from nanoqwen.book.facts import limit_ms, quoted
from nanoqwen.book.receipts import available, receipt
from nanoqwen.config import Dims, load_settings
from nanoqwen.model import block_schema, bytes_per_token, kv_bytes_per_token

#: Kernels of chapter 05 that tell the story's two versions apart, and its repair.
LESSONS = (
    ("branch_join", "barrier in the producer's branch; the others meet at a later `__syncthreads()`"),
    ("branch_exit", "the same; the others never come to a `__syncthreads()` again"),
    ("branch_signal", "the same; the others wait for a signal that the producer gives after it"),
    ("branch_each", "the same, after each page; the others wait for the next page"),
    ("fences", "`__syncwarp()`, then `__syncthreads()` for all; nobody waits for the bytes"),
    ("fences_wait", "the same, and the consumers wait for the byte count"),
)
#: Tokens in the model, whose pages hold four: full pages, and one token in the last.
FULL, PARTIAL = 8, 5
#: What the eager decoder of the story launches for a token: ten kernels a layer, the head, the argmax.
LAUNCHES_A_LAYER, LAUNCHES_BESIDES = 10, 2


def errata_part(name: str) -> str:
    """Markdown of one part. Raises ValueError for a name that is none."""
    if name not in PARTS:
        raise ValueError(f"no part is called {name!r}; there are: {', '.join(PARTS)}")
    made = PARTS[name]()
    return made.markdown() if isinstance(made, Table) else made


def _seven() -> tuple[Dims, int]:
    return Dims.qwen2_5_coder_7b(), load_settings().quant.group


def cache() -> Table:
    """Bytes of one token of context, from one tensor of one layer to the whole cache."""
    dims, _ = _seven()
    one = dims.num_kv_heads * dims.head_dim * load_settings().kv.value_bytes
    token = kv_bytes_per_token(dims)
    rows = [
        ("K or V, one layer (the story's number)", f"{one:,}"),
        ("K and V, one layer", f"{2 * one:,}"),
        (f"K and V, all {dims.num_layers} layers", f"{token:,}"),
        (f"the full context of {dims.max_position:,} tokens", f"{token * dims.max_position:,}"),
    ]
    return table(rows, head=["What", "Bytes"], caption=f"{one // 1024} KiB against {token // 1024} KiB a token: a factor of {token // one}.")


def lessons() -> Table:
    """What a search of all schedules says of chapter 05's small kernels."""
    from nanoqwen.warpmodel import explore
    from nanoqwen.warpmodel.lessons import lesson, verdict

    rows = [(f"`{name}`", what, *(verdict(explore(lesson(name, tokens))) for tokens in (FULL, PARTIAL))) for name, what in LESSONS]
    caption = "All schedules searched while this page was built. Right and hangs: in every one. Reads too early: in some."
    return table(rows, head=["Kernel", "What it does", "Full pages", "One token in the last"], caption=caption)


def activations() -> Table:
    """Bytes of the weights and of the input vector of the three MLP projections."""
    dims, group = _seven()
    rows = []
    for spec in (s for s in block_schema(dims, 0) if ".mlp." in s.name):
        weights = spec.rows * spec.cols // 2 + spec.rows * (spec.cols // group) * 2
        fp16, int8 = 2 * spec.cols, spec.cols + spec.cols // group * 2
        rows.append((spec.name.split(".")[-2], f"{weights:,}", f"{fp16:,}", f"{int8:,}", f"{100 * (fp16 - int8) / (weights + fp16):.3f}%"))
    head = ["Projection", "Weights and scales", "Input, FP16", "Input, INT8 and scales", "INT8 saves, of all bytes"]
    return table(rows, head=head, caption="Bytes, one layer, one token.")


def bandwidth() -> Table:
    """The published times as bandwidth."""
    dims, group = _seven()
    total, h100 = bytes_per_token(dims, group, 0)["total"], quoted()["bandwidth_gb_s"]["H100 SXM"]
    bound = limit_ms(total, h100)
    rows = []
    for row in quoted()["articles"]["rows"]:
        if row["engine"] != "peer":
            ms, rate = row["ms_per_token"], total / row["ms_per_token"] / 1e6
            rows.append((row["label"], f"{ms:g}", f"{rate:,.0f}", f"{100 * rate / h100:.1f}%", f"{ms / bound:.0f}"))
    rows.append(("the bound", f"{bound:.2f}", f"{h100:,}", "100.0%", "1"))
    caption = f"{total:,} bytes a token; {h100:,} GB/s is an H100 SXM's data sheet."
    return table(rows, head=["", "ms a token", "GB/s", "of the H100", "times the bound"], caption=caption)


def launches() -> Table:
    """What the published step from eager to graph says of one launch."""
    dims, _ = _seven()
    ms = {row["engine"]: row["ms_per_token"] for row in quoted()["articles"]["rows"]}
    count = LAUNCHES_A_LAYER * dims.num_layers + LAUNCHES_BESIDES
    saved = ms["eager"] - ms["graph"]
    rows = [
        ("launches a token", f"{count}"),
        ("saved by the graph, ms a token", f"{saved:.1f}"),
        ("saved a launch, us", f"{saved / count * 1e3:.0f}"),
        ("share of an eager token in which the card idled (the story: 90%)", f"{100 * saved / ms['eager']:.0f}%"),
    ]
    return table(rows, head=["From the published numbers", ""])


def eager() -> Table | str:
    """Chapter 06's ways to launch a step."""
    if "launching" not in available():
        return _missing("the comparison of ways to launch a step", "6")
    from nanoqwen.bench.launching import VARIANTS

    made = receipt("launching")
    engines = made.results["engines"]
    words = {variant: text for told in VARIANTS.values() for variant, text in told.items()}
    rows = [
        (text, *(f"{engines[name]['ms'][variant]:.3f}" if variant in engines[name]["ms"] else "" for name in VARIANTS)) for variant, text in words.items()
    ]  # fmt: skip
    host = ", ".join(f"{engines[name]['host_ms']:.3f} ms ({name})" for name in VARIANTS)
    caption = f"{made.results['launches']} launches a token. The host alone needs for one step's launches: {host}."
    return table(rows, head=["How a step is launched", *(f"{name}, ms a token" for name in VARIANTS)], caption=caption, receipt=made)


def paths() -> Table | str:
    """Chapter 07's arithmetic paths on the three MLP projections."""
    if "unpack_paths" not in available():
        return _missing("the comparison of the arithmetic paths", "7")
    made = receipt("unpack_paths")
    shapes = {name: shape for name, shape in made.results["shapes"].items() if name in ("gate", "up", "down")}
    names = list(next(iter(shapes.values()))["paths"])
    rows = [(f"`{path}`", *(f"{s['paths'][path]['us']:.2f} us, {100 * s['paths'][path]['share']:.0f}%" for s in shapes.values())) for path in names]
    quantise = ", ".join(f"{us:.2f} us for {int(cols):,} columns" for cols, us in made.results["quantise_us"].items())
    caption = f"A product, and its share of the read ceiling. Where it is a kernel of its own, quantising the input is in the time: {quantise}."
    return table(rows, head=["Path", *(f"`{name}`" for name in shapes)], caption=caption, receipt=made)


def _missing(what: str, chapter: str) -> str:
    return f"*Not measured yet: {what} writes its receipt with chapter {int(chapter):02d}.*"


PARTS: dict[str, Callable[[], Table | str]] = {
    make.__name__: make for make in (cache, lessons, activations, bandwidth, launches, eager, paths)
}  # fmt: skip


def parts() -> Iterable[str]:
    """The names of all parts."""
    return PARTS
