"""`nanoqwen inspect`: what a .nanoqwen file holds, on one page or as JSON, without loading a weight."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from nanoqwen.cli.console import EXIT_BAD_INPUT, EXIT_OK, Progress, columns, human_bytes, out, out_json, plural
from nanoqwen.cli.session import add_file, add_progress_option, open_file
from nanoqwen.errors import InputError

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")


def add_parser(add) -> None:
    parser = add("inspect", "show what a .nanoqwen file holds", run, description=(
        "Show format, dimensions, vocabulary, stop ids, chat template, generation defaults, sizes and tensors of a .nanoqwen "
        "file. Only the header, the table and the metadata are read, so it answers at once for a file of any size."))
    add_file(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor, with the type it had in the checkpoint")
    parser.add_argument("--template", action="store_true", help="print the chat template too")
    parser.add_argument("--verify", action="store_true",
                        help="read the whole file and compare every checksum; names each damaged section, exit status 2")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    add_progress_option(parser)


def run(args: argparse.Namespace) -> int:
    from nanoqwen.synthetic_pack import is_planned

    with open_file(args.file, payload=False) as pack:
        facts = describe(pack)
        if is_planned(pack):
            if args.verify:
                raise InputError(f"{pack.path}: there is nothing to verify, this model is made on the card and is no file")
            facts["notes"] = [*facts["notes"], "not a file here: sizes and offsets are those that it would have"]
        if args.verify:
            with Progress(args.progress, "verify") as progress:
                facts["damaged"] = pack.verify(progress)
    if args.json:
        out_json(facts)
    else:
        for line in page(facts, tensors=args.tensors, template=args.template):
            out(line)
    return EXIT_BAD_INPUT if facts.get("damaged") else EXIT_OK


# ------------------------------------------------------------------------------------------------------------- facts


def describe(pack) -> dict:
    """Everything `inspect` knows about an open PackFile, as plain data: the JSON answer, and what the page is laid out from."""
    from nanoqwen.model import bytes_per_token, kv_bytes_per_token
    from nanoqwen.packfile import INT4, SOURCE_DTYPES, STORAGE_NAMES

    header, dims, meta = pack.header, pack.dims, pack.meta
    tensors = [
        {
            "name": e.name,
            "shape": [e.cols] if e.rows == 1 else [e.rows, e.cols],
            "storage": STORAGE_NAMES[e.storage],
            "source_dtype": SOURCE_DTYPES[e.source_dtype],
            "offset": e.offset,
            "bytes": e.nbytes,
            "scale_bytes": e.scale_nbytes,
        }
        for e in pack.tensors.values()
    ]
    codes = sum(e.nbytes for e in pack.tensors.values() if e.storage == INT4)
    scales = sum(e.scale_nbytes for e in pack.tensors.values())
    values = sum(e.nbytes for e in pack.tensors.values() if e.storage != INT4)
    entries = header.tokenizer_entries
    return {
        "path": str(pack.path),
        "bytes": header.file_bytes,
        "format_version": header.version,
        "layout_id": header.layout_id,
        "producer": meta.get("producer"),
        "source": meta.get("source") or {},
        "dims": {
            "layers": dims.num_layers, "hidden": dims.hidden, "intermediate": dims.intermediate, "heads": dims.num_heads,
            "kv_heads": dims.num_kv_heads, "head_dim": dims.head_dim, "rope_theta": dims.rope_theta, "rms_eps": dims.rms_eps,
            "context": dims.max_position,
        },
        "quantise": {**(meta.get("quantise") or {}), "bits": 4, "group": header.group_size},
        "head": "tied to embeddings" if dims.tied else "untied (lm_head.weight)",
        "vocabulary": {"rows": dims.vocab, "tokenizer_entries": entries, "padding": dims.vocab - entries},
        "stop_ids": meta.get("stop_ids") or [],
        "special_tokens": {key: meta.get(key) for key in ("bos_token", "eos_token", "pad_token")},
        "chat_template": meta.get("chat_template"),
        "chat_template_from": meta.get("chat_template_from"),
        "generation": meta.get("generation") or {},
        "storage_bytes": {
            "int4_codes": codes, "int4_scales": scales, "fp16": values, "tokenizer": header.tokenizer[1],
            "metadata": header.meta[1], "table": header.table[1],
        },
        "kv_bytes_per_token": kv_bytes_per_token(dims),
        "bytes_per_token": bytes_per_token(dims, header.group_size, 0),
        "notes": meta.get("notes") or [],
        "defaults": meta.get("defaults") or {},
        "tensors": tensors,
    }


# -------------------------------------------------------------------------------------------------------------- page


def page(facts: dict, *, tensors: bool = False, template: bool = False) -> Iterator[str]:
    """The lines of the page for people."""
    d, vocab, source = facts["dims"], facts["vocabulary"], facts["source"]
    yield facts["path"]
    yield from columns([
        ("size", f"{facts['bytes']:,} bytes ({human_bytes(facts['bytes'])})"),
        ("format", f"version {facts['format_version']}, layout {facts['layout_id']} (ValueShuffle)"
                   + (f", written by {facts['producer']}" if facts["producer"] else "")),
        ("source", ", ".join(str(source[key]) for key in ("name", "architecture", "torch_dtype") if source.get(key)) or "not recorded"),
    ])
    yield ""
    yield "Model"
    yield from columns([
        ("layers", d["layers"]),
        ("hidden", d["hidden"]),
        ("MLP", d["intermediate"]),
        ("attention", f"{plural(d['heads'], 'query head')} on {plural(d['kv_heads'], 'KV head')} of {d['head_dim']}"
                      f" ({d['heads'] // d['kv_heads']}:1)"),
        ("RoPE", f"theta {d['rope_theta']:,.0f}"),
        ("RMSNorm", f"eps {d['rms_eps']:g}"),
        ("context", plural(d["context"], "token")),
        ("weights", f"INT4, group {facts['quantise']['group']}, {facts['quantise'].get('method', 'absmax')}; everything else FP16"),
        ("output head", facts["head"]),
    ])
    yield ""
    yield "Text"
    padding = vocab["padding"]
    yield from columns([
        ("vocabulary", f"{plural(vocab['rows'], 'embedding row')}, {vocab['tokenizer_entries']:,} tokenizer entries"
                       + (f", {plural(padding, 'row')} of padding that no answer can contain" if padding > 0 else "")),
        *_stop_rows(facts["stop_ids"]),
        ("chat template", _template_source(facts)),
        ("generation", _defaults_line(facts["generation"]) or "no defaults in the checkpoint"),
    ])
    if template and facts["chat_template"]:
        yield from ("    " + line for line in facts["chat_template"].splitlines())
    yield ""
    yield "Bytes"
    yield from columns([(label, f"{n:,}", human_bytes(n)) for label, n in _storage_rows(facts["storage_bytes"])], right=(1,))
    yield ""
    yield "Bytes that one token reads, at batch 1"
    rows = [(_READ_LABELS.get(key, key), f"{n:,}", human_bytes(n)) for key, n in facts["bytes_per_token"].items() if key != "kv"]
    rows.append(("and per token of context", f"{facts['kv_bytes_per_token']:,}", human_bytes(facts["kv_bytes_per_token"]) + " of KV cache"))
    yield from columns(rows, right=(1,))
    yield ""
    yield f"Tensors ({len(facts['tensors'])})"
    yield from columns(_every_tensor(facts["tensors"]) if tensors else _tensor_kinds(facts["tensors"]))
    for title, lines in (
        ("Notes from packing", facts["notes"]),
        ("Values that the config lacked", [f"{key}: {value}" for key, value in facts["defaults"].items()]),
    ):
        if lines:
            yield ""
            yield title
            yield from (f"  {line}" for line in lines)
    if "damaged" in facts:
        yield ""
        yield from verdict(facts["damaged"], len(facts["tensors"]))


def verdict(damaged: list[str], tensors: int) -> Iterator[str]:
    """What `verify` found, a line a damaged section."""
    if not damaged:
        yield f"Checksums: all good (header, table, metadata, tokenizer and {plural(tensors, 'tensor')})"
        return
    yield f"Checksums: {plural(len(damaged), 'damaged section')}; pack the checkpoint again or download the file again"
    yield from (f"  {section}" for section in damaged)


_READ_LABELS = {
    "int4": "INT4 codes", "scales": "scales", "lm_head": "output head", "norms_biases": "norms and biases",
    "embed_row": "one embedding row", "total": "together",
}


def _storage_rows(storage: dict[str, int]) -> list[tuple[str, int]]:
    labels = {"int4_codes": "INT4 codes", "int4_scales": "INT4 scales", "fp16": "FP16 tensors", "tokenizer": "tokenizer",
              "metadata": "metadata", "table": "tensor table"}
    return [(labels[key], count) for key, count in storage.items()]


def _stop_rows(stops: list[dict]) -> list[tuple[str, str]]:
    if not stops:
        return [("stop ids", "none known: an answer ends only at --max-tokens or a --stop string")]
    rows = []
    for k, stop in enumerate(stops):
        where = stop.get("from")
        where = ", ".join(where) if isinstance(where, list) else where
        text = stop.get("text") or "no token text"
        rows.append(("stop ids" if k == 0 else "", f"{stop['id']} {text}" + (f" (from {where})" if where else "")))
    return rows


def _template_source(facts: dict) -> str:
    template = facts["chat_template"]
    if not template:
        return "none in the checkpoint: `chat` uses the built-in ChatML of Qwen2.5"
    return f"{len(template):,} characters, from {facts['chat_template_from'] or 'the checkpoint'} (--template prints it)"


def _defaults_line(generation: dict) -> str:
    """The checkpoint's sampling defaults. They are shown and not applied: greedy means plain argmax."""
    shown = [f"{key} {generation[key]}" for key in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty") if key in generation]
    return ", ".join(shown) + "; shown only, not applied unless you pass them" if shown else ""


def _tensor_kinds(tensors: list[dict]) -> list[tuple[str, ...]]:
    """One line a kind: the tensors of all layers that agree in shape, storage and source type are counted together."""
    kinds: dict[tuple, list[dict]] = {}
    for tensor in tensors:
        name = _LAYER.sub(r"\1*\3", tensor["name"])
        kinds.setdefault((name, tuple(tensor["shape"]), tensor["storage"], tensor["source_dtype"]), []).append(tensor)
    rows = []
    for (name, shape, storage, dtype), members in kinds.items():
        total = sum(t["bytes"] + t["scale_bytes"] for t in members)
        times = f"{len(members)} x" if len(members) > 1 or "*" in name else ""
        rows.append((name, times, _shape(shape), storage, f"from {dtype}", human_bytes(total)))
    return rows


def _every_tensor(tensors: list[dict]) -> list[tuple[str, ...]]:
    return [
        (t["name"], _shape(t["shape"]), t["storage"], f"from {t['source_dtype']}", f"at {t['offset']:,}",
         human_bytes(t["bytes"] + t["scale_bytes"]))
        for t in tensors
    ]


def _shape(shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
