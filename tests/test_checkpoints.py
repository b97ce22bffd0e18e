"""Checkpoints: the same tensors, ids and refusals from a GGUF file and from Hugging Face folders."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LlamaSaver

from exporter.checkpoints.base import sha256_of
from exporter.checkpoints.embedders import open_encoder
from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.checkpoints.hf_folder import HFCheckpoint
from exporter.checkpoints.locating import ModelRequest, locate_decoder
from exporter.checkpoints.opening import open_decoder
from exporter.models.decoder import load_decoder
from exporter.models.dense import dense_logits
from runtime_py.errors import UsageError, WorkError

TEXTS = [
    "Plain words, and don't forget contractions: it's, we'll, I'D.",
    "  leading spaces\n\n\ttabs and\r\nline ends   ",
    "naïve café — “quotes” … 100% €5",
    "오늘은 비가 와요. 今日は雨です。 Привет, мир! مرحبا",
    "👩\u200d🚀🏽 family 👨‍👩‍👧‍👦 flags 🇰🇷",
    "def f(x):\n    return x**2  # code_with_underscores",
    "\u0301combining, nul \x00 and \ufeff bom",
    "",
]


def load(folder: Path) -> torch.Tensor:
    """Logits of a fixed text by our decoder."""
    checkpoint = HFCheckpoint(folder, "tiny")
    return dense_logits(load_decoder(checkpoint.config, checkpoint.tensor), tokens())


def tokens() -> torch.Tensor:
    return torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"dtype": torch.bfloat16},
        {"max_shard_size": "20KB"},
    ],
    ids=str,
)
def test_hf_folders_give_transformers_logits(tmp_path: Path, save_llama: LlamaSaver, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_llama(tmp_path, **changes)
    assert ("max_shard_size" in changes) == (len(list(folder.glob("*.safetensors"))) > 1)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(tokens()[None]).logits[0]
    assert expected.abs().max() > 2  # random weights large enough to tell
    torch.testing.assert_close(load(folder), expected, rtol=0, atol=2e-5)
    assert HFCheckpoint(folder, "tiny").config.tied == changes.get("tie_word_embeddings", False)


def test_the_older_place_of_the_rope_base_is_read(tmp_path: Path, save_llama: LlamaSaver) -> None:
    folder = save_llama(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    expected = load(folder)
    edit_config(folder, lambda data: data.update(rope_theta=5000.0, rope_scaling=None, rope_parameters=None))
    assert torch.equal(load(folder), expected)


def test_a_lost_shard_is_an_error_even_when_it_holds_only_the_head(tmp_path: Path, save_llama: LlamaSaver) -> None:
    names = [f.name for f in sorted(save_llama(tmp_path / "all", max_shard_size="20KB").glob("*.safetensors"))]
    index = json.loads((tmp_path / "all" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert [k for k, v in index["weight_map"].items() if v == names[-1]] == ["lm_head.weight"]
    for i, lost in enumerate(names):
        folder = save_llama(tmp_path / str(i), max_shard_size="20KB")
        (folder / lost).unlink()
        with pytest.raises(WorkError, match="a shard is missing") as caught:
            load(folder)
        assert str(folder) in str(caught.value) and lost in str(caught.value)
        (folder / "model.safetensors.index.json").unlink()  # a copy by hand may lack that too
        with pytest.raises(WorkError, match="a shard may be missing"):
            load(folder)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path, save_llama: LlamaSaver) -> None:
    folder = save_llama(tmp_path / "sharded", max_shard_size="20KB")
    expected = load(folder)
    shutil.copy(folder / "model-00001-of-00005.safetensors", folder / "consolidated.safetensors")
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors at all")
    assert torch.equal(load(folder), expected)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(WorkError, match="mixes two models"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda index: index["weight_map"].update({"model.norm.weight": "model-00001-of-00005.safetensors"}), "where it is not"),
        (lambda index: index["weight_map"].update({"model.more.weight": "model-00002-of-00005.safetensors"}), "where it is not"),
        (lambda index: index.update(weight_map=[]), "no usable weight_map"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "../other.safetensors"}), "no usable weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    tmp_path: Path, save_llama: LlamaSaver, change: Callable[[dict[str, Any]], Any], found: str
) -> None:
    path = save_llama(tmp_path, max_shard_size="20KB") / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    change(index)
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(WorkError, match=found) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


def test_quantised_checkpoints_are_refused(tmp_path: Path, save_llama: LlamaSaver) -> None:
    from safetensors.torch import load_file, save_file

    path = save_llama(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path)
    with pytest.raises(WorkError, match=r"up_proj\.weight is stored as I8; supported are F32, F16, BF16"):
        load(tmp_path)
    edit_config(tmp_path, lambda data: data.update(quantization_config={"quant_method": "gptq"}))
    with pytest.raises(WorkError, match="the checkpoint is quantised"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_a_truncated_safetensors_file_is_named(tmp_path: Path, save_llama: LlamaSaver, kept: float) -> None:
    path = save_llama(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if kept == 0.5 else int(kept)])
    with pytest.raises(WorkError, match="damaged or cut short") as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


def test_a_folder_with_pickles_only_is_refused_unread(tmp_path: Path, save_llama: LlamaSaver) -> None:
    (save_llama(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(WorkError, match=r"pytorch_model\.bin is a pickle.*save_pretrained") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


NEEDED = [
    "model_type",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_config_key_is_named_with_its_file(tmp_path: Path, save_llama: LlamaSaver, key: str) -> None:
    edit_config(save_llama(tmp_path), lambda data: data.pop(key))
    with pytest.raises(WorkError, match=f"{key} is None") as caught:
        load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "mixtral"}, "'mixtral' has a mixture of experts, which is not supported"),
        ({"model_type": "qwen3_moe"}, "a mixture of experts, which is not supported. Supported are llama"),
        ({"model_type": "qwen2_5_vl"}, "images or sound beside text, which is not supported"),
        ({"model_type": "qwen4"}, "'qwen4' is not supported. Supported are llama, mistral, qwen2, qwen3; the nearest is qwen"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor is 1; more than low_freq_factor, 4, is expected",
        ),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings"),
        ({"final_logit_softcapping": 30.0}, "soft-capped logits"),
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling 'linear'"),
        ({"rope_parameters": ["yarn"]}, "RoPE scaling"),
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "MLP biases"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"sliding_window": 64}, "sliding window"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads is 'two'"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
    ],
)
def test_unsupported_configurations_name_file_and_value(
    tmp_path: Path, save_llama: LlamaSaver, changes: dict[str, Any], found: str
) -> None:
    edit_config(save_llama(tmp_path), lambda data: data.update(changes))
    with pytest.raises(WorkError) as caught:
        load(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value) and found in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 98}, {"intermediate_size": 40}, {"hidden_size": 64}, {"num_key_value_heads": 4}], ids=str
)
def test_weights_of_another_shape_are_named(tmp_path: Path, save_llama: LlamaSaver, changes: dict[str, int]) -> None:
    edit_config(save_llama(tmp_path), lambda data: data.update(changes))
    with pytest.raises(WorkError, match=r"The tensor model\.\S+ has the shape \[.+\]; by the .* it is \[.+\]"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot be shared by 3 KV heads"),
        ({"head_dim": 7}, "A head of 7 dimensions cannot be rotated"),
    ],
)
def test_heads_that_make_no_sense_are_refused(
    tmp_path: Path, save_llama: LlamaSaver, changes: dict[str, int], found: str
) -> None:
    edit_config(save_llama(tmp_path), lambda data: data.update(changes))
    with pytest.raises(WorkError, match=found):
        load(tmp_path)


@pytest.mark.parametrize(("text", "found"), [("{", "cannot be read"), ("[1]", "holds no JSON object"), (None, "missing")])
def test_an_unusable_config_file_is_named(tmp_path: Path, save_llama: LlamaSaver, text: str | None, found: str) -> None:
    path = save_llama(tmp_path) / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkError, match=found) as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)


def test_hf_tokenizer_adds_no_bos_and_names_its_stop_ids(tmp_path: Path, save_llama: LlamaSaver) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = save_llama(tmp_path, eos_token_id=[2, 4])
    words = Tokenizer(models.WordLevel({"<s>": 1, "</s>": 2, "<unk>": 0, "hello": 3, "<eot>": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ bos_token }}x"
    ).save_pretrained(folder)
    checkpoint = HFCheckpoint(folder, "tiny")
    assert Tokenizer.from_str(checkpoint.tokenizer_json()).encode("hello").ids == [3]
    assert checkpoint.stop_ids() == [2, 4]
    assert checkpoint.chat_template() == "{{ bos_token }}x"
    assert checkpoint.special_tokens()["bos_token"] == "<s>"


def test_a_folder_without_tokenizer_or_template_says_so(tmp_path: Path, save_llama: LlamaSaver) -> None:
    checkpoint = HFCheckpoint(save_llama(tmp_path), "tiny")
    with pytest.raises(WorkError, match=r"tokenizer\.json is needed") as caught:
        checkpoint.tokenizer_json()
    assert str(tmp_path) in str(caught.value)


def test_source_digests_the_shards_and_holds_no_path(tmp_path: Path, save_llama: LlamaSaver) -> None:
    folder = save_llama(tmp_path, max_shard_size="20KB")
    source = HFCheckpoint(folder, "tiny").source()
    assert source.weights_sha256 == sha256_of(sorted(folder.glob("*.safetensors")))
    assert str(tmp_path) not in json.dumps(dataclasses.asdict(source))


def test_gguf_tokenizer_gives_transformers_ids_and_splits_digits(smollm: GGUFCheckpoint, transformers_tokenizer: Any) -> None:
    from tokenizers import Tokenizer

    ours, theirs = Tokenizer.from_str(smollm.tokenizer_json()), transformers_tokenizer
    for text in TEXTS:
        words = "".join(c for c in text if not c.isnumeric())  # transformers leaves numbers whole, the model was not
        assert ours.encode(words).ids == theirs.encode(words, add_special_tokens=False), text
        assert ours.decode(ours.encode(text).ids) == text
    digits = [ours.token_to_id(d) for d in "0123456789"]
    assert ours.encode("0123456789").ids == digits
    assert ours.encode("in 2025").ids == [*ours.encode("in ").ids, *(digits[d] for d in (2, 0, 2, 5))]
    for before in ("a\n\n", "a   ", "a\t "):  # digits are cut off before blanks are: the blanks stay together
        assert ours.encode(f"{before}7").ids == [*ours.encode(before).ids, digits[7]]
    assert ours.encode("a<|im_end|>", add_special_tokens=True).ids == [*ours.encode("a").ids, 2]


def test_gguf_describes_the_model(smollm: GGUFCheckpoint) -> None:
    config = smollm.config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden, config.ffn, config.vocab_size, config.context) == (576, 1536, 49152, 8192)
    assert (config.rope_theta, config.tied) == (100000.0, True)
    assert config.norm_eps == pytest.approx(1e-5)
    assert smollm.stop_ids() == [2]
    assert smollm.special_tokens() == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    with pytest.raises(WorkError, match=r"no tensor 'blk\.30\.attn_q\.weight'") as caught:
        smollm.tensor("model.layers.30.self_attn.q_proj.weight")
    assert str(smollm.path) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 1000, 100_000, 1_800_000])
def test_a_truncated_gguf_file_is_named(tmp_path: Path, smollm: GGUFCheckpoint, kept: int) -> None:
    path = tmp_path / "short.gguf"
    with smollm.path.open("rb") as file:
        path.write_bytes(file.read(kept))
    with pytest.raises(WorkError, match=r"cut short\. Copy it again") as caught:
        open_decoder(locate_decoder(ModelRequest(str(path))))
    assert str(path) in str(caught.value)


def test_another_file_is_not_taken_for_gguf(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello " * 100, encoding="utf-8")
    with pytest.raises(WorkError, match="no readable GGUF file") as caught:
        open_decoder(locate_decoder(ModelRequest(str(path))))
    assert str(path) in str(caught.value)


def test_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=r"does not exist\. Name a \.gguf file"):
        GGUFCheckpoint(tmp_path / "none.gguf", "none")
    with pytest.raises(WorkError, match=r"does not exist\. Name a \.gguf file"):
        HFCheckpoint(tmp_path / "none", "none")


@pytest.mark.parametrize(
    ("name", "near"), [("smolm2-135m", True), ("bloom", False), ("none/such.gguf", False), ("./none", False)]
)
def test_unknown_names_list_the_presets(name: str, near: bool) -> None:
    with pytest.raises(UsageError, match=r"Presets: .*smollm2-135m") as caught:
        locate_decoder(ModelRequest(name))
    assert repr(name) in str(caught.value)
    assert ("Did you mean 'smollm2-135m'?" in str(caught.value)) == near
    if "/" not in name:  # else it may be a repository
        with pytest.raises(UsageError, match=r"Presets: minilm-l6, "):
            open_encoder(name)
