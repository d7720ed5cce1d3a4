"""Hidden states that another tool wrote, read where they lie: no second copy of terabytes.

    specforge        **/*.ckpt, *.ckpt.gz: input_ids [T], loss_mask [T], aux_hidden_state [1, T, L·H],
                     hidden_state [1, T, H]
    speculators      hidden_states/hs_{i}.safetensors: hidden_states [T, L+1, H], token_ids [T]; row i of the Arrow
                     table beside it: input_ids, loss_mask (speculators 0.9)
    speculators-old  **/data_*.pt: input_ids [T], loss_mask [T], hidden_states: list of L+1 tensors [T, H]

What the store holds of such a sample is its ids and mask and, in `meta.in_place`, which file has its states: path,
format, bytes, sha256, whether its last state is taken before or after the target's final norm. `load_sample` puts the
states in; `states` here reads them in our layout: the aux layers ascending, then the last one, post-norm.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib.config import ImportedConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import finite, stretches
from eagle3lib.job import Progress, append_line, atomic_write, read_lines
from eagle3lib.lineage import digest, file_sha256

if TYPE_CHECKING:
    import torch

NAMES = {
    "specforge": re.compile(r".*\.ckpt(\.gz)?"),
    "speculators": re.compile(r"hs_(\d+)\.safetensors"),
    "speculators-old": re.compile(r"data_.*\.pt"),
}
PRE_NORM, POST_NORM = "pre-norm", "post-norm"


@dataclass(frozen=True)
class Content:
    """One file as it is: ids [T], mask [T] (None where it lies elsewhere), L+1 states [T, H] of whatever dtype."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor | None
    states: list[torch.Tensor]


class Unreadable(Exception):
    """What is wrong with a file."""


# --- the folder ---------------------------------------------------------------------------------------


def files(imported: ImportedConfig) -> list[Path]:
    """The files that hold states, in order. Raises UserError when there are none."""
    name, folder = NAMES[imported.format], Path(imported.folder)
    walk = os.walk(folder, followlinks=True)
    found = [Path(base, file) for base, _, names in walk for file in names if name.fullmatch(file)]
    if not found:
        raise UserError(
            f"config: dataset.imported.folder: {folder} holds no file that {imported.format} wrote ({name.pattern}); "
            "check folder and format"
        )
    return sorted(found, key=_in_order)


def _in_order(path: Path) -> list[Any]:
    """hs_2 before hs_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def listing(imported: ImportedConfig) -> str:
    """Digest of names and sizes: a folder that grew is imported anew."""
    folder = Path(imported.folder)
    return digest([(str(path.relative_to(folder)), path.stat().st_size) for path in files(imported)])


# --- one file -----------------------------------------------------------------------------------------


def read(path: str | Path, form: str, aux_layers: int) -> Content:
    """A file's content; memory-mapped where its format allows. Raises Unreadable with what is wrong."""
    import torch

    try:
        content = READERS[form](Path(path), aux_layers)
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(
            f"cannot be read ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]})"
        ) from None
    n = len(content.input_ids)
    if content.input_ids.dtype not in (torch.int64, torch.int32):
        raise Unreadable(f"its token ids are {content.input_ids.dtype}")
    if content.loss_mask is not None and len(content.loss_mask) != n:
        raise Unreadable(f"{len(content.loss_mask)} values of loss_mask for {n} tokens")
    if len(content.states) != aux_layers + 1:
        raise Unreadable(
            f"{len(content.states)} states, not {aux_layers + 1} (hidden_states.aux_layer_ids and the last)"
        )
    for number, state in enumerate(content.states):
        if state.ndim != 2 or len(state) != n or state.shape[1] != content.states[0].shape[1]:
            raise Unreadable(f"state {number} has shape {list(state.shape)} for {n} tokens")
    return content


def _specforge(path: Path, aux_layers: int) -> Content:
    import torch

    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            data = torch.load(io.BytesIO(file.read()), weights_only=True, map_location="cpu")
    else:
        data = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    aux, last = (_rows(data[name]) for name in ("aux_hidden_state", "hidden_state"))
    if aux.shape[-1] != aux_layers * last.shape[-1]:
        raise Unreadable(
            f"aux states {aux.shape[-1]} wide, not {aux_layers} x {last.shape[-1]} (hidden_states.aux_layer_ids)"
        )
    return Content(data["input_ids"].flatten(), data["loss_mask"].flatten(), [*aux.chunk(aux_layers, -1), last])


def _rows(state: torch.Tensor) -> torch.Tensor:
    """[T, H] of [1, T, H] or [T, H]."""
    return state[0] if state.ndim == 3 and state.shape[0] == 1 else state


def _speculators(path: Path, aux_layers: int) -> Content:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        ids, states = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
    if states.ndim != 3:
        raise Unreadable(f"its hidden_states have shape {list(states.shape)}, not [T, {aux_layers + 1}, H]")
    return Content(ids, None, list(states.unbind(1)))


def _speculators_old(path: Path, aux_layers: int) -> Content:
    import torch

    data = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    return Content(data["input_ids"].flatten(), data["loss_mask"].flatten(), [_rows(s) for s in data["hidden_states"]])


READERS = {"specforge": _specforge, "speculators": _speculators, "speculators-old": _speculators_old}


# --- the scan -----------------------------------------------------------------------------------------


def scan(imported: ImportedConfig, aux_layers: int, progress_file: Path, out: Path, threads: int) -> dict[str, int]:
    """Read every byte of every file: a line a file in `out`, in the order of `files`.

    A line of a good one: {"file", "bytes", "sha256", "input_ids", "reply_bounds"}; of a bad one: {"file", "fault"}.
    Killed, it goes on at the files that `progress_file` does not have; that is removed at the end. Returns the counts
    {"files", "bad", "bytes"}. Raises UserError when no file is good.
    """
    paths = files(imported)
    done = {line["file"]: line for line in read_lines(progress_file) if _unchanged(line)}
    masks = _Masks(imported)
    todo = [path for path in paths if str(path) not in done]
    progress_file.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(sum(path.stat().st_size for path in todo), "bytes", "scan")
    with ThreadPoolExecutor(threads) as pool:
        for line in pool.map(lambda path: _scanned(path, imported.format, aux_layers, masks), todo):
            append_line(progress_file, line)
            done[line["file"]] = line
            progress.update(line["bytes"], files=len(done), bad=sum("fault" in one for one in done.values()))
    lines = [done[str(path)] for path in paths]
    bad = [line for line in lines if "fault" in line]
    for line in bad:
        print(f"{line['file']}: {line['fault']}")
    if len(bad) == len(lines):
        raise UserError(f"{bad[0]['file']}: {bad[0]['fault']}; none of the {len(lines):,} files can be used")
    with atomic_write(out) as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")
    progress_file.unlink(missing_ok=True)
    return {"files": len(lines), "bad": len(bad), "bytes": sum(line["bytes"] for line in lines)}


def _unchanged(line: dict[str, Any]) -> bool:
    with suppress(OSError, KeyError):
        about = os.stat(line["file"])
        return (about.st_size, about.st_mtime_ns) == (line["bytes"], line["mtime_ns"])
    return False


def _scanned(path: Path, form: str, aux_layers: int, masks: _Masks) -> dict[str, Any]:
    about = path.stat()
    line: dict[str, Any] = {"file": str(path), "bytes": about.st_size, "mtime_ns": about.st_mtime_ns}
    try:
        content = read(path, form, aux_layers)
        mask = content.loss_mask if content.loss_mask is not None else masks.of(path, content.input_ids)
        for number, state in enumerate(content.states):
            if not finite(state):
                raise Unreadable(f"state {number} holds values that are not finite")
    except Unreadable as fault:
        return {**line, "fault": str(fault)}
    bounds = stretches(mask.flatten().nonzero().flatten().tolist())
    return {**line, "sha256": file_sha256(path), "input_ids": content.input_ids.tolist(), "reply_bounds": bounds}


class _Masks:
    """The loss masks of speculators 0.9: in the Arrow table that `datasets` saved beside hidden_states/."""

    def __init__(self, imported: ImportedConfig):
        self.folder = Path(imported.folder)
        self.table = _arrow_table(self.folder) if imported.format == "speculators" else None

    def of(self, path: Path, input_ids: torch.Tensor) -> torch.Tensor:
        import torch

        assert self.table is not None
        found = NAMES["speculators"].fullmatch(path.name)
        index = int(found[1]) if found else -1
        if not 0 <= index < self.table.num_rows:
            raise Unreadable(f"the table in {self.folder} has {self.table.num_rows} rows, none for it")
        if self.table["input_ids"][index].as_py() != input_ids.tolist():
            raise Unreadable(f"its token ids are not those of row {index} of the table in {self.folder}")
        mask = torch.tensor(self.table["loss_mask"][index].as_py()).flatten()
        if len(mask) != len(input_ids):
            raise Unreadable(f"{len(mask)} values of loss_mask for {len(input_ids)} tokens in row {index} of the table")
        return mask


def _arrow_table(folder: Path) -> Any:
    """What `Dataset.save_to_disk` wrote: its files are named in state.json."""
    import pyarrow

    try:
        names = [one["filename"] for one in json.loads((folder / "state.json").read_text())["_data_files"]]
        tables = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(folder / name))).read_all() for name in names]
        return pyarrow.concat_tables(tables).select(["input_ids", "loss_mask"])
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{folder}: no table of samples ({error}); dataset.imported.folder is the one that holds state.json, "
            "*.arrow and hidden_states/"
        ) from None


def imported_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of `scan`."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


# --- a sample of ours ---------------------------------------------------------------------------------


def refer(
    key: Any, identity: str, input_ids: Sequence[int], reply_bounds: Sequence[int], about: dict[str, Any], code: str,
    norm: tuple[torch.Tensor, float] | None,
) -> dict[str, Any]:  # fmt: skip
    """The content of a sample file that leaves its states where they are.

    about: {"file", "format", "bytes", "sha256"}. norm: the target's final one (weight [H], eps) for a last state that
    is taken before it.
    """
    import torch

    mask = torch.zeros(len(input_ids), dtype=torch.int64)
    for start, end in zip(reply_bounds[::2], reply_bounds[1::2], strict=True):
        mask[start:end] = 1
    content: dict[str, Any] = {
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "loss_mask": mask,
        "reply_starts": torch.tensor(list(reply_bounds[::2]), dtype=torch.int64),
        "meta": {
            "sample_id": identity,
            **key.values(),
            "engine_version": about["format"],
            "last_is_post_norm": True,
            "code": code,
            "in_place": {**about, "last": PRE_NORM if norm else POST_NORM},
        },
    }
    if norm:
        content["norm_weight"] = norm[0].clone()
        content["meta"]["in_place"]["eps"] = norm[1]
    return content


def reference_fault(sample: dict[str, Any], full: bool = False) -> str | None:
    """What is wrong with the file that a sample refers to: gone, another size, with `full` other bytes."""
    about = sample["meta"]["in_place"]
    try:
        n_bytes = os.stat(about["file"]).st_size
    except OSError as error:
        return f"its states are in {about['file']}, which cannot be read ({error.strerror})"
    if n_bytes != about["bytes"] or (full and file_sha256(about["file"]) != about["sha256"]):
        return f"its states are in {about['file']}, which is not what was imported any more"
    return None


def states(sample: dict[str, Any]) -> list[torch.Tensor]:
    """L+1 states [T, H] in bf16 of a sample that refers to a file, the last one post-norm; T as the sample's ids (the
    file may hold more: it was truncated). Raises UserError."""
    import torch

    about, ids = sample["meta"]["in_place"], sample["input_ids"]
    if fault := reference_fault(sample):
        raise UserError(f"sample {sample['meta']['sample_id']}: {fault}; put it back")
    try:
        content = read(about["file"], about["format"], len(sample["meta"]["aux_layer_ids"]))
    except Unreadable as error:
        raise UserError(f"{about['file']}: {error}") from None
    if not torch.equal(content.input_ids[: len(ids)].long(), ids):
        raise UserError(f"{about['file']}: holds other token ids than the sample that refers to it; import it anew")
    *aux, last = [state[: len(ids)] for state in content.states]
    if about["last"] == PRE_NORM:
        last = rms_norm(last, sample["norm_weight"], about["eps"])
    return [state.to(torch.bfloat16).contiguous() for state in (*aux, last)]


def rms_norm(state: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In fp32 [T, H]."""
    state = state.float()
    return state * (state.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def some_lines(path: Path, n: int, among: int = 100) -> list[dict[str, Any]]:
    """The `n` shortest good ones of the first `among` lines of `scan`."""
    good = [line for line in itertools.islice(imported_lines(path), among) if "sha256" in line]
    return sorted(good, key=lambda line: len(line["input_ids"]))[:n]
