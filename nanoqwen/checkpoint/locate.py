"""From what a user typed to a folder and its weight files: a folder, its index, its config, or a hub name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from nanoqwen.checkpoint import hub
from nanoqwen.checkpoint.jsonfile import read_object
from nanoqwen.checkpoint.safetensors_io import StoredTensor, read_header
from nanoqwen.errors import InputError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class Location:
    """A checkpoint's folder, and the hub name and revision it was fetched under (None for a local folder)."""

    folder: Path
    hub_name: str | None = None
    revision: str | None = None


def locate(source: str | Path) -> Location:
    """Resolve ``source`` to a folder that holds a ``config.json``.

    Accepted: a checkpoint folder (symlinks are followed), its ``model.safetensors.index.json``, ``config.json`` or only
    ``model.safetensors``, or a hub name ``org/name`` that is no local path. Raises InputError otherwise, naming what was
    found and what to pass.
    """
    if not str(source):
        raise InputError("the source is empty; pass a checkpoint folder, or a hub name like Qwen/Qwen2.5-0.5B-Instruct")
    path = Path(source).expanduser()
    if path.is_dir():
        location = Location(path)
    elif path.exists():
        location = Location(_folder_of_file(path))
    elif path.is_symlink():
        raise InputError(f"{source}: a link to {path.readlink()}, which does not exist; the download looks incomplete")
    elif isinstance(source, str) and hub.is_hub_name(source):
        folder = hub.download(source)
        location = Location(folder, hub_name=source, revision=folder.name)
    else:
        raise InputError(f"{source}: no such file or directory; pass a checkpoint folder, or a hub name like Qwen/Qwen2.5-0.5B-Instruct")
    if not (location.folder / CONFIG).exists():
        raise InputError(_no_config(location.folder))
    return location


def _folder_of_file(path: Path) -> Path:
    """The checkpoint folder that a file stands for; one shard stands for nothing."""
    if path.name in (INDEX, CONFIG, SINGLE):
        return path.parent
    if shard := _SHARD.fullmatch(path.name):
        count = int(shard["count"])
        names = [f"{shard['stem']}-{k + 1:05d}-of-{shard['count']}.safetensors" for k in range(min(count, 4))]
        others = ", ".join([name for name in names if name != path.name][:3]) + (", ..." if count > 4 else "")
        raise InputError(f"{path}: one of {count} shards (the others: {others}); pass the folder {path.parent}")
    if path.suffix in _PICKLES:
        raise InputError(f"{path}: PyTorch's {path.suffix} files are not read (they can run code); pass a folder with .safetensors files")
    with open(path, "rb") as file:
        head = file.read(8)
    if head == b"NANOQWEN":
        raise InputError(f"{path}: already a .nanoqwen file; `nanoqwen inspect` shows it, `nanoqwen generate` runs it")
    if head[:4] == b"GGUF":
        raise InputError(f"{path}: a GGUF file; pass the folder of the original checkpoint in safetensors format")
    raise InputError(f"{path}: a file; pass the checkpoint folder that holds config.json and the .safetensors files")


def _no_config(folder: Path) -> str:
    if (folder / CONFIG).is_symlink():
        return f"{folder / CONFIG}: a link to {(folder / CONFIG).readlink()}, which does not exist; the download looks incomplete"
    if (folder / ADAPTER_CONFIG).exists():
        return f"{folder}: a LoRA adapter ({ADAPTER_CONFIG}), not a model; merge it into its base model and pack that"
    if (folder / "snapshots").is_dir():
        inside = sorted(p.name for p in (folder / "snapshots").iterdir())
        return f"{folder}: a hub cache entry; pass the snapshot inside it, {folder / 'snapshots' / (inside[0] if inside else '...')}"
    return f"{folder}: no {CONFIG}; pass the folder of a complete Hugging Face checkpoint"


# [stored_tensors]
def stored_tensors(folder: Path, notes: list[str]) -> dict[str, StoredTensor]:
    """Every tensor stored in the checkpoint's weight files, by stored name; all headers and file sizes are checked.

    Which files: ``model.safetensors``, or those that the index names, or shards whose own names say that they are complete.
    The headers decide what a file holds; an index that contradicts them is refused, and so is a folder with two sets of
    weights. Raises InputError naming the file.
    """
    files, weight_map = _weight_files(folder, notes)
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise InputError(f"{path}: {name} is stored here and in {tensors[name].file.name}; remove the file that does not belong")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            actual = f"it is in {tensors[name].file.name}" if name in tensors else "no file holds it"
            raise InputError(f"{folder / INDEX}: says that {name} is in {file}, but {actual}; the index is stale, download it again")
    return tensors
# [/stored_tensors]


def _weight_files(folder: Path, notes: list[str]) -> tuple[list[Path], dict[str, str]]:
    """(the files to read, the index's map from tensor to file when an index decided)."""
    present = sorted(p.name for p in folder.glob("*.safetensors") if p.exists())
    weight_map = _weight_map(folder / INDEX) if (folder / INDEX).exists() else {}
    if SINGLE in present and SINGLE not in weight_map.values():
        if both := sorted(set(weight_map.values()) & set(present)):
            raise InputError(f"{folder}: two sets of weights, {SINGLE} and {both[0]} (from {INDEX}); remove the one that is out of date")
        if weight_map:
            notes.append(f"ignored {INDEX}: its files are not here, {SINGLE} is")
        chosen, weight_map = [SINGLE], {}
    elif weight_map:
        chosen = _files_of_index(folder, sorted(set(weight_map.values())), present)
    else:
        chosen = _complete_shards(folder, present)
    if left := [name for name in present if name not in chosen]:
        notes.append(f"ignored {', '.join(left[:5])}{' and more' if len(left) > 5 else ''}: not part of the model's weight files")
    return [folder / name for name in chosen], weight_map


def _weight_map(index: Path) -> dict[str, str]:
    mapping = read_object(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(f, str) for f in mapping.values()):
        raise InputError(f"{index}: has no weight_map from tensor names to file names; download it again")
    return mapping


def _files_of_index(folder: Path, wanted: list[str], present: list[str]) -> list[str]:
    """The files an index names, all of them present; a lost shard and a stale index are told apart."""
    if odd := [name for name in wanted if Path(name).name != name]:
        raise InputError(f"{folder / INDEX}: names {odd[0]!r}, which is not a file of this folder; download the index again")
    missing = [name for name in wanted if name not in present]
    if not missing:
        return wanted
    listed = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    if any(_SHARD.fullmatch(name) for name in present if name not in wanted):
        raise InputError(
            f"{folder / INDEX}: the index names files that are not here: {listed}; present: {', '.join(present)}. The index is "
            "stale: delete it if the shards are complete, or download the checkpoint again"
        )
    raise InputError(
        f"{folder}: {listed} {'is' if len(missing) == 1 else 'are'} missing ({len(missing)} of {len(wanted)} files that "
        f"{INDEX} names); the download looks incomplete, fetch what is missing"
    )


def _complete_shards(folder: Path, present: list[str]) -> list[str]:
    """Shards without an index: taken when their names, k of n, are all there."""
    shards = {name: match for name in present if (match := _SHARD.fullmatch(name))}
    counts = {int(match["count"]) for match in shards.values()}
    if len(counts) == 1 and len(shards) == counts.pop() and len({m["stem"] for m in shards.values()}) == 1:
        return sorted(shards)
    if shards:
        raise InputError(f"{folder}: no {INDEX}, and the shards present are not one complete set ({', '.join(present[:5])}); download the checkpoint again")
    if (folder / ADAPTER_CONFIG).exists():
        raise InputError(f"{folder}: a LoRA adapter ({ADAPTER_CONFIG}), not a model; merge it into its base model and pack that")
    others = sorted(p.name for p in folder.iterdir() if p.suffix in (*_PICKLES, ".gguf"))
    if others:
        ending = Path(others[0]).suffix
        raise InputError(f"{folder}: no .safetensors file here; {', '.join(others[:3])}: {ending} is not read, take the safetensors version of the checkpoint")
    unusual = f" ({', '.join(present[:3])} has another name)" if present else ""
    raise InputError(f"{folder}: no {SINGLE} and no {INDEX}{unusual}; the download looks incomplete")
