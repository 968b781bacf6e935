"""Text files in common formats, tokenizers, and the files of training.prepare, compared with the libraries' readers."""

import base64
import errno
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpi_tests.helpers.launch import ROOT
from training import prepare as preparing
from training.data.token_files import TokenFile, TokenSequence, write_llmc
from training.data.tokenizer import load_tokenizer
from training.data.tokens import language_reference, load_tokens, split

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


def json_array(path, texts, field="text"):
    path.write_text(json.dumps([{"id": 1, field: text} for text in texts], indent=2))
    return str(path)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        *[(json_lines, name) for name in ("a.JSONL", "a.ndjson", "a.json", "a", "a.log")],
        *[(json_array, name) for name in ("a.json", "a.jsonl", "a")],
        *[(parquet, name) for name in ("a.PARQUET", "a")],
    ],
)
def test_files_are_read_as_what_they_are(tmp_path, write, name):
    tokens = load_tokens([write(tmp_path / name, TEXTS)])
    assert np.asarray(tokens.ids).tobytes().split(b"\0") == [text.encode() for text in TEXTS] + [b""]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{\n  "text": "over several lines"\n}', "line 1 is not JSON ("),
        ('{"text": "a"} {"text": "b"}', "line 1 is not JSON ("),
        ('{"rows": [{"text": "a"}]}', "line 1 has no text in 'text', its fields are rows: set text_field"),
        ('["a", "b"]', "row 1 has no text in 'text', it is not an object: set text_field"),
        ('[{"text": "a"}, {"text": 3}]', "row 2 has no text in 'text', its fields are text: set text_field"),
        ('[{"text": "a"}', "not JSON ("),
        ("[" * 100_000, "not JSON ("),
        ("some words", "line 1 is not JSON ("),
    ],
)
def test_json_that_has_no_rows_of_text_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with refuses(f"{tmp_path / 'a.json'}: {message}"):
        load_tokens([str(tmp_path / "a.json")])


def test_what_is_named_as_text_is_text(tmp_path):
    content = '{"text": "a"}\n'
    for name in ("a.txt", "A.TXT", "a.py"):
        (tmp_path / name).write_text(content)
        assert np.asarray(load_tokens([str(tmp_path / name)]).ids).tobytes() == content.encode()


def test_tokens_and_folders_by_names_in_capitals(tmp_path):
    (tmp_path / "B.TXT").write_text("b")
    json_lines(tmp_path / "C.JSONL", ["c"])
    json_lines(tmp_path / "D.ndjson", ["d"])
    (tmp_path / "settings.json").write_text("{}")  # of a program
    assert np.asarray(load_tokens([str(tmp_path)]).ids).tobytes() == b"bc\0d\0"
    write_llmc(tmp_path / "T.BIN", np.array([2, 300], "<u2"))
    assert np.asarray(load_tokens([str(tmp_path / "T.BIN")]).ids).tolist() == [2, 300]


def test_lone_surrogates_become_the_replacement_character(tmp_path, tokenizer_json):
    (tmp_path / "a.jsonl").write_text('{"text": "The \\udbc0 ring \\ud83d\\ude00"}\n')
    tokens = load_tokens([str(tmp_path / "a.jsonl")])
    assert np.asarray(tokens.ids).tobytes().decode() == "The \ufffd ring \U0001f600\0"
    tokens = load_tokens([str(tmp_path / "a.jsonl")], tokenizer=tokenizer_json)
    assert np.asarray(tokens.ids).tolist() == [2, 0, 3, 0, 1]


@pytest.mark.parametrize("largest", [200, 300, 70_000])
def test_a_tokenizer_with_gaps_has_tokens_up_to_the_largest(tmp_path, largest):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "The": 1, "ring": largest - 1, "</s>": largest}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("The ring")
    tokens = load_tokens([str(tmp_path / "a.txt")], tokenizer=str(tmp_path / "tokenizer.json"))
    assert np.asarray(tokens.ids).tolist() == [1, largest - 1, largest]
    assert tokens.vocab_size == largest + 1
    assert tokens.tokenizer.decode([1, 100, largest - 1]) == "The ring"


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
    monkeypatch.setattr("training.data.text_files.MOST_FILES", 3)
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


def test_uint32_tokens_with_a_header(tmp_path):
    ids = np.random.default_rng(0).integers(0, 128_256, 1000).astype("<u4")
    write_llmc(tmp_path / "b.bin", ids)
    tokens = load_tokens([str(tmp_path / "b.bin")])
    assert np.array_equal(np.asarray(tokens.ids), ids)
    assert 0 < tokens.vocab_size - ids.max() <= 64


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
    (tmp_path / "held.bin").write_bytes(np.array([7] * 9, "<u2").tobytes())
    folder = [str(tmp_path / name) for name in ("train_0.bin", "train_1.bin", "val_0.bin")]
    train, val = split(load_tokens(folder), 0.5, 4)
    assert np.asarray(train).tolist() == [1, 2, 3] + [4] * 20
    assert np.asarray(val).tolist() == [5] * 9
    _, val = split(load_tokens(folder[:2], [str(tmp_path / "held.bin")]), 0.5, 4)
    assert np.asarray(val).tolist() == [7] * 9


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
    message = f"tokens of {tokenizer_json} and of token ids: pass data that has one tokenizer"
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
    (tmp_path / "empty.jsonl").touch()
    filled = json_lines(tmp_path / "b.jsonl", TEXTS)
    for arguments in ([tmp_path / "empty.jsonl"], [filled, "--val", tmp_path / "empty.jsonl"]):
        result = prepare(*arguments, "--out", tmp_path / "tokens", "--workers", 1)
        message = f"training.prepare: {tmp_path / 'empty.jsonl'}: empty; pass a file with text in it\n"
        assert (result.returncode, result.stderr) == (2, message)
        assert not (tmp_path / "tokens").exists()
    result = prepare(path, "--out", tmp_path)
    assert result.stderr.strip() == f"training.prepare: out={tmp_path}: File exists; name a new folder"


def test_tokens_that_do_not_fit_the_disk_leave_nothing(tmp_path, monkeypatch):
    def full(path, ids):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "tokens"
    args = {"text": [json_lines(tmp_path / "a.jsonl", TEXTS)], "val": [], "out": out, "tokenizer": "bytes"}
    monkeypatch.setattr(preparing, "write_llmc", full)
    words = re.escape(f"out={out} can't be written (No space left on device): name another folder")
    with pytest.raises(ValueError, match=words):
        preparing.prepare(SimpleNamespace(**args, text_field="text", shard_tokens=9, workers=1))
    assert not out.exists()
