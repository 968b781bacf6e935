"""Text files in common formats, tokenizers, and the files of training.prepare, compared with the libraries' readers."""

import base64
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from models.data import language_reference, load_tokens, split
from models.token_files import TokenFile, TokenSequence, write_llmc
from models.tokenizer import load_tokenizer
from mpi_tests.helpers.launch import ROOT

TEXTS = ["The ring goes round.", "Ein Ring, sie zu knechten: é", "x" * 50]


def refuses(message):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


def json_lines(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))
    return str(path)


def parquet(path, texts, field="text"):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({field: texts}), path)
    return str(path)


@pytest.fixture
def tokenizer_json(tmp_path):
    """Return a tokenizer of words, written by the tokenizers library."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {
        word: number for number, word in enumerate(["[UNK]", "<|endoftext|>", "The", "ring", "goes", "round", "."])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("write", "name"), [(json_lines, "a.jsonl"), (parquet, "a.parquet")])
def test_rows_are_documents_that_end_in_byte_0(tmp_path, write, name):
    tokens = load_tokens([write(tmp_path / name, TEXTS, "body")], text_field="body")
    assert np.asarray(tokens.ids).tobytes().split(b"\0") == [text.encode() for text in TEXTS] + [b""]


@pytest.mark.parametrize(("write", "name"), [(json_lines, "a.jsonl"), (parquet, "a.parquet")])
def test_a_field_that_is_not_there(tmp_path, write, name):
    path = write(tmp_path / name, TEXTS, "body")
    with refuses(f"{path}: ") as error:
        load_tokens([path])
    assert "body" in str(error.value)
    assert "set text_field" in str(error.value)


def test_the_language_reference_in_tokens_of_a_file(tokenizer_json):
    tokens, tokenizer = load_tokens([], tokenizer=tokenizer_json), load_tokenizer(tokenizer_json)
    assert tokens.vocab_size == tokenizer.vocab_size < 256
    assert np.asarray(tokens.ids).tolist() == list(tokenizer.encode(language_reference().decode()))


def test_rows_that_are_no_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    with refuses(f"{path}: line 2 is not JSON"):
        load_tokens([str(path)])


def test_what_is_no_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_text("text")
    with refuses(f"{path}: not Parquet"):
        load_tokens([str(path)])


def test_folders_give_their_files_by_name(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b/2.txt": "2", "1.md": "1", "3.py": "3", ".git/x.txt": "no", "picture.png": "no"}.items():
        (tmp_path / name).write_text(text)
    assert np.asarray(load_tokens([str(tmp_path)]).ids).tobytes() == b"132"


def test_folders_with_too_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr("models.text_files.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("text")
    with refuses(f"{tmp_path}: more than 3 files; name the folders that have the text"):
        load_tokens([str(tmp_path)])


def test_folders_without_text(tmp_path):
    with refuses(f"{tmp_path}: no file in this folder ends in any of .txt .md"):
        load_tokens([str(tmp_path)])


def test_a_tokenizer_json(tmp_path, tokenizer_json):
    path = tmp_path / "a.txt"
    path.write_text("The ring goes round . ring")
    tokens = load_tokens([str(path)], tokenizer=tokenizer_json)
    assert np.asarray(tokens.ids).tolist() == [2, 3, 4, 5, 6, 3, 1]
    assert tokens.vocab_size == 7
    assert tokens.tokenizer.decode([2, 3]) == "The ring"


def test_ranks_of_tiktoken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks.update({b"th": 256, b"the": 257})
    ranks.update({b"filler%d" % number: number for number in range(258, 50256)})  # as many entries as in the encoding
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    tokenizer = load_tokenizer(str(path))
    encoding = tiktoken.Encoding("own", pat_str=r".+", mergeable_ranks=ranks, special_tokens={})
    assert list(tokenizer.encode("the")) == encoding.encode("the") == [257]
    assert (tokenizer.vocab_size, tokenizer.end, tokenizer.decode([257, 50300, 33])) == (50257, 50256, "the!")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("none.json", "no such file"),
        ("own.tiktoken", "no encoding of tiktoken"),
        ("broken.json", "not a tokenizer.json"),
    ],
)
def test_tokenizers_that_are_none(tmp_path, name, why):
    pytest.importorskip("tiktoken")
    path = tmp_path / name
    if name != "none.json":
        path.write_text("{}")
    with refuses(f"tokenizer={path}: {why}"):
        load_tokenizer(str(path))


def test_uint32_tokens_are_not_taken_for_uint16(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128_256, 1000).astype("<u4")
    ids.tofile(tmp_path / "a.bin")
    write_llmc(tmp_path / "b.bin", ids)
    for name in ("a.bin", "b.bin"):
        tokens = load_tokens([str(tmp_path / name)])
        assert np.array_equal(np.asarray(tokens.ids), ids)
        assert 0 < tokens.vocab_size - ids.max() <= 64


def test_uint16_tokens_are_not_taken_for_uint32(tmp_path):
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, 50257, 100).astype("<u2")
        ids.tofile(tmp_path / "a.bin")
        assert np.array_equal(np.asarray(load_tokens([str(tmp_path / "a.bin")]).ids), ids)


@pytest.mark.parametrize("count", [1, 4, 62, 65, 4097])
def test_few_tokens_or_an_odd_number_are_of_uint16(tmp_path, count):
    """Every other number could also be the upper half of a uint32."""
    ids = np.resize(np.array([300, 1], "<u2"), count)
    ids.tofile(tmp_path / "a.bin")
    assert np.array_equal(np.asarray(load_tokens([str(tmp_path / "a.bin")]).ids), ids)


def test_many_files_are_one_sequence(tmp_path):
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 50257, length).astype("<u2") for length in (70, 1, 200, 64)]
    for number, part in enumerate(parts):
        write_llmc(tmp_path / f"{number}.bin", part)
    whole, ids = np.concatenate(parts), TokenSequence([TokenFile(str(file)) for file in sorted(tmp_path.iterdir())])
    assert len(ids) == len(whole)
    for start, stop in rng.integers(0, len(whole) + 1, (200, 2)).tolist():
        assert np.array_equal(np.asarray(ids[start:stop]), whole[start:stop])
        assert np.array_equal(np.asarray(ids[start:][: stop // 2]), whole[start:][: stop // 2])


def test_files_to_validate_on(tmp_path):
    for name, ids in {"train_0.bin": [1, 2, 3], "train_1.bin": [4] * 20, "val_0.bin": [5] * 9}.items():
        write_llmc(tmp_path / name, np.array(ids, "<u2"))
    (tmp_path / "held.bin").write_bytes(np.array([7] * 8, "<u2").tobytes())
    folder = [str(tmp_path / name) for name in ("train_0.bin", "train_1.bin", "val_0.bin")]
    train, val = split(load_tokens(folder), 0.5, 4)
    assert np.asarray(train).tolist() == [1, 2, 3] + [4] * 20
    assert np.asarray(val).tolist() == [5] * 9
    _, val = split(load_tokens(folder[:2], [str(tmp_path / "held.bin")]), 0.5, 4)
    assert np.asarray(val).tolist() == [7] * 8


def test_vocab_size_is_at_least_the_datas(tmp_path):
    assert load_tokens([], vocab_size=320).vocab_size == 320
    with refuses("vocab_size=100 is less than the 256 of Python language reference"):
        load_tokens([], vocab_size=100)


def test_a_tokenizer_of_bin_files(tmp_path, tokenizer_json):
    write_llmc(tmp_path / "a.bin", np.array([2, 3], "<u2"))
    write_llmc(tmp_path / "b.bin", np.array([2, 300], "<u2"))
    assert load_tokens([str(tmp_path / "a.bin")]).tokenizer.name == "tokenizer.json"  # found beside it
    assert load_tokens([str(tmp_path / "a.bin")], tokenizer=tokenizer_json).vocab_size == 7
    with refuses("b.bin has token 300, but tokenizer.json only 7: pass its tokenizer"):
        load_tokens([str(tmp_path / "b.bin")])


def test_data_of_two_tokenizers(tmp_path, tokenizer_json):
    (tmp_path / "other").mkdir()
    paths = [tmp_path / "a.bin", tmp_path / "other" / "b.bin"]
    for path in paths:
        write_llmc(path, np.array([2, 3], "<u2"))
    message = "tokens of tokenizer.json and of token ids: pass data that has one tokenizer"
    with refuses(message):
        load_tokens([str(path) for path in paths])
    with refuses(message):
        load_tokens([str(paths[0])], [str(paths[1])])


def test_numbers_beyond_the_tokens_are_left_out(tmp_path, tokenizer_json):
    assert load_tokenizer("bytes").decode([104, 300, 105]) == "hi"
    assert load_tokenizer(tokenizer_json).decode([2, 99, 3]) == "The ring"


def prepare(*arguments):
    command = [sys.executable, "-m", "training.prepare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_prepare_writes_what_training_reads(tmp_path, tokenizer_json):
    texts = [" ".join(np.random.default_rng(seed).choice(["The", "ring", "goes", "."], 40)) for seed in range(30)]
    (tmp_path / "held.txt").write_text("The ring .")
    result = prepare(
        json_lines(tmp_path / "a.jsonl", texts), "--val", tmp_path / "held.txt", "--tokenizer", tokenizer_json,
        "--out", tmp_path / "tokens", "--shard_tokens", 500, "--workers", 2,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout == (
        f"1,230 tokens, and 4 to validate on: python -m training --data {tmp_path / 'tokens'} --document_end 1\n"
    )
    (tmp_path / "tokenizer.json").unlink()  # a copy was saved
    names = sorted(file.name for file in (tmp_path / "tokens").iterdir())
    assert names == [
        "meta.json",
        "tokenizer.json",
        *(f"train_00000{number}.bin" for number in range(3)),
        "val_000000.bin",
    ]
    tokens = load_tokens([str(tmp_path / "tokens")])
    assert tokens.vocab_size == 7
    assert np.asarray(tokens.val_ids).tolist() == [2, 3, 6, 1]
    documents = np.split(ids := np.asarray(tokens.ids), np.flatnonzero(ids == 1) + 1)[:-1]
    assert [tokens.tokenizer.decode(document[:-1].tolist()) for document in documents] == texts


def test_prepare_leaves_nothing_behind_where_it_fails(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", TEXTS, "body")
    result = prepare(path, "--out", tmp_path / "tokens", "--workers", 1)
    assert result.returncode == 2
    assert result.stderr.strip() == (
        f"training.prepare: {path}: line 1 has no text in 'text', its fields are id, body: set text_field"
    )
    assert not (tmp_path / "tokens").exists()
    result = prepare(path, "--out", tmp_path)
    assert result.stderr.strip() == f"training.prepare: out={tmp_path}: File exists; name a new folder"
