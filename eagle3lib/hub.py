"""An exported draft on the Hugging Face hub: nothing is sent unasked, and nothing becomes public by accident."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from eagle3lib import export
from eagle3lib.errors import UserError, one_line

REPLACED = ["*.safetensors", "*.safetensors.index.json"]  # an engine would load leftovers of an earlier export too


def push(
    folder: str | os.PathLike,
    repo: str,
    yes: bool = False,
    public: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Say what of an exported folder would go into the hub's repository `repo` (org/name); send it when `yes`.

    The repository is made, private unless `public`; its weights of an earlier push are replaced. Raises UserError for
    a folder that is not whole, for a public repository when `public` was not said, and for what the hub refuses.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"push: {repo!r}: {error}; give org/name") from None
    _, _, values, _ = export.read_export(folder)
    card = Path(folder) / export.CARD_FILE
    if not card.exists():
        raise UserError(f"{card}: missing; {export.AGAIN}")
    files = [card, *export.served_files(folder)]
    say(f"to {repo} ({'public' if public else 'private'}):")
    for path in files:
        say(f"  {path.name:<36} {path.stat().st_size:>15,} bytes")
    for local in sorted(set(re.findall(r"(?<=[\s`])/[^\s`]+", card.read_text("utf-8")))):
        say(f"note: {card} names {local}, which exists here only; edit it before you push")
    if not yes:
        say("nothing was sent; --yes sends it")
        return
    lineage = (values.get("eagle3lib") or {}).get("lineage")
    say(
        f"sent: {_send(Path(folder), [path.name for path in files], repo, public, f'EAGLE-3 draft, lineage {lineage}')}"
    )


def _send(folder: Path, names: list[str], repo: str, public: bool, message: str) -> str:
    """The commit's address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    api = HfApi()
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.repo_info(repo).private:
            raise UserError(f"push: {repo} exists and is public; choose another, or say --public")
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, allow_patterns=names, delete_patterns=REPLACED, commit_message=message
        )
    except OfflineModeIsEnabled:
        raise UserError("push: HF_HUB_OFFLINE is set; unset it for this command") from None
    except UserError:
        raise
    except Exception as error:  # the hub's refusals and the many ways in which a network fails
        reason = one_line(f"{type(error).__name__}: {error}")
        raise UserError(
            f"push: {repo}: {reason}; check the name, the network and that HF_TOKEN may write there"
        ) from None
    return commit.commit_url
