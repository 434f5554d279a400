"""From a model's name to its folder or its config.json: "tiny", a folder, or a hub id. No torch.

    Hugging Face, a mirror of it, or ModelScope, as KVLAB_HUB says --resolve_model--> folder with all files
                                                                   --read_config----> config.json alone, a few KB
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlab.model.config import _read_json

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


class CheckpointError(ValueError):
    """A model that cannot be found, downloaded or read. The message says what is wrong and what to do."""


def resolve_model(name: str | os.PathLike, source: str | None = None, files: Sequence[str] = HUB_FILES) -> Path:
    """The local folder of a model: "tiny" (shipped with kvlab), a folder's path, or a hub id such as
    "Qwen/Qwen2.5-0.5B-Instruct", which is downloaded once and cached.

    `source`, or else the environment variable KVLAB_HUB, says where from: "hf" (the default), "modelscope",
    or the https URL of a mirror. files: patterns of those to download. Raises CheckpointError when there is no
    such folder or the hub cannot be reached.
    """
    text = os.fspath(name)
    if text == "tiny":
        from kvlab.tiny import MODEL_DIR

        return Path(MODEL_DIR)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return folder
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text):
        raise CheckpointError(
            f"model {text!r} is no folder here: give 'tiny', a folder, or a hub id like 'Qwen/Qwen3-0.6B'"
        )
    return download(text, files, source)


def read_config(name: str | os.PathLike, source: str | None = None) -> dict[str, Any]:
    """The config.json of a model, named as for `resolve_model`. Of a hub's files no other is downloaded."""
    folder = resolve_model(name, source, files=("config.json",))
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"no config.json in {str(folder)!r}: give a model's folder, downloaded whole")
    return _read_json(folder / "config.json")


def download(hub_id: str, files: Sequence[str], source: str | None = None) -> Path:
    """The folder of a model's `files` (patterns) from where `source` or KVLAB_HUB says; cached by the hub's client."""
    source = source or os.environ.get("KVLAB_HUB") or "hf"
    mirror = source if source.startswith(("https://", "http://")) else None
    try:
        if source == "modelscope":
            from modelscope import snapshot_download

            return Path(snapshot_download(hub_id, allow_patterns=list(files)))
        if source == "hf" or mirror:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(hub_id, allow_patterns=list(files), endpoint=mirror))
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{source!r} needs a package: pip install {error.name}") from error
    except Exception as error:  # many kinds: offline, refused, unknown name, licence not accepted, disk full
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(
            f"could not download {hub_id!r} from {source!r} ({reason}). "
            "Check the name and the network; set KVLAB_HUB to 'modelscope' or to a mirror's https URL; or "
            "download the folder elsewhere and give its path"
        ) from error
    raise CheckpointError(f"KVLAB_HUB is {source!r}: use 'hf', 'modelscope', or the https URL of a mirror")
