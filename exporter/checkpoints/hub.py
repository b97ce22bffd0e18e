"""Models of the Hugging Face hub, in huggingface_hub's own cache: found there, or downloaded into it and resumed.

``HF_HOME``, ``HF_HUB_CACHE``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` mean what they mean to that library.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.checkpoints.hub_download import download
from exporter.checkpoints.hub_model import HubModel, gated, short
from exporter.checkpoints.weight_index import INDEX, WHOLE, weight_index
from runtime_py.errors import UsageError, WorkError

Note = Callable[[str], None]

# All that an export reads of a repository; nothing in it is code.
FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors.index.json",
    "model*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.txt",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "*_Pooling/config.json",
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_ANSWER_SECONDS = 3.0  # for the hub's first answer; what is not there is said within five


@dataclass(frozen=True)
class Snapshot:
    """A complete copy in the cache: its folder and commit."""

    folder: Path
    revision: str


def find_snapshot(model: HubModel, revision: str | None, offline: bool, note: Note = lambda _: None) -> Snapshot:
    """The copy of ``revision`` (default: main) in the cache, brought up to date from the hub unless ``offline``.

    Raises ``UsageError`` for a revision that cannot be one, ``WorkError`` with the remedy when there is no complete copy.
    """
    wanted = revision or "main"
    if not _REVISION.fullmatch(wanted):
        raise UsageError(
            f"--revision {revision!r} is no branch, tag or commit. Write one like main, v1.0 or a commit's 40 digits."
        )
    from huggingface_hub import constants

    cached, lacking = _cached(model, wanted)
    if cached is not None and not lacking and (offline or constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(wanted)):
        return cached
    if offline or constants.HF_HUB_OFFLINE:
        raise WorkError(_not_here(model, wanted, cached, lacking, "and the hub is not asked (--offline or HF_HUB_OFFLINE)"))
    try:
        commit, sizes = _listed(model, wanted)
    except ConnectionError as error:
        if cached is not None and not lacking:
            note(f"the hub cannot be reached; using commit {cached.revision[:12]} from the cache")
            return cached
        raise WorkError(_not_here(model, wanted, cached, lacking, f"and the hub cannot be reached ({error})")) from None
    folder = download(model, commit, sizes, note)
    if lacking := missing_files(folder):
        raise WorkError(f"{model.repo_id} at {commit[:12]} has no {', '.join(lacking)}. Take a repository with a whole model.")
    if wanted != commit:  # so that the same name finds it without a network; the cache's layout is documented
        name = folder.parents[1] / "refs" / wanted
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_text(commit, encoding="ascii")
    return Snapshot(folder, commit)


def cached_snapshot(model: HubModel, revision: str = "main") -> Snapshot | None:
    """The complete copy in the cache, without asking the hub, or None."""
    found, lacking = _cached(model, revision)
    return None if lacking else found


def _cached(model: HubModel, revision: str) -> tuple[Snapshot | None, list[str]]:
    """The copy in the cache, if there is one, and the files that it lacks."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(model.repo_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError, ValueError):
        return None, []
    return Snapshot(folder, folder.name), missing_files(folder)


def missing_files(folder: Path) -> list[str]:
    """What a folder lacks to be a decoder's checkpoint, by name."""
    lacking = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    try:
        shards = set(weight_index(folder).values()) or {WHOLE}
    except WorkError:
        return [*lacking, INDEX]
    return lacking + sorted(name for name in shards if not (folder / name).is_file())


def _not_here(model: HubModel, revision: str, cached: Snapshot | None, lacking: Sequence[str], why: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    root = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo_id, repo_type="model") / "snapshots"
    looked = ", ".join(lacking) if cached else f"config.json, tokenizer.json, {WHOLE} (or {INDEX} and its shards)"
    accept = f"accept the licence ({model.licence}) at {model.page}, run `hf auth login`, then" if model.gated else "just"
    return (
        f"{model.repo_id}, revision {revision}, is not {'complete ' if cached else ''}on this machine, {why}.\n"
        f"  looked for   {looked}\n"
        f"  in           {cached.folder if cached else root}\n"
        f"  licence      {model.licence}: {model.page}\n"
        f"  to download  {accept} run this again with a network\n"
        f"  or           name files that you have: {model.flag} PATH"
    ) + (
        "\n  or           try shapes, sizes and speed without the weights: --weights-source random" if model.shapes_known else ""
    )


def _listed(model: HubModel, revision: str) -> tuple[str, dict[str, int]]:
    """The commit of ``revision`` on the hub and the files wanted of it with their bytes. Raises ``ConnectionError``."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        info = HfApi().model_info(model.repo_id, revision=revision, files_metadata=True, timeout=_ANSWER_SECONDS)
    except GatedRepoError:
        raise WorkError(gated(model)) from None
    except RepositoryNotFoundError:
        raise WorkError(
            f"The hub has no repository {model.repo_id!r} that this account may see. Check the name at {model.page}; for a "
            "private one run `hf auth login` first."
        ) from None
    except RevisionNotFoundError:
        raise WorkError(
            f"{model.repo_id} has no revision {revision!r}. Its branches and commits: {model.page}/commits/main"
        ) from None
    except HfHubHTTPError as error:
        raise WorkError(f"The hub refused to describe {model.repo_id} ({short(error)}). Try again later.") from None
    except Exception as error:  # the transport's own kinds differ from version to version
        raise ConnectionError(short(error)) from None
    found = {item.rfilename: int(item.size or 0) for item in info.siblings or []}
    sizes = {name: size for name, size in found.items() if any(fnmatch.fnmatchcase(name, p) for p in FILES)}
    if not any(name.endswith(".safetensors") for name in sizes):
        pickles = [name for name in found if name.endswith((".bin", ".pth", ".pt"))]
        why = f"; {pickles[0]} is a pickle, which can run code when read" if pickles else ""
        raise WorkError(f"{model.repo_id} has no model*.safetensors{why}. Take a repository with safetensors weights.")
    return str(info.sha), sizes
