"""Files of a hub's model into huggingface_hub's cache; a large file that broke off goes on where it ended.

The library itself begins such a file anew (huggingface_hub 2.4). Here its bytes are gathered beside the cache's blobs and put
among them when they are complete and have the right SHA-256; the library then links what it finds.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from exporter.checkpoints.hub_model import HubModel, gated, short
from runtime_py.errors import WorkError

_RESERVE = 1 << 28  # bytes left free behind a download
_LARGE = 1 << 20  # what is smaller is begun anew
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download(model: HubModel, commit: str, sizes: dict[str, int], note: Callable[[str], None]) -> Path:
    """Fetch the files ``sizes`` (name -> bytes) of ``commit`` that are not in the cache yet; returns the snapshot's folder.

    Raises ``WorkError`` with the remedy; run again, it goes on where it stopped.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    def is_here(name: str) -> bool:
        return isinstance(try_to_load_from_cache(model.repo_id, name, revision=commit), str)

    absent = {name: size for name, size in sorted(sizes.items(), key=lambda item: item[1]) if not is_here(name)}
    _check_space(Path(constants.HF_HUB_CACHE), sum(absent.values()))
    started, folder = time.monotonic(), Path()
    for i, (name, size) in enumerate(absent.items(), start=1):
        note(f"downloading {name}, {size / 1e6:,.1f} MB ({i} of {len(absent)}, {time.monotonic() - started:.0f} s)")
        _fetch(model, name, commit, size)
    for name in sizes:
        path = Path(hf_hub_download(model.repo_id, name, revision=commit, local_files_only=True))
        folder = path.parents[name.count("/")]
    return folder


def _fetch(model: HubModel, name: str, commit: str, size: int) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    try:
        if size >= _LARGE:
            _gather(model, name, commit)
        hf_hub_download(model.repo_id, name, revision=commit)
    except WorkError:
        raise
    except GatedRepoError:
        raise WorkError(gated(model)) from None
    except HfHubHTTPError as error:
        raise WorkError(f"The hub refused {name} of {model.repo_id} ({short(error)}). Run this again to go on.") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise WorkError(f"The disk is full while {name} is downloaded. Make room and run this again to go on.") from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise WorkError(f"{error.filename or 'The cache'} cannot be written. Set HF_HOME to a folder that can.") from None
        raise WorkError(f"The download of {name} broke off ({short(error)}). Run this again to go on.") from None
    except Exception as error:  # the transport's own kinds differ from version to version
        raise WorkError(f"The download of {name} broke off ({short(error)}). Run this again to go on.") from None


def _gather(model: HubModel, name: str, commit: str) -> None:
    """Put the blob of a large file into the cache, going on with what an earlier run left of it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(model.repo_id, name, revision=commit)
    about = get_hf_file_metadata(url)
    if about.etag is None or about.size is None:
        return  # the library's own way
    blob = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model.repo_id, repo_type="model") / "blobs" / about.etag
    if blob.exists():
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    headers = build_hf_headers()
    if urlsplit(about.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub alone
    part = blob.with_name(f"{blob.name}.part")
    with part.open("ab") as file:
        _lock(file.fileno(), name)
        if file.tell() < about.size:
            http_get(about.location, file, resume_size=file.tell(), headers=headers, expected_size=about.size)
    _check(part, name, about.etag, about.size)
    part.replace(blob)


def _lock(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise WorkError(f"Another process is downloading {name}. Wait for it, then run this again.") from None


def _check(part: Path, name: str, etag: str, size: int) -> None:
    """Refuse and remove bytes that are not the file's: its entity tag is the SHA-256 where the hub stores large files."""
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    if part.stat().st_size != size or (_SHA256.fullmatch(etag) and digest.hexdigest() != etag):
        part.unlink()
        raise WorkError(f"{name} arrived damaged and was removed. Run this again to download it anew.")


def _check_space(cache: Path, wanted: int) -> None:
    """Refuse a download that cannot fit before it begins."""
    place = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if wanted and wanted + _RESERVE > free:
        raise WorkError(
            f"The download needs {wanted / 1e9:,.1f} GB, and {place} has {free / 1e9:,.1f} GB free. Make room, or set HF_HOME "
            "to a folder on a larger disk."
        )
