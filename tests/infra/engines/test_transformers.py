"""What only an engine with a model can show: true logprobs, every architecture, clear errors."""

import itertools
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from penstock.infra.engines.base import Completion, GroupRequest, Sampling
from penstock.infra.engines.transformers.decoder import PlainDecoder, TracedDecoder, choose, open_decoder
from penstock.infra.engines.transformers.engine import TransformersEngine, load_model
from penstock.infra.errors import EngineError
from penstock.infra.tensors.stream import TensorBytes
from tests.support.paths import ROOT
from tests.support.refusals import one_line

pytestmark = pytest.mark.costly

SAMPLING = Sampling(max_new_tokens=10, stop_ids=(2,))
PROMPT = np.array([4, 9, 11, 30, 1], dtype=np.int32)
SMALL = {"vocab_size": 40, "hidden_size": 32, "max_position_embeddings": 128, "initializer_range": 0.2}
HEADS = {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def random_model(kind: str) -> Any:
    import transformers as hf

    torch.manual_seed(1)
    configs: dict[str, Any] = {
        "qwen3": hf.Qwen3Config(**SMALL, **HEADS, head_dim=16, tie_word_embeddings=True),
        "qwen2": hf.Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=False),
        "llama": hf.LlamaConfig(**SMALL, **HEADS),
        "gpt2": hf.GPT2Config(vocab_size=40, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2),
        "sliding": hf.MistralConfig(**SMALL, **HEADS, sliding_window=6),
    }
    return hf.AutoModelForCausalLM.from_config(configs[kind]).eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    random_model("qwen3").save_pretrained(path)
    return path


def drawn(engine: TransformersEngine, **changes: Any) -> list[Completion]:
    request = GroupRequest(group=5, prompt_ids=PROMPT, samples=(0, 1, 2, 3), rows=4, seed=3, sampling=SAMPLING)
    engine.submit(replace(request, **changes))
    found = []
    while not engine.idle:
        found += engine.step()
    return sorted(found, key=lambda completion: completion.sample)


def recomputed(model: Any, prompt: Any, completion: Completion, *, temperature: float) -> np.ndarray[Any, Any]:
    """Logprobs of the completion from one full forward pass."""
    ids = torch.tensor(np.concatenate([prompt, completion.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gpt2", "sliding"])
def test_logprobs_are_those_of_a_full_forward_pass(tmp_path: Path, kind: str) -> None:
    model = random_model(kind)
    model.save_pretrained(tmp_path)
    engine = TransformersEngine(tmp_path)
    for prompt, temperature in itertools.product((PROMPT, np.arange(25, dtype=np.int32)), (1.0, 0.7)):
        for completion in drawn(engine, prompt_ids=prompt, sampling=replace(SAMPLING, temperature=temperature)):
            expected = recomputed(model, prompt, completion, temperature=temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


def test_plain_attention_models_are_traced_and_others_fall_back() -> None:
    assert isinstance(open_decoder(random_model("qwen3")), TracedDecoder)
    assert isinstance(open_decoder(random_model("llama")), TracedDecoder)
    assert not isinstance(open_decoder(random_model("sliding")), TracedDecoder)


def test_both_decoders_give_the_same_logits() -> None:
    model = random_model("qwen3")
    ids = torch.randint(0, 40, (3, 6), generator=torch.Generator().manual_seed(0))
    found = []
    for decoder in (PlainDecoder(model), TracedDecoder(model)):
        with torch.inference_mode():
            logits = [decoder.prefill(torch.arange(7), rows=3, room=6)]
            logits += [decoder.next(ids[:, position]) for position in range(6)]
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_weights_that_are_not_numbers_stop_the_engine_with_their_version(directory: Path) -> None:
    engine = TransformersEngine(directory)
    broken = [replace(tensor, data=np.full(tensor.shape, np.nan, np.float32).tobytes()) for tensor in weights(engine)]
    engine.load_weights(1, broken)
    with pytest.raises(EngineError, match="version 1 produces NaN logits"):
        drawn(engine)


def weights(engine: TransformersEngine, *, dtype: torch.dtype = torch.float32) -> list[TensorBytes]:
    return [
        TensorBytes(
            name=name,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            data=value.to(dtype).contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for name, value in engine._model.named_parameters()
    ]


def test_tied_embeddings_travel_once_and_load_into_both_ends(directory: Path) -> None:
    engine, other = TransformersEngine(directory), TransformersEngine(directory)
    tensors = weights(engine)
    assert "lm_head.weight" not in {tensor.name for tensor in tensors}
    halved = [replace(tensor, data=(np.frombuffer(tensor.data, np.float32) * np.float32(0.5)).tobytes()) for tensor in tensors]
    drawn(other)  # what was traced with the old weights must follow the new ones
    engine.load_weights(1, halved)
    other.load_weights(1, halved)
    model = engine._model
    for one, two in zip(drawn(engine), drawn(other), strict=True):
        assert one.logprobs.tobytes() == two.logprobs.tobytes()
        np.testing.assert_allclose(one.logprobs, recomputed(model, PROMPT, one, temperature=1.0), atol=2e-5)


def test_bfloat16_weights_load_into_a_float32_model_exactly(directory: Path) -> None:
    engine = TransformersEngine(directory)
    engine.load_weights(1, weights(engine, dtype=torch.bfloat16))
    assert all(torch.equal(value, value.bfloat16().float()) for value in engine._model.parameters())


def test_a_bfloat16_model_reports_float32_logprobs(directory: Path) -> None:
    engine = TransformersEngine(directory, dtype="bfloat16")
    for completion in drawn(engine):
        assert completion.logprobs.dtype == np.float32
        np.testing.assert_allclose(completion.logprobs, recomputed(engine._model, PROMPT, completion, temperature=1.0), atol=0.1)


@pytest.mark.slow
def test_another_process_draws_the_same_bits(directory: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import numpy as np\n"
        "from penstock.infra.engines.base import GroupRequest, Sampling\n"
        "from penstock.infra.engines.transformers.engine import TransformersEngine\n"
        f"engine = TransformersEngine({str(directory)!r})\n"
        "engine.submit(GroupRequest(group=5, prompt_ids=np.array([4, 9, 11, 30, 1], dtype=np.int32), samples=(2,), rows=4, seed=3,"
        " sampling=Sampling(max_new_tokens=10, stop_ids=(2,))))\n"
        "found = []\n"
        "while not engine.idle: found += engine.step()\n"
        "print(found[0].token_ids.tobytes().hex(), found[0].logprobs.tobytes().hex())\n"
    )
    root = ROOT
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=180).stdout.split()
    here = drawn(TransformersEngine(directory))[2]
    assert answer == [here.token_ids.tobytes().hex(), here.logprobs.tobytes().hex()]


@pytest.mark.parametrize("content", ["nothing", "empty", "not json", "unknown type", "no weights", "cut weights", "other weights"])
def test_a_directory_without_a_model_is_one_line_that_says_what_to_do(tmp_path: Path, directory: Path, content: str) -> None:
    path = tmp_path / "model"
    if content != "nothing":
        path.mkdir()
    config = (directory / "config.json").read_text()
    written = {"not json": "{", "unknown type": '{"model_type": "nobody-knows"}'}.get(content, config)
    if content not in {"nothing", "empty"}:
        (path / "config.json").write_text(written)
    held = (directory / "model.safetensors").read_bytes()
    if content == "cut weights":
        (path / "model.safetensors").write_bytes(held[: len(held) // 2])
    if content == "other weights":
        (path / "model.safetensors").write_bytes(held.replace(b"model.layers.1.", b"model.layers.7."))
    with one_line(EngineError, str(path), "penstock model tiny"):
        TransformersEngine(path)


@pytest.mark.parametrize(("ids", "limit"), [([0] * 119, "128 positions"), ([3, 40], "outside the model's vocabulary of 40")])
def test_a_group_without_positions_or_with_ids_outside_the_vocabulary_is_refused_when_submitted(
    directory: Path, ids: list[int], limit: str
) -> None:
    with pytest.raises(EngineError, match=limit):
        drawn(TransformersEngine(directory), prompt_ids=np.array(ids, dtype=np.int32))


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).expand(100_000, -1)
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    ids, logprobs, support = choose(logits, uniform, SAMPLING)
    assert support is None
    np.testing.assert_allclose(torch.bincount(ids, minlength=4).numpy() / 100_000, [0.5, 0.0, 0.3, 0.2], atol=2e-5)
    np.testing.assert_allclose(logprobs.exp().numpy(), np.array([0.5, 0.0, 0.3, 0.2])[ids.numpy()], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 2}, {0: 0.5 / 0.8, 2: 0.3 / 0.8}),
        ({"top_p": 0.6}, {0: 0.5 / 0.8, 2: 0.3 / 0.8}),
        ({"top_p": 0.5}, {0: 1.0}),
        ({"temperature": 0.5}, {0: 0.25 / 0.38, 2: 0.09 / 0.38, 3: 0.04 / 0.38}),
        ({"greedy": True}, {0: 0.5}),
    ],
)
def test_logprobs_are_of_the_distribution_drawn_from(changes: dict[str, Any], expected: dict[int, float]) -> None:
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).expand(1000, -1)
    ids, logprobs, _ = choose(logits, torch.linspace(0, 0.999999, 1000, dtype=torch.float64), replace(SAMPLING, **changes))
    found = dict(zip(ids.tolist(), logprobs.exp().tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_limited_distribution_is_recorded_and_its_logprobs_are_those_of_the_model_over_it(directory: Path) -> None:
    engine, sampling = TransformersEngine(directory), replace(SAMPLING, top_k=5, top_p=0.8, temperature=0.9)
    model = load_model(directory)
    sizes = set()
    for completion in drawn(engine, sampling=sampling):
        support = completion.support
        assert support is not None and support.shape == (len(completion.token_ids), 5)
        sizes |= set((support >= 0).sum(1).tolist())
        ids = torch.tensor(np.concatenate([PROMPT, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1] / sampling.temperature
        for place, kept in enumerate(support):
            among = kept[kept >= 0].astype(np.int64)
            expected = logits[place, torch.from_numpy(among)].log_softmax(-1)
            assert float(expected[among.tolist().index(completion.token_ids[place])]) == pytest.approx(completion.logprobs[place], abs=1e-4)
    assert min(sizes) < max(sizes) <= 5


def test_a_completion_ends_with_the_token_that_makes_a_stop_text_whole(directory: Path, tmp_path: Path) -> None:
    model, vocabulary = tmp_path / "model", {chr(ord("a") + number): number for number in range(40)}
    shutil.copytree(directory, model)
    letters = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    letters.decoder = Fuse()
    letters.save(str(model / "tokenizer.json"))
    engine, sampling = TransformersEngine(model), Sampling(max_new_tokens=40, stop_ids=(2,))
    free = [letters.decode(one.token_ids.tolist()) for one in drawn(engine, sampling=sampling)]
    stop = next(text[3:5] for text in free if len(text) > 8)
    found = drawn(engine, sampling=replace(sampling, stop=("no such text", stop)))
    for whole, completion in zip(free, found, strict=True):
        text, cut = letters.decode(completion.token_ids.tolist()), stop in whole
        assert text == (whole[: whole.index(stop) + len(stop)] if cut else whole)
        assert not cut or (completion.finish == "stop" and completion.token_ids[-1] != 2)


def test_a_stop_text_without_a_tokenizer_is_refused_with_its_key(directory: Path) -> None:
    with pytest.raises(EngineError, match=r"sampling\.stop: cannot read the tokenizer"):
        drawn(TransformersEngine(directory), sampling=replace(SAMPLING, stop=("x",)))


def test_an_engine_that_sleeps_has_no_weights_and_takes_their_memory_again(directory: Path) -> None:
    engine = TransformersEngine(directory)

    def sizes() -> list[int]:
        return [parameter.untyped_storage().nbytes() for parameter in engine._parameters.values()]

    awake = sizes()
    engine.sleep()
    assert sizes() == [0] * len(awake)
    engine.wake()
    assert sizes() == awake
    engine.close()


@pytest.mark.slow
def test_the_memory_of_the_weights_is_free_while_an_engine_sleeps(tmp_path: Path) -> None:
    import transformers as hf

    sizes = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 128}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1))
    model.save_pretrained(tmp_path)
    del model
    engine, process = TransformersEngine(tmp_path), psutil.Process()
    new = [
        TensorBytes(name=name, dtype="float32", shape=tuple(one.shape), data=one.numpy().tobytes())
        for name, one in engine._parameters.items()
    ]
    whole = sum(one.nbytes for one in engine._parameters.values())
    engine.load_weights(1, new)  # the pages of the file it was opened from are written, and its own from now on
    drawn(engine)
    awake = process.memory_info().rss
    engine.sleep()
    asleep = process.memory_info().rss
    print(f"weights {whole / 2**20:.0f} MiB, resident {awake / 2**20:.0f} MiB awake, {asleep / 2**20:.0f} MiB asleep")
    assert awake - asleep > 0.9 * whole > 100 * 2**20
    engine.wake()
    engine.load_weights(2, new)
    assert len(drawn(engine)) == 4
    engine.close()
