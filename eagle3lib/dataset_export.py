"""A dataset's hidden states in the layouts that other trainers read.

    speculators   DEST/state.json, dataset_info.json, data-….arrow: input_ids, loss_mask, seq_len a row
                  DEST/hidden_states/hs_{row}.safetensors: hidden_states [T, L+1, H], token_ids [T]   (speculators 0.9)
    specforge     DEST/rows_{from}-{to}/data_{row}.ckpt: input_ids, loss_mask [T], hidden_state [1, T, H],
                  aux_hidden_state [1, T, L·H]

speculators applies the target's final norm itself, so its last state is one from before it. Ours is from after it:
divided by the norm's weight it is, up to the length of each row, which that norm takes away again, the one from before.
Training rows come first, validation rows last: speculators takes a share of the rows, in order, for validation.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eagle3lib.errors import UserError
from eagle3lib.hidden_states import load_sample, loss_mask, unpack
from eagle3lib.job import Progress, atomic_write, write_json
from eagle3lib.targets import TargetInfo, norm_factor

FOLDER_ROWS = 2000  # of a folder of .ckpt


def export(states: Path, target: TargetInfo, destination: Path, form: str, jobs: int) -> dict[str, int]:
    """Write the dataset of `states` (results/{target}/{dataset}/{key}); samples that are there are kept.

    Returns {"samples", "train", "validation"}. Raises UserError: states that are not extracted, or trimmed ones.
    """
    table_file = states / "hidden_states.parquet"
    if not table_file.exists():
        raise UserError(f"{table_file}: not there; give results/TARGET/DATASET/KEY of states that are extracted")
    if json.loads((states / "data_config.json").read_text())["storage_format"].endswith("-trimmed"):
        raise UserError(f"{states}: trimmed states, which no other trainer reads; extract with storage_format: bf16")
    table = pd.read_parquet(table_file)
    table = pd.concat([table[table["split"] == split] for split in ("train", "validation")])
    bounds = [[int(b) for b in row] for row in table["reply_bounds"]]
    masks = [loss_mask(n, row) for n, row in zip(table["n_tokens"].tolist(), bounds, strict=True)]
    layout = LAYOUTS[form](destination, target)
    progress = Progress(len(table), "samples", "export")

    def write(item: tuple[int, str]) -> list[int]:
        row, path = item
        sample = load_sample(states / "hidden_states" / path)
        if not layout.path(row).exists():  # they appear whole
            with atomic_write(layout.path(row)) as file:
                layout.write(file, sample["input_ids"].clone(), torch.tensor(masks[row]), unpack(sample))
        return sample["input_ids"].tolist()

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        ids = []
        for one in pool.map(write, enumerate(table["path"])):
            ids.append(one)
            progress.update()
    layout.finish(ids, masks)
    counts = table["split"].value_counts()
    return {"samples": len(table), **{split: int(counts.get(split, 0)) for split in ("train", "validation")}}


class SpecForge:
    """As its `prepare_hidden_states` writes them."""

    def __init__(self, destination: Path, _: TargetInfo):
        self.destination = destination

    def path(self, row: int) -> Path:
        first = row - row % FOLDER_ROWS
        return self.destination / f"rows_{first}-{first + FOLDER_ROWS}" / f"data_{row}.ckpt"

    def write(self, file: Any, ids: torch.Tensor, mask: torch.Tensor, states: list[torch.Tensor]) -> None:
        aux, last = torch.cat(states[:-1], dim=-1)[None], states[-1].clone()[None]
        torch.save({"input_ids": ids, "loss_mask": mask, "hidden_state": last, "aux_hidden_state": aux}, file)

    def finish(self, ids: list[list[int]], masks: list[list[int]]) -> None:
        """All is in the samples."""


class Speculators:
    """As its offline data generation writes them."""

    def __init__(self, destination: Path, target: TargetInfo):
        self.destination, self.norm = destination, norm_factor(target)
        if (self.norm == 0).any():
            raise UserError(f"{target.path}: its final norm has zeros: states from before it cannot be made of ours")

    def path(self, row: int) -> Path:
        return self.destination / "hidden_states" / f"hs_{row}.safetensors"

    def write(self, file: Any, ids: torch.Tensor, mask: torch.Tensor, states: list[torch.Tensor]) -> None:
        from safetensors.torch import save

        before = (states[-1].float() / self.norm).to(torch.bfloat16)
        file.write(save({"hidden_states": torch.stack([*states[:-1], before], dim=1), "token_ids": ids}))

    def finish(self, ids: list[list[int]], masks: list[list[int]]) -> None:
        """The table as `datasets` saves one: an Arrow stream with its features in the schema, and two JSON files."""
        import pyarrow

        number = {"dtype": "int64", "_type": "Value"}
        numbers = {"feature": number, "_type": "List"}
        features = {"input_ids": numbers, "loss_mask": numbers, "seq_len": number}
        kinds = [pyarrow.list_(pyarrow.int64())] * 2 + [pyarrow.int64()]
        about = {"huggingface": json.dumps({"info": {"features": features}})}
        schema = pyarrow.schema(list(zip(features, kinds, strict=True)), metadata=about)
        table = pyarrow.table([ids, masks, [len(one) for one in ids]], schema=schema)
        name = "data-00000-of-00001.arrow"
        with atomic_write(self.destination / name) as file, pyarrow.ipc.new_stream(file, schema) as stream:
            stream.write_table(table)
        write_json(self.destination / "dataset_info.json", {"features": features})
        state: dict[str, Any] = {"_data_files": [{"filename": name}], "_fingerprint": "eagle3lib", "_split": None}
        state |= {"_format_type": "torch", "_format_columns": None, "_format_kwargs": {}, "_output_all_columns": False}
        write_json(self.destination / "state.json", state)


LAYOUTS: dict[str, Any] = {"speculators": Speculators, "specforge": SpecForge}
