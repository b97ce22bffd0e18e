"""The history part of a build: cluster it, read it block by block, write episodes/ of the bundle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtime_py.bundle import EPISODES_FILE, EpisodeRecord, EpisodesFile, SegmentRecord
from runtime_py.embedder import Embedder
from runtime_py.episodes.cache_files import write_cache, write_sealed
from runtime_py.episodes.clustering import cluster_store
from runtime_py.episodes.coverage import UNKNOWN_SCRIPT, unknown_share
from runtime_py.episodes.history import History
from runtime_py.episodes.reader import EpisodeReader, ReadProgress
from runtime_py.episodes.rendering import Encode, TokenStream
from runtime_py.episodes.segments import Segment, make_segments
from runtime_py.episodes.store import Store
from runtime_py.language_model import LanguageModel
from runtime_py.manifest import Template
from runtime_py.tensor_files import write_tensors


@dataclasses.dataclass(frozen=True)
class HistoryTools:
    """What reading a history needs."""

    model: LanguageModel
    embedder: Embedder
    encode: Encode
    template: Template


def fill_store(
    store: Store,
    history: History,
    tools: HistoryTools,
    notes: Callable[[str], None] = lambda _: None,
    progress: ReadProgress = lambda _episode, _done, _total: None,
    checkpoint: bool = True,
) -> tuple[list[Segment], list[int]]:
    """Put ``history`` into an empty store, cluster it and read every episode; or go on where a killed attempt was.

    Returns the segments and the episode of each; no episodes when the store was clustered before.
    """
    plan = tools.model.plan
    if not store.utterances():
        store.append(history.utterances)
    labels: list[int] = []
    segments = make_segments(store.utterances())
    if not store.episodes():
        segments, labels = cluster_store(store, tools.embedder, tools.encode, plan)
    count = len(store.episodes())
    if count < plan.episodes:
        notes(f"{count} episodes instead of {plan.episodes}: the history has only {len(segments)} different segments")
    stream = TokenStream(tools.template.prefix, tools.encode, store.speakers, store.utterances())
    notes(f"{len(store.utterances())} utterances, {len(segments)} segments, {len(stream)} tokens, {count} episodes")
    share = unknown_share(tools.embedder.tokenizer, (utterance.text for utterance in store.utterances()))
    if share > UNKNOWN_SCRIPT:
        notes(
            f"WARNING: the sentence encoder hardly knows this script: {share:.0%} of the letters fall apart in its vocabulary. "
            "Episodes and routing will be poor; build with --embedder multilingual-e5-small"
        )
    reader = EpisodeReader(tools.model, store, stream, progress=progress, checkpoint=checkpoint)
    for episode in range(count):
        reader.sealed(episode)
    return segments, labels


def write_episodes(store: Store, segments: list[Segment], labels: list[int], folder: Path) -> None:
    """Write ``folder/episodes/`` from a filled store."""
    out = folder / "episodes"
    out.mkdir()
    records = []
    for index, entry in enumerate(store.episodes()):
        cache, keys = store.cache(index), store.sealed(index)
        assert cache is not None and keys is not None
        names = f"episode-{index}.safetensors", f"episode-{index}.sealed.safetensors"
        write_cache(out / names[0], cache)
        write_sealed(out / names[1], keys, cache.n_seen)
        records.append(EpisodeRecord(*names, cache.n_seen, entry.prompt, entry.medoids))
    centroids = store.centroids()
    assert centroids is not None
    width = max(len(r.medoids) for r in records)
    medoids = np.full((len(records), width), -1, np.int32)
    for row, record in zip(medoids, records, strict=True):
        row[: len(record.medoids)] = record.medoids
    write_tensors(out / "centroids.safetensors", {"centroids": centroids, "medoids": medoids}, {})
    content = EpisodesFile(
        list(store.speakers),
        store.utterances(),
        [SegmentRecord(s.first, s.last, s.part, label) for s, label in zip(segments, labels, strict=True)],
        records,
    )
    text = json.dumps(dataclasses.asdict(content), indent=1, ensure_ascii=False)
    (folder / EPISODES_FILE).write_text(text + "\n", encoding="utf-8")
